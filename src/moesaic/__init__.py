"""moesaic: train, plan and serve models larger and more uneven than the hardware under them."""

__version__ = "0.1.0"

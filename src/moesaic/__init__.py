"""moesaic: train, plan and serve models larger and more uneven than the hardware under them.

The names of `__all__` are the public Python API. Each is imported on first use, so
`import moesaic` is quick and imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.api.cluster import Cluster
    from moesaic.api.job import Job
    from moesaic.api.model import Model, load, save
    from moesaic.api.run import Run
    from moesaic.base.errors import ConfigError, MoesaicError

__version__ = "0.1.0"
__all__ = ["Cluster", "ConfigError", "Job", "Model", "MoesaicError", "Run", "load", "save"]

_MODULES = {
    "Cluster": "api.cluster", "ConfigError": "base.errors", "Job": "api.job",
    "Model": "api.model", "MoesaicError": "base.errors", "Run": "api.run",
    "load": "api.model", "save": "api.model",
}  # fmt: skip
"""Module of each public name."""


def __getattr__(name: str) -> Any:
    """Import and return a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module 'moesaic' has no attribute '{name}'")
    return getattr(import_module(f"moesaic.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "__version__"])

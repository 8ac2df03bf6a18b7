"""Public Python API, one file a noun."""

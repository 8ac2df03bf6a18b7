"""Embedding tables by key, for more rows than memory holds."""

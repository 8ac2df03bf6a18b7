"""Layers: attention, router, dispatch, expert bank, losses, and randomness by counter."""

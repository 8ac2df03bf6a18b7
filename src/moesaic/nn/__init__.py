"""Layers: attention, router, token dispatch, experts, norms, and losses."""

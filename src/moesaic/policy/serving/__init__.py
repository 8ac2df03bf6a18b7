"""Policies of the inference engine: memory, and the experts in it."""

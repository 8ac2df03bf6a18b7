"""Policies of the inference engine: memory."""

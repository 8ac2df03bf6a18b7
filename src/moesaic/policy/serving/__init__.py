"""Policies of the inference engine: memory, batches, and the regime of a pass."""

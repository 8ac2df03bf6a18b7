"""Policies of the inference engine: memory, experts in it, batches, and the regime of a pass."""

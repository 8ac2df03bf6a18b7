"""Policies of the inference engine: which requests are computed, and how many tokens of each."""

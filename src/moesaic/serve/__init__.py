"""Inference: load a model onto one device and generate text."""

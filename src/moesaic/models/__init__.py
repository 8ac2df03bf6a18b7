"""Whole networks as lists of named blocks, and their weights to and from Hugging Face."""

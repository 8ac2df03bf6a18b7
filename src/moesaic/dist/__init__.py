"""Ranks, links, and state that is spread over them."""

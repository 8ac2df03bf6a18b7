"""Policies: pure functions from facts to decisions, without torch."""

"""Policies that make a plan: choices of its free fields, places of its ranks, and predictions."""

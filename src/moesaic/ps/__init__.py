"""Embedding tables: rows by key, and their files."""

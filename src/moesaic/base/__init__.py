"""Foundations without torch: configuration, errors, events, records, tensor files."""

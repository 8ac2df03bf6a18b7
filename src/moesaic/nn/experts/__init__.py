"""Experts of one layer: parameters, replicas, adapters, and the grouped network."""

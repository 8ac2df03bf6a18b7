"""What a run minimises: one file an objective."""

"""Training objectives, one per file."""

"""Plain data that can be written to a file and read back. No torch."""

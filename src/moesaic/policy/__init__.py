"""What to do: pure functions from facts to decisions. No torch."""

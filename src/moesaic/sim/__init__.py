"""What would happen: timelines of steps, from the arithmetic of `policy.cost`. No torch."""

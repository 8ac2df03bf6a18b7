"""Simulation of steps: timelines from the cost model of `policy.cost`, without torch."""

"""Ranks, collectives, transports, sharded state, checkpoints and the hardware probe."""

"""The training engine: a job, a plan and a world become a run that takes steps."""

"""Training engine: turns a job, a plan and a world into a run that takes steps."""

"""The Python API: jobs, clusters, runs, models and expert layers. The command line calls it."""

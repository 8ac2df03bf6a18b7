"""The Python API: jobs, clusters, runs and models. The command line calls it."""

"""Test utilities, also for users of the package: rank pools, tiny jobs, kernel traces, network
namespaces."""

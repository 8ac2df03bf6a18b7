"""Cost model: seconds and bytes of a workload on a cluster, from measured curves where available.

Planning, placement and balancing all use this one model.
"""

"""Hardware probe: measures hosts, devices, links and disks with the ranks that will use them.

Each module measures figures, lists of numbers by name. `probe` runs them on all ranks, several
times; `cluster` turns the figures into one `facts.cluster.Cluster`.
"""

"""The probe: what hosts, devices, links and disks can do, measured by the ranks that will use them.

Each part measures *figures*, lists of numbers by name; `probe` runs the parts on all ranks, several
times over, and `cluster` makes one `facts.cluster.Cluster` of what they found.
"""

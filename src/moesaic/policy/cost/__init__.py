"""What a workload costs on a cluster: seconds and bytes, from measured curves where there are any.

Everything that plans, places or balances asks here, so that there is one arithmetic.
"""

"""Policies of expert load: which experts get copies for a step, and who computes what.

Each is a pure function of rows [ranks, experts] and what they cost, and gives a `Balance`.
"""

from moesaic.policy.balance.asked import (
    Asked,
    Method,
    Policy,
    compiling,
    drift,
    homes_of,
    setting_of,
)
from moesaic.policy.balance.begins import balances, stands_aside
from moesaic.policy.balance.homes import Moving, Rehomed, moving, rehomed, rehomes
from moesaic.policy.balance.model import (
    Times,
    at_copies,
    busiest,
    copy_rows,
    rows,
    times,
    unless_worse,
)
from moesaic.policy.balance.prices import Rank, planned, usual
from moesaic.policy.balance.prophet import Search, pro_prophet
from moesaic.policy.balance.quota import quota, within
from moesaic.policy.balance.replicas import eplb, evenly
from moesaic.policy.balance.shadow import faster_moe

__all__ = [
    "Asked", "Method", "Moving", "Policy", "Rank", "Rehomed", "Search", "Times", "at_copies",
    "balances", "busiest", "compiling", "copy_rows", "drift", "eplb", "evenly", "faster_moe",
    "homes_of", "moving", "planned", "pro_prophet", "quota", "rehomed", "rehomes", "rows",
    "setting_of", "stands_aside", "times", "unless_worse", "usual", "within",
]  # fmt: skip

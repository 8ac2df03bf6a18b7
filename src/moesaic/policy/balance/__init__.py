"""Policies of expert load: which experts get copies for a step, and who computes what.

Each is a pure function of rows [ranks, experts] and what they cost, and gives a `Balance`.
"""

from moesaic.policy.balance.asked import Asked, compiling, drift, homes_of, setting_of
from moesaic.policy.balance.begins import balances, stands_aside
from moesaic.policy.balance.best import Policy, auto, unless_worse
from moesaic.policy.balance.homes import Moving, Rehomed, moving, rehomed, rehomes
from moesaic.policy.balance.model import Times, at_copies, busiest, copy_rows, rows, times
from moesaic.policy.balance.prices import Rank, planned, usual
from moesaic.policy.balance.prophet import Search, pro_prophet
from moesaic.policy.balance.quota import quota, within
from moesaic.policy.balance.replicas import eplb, evenly
from moesaic.policy.balance.shadow import faster_moe, top_k_broadcast
from moesaic.policy.balance.spill import llep
from moesaic.policy.balance.split import levelled, lp

__all__ = [
    "Asked", "Moving", "Policy", "Rank", "Rehomed", "Search", "Times", "at_copies", "auto",
    "balances", "busiest", "compiling", "copy_rows", "drift", "eplb", "evenly",
    "faster_moe", "homes_of", "levelled", "llep", "lp", "moving", "planned", "pro_prophet",
    "quota", "rehomed", "rehomes", "rows", "setting_of", "stands_aside", "times",
    "top_k_broadcast", "unless_worse", "usual", "within",
]  # fmt: skip

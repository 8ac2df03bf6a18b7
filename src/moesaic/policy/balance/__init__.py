"""Load-balancing policies for experts: which experts get replicas for a step, and which tokens they
take.

Each is a pure function of routed tokens [ranks, experts] and costs, and returns a
`BalanceDecision`.
"""

from moesaic.policy.balance.balancer import (
    LayerBalancer,
    LayerDecision,
    Method,
    Policy,
    compile_notice,
    expert_owners,
    layer_problem,
    load_drift,
)
from moesaic.policy.balance.cost_model import (
    LayerTimes,
    break_even_tokens,
    count_rank_tokens,
    drop_if_slower,
    layer_times,
    load_imbalance,
    use_local_replicas,
)
from moesaic.policy.balance.eligibility import reason_not_to_balance, should_balance
from moesaic.policy.balance.eplb import assign_evenly, eplb
from moesaic.policy.balance.faster_moe import faster_moe
from moesaic.policy.balance.migration import (
    Migration,
    MigrationCosts,
    MigrationFacts,
    can_migrate,
    migration_costs,
    plan_migration,
)
from moesaic.policy.balance.prices import RankDevice, default_prices, predict_prices
from moesaic.policy.balance.pro_prophet import ProphetSearch, pro_prophet
from moesaic.policy.balance.quota import assign_to_replicas, quota
from moesaic.policy.balance.stats import BalanceStats, balance_stats

__all__ = [
    "BalanceStats",
    "LayerBalancer",
    "LayerDecision",
    "LayerTimes",
    "Method",
    "Migration",
    "MigrationCosts",
    "MigrationFacts",
    "Policy",
    "ProphetSearch",
    "RankDevice",
    "assign_evenly",
    "assign_to_replicas",
    "balance_stats",
    "break_even_tokens",
    "can_migrate",
    "compile_notice",
    "count_rank_tokens",
    "default_prices",
    "drop_if_slower",
    "eplb",
    "expert_owners",
    "faster_moe",
    "layer_problem",
    "layer_times",
    "load_drift",
    "load_imbalance",
    "migration_costs",
    "plan_migration",
    "predict_prices",
    "pro_prophet",
    "quota",
    "reason_not_to_balance",
    "should_balance",
    "use_local_replicas",
]  # fmt: skip

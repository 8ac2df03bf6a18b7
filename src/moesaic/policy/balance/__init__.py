"""Load-balancing policies for experts: which experts get replicas for a step, and which tokens they
take.

Each is a pure function of routed tokens [ranks, experts] and costs, and returns a
`BalanceDecision`.
"""

from moesaic.policy.balance.balance_costs import (
    BalanceCostFacts,
    RankDevice,
    default_balance_costs,
    predict_balance_costs,
)
from moesaic.policy.balance.balancer import (
    LayerBalancer,
    LayerDecision,
    layer_problem,
)
from moesaic.policy.balance.cost_model import break_even_tokens, layer_times
from moesaic.policy.balance.eligibility import reason_not_to_balance, should_balance
from moesaic.policy.balance.faster_moe import faster_moe
from moesaic.policy.balance.migration import (
    Migration,
    MigrationCosts,
    MigrationFacts,
    can_migrate,
    migration_costs,
    plan_migration,
)
from moesaic.policy.balance.pro_prophet import pro_prophet
from moesaic.policy.balance.quota import quota
from moesaic.policy.balance.stats import BalanceStats, balance_stats

__all__ = [
    "BalanceCostFacts", "BalanceStats", "LayerBalancer", "LayerDecision", "Migration",
    "MigrationCosts", "MigrationFacts", "RankDevice", "balance_stats", "break_even_tokens",
    "can_migrate", "default_balance_costs", "faster_moe", "layer_problem", "layer_times",
    "migration_costs", "plan_migration", "predict_balance_costs", "pro_prophet", "quota",
    "reason_not_to_balance", "should_balance",
]  # fmt: skip

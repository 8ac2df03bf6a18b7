"""moesaic: train, plan and serve models larger and more uneven than the hardware under them.

The names of `__all__` are the public Python API. Each is imported on first use, so
`import moesaic` is quick and imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moesaic.api.cluster import Cluster
    from moesaic.api.engine import Engine
    from moesaic.api.expert_group import ExpertGroup
    from moesaic.api.experts import clip_grad_norm_, exclude_experts, expert_parameters
    from moesaic.api.job import Job
    from moesaic.api.model import Model, load, save
    from moesaic.api.moe import MoE
    from moesaic.api.predictor import Predictor
    from moesaic.api.run import Run
    from moesaic.api.table import Table
    from moesaic.api.upcycle import aux_loss, upcycle
    from moesaic.base.errors import ConfigError, MoesaicError
    from moesaic.nn.embedding import TableBag
    from moesaic.train.data.clicks_table import hash_ids

__version__ = "0.1.0"
__all__ = [
    "Cluster",
    "ConfigError",
    "Engine",
    "ExpertGroup",
    "Job",
    "MoE",
    "Model",
    "MoesaicError",
    "Predictor",
    "Run",
    "Table",
    "TableBag",
    "aux_loss",
    "clip_grad_norm_",
    "exclude_experts",
    "expert_parameters",
    "hash_ids",
    "load",
    "save",
    "upcycle",
]  # fmt: skip

_MODULES = {
    "Cluster": "api.cluster", "ConfigError": "base.errors", "Engine": "api.engine",
    "ExpertGroup": "api.expert_group", "Job": "api.job", "MoE": "api.moe",
    "Model": "api.model", "MoesaicError": "base.errors", "Predictor": "api.predictor",
    "Run": "api.run", "Table": "api.table", "TableBag": "nn.embedding",
    "aux_loss": "api.upcycle", "clip_grad_norm_": "api.experts",
    "exclude_experts": "api.experts", "expert_parameters": "api.experts",
    "hash_ids": "train.data.clicks_table", "load": "api.model",
    "save": "api.model", "upcycle": "api.upcycle",
}  # fmt: skip
"""Module of each public name."""


def __getattr__(name: str) -> Any:
    """Import and return a public name."""
    if name not in _MODULES:
        raise AttributeError(f"module 'moesaic' has no attribute '{name}'")
    return getattr(import_module(f"moesaic.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "__version__"])

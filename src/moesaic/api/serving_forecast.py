"""A server before it starts: how it divides memory, and how fast it should be."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from moesaic.api.cluster import Cluster
from moesaic.api.engine import default_cache_tokens
from moesaic.api.serve import import_server
from moesaic.base.errors import ConfigError
from moesaic.base.units import parse_bytes
from moesaic.facts.cluster import Device, Disk, Host
from moesaic.facts.job import ModelConfig
from moesaic.policy.serving.budget import ServingBudget, ServingFacts
from moesaic.policy.serving.forecast import Forecast, ForecastFacts, forecast
from moesaic.serve.config import ServeConfig

STREAMS = (1, 8, 32)
"""Streams of a forecast at most, if the engine and its cache have room for them."""
CONTEXT = 512
"""Tokens of each stream in a forecast at most."""
_ALL_MEMORY = "1000000TB"


class ServingForecast(NamedTuple):
    """A server's memory, and its speed on a cluster's first host."""

    sizes: ServingFacts
    """Bytes of each part."""
    budget: ServingBudget
    """Experts in memory, and positions of the key-value cache."""
    speeds: list[Forecast]
    """Empty without a cluster."""


def forecast_server(
    directory: Path, config: ServeConfig, cluster: Cluster | None = None
) -> ServingForecast:
    """Return what `moesaic serve` would do with the model in `directory`, without its weights.

    Args:
        directory: a run, a checkpoint or a Hugging Face directory.
        config: settings.
        cluster: the machine, as `moesaic probe` measures it; None: no speeds.
    """
    from moesaic.dist.state import PRECISIONS
    from moesaic.models.hf.origin import open_origin

    import_server()  # Its libraries count as memory of the interpreter.
    from moesaic.serve.loading import divide_budget, weights_dtype

    origin = open_origin(directory)
    dtype = weights_dtype(origin, config.precision)
    decision = divide_budget(
        origin, dtype, parse_bytes(config.memory or _ALL_MEMORY), config.tokens_per_pass,
        config.max_running, cache_tokens=config.cache_tokens,
    )  # fmt: skip
    sizes, budget = decision.facts, decision.outcome
    if config.memory is None and config.cache_tokens is None:
        budget = budget._replace(
            cache_tokens=_unlimited_tokens(origin.model, dtype.itemsize, sizes, config)
        )
    speeds = list[Forecast]()
    if cluster is not None:
        context = min(CONTEXT, origin.model.max_positions)
        room = max(min(config.max_running, budget.cache_tokens // context), 1)
        host = cluster.facts.hosts[0]
        name = next(name for name, one in PRECISIONS.items() if one == dtype)
        facts = ForecastFacts(
            origin.model, name, _processor(host), _disk(host, directory).read,
            budget.num_slots, context,
        )  # fmt: skip
        speeds = forecast(facts, sorted({min(streams, room) for streams in STREAMS}))
    return ServingForecast(sizes, budget, speeds)


def _unlimited_tokens(
    model: ModelConfig, item_bytes: int, sizes: ServingFacts, config: ServeConfig
) -> int:
    """Return the positions of the key-value cache without a memory budget."""
    from moesaic.kernels import device as devices

    weights_bytes = sizes.dense_bytes + sizes.num_experts * sizes.expert_bytes
    free_bytes = devices.free_bytes(devices.resolve(config.device, key="device")) - weights_bytes
    return default_cache_tokens(model, item_bytes, config.max_running, free_bytes)


def _processor(host: Host) -> Device:
    """Return the device of one rank that has the whole host."""
    found = [device for device in host.devices if device.kind == "cpu"]
    if not found:
        raise ConfigError(
            f"host '{host.name}' of the cluster has no device of kind cpu, which serving uses: "
            "give a cluster file of this machine, from `moesaic probe`"
        )
    return min(found, key=lambda device: device.count)


def _disk(host: Host, directory: Path) -> Disk:
    """Return the disk that has the model, as far as the paths of disks show."""
    if not host.disks:
        raise ConfigError(
            f"host '{host.name}' of the cluster has no disks, from which experts are read: let "
            "`moesaic probe` measure the model's disk"
        )
    where = directory.resolve()
    above = [disk for disk in host.disks if where.is_relative_to(Path(disk.path).resolve())]
    return max(above or host.disks, key=lambda disk: len(disk.path))

"""Model loading for inference: a whole model on one device, from any form on disk.

With a memory budget, dense weights are in memory, and as many experts as fit. The others are read
from the model's files when a pass needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, NamedTuple, Self

import torch

from moesaic.base.decisions import Decision, decide
from moesaic.base.errors import ConfigError
from moesaic.base.host_memory import free_memory_bytes, used_memory_bytes
from moesaic.base.units import format_bytes
from moesaic.dist.state import PRECISIONS
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.train import MatmulBackend
from moesaic.facts.workload import parameters
from moesaic.kernels import cpu_attention, cpu_gemv
from moesaic.kernels import device as devices
from moesaic.models.build import allocate_model, build_model
from moesaic.models.hf.origin import Origin
from moesaic.models.hf.reader import DTYPES
from moesaic.models.hf.shards import Progress
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.nn.experts.places import Places
from moesaic.policy.serving.budget import (
    ServingBudget,
    ServingFacts,
    all_experts_fit,
    check_memory,
    divide_memory,
    serving_facts,
)
from moesaic.policy.serving.residency import ExpectedUse
from moesaic.serve.expert_reads import ExpertReads
from moesaic.store.cache import BlockCache
from moesaic.store.expert_files import ExpertFiles, StoredExpert, buffer_bytes

READ_THREADS = 4
"""Threads that read experts."""

BudgetDecision = Decision[ServingFacts, ServingBudget]


class ExpertStats(NamedTuple):
    """Use of experts since loading; all zero where all of them are in memory."""

    hits: int = 0
    """Experts that passes used without a read, once for each pass and layer."""
    misses: int = 0
    """Experts that were read, for a pass or ahead of one."""
    read_bytes: int = 0
    """Bytes read from the files of experts."""
    read_s: float = 0.0
    """Seconds with reads in flight."""
    stall_s: float = 0.0
    """Seconds that passes waited for experts."""


class ServedModel:
    """A model for inference, and what is known of its memory. Close it to close its files."""

    def __init__(
        self,
        model: LanguageModel,
        decision: BudgetDecision | None = None,
        files: ExpertFiles | None = None,
        cache: BlockCache | None = None,
        places: Mapping[int, Places] | None = None,
    ) -> None:
        self.model = model
        self.reads: ExpertReads | None = None
        """How an engine's passes read experts; None if all of them are in memory."""
        if cache is not None and places is not None:
            self.reads = ExpertReads(cache, places, model.config.top_k)
        self.decision = decision
        """Division of the memory budget; None without one."""
        self._files, self._cache, self._places = files, cache, places or {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    @property
    def warnings(self) -> list[str]:
        """Messages for the user about the drive."""
        if self._files is None or self._files.is_direct:
            return []
        return [
            "the model's drive has no direct I/O, so the page cache takes memory beyond the "
            "budget: move the model to ext4 or xfs"
        ]

    @property
    def expert_stats(self) -> ExpertStats:
        """Use of experts since loading; any thread may ask."""
        if self._files is None or self._cache is None:
            return ExpertStats()
        found = self._cache.stats
        return ExpertStats(
            found.hits, found.reads, self._files.read_bytes, found.read_s, found.stall_s
        )

    def experts_in_memory(self) -> dict[int, list[int]]:
        """Return the experts in memory by layer; any thread may ask."""
        if self._cache is None:
            return {layer: list(bank.experts) for layer, bank in self.model.expert_banks()}
        blocks, _ = self._cache.contents()
        return {
            layer: [slot for slot in range(places.num_slots) if places.block(slot) in blocks]
            for layer, places in self._places.items()
        }

    def close(self) -> None:
        """Close the files of experts; the model computes no more if it reads from them."""
        for places in self._places.values():
            places.close()
        if self._cache is not None:
            self._cache.close()


@torch.no_grad()
def load_model(  # noqa: PLR0913 - settings of loading
    origin: Origin,
    device: torch.device,
    precision: str = "keep",
    grouped_mm: Literal["auto"] | MatmulBackend = "auto",
    memory: int | None = None,
    *,
    cache_tokens: int | None = None,
    tokens_per_pass: int = 512,
    max_running: int = 16,
    progress: Progress | None = None,
) -> ServedModel:
    """Return the model of `origin` on `device`, filled tensor by tensor.

    Args:
        origin: the model on disk.
        device: device of the parameters.
        precision: fp32, bf16 or fp64; keep: the dtype of the embedding on file.
        grouped_mm: kernels of the expert matmuls on a GPU.
        memory: bytes that this process may take; None: all experts are in memory.
        cache_tokens: key-value positions that the engine wants; None: `memory` decides.
        tokens_per_pass: most tokens of one pass.
        max_running: most texts whose next tokens one pass chooses.
        progress: callback with (bytes read, bytes in total) after every tensor.
    """
    dtype = weights_dtype(origin, precision)
    if dtype == torch.float64 and grouped_mm not in ("auto", "torch") and origin.model.experts:
        raise ConfigError(
            f'grouped_mm = "{grouped_mm}" with weights in fp64, which the Triton kernels do not '
            'support: set it to "torch", or precision to "fp32"'
        )
    if memory is None:
        _check_room(origin.model, dtype, device)
        return ServedModel(_load(origin, device, dtype, grouped_mm, progress=progress))
    _check_device(device, memory)
    decision = divide_budget(
        origin, dtype, memory, tokens_per_pass, max_running, cache_tokens=cache_tokens
    )
    budget = decision.outcome
    if budget.num_slots == decision.facts.num_experts:
        return ServedModel(_load(origin, device, dtype, grouped_mm, progress=progress), decision)
    with ExitStack() as stack:
        files = _open_files(origin, dtype)
        stack.callback(files.close)
        residency = ExpectedUse(origin.model.experts, len(origin.model.expert_layers))
        cache = BlockCache(files, budget.num_slots, residency, READ_THREADS)
        stack.callback(cache.close)
        places = _make_places(origin.model, cache, dtype)
        model = _load(origin, device, dtype, grouped_mm, places, progress)
        stack.pop_all()
    return ServedModel(model, decision, files, cache, places)


def weights_dtype(origin: Origin, precision: str) -> torch.dtype:
    """Return the dtype of weights and computation; keep: that of the embedding on file."""
    return PRECISIONS.get(precision) or origin.tensors.dtype("embed.weight")


def divide_budget(
    origin: Origin,
    dtype: torch.dtype,
    memory: int,
    tokens_per_pass: int,
    max_running: int,
    *,
    cache_tokens: int | None = None,
) -> BudgetDecision:
    """Return how a model of `dtype` and its key-value cache divide `memory` bytes; arguments are
    those of `load_model`. Raise ConfigError if they are too few."""
    model = origin.model
    # Compiled kernels are part of the memory that is in use.
    cpu_gemv.prepare(dtype, model.hidden * max(model.ffn, model.vocab))
    cpu_attention.prepare(dtype, torch.device("cpu"))
    facts = serving_facts(
        model, dtype.itemsize, memory_bytes=memory, interpreter_bytes=used_memory_bytes(),
        read_bytes=0, tokens_per_pass=tokens_per_pass,
        max_running=max_running, cache_tokens=cache_tokens,
    )  # fmt: skip
    if not all_experts_fit(facts):
        largest = max((buffer_bytes(one) for one in _stored_experts(origin)), default=0)
        facts = facts._replace(read_bytes=READ_THREADS * largest)
    check_memory(facts)
    log = list[BudgetDecision]()
    decide(divide_memory, facts, log)
    return log[0]


def _stored_experts(origin: Origin) -> list[StoredExpert]:
    return [one for layer in origin.stored_experts().values() for one in layer]


def _check_device(device: torch.device, memory: int) -> None:
    if device.type != "cpu":
        raise ConfigError(
            f'memory = {format_bytes(memory)} with device = "{device.type}": the budget is for '
            'models on a CPU, remove it or set device to "cpu"'
        )
    available = free_memory_bytes() + used_memory_bytes()
    if memory > available:
        raise ConfigError(
            f"memory = {format_bytes(memory)} is more than the {format_bytes(available)} that this "
            f'process can have: set it to "{available >> 20}MiB" or less'
        )


def _check_room(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError if the weights do not fit into this machine's memory."""
    size, free = sum(p.size for p in parameters(model)) * dtype.itemsize, free_memory_bytes()
    if device.type != "cpu" or size <= free:
        return
    remedy = "free some memory, or use a larger machine"
    if model.experts:
        remedy = f'set memory to "{free >> 20}MiB" or less, and experts are read from the files'
    raise ConfigError(
        f"the model's weights take {format_bytes(size)}, and this process can have "
        f"{format_bytes(free)}: {remedy}"
    )


def _load(
    origin: Origin,
    device: torch.device,
    dtype: torch.dtype,
    grouped_mm: Literal["auto"] | MatmulBackend,
    places: Mapping[int, Places] | None = None,
    progress: Progress | None = None,
) -> LanguageModel:
    """Return the model with all weights in memory, except for the experts in `places`."""
    model = build_model(origin.model, dtype, places=places)
    allocate_model(model, device)
    for _, moe in model.expert_layers():
        moe.bank.backend = grouped_mm
        if places is not None:
            moe.bank.arena.requires_grad_(False)
    shards = tensor_shards(model)
    if places is not None:
        shards = [shard for shard in shards if ".moe.experts." not in shard.name]
    origin.fill(shards, progress)
    devices.release_freed_memory()
    return model.eval()


def _open_files(origin: Origin, dtype: torch.dtype) -> ExpertFiles:
    model, experts = origin.model, _stored_experts(origin)
    name = next(name for name, one in DTYPES.items() if one == dtype)
    return ExpertFiles(experts, 3 * model.hidden * model.ffn, name)


def _make_places(model: ModelConfig, cache: BlockCache, dtype: torch.dtype) -> dict[int, Places]:
    number, width = model.experts, 3 * model.hidden * model.ffn
    return {
        layer: Places(cache, index * number, number, width, dtype)
        for index, layer in enumerate(model.expert_layers)
    }

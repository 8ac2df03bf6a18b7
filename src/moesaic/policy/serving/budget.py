"""Division of a process's memory in inference: experts in memory, and key-value positions.

Dense weights are always in memory. Experts are, if all of them fit beside the key-value cache. Else
some of them are, and the others are read when a pass needs them.
"""

from __future__ import annotations

from typing import NamedTuple

from moesaic.base.errors import ConfigError
from moesaic.base.units import format_bytes
from moesaic.facts.job import ModelConfig
from moesaic.facts.workload import parameters
from moesaic.facts.workload.sizes import ATTENTION_QUERY_BLOCK, BIAS_BYTES, EXPERT_CHUNK_BYTES

MIN_SLOTS = 2
"""Experts in memory that inference needs: one computes while the other is read."""
PAGE_TOKENS = 16
"""Positions of the key-value cache come in multiples of this."""

_ALIGNMENT = 4096
_FP32_BYTES = 4
_COPY_INDEX_BYTES = 32
"""Bytes of the numbers of a position's old and new place, while it is copied."""
_LOGIT_BYTES = 40
"""Bytes of temporaries that sampling needs for each logit."""
_MIN_CONTEXT = 512
"""Key-value positions that are kept at least, unless the model or the caller has fewer."""
_CONTEXTS = 8
"""Longest texts whose key-value positions are kept at most, unless the caller says how many."""
_CACHE_FRACTION = 4
"""The cache takes at most one part in this many of what experts and cache divide."""
_GROWTH_BYTES = 64 << 20
"""Bytes that libraries take later for compiled kernels, and freed memory that the C library keeps.
"""
_UNIT = 16 << 20
"""The interpreter's bytes are rounded up to this, because they differ between starts."""


class ServingFacts(NamedTuple):
    """Sizes of an inference process."""

    memory_bytes: int
    """The budget."""
    interpreter_bytes: int
    """Taken by the interpreter and its libraries, now and later."""
    dense_bytes: int
    """Weights that are not experts."""
    pass_bytes: int
    """Activations and logits of one pass."""
    read_bytes: int
    """Buffers of the threads that read experts."""
    expert_bytes: int
    """One expert in memory; 0 without experts."""
    num_experts: int
    """Experts of all layers."""
    position_bytes: int
    """One position: its keys and values in all layers, and its part in what comes and goes: the
    masks of attention in a pass, or the copy of a layer when requests move."""
    max_positions: int
    """Longest text of the model, in tokens."""
    cache_tokens: int | None
    """Key-value positions that the caller wants; None: as many as make sense."""

    @property
    def fixed_bytes(self) -> int:
        """Bytes that experts and cache do not divide."""
        return self.interpreter_bytes + self.dense_bytes + self.pass_bytes

    @property
    def min_cache_tokens(self) -> int:
        """Fewest key-value positions."""
        wanted = self.cache_tokens
        return _round_up(min(self.max_positions, _MIN_CONTEXT) if wanted is None else wanted)

    @property
    def max_cache_tokens(self) -> int:
        """Most key-value positions."""
        wanted = self.cache_tokens
        return _round_up(_CONTEXTS * self.max_positions if wanted is None else wanted)


class ServingBudget(NamedTuple):
    """Division of the memory."""

    num_slots: int
    """Experts in memory; all of them: no expert is ever read again."""
    cache_tokens: int
    """Positions of the key-value cache."""


def serving_facts(
    model: ModelConfig,
    item_bytes: int,
    *,
    memory_bytes: int,
    interpreter_bytes: int,
    read_bytes: int,
    tokens_per_pass: int,
    max_running: int,
    cache_tokens: int | None = None,
) -> ServingFacts:
    """Return the sizes of a process that serves `model`.

    Args:
        model: the model.
        item_bytes: bytes of a number in memory.
        memory_bytes: the budget.
        interpreter_bytes: taken before the model is loaded.
        read_bytes: buffers of the threads that read experts.
        tokens_per_pass: most tokens of one pass.
        max_running: most texts whose next tokens one pass chooses.
        cache_tokens: wanted key-value positions; None: as many as make sense.
    """
    dense = list(parameters(model, lambda _: ()))
    biases = sum(p.size for p in dense if p.kind == "bias")
    numbers = sum(p.size for p in dense) - biases
    expert_bytes = 3 * model.hidden * model.ffn * item_bytes if model.experts else 0
    return ServingFacts(
        memory_bytes,
        _round_up(interpreter_bytes + _GROWTH_BYTES, _UNIT),
        numbers * item_bytes + biases * BIAS_BYTES,
        _pass_bytes(model, item_bytes, tokens_per_pass, max_running),
        read_bytes,
        _round_up(expert_bytes, _ALIGNMENT),
        model.experts * len(model.expert_layers),
        model.layers * model.cache_width * item_bytes
        + max(_mask_bytes(item_bytes, tokens_per_pass), _copy_bytes(model, item_bytes)),
        model.max_positions,
        cache_tokens,
    )


def all_experts_fit(facts: ServingFacts) -> bool:
    """Return whether all experts fit beside the fewest key-value positions."""
    return facts.memory_bytes >= _resident_bytes(facts)


def divide_memory(facts: ServingFacts) -> ServingBudget:
    """Return all experts in memory if they fit; else the experts and positions that divide what is
    left beside the fewest experts. The cache gets a quarter of that, within its limits."""
    left = facts.memory_bytes - facts.fixed_bytes
    if all_experts_fit(facts):
        tokens = (left - facts.num_experts * facts.expert_bytes) // facts.position_bytes
        return ServingBudget(facts.num_experts, _limit_tokens(tokens, facts))
    left -= facts.read_bytes + MIN_SLOTS * facts.expert_bytes
    tokens = _limit_tokens(left // _CACHE_FRACTION // facts.position_bytes, facts)
    num_slots = MIN_SLOTS + (left - tokens * facts.position_bytes) // facts.expert_bytes
    return ServingBudget(min(num_slots, facts.num_experts), tokens)


def smallest_memory(facts: ServingFacts) -> int:
    """Return the bytes of the smallest budget that works."""
    resident, num_missing = _resident_bytes(facts), facts.num_experts - MIN_SLOTS
    leased = resident + facts.read_bytes - num_missing * facts.expert_bytes
    return min(resident, leased) if facts.num_experts else resident


def _resident_bytes(facts: ServingFacts) -> int:
    """Return the bytes of the smallest budget with all experts in memory."""
    cache_bytes = facts.min_cache_tokens * facts.position_bytes
    return facts.fixed_bytes + facts.num_experts * facts.expert_bytes + cache_bytes


def check_memory(facts: ServingFacts) -> None:
    """Raise if a budget is too small for the model."""
    smallest = smallest_memory(facts)
    if facts.memory_bytes >= smallest:
        return
    parts = {
        "the interpreter": facts.interpreter_bytes, "dense weights": facts.dense_bytes,
        "a pass": facts.pass_bytes, "reading": facts.read_bytes * (facts.num_experts > 0),
        f"{min(MIN_SLOTS, facts.num_experts)} experts":
            min(MIN_SLOTS, facts.num_experts) * facts.expert_bytes,
        f"{facts.min_cache_tokens} key-value positions":
            facts.min_cache_tokens * facts.position_bytes,
    }  # fmt: skip
    listed = ", ".join(f"{format_bytes(size)} for {name}" for name, size in parts.items() if size)
    # The interpreter's use may be one unit more at the next start.
    raise ConfigError(
        f"memory = {format_bytes(facts.memory_bytes)} is too small for this model, which needs "
        f'{format_bytes(smallest)} ({listed}): set memory to "{-(-(smallest + _UNIT) >> 20)}MiB" '
        "or more"
    )


def _mask_bytes(item_bytes: int, tokens_per_pass: int) -> int:
    """Return the bytes of a key in the masks of a pass, which all layers share, and in the making
    of one."""
    rows = max(tokens_per_pass, ATTENTION_QUERY_BLOCK)
    return rows * item_bytes + ATTENTION_QUERY_BLOCK * (item_bytes + 2)


def _copy_bytes(model: ModelConfig, item_bytes: int) -> int:
    """Return the bytes of a position while the cache copies pages, one tensor of a layer after the
    other."""
    largest = max(heads * channels for heads, channels in model.cache_shapes)
    return largest * item_bytes + _COPY_INDEX_BYTES


def _pass_bytes(model: ModelConfig, item_bytes: int, tokens_per_pass: int, max_running: int) -> int:
    """Return the peak bytes of activations in one pass: of a layer's larger half, or of the
    head."""
    tokens, hidden, rows = tokens_per_pass, model.hidden, tokens_per_pass * model.top_k
    residual = 4 * tokens * hidden * item_bytes
    dense = max((3 * tokens * model.ffn_width(layer) for layer in range(model.layers)), default=0)
    experts = 2 * rows * hidden + 3 * tokens * (model.ffn + model.shared_experts * model.ffn)
    routing = tokens * model.experts * _FP32_BYTES * 6 + model.experts * hidden * _FP32_BYTES
    mixture = experts * item_bytes + routing + 2 * EXPERT_CHUNK_BYTES
    logits = max_running * model.vocab * (item_bytes + _LOGIT_BYTES)
    layer = max(_attention_bytes(model, item_bytes, tokens), dense * item_bytes, mixture)
    return residual + max(layer, logits)


def _attention_bytes(model: ModelConfig, item_bytes: int, tokens: int) -> int:
    """Return the bytes of queries, keys, values and results of one layer, without the cache."""
    width = 5 * model.heads * model.head_dim + 4 * model.kv_heads * model.head_dim
    if model.latent is not None:
        latent = model.latent.kv_lora_rank + model.latent.qk_rope_head_dim
        width += 4 * model.heads * latent
    return tokens * width * item_bytes


def _limit_tokens(tokens: int, facts: ServingFacts) -> int:
    whole = tokens // PAGE_TOKENS * PAGE_TOKENS
    return max(min(whole, facts.max_cache_tokens), facts.min_cache_tokens)


def _round_up(size: int, multiple: int = PAGE_TOKENS) -> int:
    return -(-size // multiple) * multiple

"""Rows of layout and model family, and a choice of rows that covers every pair of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.testing.jobs import tiny_job

RANKS = (1, 2, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
DISPATCH_METHODS: dict[str, dict[str, Any]] = {
    "all_to_all": {"dispatch": "all_to_all"},
    "dedup": {"dispatch": "dedup"},
    "hierarchical all_to_all": {"dispatch": "all_to_all", "dispatch_hosts": 2},
    "hierarchical dedup": {"dispatch": "dedup", "dispatch_hosts": 2},
    "hierarchical dedup in chunks": {"dispatch": "dedup", "dispatch_hosts": 2, "chunks": 3},
    "all_to_all, overlap_local": {"dispatch": "all_to_all", "overlap_local": True},
}
"""Dispatch methods by name; hierarchical ones need several ranks per host."""
EMBEDDINGS = ("whole", "columns")
LATENT = {"kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "v_head_dim": 6}
SMALL: dict[str, Any] = {
    "vocab": 60, "hidden": 32, "layers": 4, "heads": 4, "head_dim": 8, "ffn": 24, "init_std": 0.2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "tiny-dense": {"model": {"tied": True, "experts": 0, "top_k": 0, "kv_heads": 4}},
    "tiny-mixtral": {
        "model": {"window": 5, "kv_heads": 2, "experts": 8},
        "routing": {"router": "gshard", "capacity_factor": 1.0, "balance_loss": 1.0},
    },
    "tiny-olmoe": {
        "model": {"top_k": 1, "clip_qkv": 1.5, "kv_heads": 4, "experts": 8},
        "routing": {"router": "switch", "noise": 0.1, "capacity_factor": 1.0},
    },
    "tiny-qwen3": {
        "model": {"tied": True, "kv_heads": 2, "experts": 8},
        "routing": {"router": "balanced"},
    },
    "tiny-deepseek": {
        "model": {"dense_ffn": 40, "kv_heads": 4, "latent": LATENT, "experts": 8, "top_k": 3},
        "routing": {"bias_update_rate": 0.02},
    },
}  # fmt: skip
"""Every family, with every router, drops, noise and tied heads among them."""


class Row(NamedTuple):
    """Family and layout of one run."""

    family: str
    ranks: int
    pp: int
    tp: int
    ep: int
    etp: int
    dp_shard: int
    embedding: str | None
    method: str | None
    schedule: str | None
    recompute: bool

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of two samples: the most stages of a pipeline, or else 2.

        With eight ranks, half of them have no sample.
        """
        return 4 if self.pp > 1 else 2

    @property
    def job(self) -> Job:
        """Job of the family under the layout."""
        layout = {axis: getattr(self, axis) for axis in AXES}
        if self.method is not None:
            layout |= DISPATCH_METHODS[self.method]
        if self.schedule is not None:
            layout |= {"schedule": self.schedule}
        if self.embedding is not None:
            layout |= {"embedding": self.embedding}
        return job(self.family, self.micro_batches, layout, self.recompute)

    def __str__(self) -> str:
        axes = (f"{name} {value}" for name, value in self._asdict().items() if name in AXES)
        words = [self.family, f"{self.ranks} ranks", *axes, self.method or "", self.schedule or ""]
        words += [f"embedding {self.embedding}"] * (self.embedding == "columns")
        return ", ".join([*filter(None, words), *["recompute"] * self.recompute])


AXES = ("pp", "tp", "ep", "etp", "dp_shard")


def job(
    family: str, micro_batches: int, layout: dict[str, Any] | None = None, recompute: bool = False
) -> Job:
    """Return the job of a family, for one rank unless a layout is given."""
    given = FAMILIES[family]
    return tiny_job(
        model={**PRESETS[family], **SMALL, **given["model"]},
        routing=given.get("routing", {}),
        train={
            "batch": 2 * micro_batches, "micro_batches": micro_batches, "recompute": recompute,
        },
        layout=layout or {},
    )  # fmt: skip


def reference(family: str) -> Row:
    """Return the row of a family on one rank."""
    return Row(family, 1, 1, 1, 1, 1, 1, None, None, None, False)


def rows() -> list[Row]:
    """Return every family under every layout that it supports."""
    found = []
    for ranks, pp, tp, ep, etp, dp_shard in product(RANKS, repeat=6):
        if ranks % (pp * tp) or (ranks // pp) % (ep * etp) or (ranks // pp // tp) % dp_shard:
            continue
        schedules: Sequence[str | None] = SCHEDULES if pp > 1 else (None,)
        methods: Sequence[str | None] = tuple(DISPATCH_METHODS) if ep > 1 else (None,)
        # Tensor parallelism shards the vocabulary instead, and one rank has all columns.
        embeddings: Sequence[str | None] = EMBEDDINGS if tp == 1 and ranks > pp else (None,)
        for family, embedding, method, schedule, recompute in product(
            FAMILIES, embeddings, methods, schedules, (False, True)
        ):
            row = Row(
                family, ranks, pp, tp, ep, etp, dp_shard, embedding, method, schedule, recompute
            )
            if _possible(row):
                found.append(row)
    return found


def _possible(row: Row) -> bool:
    """Return whether the layout is valid for the family; other tests cover the refusals."""
    model = FAMILIES[row.family]["model"]
    stages = row.pp * (2 if row.schedule == "interleaved" else 1)
    return (
        stages <= SMALL["layers"]
        and model["kv_heads"] % row.tp == 0
        and row.tp % row.etp == 0
        and (row.ep == row.etp == 1 or bool(model["experts"]))
        and not (row.schedule == "zero-bubble" and row.recompute)
        and not (
            row.method is not None
            and "dispatch_hosts" in DISPATCH_METHODS[row.method]
            and row.ep < 4
        )
    )


def pairs_of(row: Row) -> set[Any]:
    """Return what a row covers: every pair of its values, for its family every pair of axes above 1
    (recompute among them), and `pp`, `tp`, `ep` and `dp_shard` together."""
    above = [axis for axis in AXES if getattr(row, axis) > 1] + ["recompute"] * row.recompute
    met: set[Any] = set(combinations(enumerate(row), 2))
    met |= {(row.family, *axes) for axes in combinations(above, 2)}
    if min(row.pp, row.tp, row.dp_shard) > 1 and (row.ep > 1 or row.family == "tiny-dense"):
        met.add((row.family, "pp, tp, ep and dp_shard"))
    return met


def values_of(row: Row) -> set[Any]:
    """Return what a row covers alone: each of its values, for its family each axis above 1, and
    `pp`, `tp`, `ep` and `dp_shard` together."""
    above = [axis for axis in AXES if getattr(row, axis) > 1] + ["recompute"] * row.recompute
    together = {met for met in pairs_of(row) if met == (row.family, "pp, tp, ep and dp_shard")}
    return set(enumerate(row)) | {(row.family, axis) for axis in above} | together


def covering(whole: Sequence[Row], things: Callable[[Row], set[Any]] = pairs_of) -> list[Row]:
    """Return rows of `whole` that cover all of its things; rows of few ranks first."""
    left = {row: things(row) for row in whole}
    chosen: list[Row] = []
    while left:
        best = max(left, key=lambda row: len(left[row]) / row.ranks)
        met = left.pop(best)
        chosen.append(best)
        left = {row: rest - met for row, rest in left.items() if rest - met}
    return chosen

"""Layouts and families, and a choice of rows in which every two of their values meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.testing.jobs import tiny_job

RANKS = (1, 2, 4, 8)
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
WAYS: dict[str, dict[str, Any]] = {
    "rows": {"dispatch": "rows"},
    "visits": {"dispatch": "visits"},
    "rows by hosts": {"dispatch": "rows", "hosts": 2},
    "visits by hosts": {"dispatch": "visits", "hosts": 2},
    "visits by hosts in parts": {"dispatch": "visits", "hosts": 2, "chunks": 3},
    "rows, local ones first": {"dispatch": "rows", "local": "first"},
}
"""How tokens travel to experts; by way of hosts where each has several of the ranks, whole or in
parts of a rank's tokens, along with what is local or beside it."""
EMBEDDINGS = ("whole", "columns")
LATENT = {"width": 10, "queries": 12, "rotary": 4, "value": 6}
SMALL: dict[str, Any] = {
    "vocab": 60, "hidden": 32, "layers": 4, "heads": 4, "head_dim": 8, "ffn": 24, "init_std": 0.2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "tiny-dense": {"model": {"tied": True, "experts": 0, "top_k": 0, "kv_heads": 4}},
    "tiny-mixtral": {
        "model": {"window": 5, "kv_heads": 2, "experts": 8},
        "routing": {"router": "gshard", "capacity": 1.0, "balance_loss": 1.0},
    },
    "tiny-olmoe": {
        "model": {"top_k": 1, "clip_qkv": 1.5, "kv_heads": 4, "experts": 8},
        "routing": {"router": "switch", "noise": 0.1, "capacity": 1.0},
    },
    "tiny-qwen3": {
        "model": {"tied": True, "kv_heads": 2, "experts": 8},
        "routing": {"router": "balanced"},
    },
    "tiny-deepseek": {
        "model": {"dense_ffn": 40, "kv_heads": 4, "latent": LATENT, "experts": 8, "top_k": 3},
        "routing": {"bias_step": 0.02},
    },
}  # fmt: skip
"""Between them every family and every router, drops, noise, tied heads."""


class Row(NamedTuple):
    """One family under one layout."""

    family: str
    ranks: int
    pp: int
    tp: int
    ep: int
    etp: int
    shard: int
    embedding: str | None
    way: str | None
    schedule: str | None
    recompute: bool

    @property
    def micro_batches(self) -> int:
        """Of two samples each, of which half of the ranks have none if there are eight.

        As many as the stages that there may be; where there are none, those that begin and end
        what adds up.
        """
        return 4 if self.pp > 1 else 2

    @property
    def job(self) -> Job:
        """The family's under the layout."""
        layout = {axis: getattr(self, axis) for axis in AXES}
        if self.way is not None:
            layout |= WAYS[self.way]
        if self.schedule is not None:
            layout |= {"schedule": self.schedule}
        if self.embedding is not None:
            layout |= {"embedding": self.embedding}
        return job(self.family, self.micro_batches, layout, self.recompute)

    def __str__(self) -> str:
        axes = (f"{name} {value}" for name, value in self._asdict().items() if name in AXES)
        words = [self.family, f"{self.ranks} ranks", *axes, self.way or "", self.schedule or ""]
        words += [f"embedding in {self.embedding}"] * (self.embedding == "columns")
        return ", ".join([*filter(None, words), *["recompute"] * self.recompute])


AXES = ("pp", "tp", "ep", "etp", "shard")


def job(
    family: str, micro_batches: int, layout: dict[str, Any] | None = None, recompute: bool = False
) -> Job:
    """A family's, for one rank that does everything by itself unless a layout is given."""
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
    """The row of a family that shares nothing out."""
    return Row(family, 1, 1, 1, 1, 1, 1, None, None, None, False)


def rows() -> list[Row]:
    """Every family under every layout that there is for it."""
    found = []
    for ranks, pp, tp, ep, etp, shard in product(RANKS, repeat=6):
        if ranks % (pp * tp) or (ranks // pp) % (ep * etp) or (ranks // pp // tp) % shard:
            continue
        schedules: Sequence[str | None] = SCHEDULES if pp > 1 else (None,)
        ways: Sequence[str | None] = tuple(WAYS) if ep > 1 else (None,)
        # The slices of several share out its words, and one rank has all columns.
        tables: Sequence[str | None] = EMBEDDINGS if tp == 1 and ranks > pp else (None,)
        for family, table, way, schedule, recompute in product(
            FAMILIES, tables, ways, schedules, (False, True)
        ):
            row = Row(family, ranks, pp, tp, ep, etp, shard, table, way, schedule, recompute)
            if _possible(row):
                found.append(row)
    return found


def _possible(row: Row) -> bool:
    """Whether the job can be trained like that; what cannot is refused, and tested elsewhere."""
    model = FAMILIES[row.family]["model"]
    stages = row.pp * (2 if row.schedule == "interleaved" else 1)
    return (
        stages <= SMALL["layers"]
        and model["kv_heads"] % row.tp == 0
        and row.tp % row.etp == 0
        and (row.ep == row.etp == 1 or bool(model["experts"]))
        and not (row.schedule == "zero-bubble" and row.recompute)
        and not (row.way is not None and "hosts" in WAYS[row.way] and row.ep < 4)
    )


def meetings(row: Row) -> set[Any]:
    """What meets in a row: any two of its values; of its family, any two of its axes that share
    something out, recomputation among them; and all of the four that share out most."""
    above = [axis for axis in AXES if getattr(row, axis) > 1] + ["recompute"] * row.recompute
    met: set[Any] = set(combinations(enumerate(row), 2))
    met |= {(row.family, *axes) for axes in combinations(above, 2)}
    if min(row.pp, row.tp, row.shard) > 1 and (row.ep > 1 or row.family == "tiny-dense"):
        met.add((row.family, "pp, tp, ep and shard"))
    return met


def covering(whole: Sequence[Row]) -> list[Row]:
    """Rows of `whole` in which all meets that does so anywhere in it; few ranks first."""
    left = {row: meetings(row) for row in whole}
    chosen: list[Row] = []
    while left:
        best = max(left, key=lambda row: len(left[row]) / row.ranks)
        met = left.pop(best)
        chosen.append(best)
        left = {row: pairs - met for row, pairs in left.items() if pairs - met}
    return chosen

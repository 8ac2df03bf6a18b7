"""The plan model. Training obeys every field, and refuses a plan that it cannot obey."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from moesaic.base import keys
from moesaic.base.config import Section
from moesaic.base.units import plural
from moesaic.facts.job import Job, ModelConfig
from moesaic.facts.job.balance import BalanceCosts
from moesaic.facts.job.model import MAX_EXPERTS
from moesaic.facts.job.train import (
    MAX_CHUNKS,
    DispatchMethod,
    EmbeddingSharding,
    MatmulBackend,
    PipelineSchedule,
)
from moesaic.facts.plan.partition import Partition
from moesaic.facts.plan.predictions import Predictions

MAX_RANKS = 1 << 20
"""Most ranks of a plan."""
OTHER_RANKS = "another number of ranks"
"""Remedy of a plan whose groups fit no ranks, for one who may choose their number."""
_LINE_WIDTH = 100


def group_faults(
    values: Mapping[str, Any], other_ranks: str = OTHER_RANKS, table: str = ""
) -> Iterator[str]:
    """Yield a sentence for each group of ranks in the `values` of a plan that does not divide the
    ranks around it.

    The remedy is `other_ranks`, or another size. With a `table` of a job, it says how to set 1.
    """
    ranks, pp, tp, etp = (values[key] for key in ("ranks", "pp", "tp", "etp"))
    if tp % etp:
        yield (
            f"etp = {etp} does not divide tp = {tp}, whose ranks split the experts: "
            f"use {keys.list_divisors(tp)}"
        )
    # If pp or tp does not divide, compare the inner groups with the ranks around it.
    stage = ranks // pp if ranks % pp == 0 else ranks
    is_known = ranks % pp == 0 and stage % tp == 0
    ep_name = "ep * etp" if etp > 1 else "ep"
    for name, value, total, noun, of in (
        ("pp", pp, ranks, "rank", ""),
        ("tp", tp, stage, "rank", " of a stage"),
        (ep_name, values["ep"] * etp if tp % etp == 0 else 1, stage, "rank", " of a stage"),
        ("dp_shard", values["dp_shard"] if is_known else 1, stage // tp, "replica", ""),
    ):
        if total % value:
            where = plural(total, "rank") if total == ranks else f"{plural(total, noun)}{of}"
            hint = f" (--set {table}.{name.split()[0]}=1)" if table and total == 1 else ""
            yield (
                f"{name} = {value} does not divide {where}: use {keys.list_divisors(total)}{hint}, "
                f"or {other_ranks}"
            )


def _consecutive_experts(given: dict[str, Any]) -> list[list[int]]:
    """Return the experts of each of the `ep` ranks of a plan that places them in order."""
    ep, experts = given.get("ep", 0), given.get("experts", 0)
    if not ep or experts % ep:
        return []
    share = experts // ep
    return [list(range(rank * share, (rank + 1) * share)) for rank in range(ep)]


class RankPlace(Section):
    """Host and device of one rank."""

    host: str
    """Host. Names may differ from the real ones; which ranks share a host may not."""
    device: str
    """Model of the device."""
    kind: Literal["cpu", "gpu", "npu", "xpu"]
    """Kind of the device, as in a cluster's file."""


class Plan(Section):
    """A parallel layout for a number of ranks.

    Rank `(pp_rank * dp + dp_rank) * tp + tp_rank` follows from these groups of consecutive ranks:

    - `pp` pipeline ranks have `ranks_per_stage` ranks each, which hold the same blocks.
    - In a stage, `tp` ranks form a replica: they split every dense matrix and hold the same
      samples. Outside sharded matrices each has an equal sequence shard of the tokens.
    - Every replica holds its own samples of each global micro-batch.
    - In a stage, `etp` ranks split the same experts, and `ep` such groups in a row split a layer's
      experts. Ranks that are `ep * etp` apart hold the same experts.
    - `dp_shard` replicas in a row shard the dense parameters of each TP rank.
    """

    ranks: int = Field(ge=1, le=MAX_RANKS)
    """World size."""
    ep: int = Field(ge=1, le=MAX_RANKS)
    """Expert parallelism: ranks that split each layer's experts."""
    dp_shard: int = Field(ge=1)
    """Replicas that shard the dense parameters."""
    tp: int = Field(default=1, ge=1)
    """Tensor parallelism: ranks that split every dense matrix."""
    etp: int = Field(default=1, ge=1)
    """Tensor parallelism of experts: ranks, of the `tp` ones, that also split every expert's
    matrices."""
    pp: int = Field(default=1, ge=1)
    """Pipeline ranks, each a group of ranks."""
    schedule: PipelineSchedule = "1f1b"
    """Order of the forward and backward passes of micro-batches on the pipeline ranks."""
    dispatch: DispatchMethod = "all_to_all"
    """How tokens reach experts of other ranks. all_to_all: once per expert. dedup: once per rank,
    or once per host with `dispatch_hosts`."""
    dispatch_hosts: int = Field(default=1, ge=1)
    """Equal groups of consecutive ranks among the `ep` ranks, as on hosts. Tokens go to the rank
    with the same index in another group, and from there to ranks of that group. 1: directly."""
    overlap_local: bool = False
    """Compute tokens for the rank's own experts while tokens for other ranks travel. false: in the
    same matmuls as received tokens."""
    chunks: int = Field(default=1, ge=1, le=MAX_CHUNKS)
    """Chunks that a rank's tokens are dispatched in, one after another."""
    grouped_mm: Literal["auto"] | MatmulBackend = "auto"
    """Kernels of the expert matmuls on a GPU, as in a job's `kernels.grouped_mm`; auto: as in the
    job."""
    embedding: EmbeddingSharding = "whole"
    """Embedding table on each rank of a stage. whole: all of it, except for shards by `tp` or
    `dp_shard`. columns: an equal column shard."""
    experts: int = Field(ge=0, lt=MAX_EXPERTS)
    """Experts per layer."""
    expert_placement: list[list[int]] = Field(default_factory=_consecutive_experts)
    """Experts on each of the `ep` ranks, in slot order; unset: consecutive experts."""
    expert_placement_by_layer: dict[str, list[list[int]]] = Field(default_factory=dict)
    """Placement of layers that differ from `expert_placement`, in the same form, by the number of
    the layer ("3")."""
    balance_costs: BalanceCosts | None = None
    """Costs that balance policies assume; `moesaic plan` derives them from the cluster's file.
    Unset: those of the job's `balance.costs`. The plan of a run has the costs that it used."""
    stages: list[list[str]] | None = None
    """Names of the blocks of each stage; stage i is on pipeline rank i % `pp`. Unset: an even
    split."""
    recompute: bool | None = None
    """Activation checkpointing: backward computes each layer again; unset: as `train.recompute`."""
    micro_batches: int | None = Field(default=None, ge=1)
    """Micro-batches of a global batch; must equal the job's, since results depend on them."""
    places: list[RankPlace] = Field(default_factory=list)
    """Host and device of each rank; empty: any."""
    predictions: Predictions | None = None
    """Predicted time and memory of a step; unset: unknown."""

    def recomputes(self, job: Job) -> bool:
        """Return whether backward computes each layer again."""
        return job.train.recompute if self.recompute is None else self.recompute

    def conflicts(self) -> Iterator[str]:
        """Yield sizes that do not divide others, and lists that do not fit the sizes."""
        own = [*group_faults(dict(self)), *self._size_conflicts()]
        yield from own
        if not own:
            yield from self._list_conflicts()

    def _size_conflicts(self) -> Iterator[str]:
        """Yield experts, hosts and chunks that do not fit the sizes."""
        if self.experts % self.ep:
            yield (
                f"ep = {self.ep} does not divide experts = {self.experts}: "
                f"use {keys.list_divisors(self.experts)}"
            )
        if self.embedding == "columns" and self.tp > 1:
            yield (
                f'embedding = "columns" with tp = {self.tp}, which already shards the '
                'vocabulary: set embedding = "whole", or tp = 1'
            )
        if self.ep % self.dispatch_hosts:
            yield (
                f"dispatch_hosts = {self.dispatch_hosts} does not divide ep = {self.ep}, and every "
                f"host has equally many of these ranks: use {keys.list_divisors(self.ep)}"
            )
        if self.ep == 1 and self.overlaps_dispatch:
            yield (
                f"chunks = {self.chunks} and overlap_local = {keys.show(self.overlap_local)} with "
                "ep = 1, where all experts are local: raise ep, or remove them"
            )

    def _list_conflicts(self) -> Iterator[str]:
        """Yield lists that do not fit the sizes."""
        yield from self._placement_conflicts("expert_placement", self.expert_placement)
        for layer, by_rank in self.expert_placement_by_layer.items():
            yield from self._placement_conflicts(f"expert_placement_by_layer.{layer}", by_rank)
        if self.stages is not None and len(self.stages) != self.num_stages:
            schedule = f" and schedule = '{self.schedule}'" if self.pp > 1 else ""
            yield (
                f"stages lists {len(self.stages)} stages where pp = {self.pp}{schedule}: "
                f"spread the names of all blocks over {self.num_stages}"
            )
        if self.places and len(self.places) != self.ranks:
            yield (
                f"places has {len(self.places)} entries for ranks = {self.ranks}: give every rank "
                "one, in their order, or remove places"
            )

    def _placement_conflicts(self, name: str, by_rank: list[list[int]]) -> Iterator[str]:
        """Yield a sentence if a placement has not every expert once, and as many on each rank."""
        share = self.experts // self.ep
        placed = Counter(expert for experts in by_rank for expert in experts)
        wrong = [one for one in (*range(self.experts), *placed) if placed[one] != 1]
        wrong += [one for one in placed if not 0 <= one < self.experts]
        sizes = [len(experts) for experts in by_rank]
        if wrong or sizes != [share] * self.ep:
            has = f"expert {wrong[0]} {placed[wrong[0]]} times" if wrong else f"shares of {sizes}"
            yield (
                f"{name} has {has}: place every expert once, from 0 to {self.experts - 1}, and "
                f"{share} on each of {self.ep} ranks"
            )

    @classmethod
    def data_parallel(cls, ranks: int) -> Plan:
        """Return the plan of a model without experts whose replica each rank holds."""
        return cls(ranks=ranks, ep=1, dp_shard=1, experts=0)

    def to_json(self) -> str:
        """Return the plan as JSON for editing; what fits, and every table row, is on one line."""
        return _format_json(self.model_dump(mode="json", by_alias=True), "", top=True) + "\n"

    @property
    def overlaps_dispatch(self) -> bool:
        """True if experts compute while tokens travel."""
        return self.chunks > 1 or self.overlap_local

    def experts_of(self, rank: int, layer: int) -> tuple[int, ...]:
        """Return the experts of a layer on `rank`, whole or sharded, in slot order."""
        return self.experts_at(rank // self.etp, layer)

    def experts_at(self, ep_position: int, layer: int) -> tuple[int, ...]:
        """Return the experts at a position of the EP group; the ETP ranks of a group share a
        position."""
        return tuple(self._placement_of_layer(layer)[ep_position % self.ep])

    def slot_experts(self, layer: int) -> list[int]:
        """Return the experts of all slots of an EP group, rank by rank."""
        return [expert for experts in self._placement_of_layer(layer) for expert in experts]

    def _placement_of_layer(self, layer: int) -> list[list[int]]:
        return self.expert_placement_by_layer.get(str(layer), self.expert_placement)

    def with_expert_placement(self, slots_by_layer: Mapping[int, Sequence[int]]) -> Plan:
        """Return the plan with other owner ranks of experts in some layers.

        `slots_by_layer` has the expert of every slot of a layer, rank by rank."""
        each = self.experts // self.ep
        by_layer = dict(self.expert_placement_by_layer)
        for layer, slots in slots_by_layer.items():
            by_layer[str(layer)] = [
                list(slots[at : at + each]) for at in range(0, self.experts, each)
            ]
        ordered = sorted((int(layer), one) for layer, one in by_layer.items())
        different = {str(layer): one for layer, one in ordered if one != self.expert_placement}
        return self.model_copy(update={"expert_placement_by_layer": different})

    def decisions(self) -> dict[str, Any]:
        """Return the plan as plain data, without predictions."""
        return self.model_dump(mode="json", by_alias=True, exclude={"predictions"})

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold the same pipeline stage."""
        return self.ranks // self.pp

    @property
    def dp(self) -> int:
        """Replicas: groups of `tp` ranks with their own samples."""
        return self.ranks_per_stage // self.tp

    @property
    def embedding_shards(self) -> int:
        """Column shards of the embedding, one on each rank of a stage; 1 if it is whole."""
        return self.ranks_per_stage if self.embedding == "columns" else 1

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline; stage i is on pipeline rank i % `pp`."""
        return self.pp * (2 if self.pp > 1 and self.schedule == "interleaved" else 1)

    @property
    def num_exchanges(self) -> int:
        """Exchanges on a token's way to its experts: two if it goes by way of hosts."""
        return 2 if 1 < self.dispatch_hosts < self.ep else 1

    def pp_rank(self, rank: int) -> int:
        """Return the pipeline rank of `rank`."""
        return rank // self.ranks_per_stage

    def dp_rank(self, rank: int) -> int:
        """Return the replica of `rank`."""
        return rank % self.ranks_per_stage // self.tp

    def counts_samples(self, rank: int) -> bool:
        """Return True if `rank` counts its samples; other TP ranks hold the same ones."""
        return rank % self.tp == 0

    def stage_groups(self) -> Partition:
        """Return the groups of ranks that hold the same blocks."""
        return Partition(self.ranks, self.ranks_per_stage)

    def pp_groups(self) -> Partition:
        """Return the groups of ranks that pass the same tokens on, from the first stage to the
        last."""
        return Partition(self.ranks, self.pp, self.ranks_per_stage)

    def tp_groups(self) -> Partition:
        """Return the groups of ranks that split dense matrices."""
        return Partition(self.ranks, self.tp)

    def ep_groups(self) -> Partition:
        """Return the groups of ranks that exchange tokens."""
        return Partition(self.ranks, self.ep, self.etp)

    def exchange_groups(self) -> list[Partition]:
        """Return the groups of ranks of each exchange of a dispatch, in order.

        A flat dispatch exchanges inside the EP groups. With hosts, it exchanges between the ranks
        of one index on all hosts, then inside each host."""
        if self.num_exchanges == 1:
            return [self.ep_groups()]
        each = self.ep // self.dispatch_hosts
        across = Partition(self.ranks, self.dispatch_hosts, each * self.etp)
        return [across, Partition(self.ranks, each, self.etp)]

    def etp_groups(self) -> Partition:
        """Return the groups of ranks that split the matrices of the same experts."""
        return Partition(self.ranks, self.etp)

    def same_etp_rank_groups(self) -> Partition:
        """Return the groups of ranks of one stage with the same ETP rank; each group dispatches
        every token once."""
        return Partition(self.ranks, self.ranks_per_stage // self.etp, self.etp)

    def expert_dp_groups(self) -> Partition:
        """Return the groups of ranks that hold the same experts, or the same shards of them."""
        stride = self.ep * self.etp
        return Partition(self.ranks, self.ranks_per_stage // stride, stride)

    def dp_groups(self) -> Partition:
        """Return the groups of ranks with the same blocks and TP rank, before FSDP sharding."""
        return Partition(self.ranks, self.dp, self.tp)

    def dp_shard_groups(self) -> Partition:
        """Return the groups of ranks that shard the dense parameters."""
        return Partition(self.ranks, self.dp_shard, self.tp)

    def dp_replicate_groups(self) -> Partition:
        """Return the groups of ranks that hold the same shard of the dense parameters."""
        return Partition(self.ranks, self.dp // self.dp_shard, self.tp * self.dp_shard)

    def partitions(self) -> list[Sequence[list[int]]]:
        """Return every partition of the ranks into groups that a model may use in forward and
        backward."""
        tied = [[chain[0], chain[-1]] for chain in self.pp_groups() if self.pp > 1]
        return [
            self.stage_groups(), self.pp_groups(), tied, self.tp_groups(), self.ep_groups(),
            *self.exchange_groups(), self.etp_groups(), self.same_etp_rank_groups(),
            self.expert_dp_groups(), self.dp_groups(), self.dp_shard_groups(),
            self.dp_replicate_groups(),
        ]  # fmt: skip

    def sample_range(self, rank: int, batch: int) -> range:
        """Return the consecutive samples that `rank` holds of the `batch` samples of a global
        micro-batch."""
        replica, replicas = self.dp_rank(rank), self.dp
        return range(replica * batch // replicas, (replica + 1) * batch // replicas)


def stage_blocks(plan: Plan, model: ModelConfig) -> list[list[str]]:
    """Return the block names of each stage: those of `plan`, or an even split of the layers."""
    if plan.stages is not None:
        return plan.stages
    blocks, count = block_names(model), plan.num_stages
    cuts = [1 + stage * model.layers // count for stage in range(1, count)]
    return [blocks[start:end] for start, end in zip([0, *cuts], [*cuts, len(blocks)], strict=True)]


def block_names(model: ModelConfig) -> list[str]:
    """Return the names of the blocks of `model`, in order."""
    return ["embed", *(f"layers.{index}" for index in range(model.layers)), "head"]


def _format_json(value: Any, indent: str, *, top: bool = False) -> str:
    """Return `value` as JSON, on one line if it is short enough or a table of plain values."""
    line = json.dumps(value, ensure_ascii=False)
    parts = list(value.values()) if isinstance(value, dict) else value
    is_nested = isinstance(parts, list) and any(isinstance(one, dict | list) for one in parts)
    if not top and (len(line) <= _LINE_WIDTH or not is_nested):
        return line
    inner = f"{indent}  "
    items = [_format_json(one, inner) for one in parts]
    opening, closing = "[]"
    if isinstance(value, dict):
        opening, closing = "{}"
        items = [f"{json.dumps(key)}: {item}" for key, item in zip(value, items, strict=True)]
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{indent}{closing}"

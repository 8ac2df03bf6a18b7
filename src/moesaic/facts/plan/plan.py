"""The plan as a contract: every field is obeyed, and what cannot be obeyed is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from moesaic.base.config import Section
from moesaic.facts.job.balance import Prices
from moesaic.facts.job.model import MOST_EXPERTS
from moesaic.facts.job.train import MOST_CHUNKS, Dispatch, Embedding, GroupedMM, Local, Schedule
from moesaic.facts.plan.predictions import Predictions

MOST_RANKS = 1 << 20
"""Ranks that a plan can be for."""
_WIDTH = 100


class Tiers(Section):
    """Where things lie while they are not computed with."""

    parameters: Literal["device"] = "device"
    """Parameters: in the memory of their rank's device."""
    moments: Literal["device"] = "device"
    """The optimizer's moments: likewise."""


class RankPlace(Section):
    """Where one rank runs."""

    host: str
    """Its host. Names may differ from the real ones; which ranks share a host may not."""
    device: str
    """Model of its device."""
    kind: Literal["cpu", "gpu", "npu", "xpu"]
    """Kind of its device, as a cluster's file calls it."""


class Plan(Section):
    """A layout resolved for a number of ranks.

    A pipeline of `pp` parts, each a run of `span` ranks; in a part, runs of `tp` ranks that share
    out every matrix and hold the same samples, so that rank `(part * replicas + replica) * tp +
    slice` has its name. Every replica holds its own samples of each global micro-batch, and each of
    its slices an equal run of their tokens wherever a matrix is not cut. In a part, runs of `etp`
    ranks have the same experts, each a slice of them, and `ep` such runs in a row share out the
    experts; ranks that are `ep * etp` apart hold copies of the same ones. `shard` replicas in a row
    share out what dense parameters each slice has.
    """

    ranks: int = Field(ge=1, le=MOST_RANKS)
    """World size."""
    ep: int = Field(ge=1)
    """Ranks that share out the experts."""
    shard: int = Field(ge=1)
    """Replicas that share out the dense parameters."""
    tp: int = Field(default=1, ge=1)
    """Ranks that share out every dense matrix."""
    etp: int = Field(default=1, ge=1)
    """Of those, ranks that share out every expert's matrices too."""
    pp: int = Field(default=1, ge=1)
    """Parts of the pipeline."""
    schedule: Schedule = "1f1b"
    """The order in which parts compute forward and backward of micro-batches."""
    dispatch: Dispatch = "rows"
    """How tokens reach experts of other ranks: once for each expert, or once for each rank, or for
    each of several `hosts`."""
    hosts: int = Field(default=1, ge=1)
    """Equal runs of the `ep` ranks: tokens go to the rank of the same place in a run, and from that
    one to the run's ranks; 1: straight to each."""
    local: Local = "along"
    """Whether experts take what tokens of their own rank have for them along with what comes from
    other ranks, or by itself, while that travels."""
    chunks: int = Field(default=1, ge=1, le=MOST_CHUNKS)
    """Parts of a rank's tokens that go to experts of other ranks one after another."""
    grouped_mm: Literal["auto"] | GroupedMM = "auto"
    """Kernels of the expert matmuls on a GPU, as in a job's `kernels.grouped_mm`; auto: as the job
    says."""
    embedding: Embedding = "whole"
    """What of the embedding's table each rank of a part has: all, but for what `tp` or `shard`
    share out; or equal columns."""
    experts: int = Field(ge=0, lt=MOST_EXPERTS)
    """Experts a layer."""
    homes_by_rank: list[list[int]] = Field(default_factory=list, alias="homes")
    """The experts on each of the `ep` ranks, in the order of its slots; unset: in turn."""
    homes_of_layers: dict[str, list[list[int]]] = Field(default_factory=dict)
    """Homes of layers that have others than `homes` says, by the number of the layer ("3"), in the
    same form."""
    copies: list[list[int]] = Field(default_factory=list)
    """Experts that each of the `ep` ranks has beside its own whatever the loads are: none. Those of
    a single step are decided while it runs (`balance` of a job)."""
    prices: Prices | None = None
    """What a policy of balance counts on; `moesaic plan` works it out from the cluster's figures.
    Unset: as a job's `balance.prices` says. The plan of a run has what it went by."""
    stages: list[list[str]] | None = None
    """Names of the blocks of each stage, which parts take in turn; unset: an even cut."""
    tiers: Tiers = Tiers()
    """Where things lie while they are not computed with."""
    mode: Literal["synchronous"] = "synchronous"
    """How ranks keep step: all of them take every step together."""
    recompute: bool | None = None
    """Whether layers are computed again in backward; unset: as `train.recompute` says."""
    micro_batches: int | None = Field(default=None, ge=1)
    """Parts of a global batch: those of the job, for its numbers depend on them."""
    places: list[RankPlace] = Field(default_factory=list)
    """Where each rank runs; empty: anywhere."""
    predictions: Predictions | None = None
    """What a step is expected to take; unset: nobody has said."""

    @model_validator(mode="before")
    @classmethod
    def _fill_homes(cls, raw: Any) -> Any:
        """Where nobody says which experts live where: equal shares, in turn."""
        if not isinstance(raw, dict) or raw.get("homes") or raw.get("homes_by_rank"):
            return raw
        ep, experts = raw.get("ep"), raw.get("experts")
        if not (isinstance(ep, int) and isinstance(experts, int)) or ep < 1 or experts % ep:
            return raw
        if max(ep, experts) >= MOST_EXPERTS:  # The fields say what is wrong with it.
            return raw
        share = experts // ep
        return {**raw, "homes": [list(range(i * share, (i + 1) * share)) for i in range(ep)]}

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if self.ranks % (self.tp * self.pp):
            raise ValueError(
                f"tp * pp = {self.tp} * {self.pp} does not divide ranks = {self.ranks}: "
                "choose divisors"
            )
        if self.tp % self.etp:
            raise ValueError(
                f"etp = {self.etp} does not divide tp = {self.tp}, and slices of experts are "
                "slices of all else too: choose a divisor"
            )
        cut = self.etp > 1
        for name, value, of, many in (
            ("ep * etp" if cut else "ep", self.ep * self.etp, "ranks of a part", self.span),
            ("shard", self.shard, "replicas", self.replicas),
        ):
            if many % value:
                whole = "ranks" if many == self.ranks else of
                raise ValueError(
                    f"{name} = {value} does not divide {whole} = {many}: choose a divisor"
                )
        if self.experts % self.ep:
            raise ValueError(
                f"ep = {self.ep} does not divide experts = {self.experts}: choose a divisor"
            )
        if self.embedding == "columns" and self.tp > 1:
            raise ValueError(
                f'embedding = "columns" with tp = {self.tp}, whose slices share out the words of '
                'the table already: set embedding = "whole", or tp = 1'
            )
        self._check_homes("homes", self.homes_by_rank)
        self._check_layers()
        self._check_hosts()
        self._check_copies()
        if self.stages is not None and len(self.stages) != self.num_stages:
            of = f" and schedule = '{self.schedule}'" if self.pp > 1 else ""
            raise ValueError(
                f"stages lists {len(self.stages)} stages where pp = {self.pp}{of}: "
                f"spread the names of all blocks over {self.num_stages}"
            )
        if self.places and len(self.places) != self.ranks:
            raise ValueError(
                f"places has {len(self.places)} entries for ranks = {self.ranks}: give every rank "
                "one, in their order, or remove places"
            )
        self._check_timeline()
        return self

    def _check_homes(self, name: str, by_rank: list[list[int]]) -> None:
        share = self.experts // self.ep
        if len(by_rank) != self.ep:
            raise ValueError(
                f"{name} has {len(by_rank)} lists for ep = {self.ep}: give each of the ranks that "
                "share out the experts one"
            )
        seen: dict[int, int] = {}
        for rank, homes in enumerate(by_rank):
            for expert in homes:
                if not self.experts:
                    raise ValueError(
                        f"{name}[{rank}] names expert {expert}, and experts = 0: empty its lists"
                    )
                if not 0 <= expert < self.experts:
                    raise ValueError(
                        f"{name}[{rank}] names expert {expert}, and experts = {self.experts}: "
                        f"they are numbered from 0 to {self.experts - 1}"
                    )
                if expert in seen:
                    raise ValueError(
                        f"{name} names expert {expert} twice, in {name}[{seen[expert]}] and "
                        f"{'again there' if seen[expert] == rank else f'in {name}[{rank}]'}: an "
                        "expert has one home, put one that is missing in its place"
                    )
                seen[expert] = rank
        if len(seen) < self.experts:
            lost = [expert for expert in range(self.experts) if expert not in seen]
            others = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise ValueError(
                f"{name} lacks expert {lost[0]}{others}, and experts = {self.experts}: give every "
                "expert a home, or correct experts"
            )
        for rank, homes in enumerate(by_rank):
            if len(homes) != share:
                raise ValueError(
                    f"{name}[{rank}] has {len(homes)} experts where each rank has {share}: "
                    "make the shares equal"
                )

    def _check_layers(self) -> None:
        for layer, homes in self.homes_of_layers.items():
            if not (layer.isascii() and layer.isdecimal() and layer == str(int(layer))):
                raise ValueError(
                    f'homes_of_layers has the key "{layer}" where its keys are numbers of layers, '
                    'such as "3": correct or remove it'
                )
            self._check_homes(f"homes_of_layers.{layer}", homes)

    def _check_hosts(self) -> None:
        if self.ep % self.hosts:
            raise ValueError(
                f"hosts = {self.hosts} does not divide ep = {self.ep}, and each has as many of the "
                "ranks that share out the experts: choose a divisor"
            )
        if self.chunks > 1 and self.ep == 1:
            raise ValueError(
                f"chunks = {self.chunks} with ep = 1, where no token travels: raise ep, or set "
                "chunks = 1"
            )
        if self.local == "first" and self.ep == 1:
            raise ValueError(
                'local = "first" with ep = 1, where everything is local: raise ep, or set local = '
                '"along"'
            )

    def _check_copies(self) -> None:
        for rank, copies in enumerate(self.copies):
            if copies:
                raise ValueError(
                    f"copies[{rank}] names expert {copies[0]}, and a plan sends no expert to where "
                    "it has no home, a job's balance.policy does: empty copies"
                )

    def _check_timeline(self) -> None:
        told = [one.rank for one in self.predictions.timeline] if self.predictions else []
        for at, rank in enumerate(told):
            if rank >= self.ranks:
                raise ValueError(
                    f"predictions.timeline[{at}].rank = {rank}, and ranks = {self.ranks}: "
                    "predictions are of another plan; remove them, or plan anew"
                )
            if rank in told[:at]:
                raise ValueError(
                    f"predictions.timeline has rank {rank} twice: remove one of the two"
                )

    def to_json(self) -> str:
        """The plan as JSON that a person can edit: what fits on a line stands on one.

        So does each row of a table, whatever its length.
        """
        return _json(self.model_dump(mode="json", by_alias=True), "", top=True) + "\n"

    @property
    def overlaps(self) -> bool:
        """Whether experts compute while tokens travel."""
        return self.chunks > 1 or self.local == "first"

    def homes(self, rank: int, layer: int) -> tuple[int, ...]:
        """The experts of a layer that live on `rank`, or slices of them, in the order of its
        slots."""
        return self.homes_at(rank // self.etp, layer)

    def homes_at(self, place: int, layer: int) -> tuple[int, ...]:
        """The same; ranks that hold slices of the same experts are one place."""
        return tuple(self._homes_of(layer)[place % self.ep])

    def slots(self, layer: int) -> list[int]:
        """The experts of all slots of an expert group, rank by rank."""
        return [expert for homes in self._homes_of(layer) for expert in homes]

    def _homes_of(self, layer: int) -> list[list[int]]:
        return self.homes_of_layers.get(str(layer), self.homes_by_rank)

    def with_slots(self, slots_by_layer: Mapping[int, Sequence[int]]) -> Plan:
        """The plan with other homes of some layers, as `slots` has them."""
        each = self.experts // self.ep
        homes = dict(self.homes_of_layers)
        for layer, slots in slots_by_layer.items():
            found = [list(slots[at : at + each]) for at in range(0, self.experts, each)]
            homes[str(layer)] = found
        kept = sorted((int(layer), one) for layer, one in homes.items())
        others = {str(layer): one for layer, one in kept if one != self.homes_by_rank}
        return self.model_copy(update={"homes_of_layers": others})

    def decisions(self) -> dict[str, Any]:
        """The plan as plain data, without what it expects."""
        return self.model_dump(mode="json", by_alias=True, exclude={"predictions"})

    @property
    def span(self) -> int:
        """Ranks of one part of the pipeline."""
        return self.ranks // self.pp

    @property
    def replicas(self) -> int:
        """Sets of ranks that hold samples of their own."""
        return self.span // self.tp

    @property
    def columns(self) -> int:
        """Equal parts that the embedding's columns are in, one on each rank of a part."""
        return self.span if self.embedding == "columns" else 1

    @property
    def num_stages(self) -> int:
        """Stages that the model is cut into; stage i is on part i % pp."""
        return self.pp * (2 if self.pp > 1 and self.schedule == "interleaved" else 1)

    @property
    def trips(self) -> int:
        """How often tokens travel on their way to experts."""
        return 2 if 1 < self.hosts < self.ep else 1

    def part(self, rank: int) -> int:
        """The part of the pipeline that `rank` is in."""
        return rank // self.span

    def replica(self, rank: int) -> int:
        """Which replica `rank` belongs to."""
        return rank % self.span // self.tp

    def counts(self, rank: int) -> bool:
        """Whether `rank` counts its samples: other slices hold the same."""
        return rank % self.tp == 0

    def part_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same blocks."""
        return _runs(self.ranks, self.span)

    def chain_groups(self) -> list[list[int]]:
        """Groups of ranks that pass the same tokens on, from the first part to the last."""
        return [list(range(i, self.ranks, self.span)) for i in range(self.span)]

    def slice_groups(self) -> list[list[int]]:
        """Groups of ranks that share out matrices."""
        return _runs(self.ranks, self.tp)

    def expert_groups(self) -> list[list[int]]:
        """Groups of ranks that exchange tokens."""
        homes = _runs(self.ranks, self.ep * self.etp)
        return [ranks[i :: self.etp] for ranks in homes for i in range(self.etp)]

    def trip_groups(self) -> list[list[list[int]]]:
        """Groups of ranks that tokens travel in, trip after trip: straight to the ranks of their
        experts, or to the ranks of the same place on each host, and then to those of the host."""
        groups = self.expert_groups()
        if self.trips == 1:
            return [groups]
        each = self.ep // self.hosts
        across = [group[place::each] for group in groups for place in range(each)]
        within = [group[at : at + each] for group in groups for at in range(0, self.ep, each)]
        return [across, within]

    def expert_slice_groups(self) -> list[list[int]]:
        """Groups of ranks that share out the matrices of the same experts."""
        return _runs(self.ranks, self.etp)

    def same_expert_slice_groups(self) -> list[list[int]]:
        """Groups of ranks that between them send each token of a part to experts once."""
        return [part[i :: self.etp] for part in self.part_groups() for i in range(self.etp)]

    def replica_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same experts, or slices of them."""
        apart = self.ep * self.etp
        return [part[i::apart] for part in self.part_groups() for i in range(apart)]

    def same_slice_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same slices of the same blocks, shared out or not."""
        return [part[i :: self.tp] for part in self.part_groups() for i in range(self.tp)]

    def shard_groups(self) -> list[list[int]]:
        """Groups of ranks that share out the dense parameters."""
        size = self.shard
        return [
            alike[i : i + size]
            for alike in self.same_slice_groups()
            for i in range(0, len(alike), size)
        ]

    def shard_replica_groups(self) -> list[list[int]]:
        """Groups of ranks that hold the same share of the dense parameters."""
        return [
            alike[i :: self.shard] for alike in self.same_slice_groups() for i in range(self.shard)
        ]

    def rows(self, rank: int, batch: int) -> range:
        """Which of the `batch` samples of a global micro-batch `rank` holds: a run of them."""
        replica, replicas = self.replica(rank), self.replicas
        return range(replica * batch // replicas, (replica + 1) * batch // replicas)

    def bounds(self, batch: int) -> list[int]:
        """Where the rows of each replica begin, and where the last ones end."""
        replicas = self.replicas
        return [replica * batch // replicas for replica in range(replicas + 1)]


def _runs(ranks: int, size: int) -> list[list[int]]:
    return [list(range(i, i + size)) for i in range(0, ranks, size)]


def _json(value: Any, margin: str, *, top: bool = False) -> str:
    """`value` as JSON, on one line where that is not too long."""
    line = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or not value or (len(line) <= _WIDTH and not top):
        return line
    inner = f"{margin}  "
    if isinstance(value, dict):
        items = [f"{json.dumps(key)}: {_json(one, inner)}" for key, one in value.items()]
    else:
        items = [_row(one, inner) for one in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(items) + f"\n{margin}{closing}"


def _row(value: Any, margin: str) -> str:
    """An item of a list as JSON: on one line if it is a row of a table, an object of values."""
    if isinstance(value, dict) and not any(isinstance(v, dict | list) for v in value.values()):
        return json.dumps(value, ensure_ascii=False)
    return _json(value, margin)

"""Recorded routing: the experts every token chose, by step, layer and global sample.

What is recorded says nothing of layout: a record of one rank replays on four. Each rank writes its
own samples, as Parquet, under one directory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from moesaic.base.errors import DataError, unwritable
from moesaic.base.lock import locked
from moesaic.base.records import RecordWriter
from moesaic.dist.world import World
from moesaic.facts.job import Job

if TYPE_CHECKING:
    import pyarrow.dataset as ds

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        ("sample", pa.int64()),
        ("choices", pa.int16()),
        ("experts", pa.list_(pa.int16())),
    ]
)

_START = "start-{number:03d}-step-{first:08d}"
_START_NAME = re.compile(r"start-(\d+)-step-(\d+)")
_DIGEST = b"moesaic.samples"
"""Where a part says what samples its indices stand for."""


class RouteRecorder:
    """Writes this rank's choices to `directory`, over the samples that `digest` stands for."""

    def __init__(self, directory: Path, digest: str) -> None:
        self.directory = directory
        self._writer = RecordWriter(directory, SCHEMA.with_metadata({_DIGEST: digest}))

    def record(self, step: int, samples: Tensor, choices: Mapping[int, Tensor]) -> None:
        """Add one micro-batch's choices, by layer; a rank may have none of its samples."""
        ids = samples.tolist()
        if not ids:
            return
        for layer, experts_TK in choices.items():
            flat = experts_TK.cpu().reshape(len(ids), -1).to(torch.int16).numpy()
            self._writer.add(
                {
                    "step": step, "layer": layer, "sample": sample,
                    "choices": experts_TK.shape[1], "experts": row,
                }
                for sample, row in zip(ids, flat, strict=True)
            )  # fmt: skip

    def flush(self) -> None:
        """Write what is still in memory."""
        self._writer.flush()


@contextmanager
def recording(path: Path, world: World, digest: str, first: int) -> Iterator[RouteRecorder]:
    """This rank's recorder under `path`, from step `first` on; one run at a time.

    Every start of the run writes to a directory of its own, and makes void what earlier ones wrote
    of the steps from its first one on.
    """
    place = path.expanduser()
    named = f"routing.record = '{path}'"

    def begin() -> str:
        try:
            place.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(place / "LOCK", refuse))
        except OSError as error:
            raise unwritable(named, error) from None
        before = _starts(place)
        if before and not first:
            raise DataError(f"{named} holds the recording of another run: name another place")
        for _, _, directory in before:
            for part in directory.rglob("part-*.parquet"):
                _check_samples(part, digest, named)
        return _START.format(number=len(before), first=first)

    def refuse(holder: str) -> NoReturn:
        raise DataError(f"{named} is in use by {holder}: wait for its end, or name another place")

    with ExitStack() as stack:
        name = world.led(begin)
        yield RouteRecorder(place / name / f"rank-{world.rank}", digest)


def _starts(path: Path) -> list[tuple[int, int, Path]]:
    """(number, first step, directory) of each start that recorded under `path`, in order."""
    found = ((_START_NAME.fullmatch(one.name), one) for one in path.glob("start-*"))
    return sorted((int(match[1]), int(match[2]), one) for match, one in found if match)


def _check_samples(part: Path, digest: str, named: str) -> None:
    """Raise if a part is of other samples, or of another kind."""
    schema = pq.read_schema(part)
    if not schema.equals(SCHEMA):
        raise DataError(f"{named} holds Parquet of another kind: see routing.record")
    if (schema.metadata or {}).get(_DIGEST, b"") != digest.encode():
        raise DataError(
            f"{named} was recorded over other samples (text, tokenizer, seed, sequence or packing "
            "differ): restore them, or record elsewhere"
        )


@dataclass
class _Start:
    """What one start of a run recorded."""

    first: int
    data: ds.Dataset
    samples: dict[int, int]
    """How many samples there are of each step."""


class RouteReplay:
    """Reads choices back, a step at a time.

    Args:
        path: what `routing.record` named.
        job: the job that replays.
        digest: of the text it trains on.
    """

    def __init__(self, path: Path, job: Job, digest: str) -> None:
        import pyarrow.dataset as ds  # Brings pandas along, which starts slowly.

        self._path, self._job = path, job
        self._starts: list[_Start] = []
        for _, first, directory in _starts(path.expanduser()):
            parts = sorted(directory.rglob("part-*.parquet"))
            with self._readable():
                for part in parts:
                    _check_samples(part, digest, self._named)
                data = ds.dataset([str(part) for part in parts], schema=SCHEMA, format="parquet")
                self._starts.append(_Start(first, data, _count_samples(data)))
        if not self._starts:
            raise DataError(f"{self._named} holds no recorded routing: see routing.record")

    def check_steps(self, first: int) -> None:
        """Raise unless every step of the job from `first` on (0: all of them) was recorded."""
        train = self._job.train
        for step in range(first, train.steps):
            if self._start(step).samples.get(step) != train.batch:
                remedy = f", or set train.steps = {step}" if step > first else ""
                raise DataError(
                    f"{self._named} holds no routing of {train.batch} samples (train.batch) at "
                    f"step {step + 1}, but train.steps = {train.steps}: record as many{remedy}"
                )

    def _start(self, step: int) -> _Start:
        """Who recorded `step` last, for a start makes void what was there of its steps."""
        earlier = [start for start in self._starts if start.first <= step]
        return earlier[-1] if earlier else self._starts[0]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self._named} cannot be read ({error}): record again") from None

    @property
    def _named(self) -> str:
        return f"routing.replay = '{self._path}'"

    def choices(self, step: int, samples: Tensor) -> dict[int, Tensor]:
        """Choices by layer, [tokens, choices], for the samples of one micro-batch."""
        import pyarrow.dataset as ds

        ids = samples.tolist()
        where = (ds.field("step") == step) & ds.field("sample").isin(pa.array(ids, pa.int64()))
        found: dict[int, dict[int, Tensor]] = {}
        with self._readable():
            table = self._start(step).data.to_table(filter=where)
        for row in table.to_pylist():
            experts = torch.from_numpy(np.asarray(row["experts"], dtype=np.int64))
            layers = found.setdefault(row["layer"], {})
            layers[row["sample"]] = experts.view(-1, row["choices"])
        if not ids:
            return {}
        if not found:
            raise DataError(f"{self._named} has no record of step {step}")
        self._check(found)
        return {layer: self._in_order(rows, ids, step) for layer, rows in found.items()}

    def _check(self, found: dict[int, dict[int, Tensor]]) -> None:
        """Raise unless what was recorded fits the job's model."""
        model, sequence = self._job.model, self._job.data.sequence
        some = next(iter(found[max(found)].values()))
        highest = max(int(torch.where(e < 0, -1 - e, e).max()) for e in found[max(found)].values())
        for name, recorded, wanted in (
            ("expert layers", sorted(found), list(model.expert_layers)),
            ("tokens a sample", some.shape[0], sequence),
            ("experts a token", some.shape[1], model.top_k),
            ("experts", max(highest + 1, model.experts), model.experts),
        ):
            if recorded != wanted:
                raise DataError(
                    f"{self._named} has {name} {recorded}, this job {wanted}: replay needs the "
                    "model, seed, data and batch of the run that was recorded"
                )

    def _in_order(self, rows: dict[int, Tensor], ids: list[int], step: int) -> Tensor:
        missing = [sample for sample in ids if sample not in rows]
        if missing:
            raise DataError(
                f"{self._named} lacks sample {missing[0]} of step {step}: "
                "replay needs the seed, data and batch of the run that was recorded"
            )
        return torch.cat([rows[sample] for sample in ids])


def _count_samples(data: ds.Dataset) -> dict[int, int]:
    """Samples of each step."""
    table = data.to_table(columns=["step", "sample"])
    counts = table.group_by("step").aggregate([("sample", "count_distinct")])
    steps, samples = (column.to_pylist() for column in counts.columns)
    if counts.column_names[0] != "step":
        steps, samples = samples, steps
    return dict(zip(steps, samples, strict=True))

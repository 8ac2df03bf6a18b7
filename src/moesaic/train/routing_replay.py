"""Recorded routing: the experts of every token, by step, layer and global sample.

A recording does not depend on layout: one rank's replays on four. Each rank writes its own samples
as Parquet under one directory.
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

from moesaic.base.errors import DataError, write_error
from moesaic.base.lock import file_lock
from moesaic.base.records import RecordWriter
from moesaic.dist.world import World
from moesaic.facts.job import Job

if TYPE_CHECKING:
    import pyarrow.dataset as ds

ROUTING_SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        ("sample", pa.int64()),
        ("choices", pa.int16()),
        ("experts", pa.list_(pa.int16())),
    ]
)

_RECORDING = "start-{number:03d}-step-{first:08d}"
_RECORDING_NAME = re.compile(r"start-(\d+)-step-(\d+)")
_DIGEST = b"moesaic.samples"
"""Parquet metadata key of the digest of the recorded samples."""


class RoutingRecorder:
    """Writer of this rank's routing to `directory`, over the samples with the given `digest`."""

    def __init__(self, directory: Path, digest: str) -> None:
        self.directory = directory
        self._writer = RecordWriter(directory, ROUTING_SCHEMA.with_metadata({_DIGEST: digest}))

    def record(self, step: int, samples: Tensor, expert_ids: Mapping[int, Tensor]) -> None:
        """Add one micro-batch's expert ids by layer, [tokens, top_k]; a rank may have none of its
        samples."""
        ids = samples.tolist()
        if not ids:
            return
        for layer, experts_TK in expert_ids.items():
            flat = experts_TK.cpu().reshape(len(ids), -1).to(torch.int16).numpy()
            self._writer.add(
                {
                    "step": step, "layer": layer, "sample": sample,
                    "choices": experts_TK.shape[1], "experts": row,
                }
                for sample, row in zip(ids, flat, strict=True)
            )  # fmt: skip

    def flush(self) -> None:
        """Write buffered rows."""
        self._writer.flush()


@contextmanager
def open_recorder(
    path: Path, world: World, digest: str, first_step: int
) -> Iterator[RoutingRecorder]:
    """Open this rank's recorder under `path` from step `first_step` on, with a lock against other
    runs.

    Each start of a run writes to its own directory, and overrides earlier recordings from its first
    step on.
    """
    root = path.expanduser()
    label = f"routing.record = '{path}'"

    def begin() -> str:
        try:
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(file_lock(root / "LOCK", refuse))
        except OSError as error:
            raise write_error(label, error) from None
        before = _list_recordings(root)
        if before and not first_step:
            raise DataError(f"{label} holds the recording of another run: choose another directory")
        for _, _, recording in before:
            for part in recording.rglob("part-*.parquet"):
                _check_samples(part, digest, label)
        return _RECORDING.format(number=len(before), first=first_step)

    def refuse(holder: str) -> NoReturn:
        raise DataError(
            f"{label} is in use by {holder}: wait until it ends, or choose another directory"
        )

    with ExitStack() as stack:
        name = world.run_on_rank_zero(begin)
        yield RoutingRecorder(root / name / f"rank-{world.rank}", digest)


def _list_recordings(path: Path) -> list[tuple[int, int, Path]]:
    """Return (number, first step, directory) of each recording under `path`, in order."""
    matches = ((_RECORDING_NAME.fullmatch(entry.name), entry) for entry in path.glob("start-*"))
    return sorted((int(match[1]), int(match[2]), entry) for match, entry in matches if match)


def _check_samples(path: Path, digest: str, label: str) -> None:
    """Raise if a Parquet file has another schema or belongs to other samples."""
    schema = pq.read_schema(path)
    if not schema.equals(ROUTING_SCHEMA):
        raise DataError(f"{label} holds Parquet files that record no routing: see routing.record")
    if (schema.metadata or {}).get(_DIGEST, b"") != digest.encode():
        raise DataError(
            f"{label} was recorded over other samples (text, tokenizer, seed, sequence or packing "
            "differ): restore them, or choose another directory"
        )


@dataclass
class _Recording:
    """Recording of one start of a run."""

    first_step: int
    data: ds.Dataset
    num_samples: dict[int, int]
    """Samples recorded per step."""


class RoutingReplay:
    """Reader of recorded routing, one step at a time.

    Args:
        path: directory given as `routing.record`.
        job: the job that replays.
        digest: digest of the samples it trains on.
    """

    def __init__(self, path: Path, job: Job, digest: str) -> None:
        import pyarrow.dataset as ds  # pyarrow.dataset imports pandas, which is slow.

        self._path, self._job = path, job
        self._recordings: list[_Recording] = []
        for _, first, directory in _list_recordings(path.expanduser()):
            parts = sorted(directory.rglob("part-*.parquet"))
            with self._wrap_read_errors():
                for part in parts:
                    _check_samples(part, digest, self._label)
                data = ds.dataset(
                    [str(part) for part in parts], schema=ROUTING_SCHEMA, format="parquet"
                )
                self._recordings.append(_Recording(first, data, _count_samples(data)))
        if not self._recordings:
            raise DataError(f"{self._label} holds no recorded routing: see routing.record")

    def check_steps(self, first_step: int) -> None:
        """Raise unless every step of the job from `first_step` (0 is the first) was recorded in
        full."""
        train = self._job.train
        for step in range(first_step, train.steps):
            if self._find_recording(step).num_samples.get(step) != train.batch:
                remedy = f", or set train.steps = {step}" if step > first_step else ""
                raise DataError(
                    f"{self._label} holds no routing of {train.batch} samples (train.batch) at "
                    f"step {step + 1}, but train.steps = {train.steps}: record as many{remedy}"
                )

    def _find_recording(self, step: int) -> _Recording:
        """Return the last recording that started at or before `step`, which overrides earlier
        ones."""
        earlier = [start for start in self._recordings if start.first_step <= step]
        return earlier[-1] if earlier else self._recordings[0]

    @contextmanager
    def _wrap_read_errors(self) -> Iterator[None]:
        try:
            yield
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self._label} cannot be read ({error}): record again") from None

    @property
    def _label(self) -> str:
        return f"routing.replay = '{self._path}'"

    def read_expert_ids(self, step: int, samples: Tensor) -> dict[int, Tensor]:
        """Return expert ids by layer, [tokens, top_k], for the samples of one micro-batch."""
        import pyarrow.dataset as ds

        ids = samples.tolist()
        filter_ = (ds.field("step") == step) & ds.field("sample").isin(pa.array(ids, pa.int64()))
        by_layer: dict[int, dict[int, Tensor]] = {}
        with self._wrap_read_errors():
            table = self._find_recording(step).data.to_table(filter=filter_)
        for row in table.to_pylist():
            experts = torch.from_numpy(np.asarray(row["experts"], dtype=np.int64))
            layers = by_layer.setdefault(row["layer"], {})
            layers[row["sample"]] = experts.view(-1, row["choices"])
        if not ids:
            return {}
        if not by_layer:
            raise DataError(f"{self._label} has no record of step {step}")
        self._check(by_layer)
        return {layer: self._gather_samples(rows, ids, step) for layer, rows in by_layer.items()}

    def _check(self, by_layer: dict[int, dict[int, Tensor]]) -> None:
        """Raise unless the recording fits the job's model."""
        model, sequence = self._job.model, self._job.data.sequence
        sample_ids = next(iter(by_layer[max(by_layer)].values()))
        highest = max(
            int(torch.where(e < 0, -1 - e, e).max()) for e in by_layer[max(by_layer)].values()
        )
        for name, recorded, wanted in (
            ("expert layers", sorted(by_layer), list(model.expert_layers)),
            ("tokens a sample", sample_ids.shape[0], sequence),
            ("experts a token", sample_ids.shape[1], model.top_k),
            ("experts", max(highest + 1, model.experts), model.experts),
        ):
            if recorded != wanted:
                raise DataError(
                    f"{self._label} has {name} {recorded}, this job {wanted}: replay needs the "
                    "model, seed, data and batch of the run that was recorded"
                )

    def _gather_samples(self, rows: dict[int, Tensor], ids: list[int], step: int) -> Tensor:
        missing = [sample for sample in ids if sample not in rows]
        if missing:
            raise DataError(
                f"{self._label} lacks sample {missing[0]} of step {step}: "
                "replay needs the seed, data and batch of the run that was recorded"
            )
        return torch.cat([rows[sample] for sample in ids])


def _count_samples(data: ds.Dataset) -> dict[int, int]:
    """Return the number of recorded samples per step."""
    table = data.to_table(columns=["step", "sample"])
    counts = table.group_by("step").aggregate([("sample", "count_distinct")])
    steps, samples = (column.to_pylist() for column in counts.columns)
    if counts.column_names[0] != "step":
        steps, samples = samples, steps
    return dict(zip(steps, samples, strict=True))

"""Recorded routing: the experts every token chose, by step, layer and global sample.

What is recorded says nothing of layout: a record of one rank replays on four. Each rank writes its
own samples, as Parquet, under one directory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import torch
from torch import Tensor

from moesaic.base.errors import DataError
from moesaic.base.records import RecordWriter
from moesaic.facts.job import Job

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        ("sample", pa.int64()),
        ("choices", pa.int16()),
        ("experts", pa.list_(pa.int16())),
    ]
)

_DIGEST = b"moesaic.samples"
"""Where a part says what samples its indices stand for."""


class RouteRecorder:
    """Writes this rank's choices, marked with the `digest` of the text they were made over."""

    def __init__(self, path: Path, rank: int, digest: str) -> None:
        schema = SCHEMA.with_metadata({_DIGEST: digest})
        self._writer = RecordWriter(path.expanduser() / f"rank-{rank}", schema)

    def record(self, step: int, samples: Tensor, choices: Mapping[int, Tensor]) -> None:
        """Add one micro-batch's choices, by layer."""
        ids = samples.tolist()
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


def refuse_recorded(path: Path) -> None:
    """Raise if `path` holds a recording: two runs in one would mix."""
    if path.expanduser().is_dir() and any(path.expanduser().rglob("part-*.parquet")):
        raise DataError(
            f"routing.record = '{path}' holds the recording of another run: name another place"
        )


class RouteReplay:
    """Reads choices back, a step at a time.

    Args:
        path: what `routing.record` named.
        job: the job that replays.
        digest: of the text it trains on.
    """

    def __init__(self, path: Path, job: Job, digest: str) -> None:
        self._path, self._job = path, job
        parts = sorted(map(str, path.expanduser().rglob("part-*.parquet")))
        if not parts:
            raise DataError(f"{self._named} holds no recorded routing: see routing.record")
        self._steps: set[int] = set()
        for part in parts:
            self._look_at(part, digest)
        self._dataset = ds.dataset(parts, format="parquet")

    def _look_at(self, part: str, digest: str) -> None:
        """Note the steps of one part; raise if it is of other samples, or of another kind."""
        with self._readable(), pq.ParquetFile(part) as parquet:
            schema = parquet.schema_arrow
            if not schema.equals(SCHEMA):
                raise DataError(f"{self._named} holds Parquet of another kind: see routing.record")
            recorded = (schema.metadata or {}).get(_DIGEST, b"").decode(errors="replace")
            if recorded != digest:
                raise DataError(
                    f"{self._named} was recorded over other samples (text, tokenizer, seed, "
                    "sequence or packing differ): restore them, or record again"
                )
            self._steps.update(parquet.read(["step"]).column(0).unique().to_pylist())

    def check_steps(self, first: int) -> None:
        """Raise unless every step of the job from `first` on (0: all of them) was recorded."""
        wanted = range(first, self._job.train.steps)
        lacking = next((step for step in wanted if step not in self._steps), None)
        if lacking is not None:
            remedy = f", or set train.steps = {lacking}" if lacking > first else ""
            raise DataError(
                f"{self._named} holds no routing of step {lacking + 1}, but train.steps = "
                f"{self._job.train.steps}: record as many steps{remedy}"
            )

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
        ids = samples.tolist()
        where = (ds.field("step") == step) & ds.field("sample").isin(pa.array(ids, pa.int64()))
        found: dict[int, dict[int, Tensor]] = {}
        with self._readable():
            table = self._dataset.to_table(filter=where)
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
            ("expert layers", sorted(found), list(range(model.layers))),
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

"""Recorded routing: the experts every token chose, by step, layer and global sample.

What is recorded says nothing of layout: a record of one rank replays on four. Each rank writes its
own samples, as Parquet, under one directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import torch
from torch import Tensor

from moesaic.base.errors import DataError
from moesaic.base.records import RecordWriter

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("layer", pa.int16()),
        ("sample", pa.int64()),
        ("choices", pa.int16()),
        ("experts", pa.list_(pa.int16())),
    ]
)


class RouteRecorder:
    """Writes this rank's choices."""

    def __init__(self, path: Path, rank: int) -> None:
        self._writer = RecordWriter(path / f"rank-{rank}", SCHEMA)

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

    def close(self) -> None:
        """Write what is left."""
        self._writer.flush()


class RouteReplay:
    """Reads choices back, a step at a time."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir() or not any(path.rglob("part-*.parquet")):
            raise DataError(
                f"routing.replay = '{path}' holds no recorded routing: see routing.record"
            )
        self._path = path
        self._dataset = ds.dataset(sorted(map(str, path.rglob("part-*.parquet"))), format="parquet")

    def choices(self, step: int, samples: Tensor) -> dict[int, Tensor]:
        """Experts by layer, [tokens, choices], for the samples of one micro-batch."""
        ids = samples.tolist()
        where = (ds.field("step") == step) & ds.field("sample").isin(pa.array(ids, pa.int64()))
        found: dict[int, dict[int, Tensor]] = {}
        table = self._dataset.to_table(filter=where)
        for row in table.to_pylist():
            experts = torch.from_numpy(np.asarray(row["experts"], dtype=np.int64))
            layers = found.setdefault(row["layer"], {})
            layers[row["sample"]] = experts.view(-1, row["choices"])
        if ids and not found:
            raise DataError(f"routing.replay = '{self._path}' has no record of step {step}")
        return {layer: self._in_order(rows, ids, step) for layer, rows in found.items()}

    def _in_order(self, rows: dict[int, Tensor], ids: list[int], step: int) -> Tensor:
        missing = [sample for sample in ids if sample not in rows]
        if missing:
            raise DataError(
                f"routing.replay = '{self._path}' lacks sample {missing[0]} of step {step}: "
                "replay needs the seed, data and batch of the run that was recorded"
            )
        return torch.cat([rows[sample] for sample in ids])

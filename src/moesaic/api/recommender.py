"""Recommenders after training: click probabilities for samples, and exports for serving."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet

from moesaic.api.predictor import Predictor, probabilities
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, write_error
from moesaic.base.files import atomic_replace
from moesaic.dist.world import World
from moesaic.facts.job import CtrJob
from moesaic.facts.job.table import RecordLayout, TableConfig
from moesaic.models.recommender_files import RecommenderOrigin, open_recommender
from moesaic.ps.stored_rows import StoredRows
from moesaic.ps.table import decayed_counts, scores_of
from moesaic.train.click_metrics import ClickScores
from moesaic.train.data.clicks import ClickBatch, ClickData
from moesaic.train.data.clicks_scan import ClickScan

COLUMN = "probability"
_SCHEMA = pa.schema([(COLUMN, pa.float32())])
_BATCH = 4096
"""Samples of the job that are predicted at a time."""

Progress = Callable[[int], object]
"""Callback with the samples done."""


def predict(
    source: Path,
    data: str | None = None,
    out: Path | None = None,
    on_progress: Progress = lambda done: None,
) -> dict[str, Any]:
    """Predict clicks, and return metrics and counts as plain data.

    Args:
        source: a run of kind "ctr", a checkpoint of it, or its export.
        data: a file, a directory or a glob in the format of the job, with or without labels; None:
            the validation samples of the job.
        out: file for the probabilities, in the order of the samples; .parquet or .csv.
        on_progress: callback with the samples done.
    """
    origin = open_recommender(source)
    samples = _Samples(origin.job, data)
    if out is None and not samples.has_labels:
        raise ConfigError(
            f"'{data}' has no labels, so there are no metrics: name a file for the probabilities "
            "(--out)"
        )
    scores, best = ClickScores(has_users=origin.job.data.has_users), ClickScores(has_users=False)
    done = 0
    with ExitStack() as stack:
        predictor = stack.enter_context(Predictor.load(origin))
        began = time.perf_counter()
        writer = None if out is None else stack.enter_context(_Writer(out))
        for batch in samples.batches():
            logits = predictor.logits(batch.keys, batch.offsets, batch.dense)
            if writer is not None:
                writer.write(logits)
            if samples.has_labels:
                scores.add(batch.labels, logits, batch.weights, batch.users)
            if batch.probabilities is not None:
                best.add(batch.labels, _logit(batch.probabilities), batch.weights)
            done += len(batch)
            on_progress(done)
    seconds = time.perf_counter() - began
    metrics = scores.metrics() if samples.has_labels else None
    return {
        "model": str(origin.path), "step": origin.step, "data": data, "samples": done,
        "out": None if out is None else str(out),
        "metrics": None if metrics is None else metrics.figures(),
        "best_auc": best.metrics().auc,
        "remarks": [] if metrics is None
        else [*metrics.remarks(has_users=origin.job.data.has_users)],
        "seconds": seconds, "samples_per_s": done / max(seconds, 1e-9),
        "warnings": origin.warnings,
    }  # fmt: skip


def export(source: Path, directory: Path) -> RecommenderOrigin:
    """Write the recommender in `source` as a new directory; return where it came from."""
    origin = open_recommender(source)
    if origin.checkpoint is None:
        raise ConfigError(f"'{source}' is exported already: copy the directory")
    origin.export(directory)
    return origin


def describe_rows(rows: StoredRows, num_hottest: int = 10) -> dict[str, Any]:
    """Return rows, bytes, and the keys with the highest scores, as plain data."""
    facts, layout = rows.manifests[0].facts, rows.layout
    config = parse(TableConfig, facts["config"], "the table")
    record = RecordLayout(layout.dim, layout.dtype, config.optimizer)
    hottest_keys, hottest = np.empty(0, np.int64), np.empty((0, 3))
    for keys, records in rows.live_rows():
        counts, _ = decayed_counts(records, record, config, facts["day"])
        hottest_keys = np.concatenate([hottest_keys, keys])
        hottest = np.concatenate([hottest, np.column_stack([scores_of(config, counts), counts])])
        best = np.lexsort([hottest_keys, -hottest[:, 0]])[:num_hottest]
        hottest_keys, hottest = hottest_keys[best], hottest[best]
    return {
        "rows": rows.num_rows, "dim": layout.dim, "optimizer": layout.optimizer,
        "row_bytes": layout.record_bytes,
        "file_bytes": sum(
            segment.num_blocks * layout.block_bytes
            for manifest in rows.manifests for segment in manifest.segments
        ),
        "day": facts["day"],
        "hottest": [
            {"key": key, "show": show, "click": click, "score": score}
            for key, (score, show, click) in zip(
                hottest_keys.tolist(), hottest.tolist(), strict=True
            )
        ],
    }  # fmt: skip


class _Samples:
    """Samples to predict."""

    def __init__(self, job: CtrJob, data: str | None) -> None:
        self._scan = self._validation = None
        if data is not None:
            if job.data.stream is not None:
                raise ConfigError(
                    "the job's samples are the built-in stream, which has no files: leave out "
                    "--data to predict its validation samples"
                )
            self._scan = ClickScan.open(job.data, data)
            return
        if not job.has_validation:
            raise ConfigError(
                "--data is missing: name files of samples, as the job has none for validation"
            )
        self._validation = ClickData.open(job.data, job.seed, World.solo()).validation

    @property
    def has_labels(self) -> bool:
        """True if the samples have labels."""
        return self._scan is None or self._scan.has_labels

    def batches(self) -> Iterator[ClickBatch]:
        """Yield all samples in order."""
        if self._scan is not None:
            yield from self._scan.batches()
        elif self._validation is not None:
            for start in range(0, len(self._validation), _BATCH):
                end = min(start + _BATCH, len(self._validation))
                yield self._validation.read(range(start, end), shuffled=False)


class _Writer:
    """File of probabilities, which appears whole or not at all."""

    def __init__(self, out: Path) -> None:
        self._out, self._stack = out, ExitStack()

    def __enter__(self) -> _Writer:
        try:
            partial = self._stack.enter_context(atomic_replace(self._out))
            kind = parquet.ParquetWriter if self._out.suffix == ".parquet" else csv.CSVWriter
            self._file = self._stack.enter_context(kind(partial, _SCHEMA))
        except OSError as error:
            raise write_error(f"--out '{self._out}'", error) from error
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def write(self, logits: np.ndarray[Any, Any]) -> None:
        """Append the probabilities of logits."""
        column = pa.array(probabilities(logits))
        try:
            self._file.write(pa.RecordBatch.from_arrays([column], schema=_SCHEMA))
        except OSError as error:
            raise write_error(f"--out '{self._out}'", error) from error


def _logit(probabilities: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    logits: np.ndarray[Any, Any] = np.log(probabilities) - np.log1p(-probabilities)
    return logits

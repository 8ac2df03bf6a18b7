"""Recommenders on disk: a run, a checkpoint, or an exported directory.

An export has config.json, the network's weights as safetensors, and the table as read-only segment
files. It appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save

from moesaic.base.config import parse, read_json
from moesaic.base.errors import ConfigError, StoreError
from moesaic.dist.checkpoint import Checkpoint
from moesaic.facts.job import CtrJob
from moesaic.models.hf.config import RECOMMENDER
from moesaic.models.hf.origin import find_checkpoint
from moesaic.models.hf.shards import atomic_directory
from moesaic.models.recommender import Recommender, network_params
from moesaic.nn.embedding import Rows
from moesaic.ps.stored_rows import StoredRows, export_rows

CONFIG, WEIGHTS = "config.json", "model.safetensors"
TABLE = "table"
"""Directory of the table's snapshots in a run."""
VERSION = 1


@dataclass(frozen=True)
class RecommenderOrigin:
    """A recommender on disk."""

    path: Path
    """Directory of the checkpoint or of the export."""
    job: CtrJob
    """Job that trained it."""
    step: int
    """Finished steps."""
    rows: StoredRows
    """Rows of its table."""
    warnings: list[str]
    """Sentences about damaged checkpoints that were passed over."""
    checkpoint: Checkpoint | None
    """Checkpoint with the weights; None: an export."""

    def load_network(self) -> Recommender:
        """Return the network in main memory, with its weights."""
        job = self.job
        dtype = torch.float64 if job.train.precision == "fp64" else torch.float32
        network = Recommender(job.model, job.data.num_slots, job.data.num_dense, dtype=dtype)
        if self.checkpoint is None:
            network.load_state_dict(_read_weights(self.path))
        else:
            params = network_params(network, [0])
            self.checkpoint.fill([shard for one in params for shard in one.parameter_shards(0)])
        return network.eval().requires_grad_(False)

    def export(self, directory: Path) -> None:
        """Write the recommender as a new directory."""
        weights = save(dict(self.load_network().state_dict()))
        config = {
            "format": RECOMMENDER, "version": VERSION, "step": self.step,
            "job": self.job.model_dump(mode="json"),
            "weights_sha256": hashlib.sha256(weights).hexdigest(),
        }  # fmt: skip
        with atomic_directory(directory) as partial:
            (partial / WEIGHTS).write_bytes(weights)
            export_rows(
                partial, self.rows.layout, self.rows.live_rows(), step=self.step,
                facts=self.rows.manifests[0].facts,
            )  # fmt: skip
            (partial / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")


@torch.no_grad()
def predict_logits(
    network: Recommender,
    rows: Rows,
    keys: NDArray[np.int64],
    offsets: NDArray[np.int64],
    dense: NDArray[np.float32],
) -> NDArray[Any]:
    """Return the logits of samples.

    Args:
        network: the network, in main memory.
        rows: the table.
        keys: keys of all bags.
        offsets: start of each bag, slot by slot, and the end of the last one.
        dense: dense features, [samples, features].
    """
    sums = torch.from_numpy(rows.look_up(keys, offsets, training=False).sums)
    pooled = sums.view(network.num_slots, len(dense), sums.shape[1]).transpose(0, 1)
    logits: NDArray[Any] = network(pooled, torch.from_numpy(dense).to(sums.dtype)).numpy()
    return logits


def is_recommender(path: Path) -> bool:
    """Return whether a directory is a run, a checkpoint or an export of a recommender."""
    if is_export(path):
        return True
    for run in (path, path.absolute().parent.parent):
        if (run / "job.json").is_file():
            job = read_json(run / "job.json", f"run '{run}'", "restore the file")
            return job.get("kind") == "ctr"
    return False


def is_export(path: Path) -> bool:
    """Return whether a directory is an exported recommender."""
    if not (path / CONFIG).is_file():
        return False
    config = read_json(path / CONFIG, f"'{path / CONFIG}'", "restore the file")
    return config.get("format") == RECOMMENDER


def open_recommender(path: Path) -> RecommenderOrigin:
    """Return the recommender at `path`: an export, a checkpoint, or the newest intact checkpoint of
    a run."""
    if is_export(path):
        return _open_export(path)
    checkpoint, warnings = find_checkpoint(
        path, expected='a run of kind "ctr", a checkpoint of it, or its export'
    )
    raw = checkpoint.facts.get("job") or {}
    if raw.get("kind") != "ctr":
        raise ConfigError(f"'{path}' is no recommender: give a run of kind \"ctr\", or its export")
    job = parse(CtrJob, raw, f"checkpoint '{checkpoint.path}'")
    directory = checkpoint.path.absolute().parent.parent / TABLE
    rows = StoredRows.open_snapshot(directory, checkpoint.snapshots.get("", {}))
    return RecommenderOrigin(checkpoint.path, job, checkpoint.step, rows, warnings, checkpoint)


def _open_export(path: Path) -> RecommenderOrigin:
    config = read_json(path / CONFIG, f"'{path / CONFIG}'", "restore the file")
    if config.get("version") != VERSION:
        raise ConfigError(
            f"'{path}' has version {config.get('version')} of its format, and this moesaic reads "
            f"{VERSION}: open it with the moesaic that wrote it"
        )
    job = parse(CtrJob, config["job"], f"'{path / CONFIG}'")
    return RecommenderOrigin(path, job, config["step"], StoredRows.open_export(path), [], None)


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    """Return the weights of an export, verified."""
    config = read_json(path / CONFIG, f"'{path / CONFIG}'", "restore the file")
    file = path / WEIGHTS
    try:
        content = file.read_bytes()
    except OSError as error:
        raise StoreError(f"'{file}' cannot be read ({error.strerror}): export it anew") from error
    if hashlib.sha256(content).hexdigest() != config["weights_sha256"]:
        raise StoreError(f"'{file}' differs from what was written: export it anew")
    return load(content)

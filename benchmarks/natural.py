"""Shares of experts in a real run: a small model trained without a balance loss."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks import measure

STEPS = 150


def trained(experts: int, top_k: int) -> NDArray[np.float64]:
    """Train the demo's model without a balance loss; return shares, [steps, layers, experts]."""
    demo = measure.ROOT / "examples" / "demo"
    with tempfile.TemporaryDirectory() as place:
        subprocess.run([sys.executable, demo / "make_text.py", place], check=True)
        changed = {
            "data.path": f"{place}/topics.jsonl", "layout.ep": 1, "routing.balance_loss": 0.0,
            "model.experts": experts, "model.top_k": top_k, "train.steps": STEPS,
            "data.cache": f"{place}/cache",
        }  # fmt: skip
        sets = [f"--set={key}={json.dumps(value)}" for key, value in changed.items()]
        command = [sys.executable, "-m", "moesaic", "train", demo / "demo.toml", *sets]
        subprocess.run([*command, "--out", f"{place}/run"], check=True, capture_output=True)
        table = pq.read_table(Path(place) / "run" / "loads").to_pylist()
    table.sort(key=lambda one: (one["step"], one["layer"]))
    counts = np.array([one["counts"] for one in table], np.float64).reshape(STEPS, -1, experts)
    shares: NDArray[np.float64] = counts / counts.sum(axis=-1, keepdims=True)
    return shares


def least_even(shares: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return shares of the layer with the hottest expert in the last step, [steps, experts]."""
    return shares[:, shares[-1].max(axis=-1).argmax()]

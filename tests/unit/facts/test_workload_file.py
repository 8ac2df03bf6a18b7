"""Traced workloads as files: write, read, reject, and convert to blocks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.base.errors import ConfigError
from moesaic.facts.workload import (
    MatmulShape,
    TracedModel,
    load_traced,
    traced_blocks,
    traced_memory,
)
from moesaic.facts.workload.sizes import BUCKET_BYTES
from moesaic.facts.workload.traced import parse_traced

WORK = [
    {"name": "matmul", "matmuls": [{"rows": 4, "columns": 5, "inner": 6, "count": 2}]},
    {"name": "matmul", "dtype": "bf16",
     "matmuls": [{"rows": 4, "columns": 4, "inner": 6, "count": 1}]},
    {"name": "attend", "kind": "attention", "causal_fraction": 0.625,
     "num_transcendentals": 80, "matmuls": [
         {"rows": 4, "columns": 4, "inner": 2, "count": 8},
         {"rows": 4, "columns": 3, "inner": 4, "count": 8},
     ]},
    {"name": "elementwise", "moved_bytes": 100, "num_kernels": 3, "num_transcendentals": 17},
]  # fmt: skip
BLOCK = {
    "name": "a", "parameters": 30, "parameter_bytes": 120, "gradients": [80, 40], "forward": WORK,
    "backward": WORK, "saved_bytes": 700, "output_bytes": 50,
}  # fmt: skip
FROZEN = {
    **BLOCK, "name": "b", "gradients": [], "forward": WORK, "backward": [], "saved_bytes": 11,
}  # fmt: skip
RAW: dict[str, Any] = {
    "version": 4, "name": "net", "torch": "2.13.0", "batch": 4, "buffer_bytes": 9,
    "inputs": [{"name": "[0]", "shape": [4, 3], "dtype": "float32"}], "blocks": [BLOCK, FROZEN],
}  # fmt: skip


def make_traced() -> TracedModel:
    return parse_traced(RAW, "here")


def test_file_round_trip(tmp_path: Path) -> None:
    traced, path = make_traced(), tmp_path / "workload.json"
    path.write_text(traced.to_json(), encoding="utf-8")
    assert load_traced(path) == traced
    assert traced.parameters == 60
    assert traced.flops == 3 * (2 * 2 * 4 * 5 * 6 + 2 * 4 * 4 * 6 + 8 * 2 * 4 * 4 * (2 + 3))


def test_traced_blocks() -> None:
    first, second, step = traced_blocks(make_traced())
    assert [first.name, second.name, step.name] == ["a", "b", "step"]
    assert [op.name for op in first.forward.ops] == ["matmul", "matmul", "attend", "elementwise"]
    assert first.forward.ops[0].matmuls == (MatmulShape(4, 5, 6, 2),)
    assert first.forward.ops[2].matmuls == (MatmulShape(4, 4, 2, 8), MatmulShape(4, 3, 4, 8))
    assert [op.dtype for op in first.forward.ops[:2]] == ["fp32", "bf16"]
    assert [op.causal_fraction for op in first.forward.ops] == [1.0, 1.0, 0.625, 1.0]
    assert [op.num_transcendentals for op in first.forward.ops] == [0, 0, 80, 17]
    assert [op.num_kernels for op in first.forward.ops] == [0, 0, 0, 3]
    assert first.forward.moved_bytes == 100
    assert first.forward.flops == make_traced().blocks[0].block().forward.flops
    moved = {op.name: (op.moved_bytes, op.num_kernels) for op in first.update.ops}
    assert moved == {"norm": (120, 2), "clip": (240, 2), "adamw": (7 * 120, 2)}
    assert not any(op.moved_bytes or op.num_kernels for op in second.update.ops)
    assert not step.update.collectives


def test_gradients_are_reduced_in_buckets() -> None:
    large = {
        **BLOCK, "name": "c", "parameters": BUCKET_BYTES // 4 + 30,
        "parameter_bytes": BUCKET_BYTES + 120, "gradients": [BUCKET_BYTES, 20, 100],
    }  # fmt: skip
    traced = parse_traced({**RAW, "blocks": [BLOCK, large]}, "here")
    *blocks, step = traced_blocks(traced, 4)
    calls = {block.name: block.update.collectives for block in blocks}
    sizes = {name: [call.num_bytes for call in block_calls] for name, block_calls in calls.items()}
    # In backward order, each aligned to 256 bytes; a gradient of bucket size has its own bucket.
    assert sizes == {"a": [256 + 80], "c": [256 + 20, BUCKET_BYTES]}
    assert {call.ranks for block_calls in calls.values() for call in block_calls} == {(0, 1, 2, 3)}
    assert {call.operation for block_calls in calls.values() for call in block_calls} == {
        "all_reduce"
    }
    assert not step.update.collectives
    assert step.update.moved_bytes == 2 * (256 + 20 + 256 + 80)


def test_traced_memory() -> None:
    rank_memory = traced_memory(make_traced())
    assert rank_memory.parameters_bytes == 240 + 9
    assert (rank_memory.gradients_bytes, rank_memory.moments_bytes) == (120, 240)
    assert (rank_memory.activations_bytes, rank_memory.working_bytes) == (700, 50)
    # Backward of `a` needs its activations, its gradients and that of its output.
    assert rank_memory.peak_bytes == 240 + 9 + 240 + 700 + 120 + 50


def change(path: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(RAW)
    *parents, key = (int(name) if name.isdigit() else name for name in path.split("."))
    node: Any = raw
    for name in parents:
        node = node[name]
    node[key] = value
    return raw


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (change("version", 1), "version = 1 is not known: moesaic reads version 4"),
        (change("version", True), "version = true is not known"),
        (change("batsch", 2), "unknown key 'batsch': did you mean 'batch'?"),
        (change("blocks.0.saved", 2), "unknown key 'blocks[0].saved'"),
        (change("blocks.0.saved_bytes", -1), "blocks[0].saved_bytes = -1: give an integer from 0"),
        (change("blocks.0.saved_bytes", 10**400), "...: give an integer from 0"),
        (
            change("blocks.1.forward.3.num_kernels", -1),
            "num_kernels = -1: give an integer from",
        ),
        (change("blocks.0.forward.3.num_kernels", 0), "moved_bytes = 100 with num_kernels = 0"),
        (change("blocks.0.forward.0.dtype", "int8"), 'dtype = "int8" is not known'),
        (
            change("blocks.0.forward.2.causal_fraction", 0.0),
            "causal_fraction = 0.0: give a number above 0",
        ),
        (change("blocks.0.gradients", [-4]), "gradients of a has a negative size"),
        (change("blocks.0.gradients", [400]), "are 400 bytes and parameter_bytes is 120"),
        (change("blocks.1.name", "a"), "blocks has 'a' more than once"),
        (
            change("blocks.1.name", "step"),
            "blocks has 'step', which is the name for work",
        ),
        (change("blocks", []), "blocks = []: give a list of one or more tables"),
        ({key: value for key, value in RAW.items() if key != "version"}, "version is missing"),
    ],
)
def test_invalid_workload_is_rejected(raw: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_traced(raw, "workload.json")
    assert str(caught.value).startswith("workload.json: ")
    assert message in str(caught.value)


def test_unreadable_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot be read \(No such file.*: give a file that `moesaic tra"
    ):
        load_traced(tmp_path / "none.json")
    path = tmp_path / "half.json"
    path.write_text(json.dumps(RAW)[:-9])
    with pytest.raises(ConfigError, match="is not readable JSON"):
        load_traced(path)

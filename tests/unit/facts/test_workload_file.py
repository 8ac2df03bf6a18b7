"""A foreign model's work as a file: written, read, refused, turned into blocks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from moesaic.base.errors import ConfigError
from moesaic.facts.workload import (
    Product,
    Traced,
    load_traced,
    traced_blocks,
    traced_memory,
)
from moesaic.facts.workload.file import read_traced
from moesaic.facts.workload.sizes import BUCKET_BYTES

WORK = {
    "products": [
        {"rows": 4, "columns": 5, "inner": 6, "count": 2, "type": "fp32"},
        {"rows": 4, "columns": 4, "inner": 6, "count": 1, "type": "bf16"},
    ],
    "attention": [
        {
            "queries": 4, "keys": 4, "width": 2, "values": 3, "count": 8, "type": "fp32",
            "share": 0.625,
        },
    ],
    "moved_bytes": 100, "calls": 3, "specials": 17,
}  # fmt: skip
IDLE = {"moved_bytes": 0, "calls": 0}
BLOCK = {
    "name": "a", "parameters": 30, "parameter_bytes": 120, "gradients": [80, 40], "forward": WORK,
    "backward": WORK, "saved_bytes": 700, "output_bytes": 50,
}  # fmt: skip
FROZEN = {
    **BLOCK, "name": "b", "gradients": [], "forward": WORK, "backward": IDLE, "saved_bytes": 11,
}  # fmt: skip
RAW: dict[str, Any] = {
    "version": 1, "name": "net", "torch": "2.13.0", "batch": 4, "buffer_bytes": 9,
    "inputs": [{"name": "[0]", "shape": [4, 3], "dtype": "float32"}], "blocks": [BLOCK, FROZEN],
}  # fmt: skip


def make() -> Traced:
    return read_traced(RAW, "here")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    traced, path = make(), tmp_path / "workload.json"
    path.write_text(traced.to_json(), encoding="utf-8")
    assert load_traced(path) == traced
    assert traced.parameters == 60
    assert traced.flops == 3 * (2 * 2 * 4 * 5 * 6 + 2 * 4 * 4 * 6 + 8 * 2 * 4 * 4 * (2 + 3))


def test_it_becomes_blocks() -> None:
    first, second, step = traced_blocks(make())
    assert [first.name, second.name, step.name] == ["a", "b", "step"]
    assert [op.name for op in first.forward.ops] == ["products", "products", "attend", "passes"]
    assert first.forward.ops[0].products == (Product(4, 5, 6, 2),)
    assert first.forward.ops[2].products == (Product(4, 4, 2, 8), Product(4, 3, 4, 8))
    assert [op.type for op in first.forward.ops[:2]] == ["fp32", "bf16"]
    assert [op.causal_share for op in first.forward.ops] == [1.0, 1.0, 0.625, 1.0]
    assert [op.specials for op in first.forward.ops] == [0, 0, 80, 17]
    assert (first.forward.moved_bytes, first.forward.calls) == (100, 3)
    assert first.forward.flops == make().blocks[0].forward.flops
    moved = {op.name: (op.moved_bytes, op.calls) for op in first.update.ops}
    assert moved == {"norm": (120, 2), "clip": (240, 2), "adamw": (7 * 120, 2)}
    assert second.update.moved_bytes == second.update.calls == 0
    assert not step.update.messages


def test_ranks_add_up_their_gradients_in_buckets() -> None:
    large = {
        **BLOCK, "name": "c", "parameters": BUCKET_BYTES // 4 + 30,
        "parameter_bytes": BUCKET_BYTES + 120, "gradients": [BUCKET_BYTES, 20, 100],
    }  # fmt: skip
    traced = read_traced({**RAW, "blocks": [BLOCK, large]}, "here")
    *blocks, step = traced_blocks(traced, 4)
    sums = {block.name: block.update.messages for block in blocks}
    sizes = {name: [one.num_bytes for one in found] for name, found in sums.items()}
    # From behind, each beginning at a multiple of 256 bytes; what is as large as a bucket, alone.
    assert sizes == {"a": [256 + 80], "c": [256 + 20, BUCKET_BYTES]}
    assert {one.ranks for found in sums.values() for one in found} == {(0, 1, 2, 3)}
    assert {one.operation for found in sums.values() for one in found} == {"all_reduce"}
    assert not step.update.messages
    assert step.update.moved_bytes == 2 * (256 + 20 + 256 + 80)


def test_it_says_what_a_rank_holds() -> None:
    needs = traced_memory(make())
    assert needs.parameters_bytes == 240 + 9
    assert (needs.gradients_bytes, needs.moments_bytes) == (120, 240)
    assert needs.activations_bytes == 711
    # Backward of `a` finds its own activations, its gradients and that of its output.
    assert needs.peak_bytes == 240 + 9 + 240 + 700 + 120 + 50


def change(path: str, value: Any) -> dict[str, Any]:
    raw = copy.deepcopy(RAW)
    *above, last = (int(part) if part.isdigit() else part for part in path.split("."))
    held: Any = raw
    for part in above:
        held = held[part]
    held[last] = value
    return raw


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (change("version", 2), "version = 2 is not known: this moesaic reads version 1"),
        (change("version", True), "version = true is not known"),
        (change("batsch", 2), "unknown key 'batsch': did you mean 'batch'?"),
        (change("blocks.0.saved", 2), "unknown key 'blocks[0].saved'"),
        (change("blocks.0.saved_bytes", -1), "blocks[0].saved_bytes = -1 is out of range"),
        (change("blocks.0.saved_bytes", 10**400), "is out of range: give an integer from 0"),
        (change("blocks.1.forward.calls", -1), "calls = -1 is out of range: give an integer from"),
        (change("blocks.0.forward.calls", 0), "moved_bytes = 100 with calls = 0, and no kernel"),
        (change("blocks.0.forward.products.0.type", "int8"), 'type = "int8" is not known'),
        (change("blocks.0.forward.attention.0.share", 0.0), "share = 0.0 is out of range"),
        (change("blocks.0.gradients", [-4]), "gradients of a has a negative size"),
        (change("blocks.0.gradients", [400]), "are 400 bytes and parameter_bytes is 120"),
        (change("blocks.1.name", "a"), "blocks has 'a' more than once"),
        (
            change("blocks.1.name", "step"),
            "blocks has 'step', which stands for what is",
        ),
        (change("blocks", []), "blocks = [] is empty"),
        ({key: value for key, value in RAW.items() if key != "version"}, "version is missing"),
    ],
)
def test_what_is_none_is_refused(raw: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_traced(raw, "workload.json")
    assert str(caught.value).startswith("workload.json: ")
    assert words in str(caught.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file: give a file that `moesaic tra"):
        load_traced(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_traced(tmp_path)
    path = tmp_path / "half.json"
    path.write_text(json.dumps(RAW)[:-9])
    with pytest.raises(ConfigError, match="is not readable JSON"):
        load_traced(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not readable JSON"):
        load_traced(path)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON object: give a file that `moesaic trace"):
        load_traced(path)
    path.write_text('{"version": 1, "version": 1}')
    with pytest.raises(ConfigError, match="has the key 'version' twice in one object"):
        load_traced(path)

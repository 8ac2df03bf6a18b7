"""Kernels of our own for GPUs: their numbers as Triton's interpreter has them, where there is no
GPU; that they are compiled for GPUs of three generations."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moesaic.base.errors import ConfigError
from moesaic.dist import products
from moesaic.facts.job.train import Products
from moesaic.facts.plan.layout import planned
from moesaic.nn.bank import Bank
from moesaic.nn.dispatch import Dispatcher
from moesaic.nn.travel import Ranks
from moesaic.testing.jobs import tiny_job

pytest.importorskip("triton")

COUNTS = [[3, 0, 2], [0, 0, 5], [1, 1, 1], [0, 0, 0], [40, 0, 17], [2, 131, 3]]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter takes bf16 for whole numbers.
TYPES = [torch.float32, torch.float16, *[torch.bfloat16] * (DEVICE.type == "cuda")]


@pytest.fixture(scope="module")
def tiles() -> Iterator[Any]:
    """The module; it is asked for when kernels are made whether they are to be interpreted."""
    before = os.environ.get("TRITON_INTERPRET")
    if DEVICE.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield importlib.import_module("moesaic.dist.tiles")
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before


def of_slots(numbers: Tensor, counts: list[int]) -> list[Tensor]:
    """Exactly."""
    return list(numbers.double().split(counts))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("transposed", [True, False])
def test_rows_by_matrices(
    tiles: Any, counts: list[int], dtype: torch.dtype, transposed: bool
) -> None:
    """With matrices that lie apart and are of another type, and places between others."""
    arena = torch.randn(3, 2, 72, 40, device=DEVICE)
    rows = torch.randn(sum(counts), 40 if transposed else 72, device=DEVICE).to(dtype)
    for weight in (arena[:, 1], arena[:, 1].to(dtype)):
        place = torch.full((sum(counts) + 2, 90), 7.0, device=DEVICE).to(dtype)
        into = place[1:-1, 2 : 2 + weight.shape[1 if transposed else 2]]
        tiles.grouped_mm(rows, weight, torch.tensor(counts), transposed, into, eight=False)
        exact = [
            part @ (w.T if transposed else w)
            for part, w in zip(of_slots(rows, counts), weight.to(dtype).double(), strict=True)
        ]
        torch.testing.assert_close(into, torch.cat(exact).to(dtype))
        into.fill_(7.0)
        assert bool((place == 7.0).all()), "nothing beside its place was written"


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("added", [True, False])
def test_rows_by_rows(tiles: Any, counts: list[int], dtype: torch.dtype, added: bool) -> None:
    """Slots without rows come to nothing."""
    left, right = (torch.randn(sum(counts), n, device=DEVICE).to(dtype) for n in (40, 72))
    before = torch.randn(3, 40, 72, device=DEVICE)
    out = before.clone()
    tiles.grouped_outer(left, right, torch.tensor(counts), out, added)
    pairs = zip(of_slots(left, counts), of_slots(right, counts), strict=True)
    exact = torch.stack([a.T @ b for a, b in pairs]) + before.double() * added
    torch.testing.assert_close(out, exact.float())


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("transposed", [True, False])
def test_eight_bits_are_scaled(tiles: Any, counts: list[int], transposed: bool) -> None:
    """By row and by column, however far these are from one another; as close as eight bits are."""
    weight = torch.randn(3, 72, 40, device=DEVICE)
    weight *= torch.logspace(-6, 6, 72 if transposed else 40, device=DEVICE).view(
        (-1, 1) if transposed else (1, -1)
    )
    rows = torch.randn(sum(counts), 40 if transposed else 72, device=DEVICE)
    rows *= torch.logspace(-9, 9, sum(counts), device=DEVICE)[:, None]
    out = rows.new_empty((sum(counts), 72 if transposed else 40))
    tiles.grouped_mm(rows, weight, torch.tensor(counts), transposed, out, eight=True)
    matrices = weight.transpose(1, 2) if transposed else weight
    (rows8, by_row), (matrices8, by_column) = tiles.narrowed(rows, 1), tiles.narrowed(matrices, 1)
    exact, near = [], []
    for slot, (start, stop) in enumerate(pairwise([0, *torch.tensor(counts).cumsum(0).tolist()])):
        scales = by_row[start:stop, None].double() * by_column[slot].double()
        near.append(rows8[start:stop].double() @ matrices8[slot].double() * scales)
        exact.append(rows[start:stop].double() @ matrices[slot].double())
    torch.testing.assert_close(out, torch.cat(near).float(), rtol=1e-4, atol=0)
    # Of four significant bits one factor is off by a sixteenth at most.
    sizes = [
        part.abs() @ matrix.double().abs()
        for part, matrix in zip(of_slots(rows, counts), matrices, strict=True)
    ]
    assert bool(((out - torch.cat(exact)).abs() <= 0.13 * torch.cat(sizes)).all())


def test_narrow_numbers_stay_what_they_are(tiles: Any) -> None:
    """Nothing stays nothing, the largest comes back as it was, and what is no number is none."""
    numbers = torch.tensor([[0.0, 0.0], [3.0, -448.0 * 7], [float("nan"), 1.0], [1e-40, 0.0]])
    eight, scales = tiles.narrowed(numbers, 1)
    back = eight.float() * scales[:, None]
    assert back[0].tolist() == [0.0, 0.0]
    assert back[1, 1] == numbers[1, 1]
    assert bool(back[2].isnan().any())
    assert bool(back[3].isfinite().all())


def passed(bank: Bank, choices: Tensor, seed: int) -> list[Tensor]:
    """Results of a layer's experts, and gradients of tokens, weights of rows and matrices."""
    draw = torch.Generator().manual_seed(seed)
    tokens, cotangent = (torch.randn(len(choices), bank.hidden, generator=draw) for _ in range(2))
    weights = torch.rand(choices.shape, generator=draw)
    leaves = [tokens.to(DEVICE).requires_grad_(), weights.to(DEVICE).requires_grad_()]
    dispatcher = Dispatcher(len(bank.experts), Ranks())
    placed = dispatcher.place(dispatcher.count(choices.to(DEVICE), training=True))
    sent = dispatcher.start(*leaves, placed)
    with bank.at_work() as compute:
        out = sent.through(compute)
    out.backward(cotangent.to(DEVICE))
    own = bank.arena if bank.adapters is None else bank.adapters.arena
    found = [out.detach(), *(leaf.grad for leaf in [*leaves, own])]
    own.grad = None
    return [one for one in found if one is not None]


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("spread", ["even", "all to one", "by chance"])
def test_a_layer_by_them_is_the_same(tiles: Any, adapted: bool, spread: str) -> None:
    """Forward and backward, and near enough in eight bits, but for what comes of adapters alone."""
    del tiles
    choices = {
        "even": torch.arange(24).view(12, 2) % 4,
        "all to one": torch.tensor([[2, 0]] * 12),
        "by chance": torch.rand(12, 4, generator=torch.Generator().manual_seed(3)).argsort()[:, :2],
    }[spread]
    found = {}
    for by in get_args(Products):
        bank = Bank(range(4), 24, 40, by=by)
        if adapted:
            bank.adapt(3, 2.0)
        bank.to(DEVICE)
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for one in bank.parameters():
                one.copy_(torch.randn(one.shape, generator=draw) * 0.3)
        found[by] = passed(bank, choices, 5)
    assert len(found["torch"]) == 4
    for one, other, eight in zip(*found.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert 0 < float((eight - one).norm() / one.norm()) < 0.1
    outside = torch.device("cuda")
    assert products.engine(outside, torch.bfloat16, "triton") == "kernels of our own"
    assert "eight bits" in products.engine(outside, torch.bfloat16, "fp8")


def test_what_cannot_multiply_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU; on a GPU that is too old; without Triton."""
    outside = torch.device("cuda")
    products.check("torch", torch.device("cpu"))
    with pytest.raises(ConfigError, match=r'layout.products = "triton" is for GPUs.*leave it out'):
        products.check("triton", torch.device("cpu"))
    monkeypatch.setattr(products, "generation", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"capability 8.9 or more, and this one has 8.0"):
        products.check("fp8", outside)
    products.check("triton", outside)
    monkeypatch.setattr(products, "generation", lambda device: (9, 0))
    products.check("fp8", outside)
    monkeypatch.setitem(sys.modules, "moesaic.dist.tiles", None)
    monkeypatch.delattr("moesaic.dist.tiles", raising=False)
    with pytest.raises(ConfigError, match=r"needs Triton, .*pip install triton"):
        products.check("fp8", outside)


def test_jobs_and_plans_say_what_multiplies() -> None:
    """Nobody but the job takes eight bits; kernels have no fp64."""
    job = tiny_job(train={"precision": "bf16"}, layout={"products": "fp8"})
    assert planned(job, 1).products == "fp8"
    assert planned(tiny_job(), 1).products == "torch"
    with pytest.raises(ConfigError, match=r'layout.products = "triton" with train.precision'):
        tiny_job(layout={"products": "triton"})
    dense = {"family": "llama", "experts": 0, "top_k": 0}
    idle = tiny_job(model=dense, train={"precision": "bf16"}, layout={"products": "triton"}).idle()
    assert "layout.products has no effect: the model is dense" in idle


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moesaic.dist import kernels, tiles
import torch

def source(function, pointers, consts):
    names = function.arg_names
    return ASTSource(function, {
        name: pointers.get(name, "constexpr" if name in consts else "i32") for name in names
    }, consts)

target = GPUTarget("cuda", int(sys.argv[1]), 32)
for kind, dtype, rows in (("bf16", torch.bfloat16, 128), ("fp32", torch.float32, 16)):
    own = tiles.blocks(dtype, rows)
    options = {"num_warps": own.warps, "num_stages": own.stages}
    of_rows = {
        "rows": f"*{kind}", "matrices": "*fp32", "out": f"*{kind}", "tiles": "*i32",
        "row_scales": "*fp32", "column_scales": "*fp32",
    }
    consts = {
        "SCALED": False, "BLOCK_M": own.rows, "BLOCK_N": own.columns, "BLOCK_K": own.depth,
        "rows_k": 1,
    }
    made = triton.compile(source(kernels.rows_by_matrices, of_rows, consts), target, options)
    print(kind, made.metadata.shared, len(made.asm["cubin"]))
    of_outer = {"left": f"*{kind}", "right": f"*{kind}", "out": "*fp32", "ends": "*i32"}
    consts = {"ADDED": True, "BLOCK_M": own.rows, "BLOCK_N": own.columns, "BLOCK_R": 32}
    made = triton.compile(source(kernels.rows_by_rows, of_outer, consts), target, options)
    print(kind, made.metadata.shared, len(made.asm["cubin"]))
if int(sys.argv[1]) >= 89:
    own = tiles.blocks(tiles.EIGHT, 128)
    consts = {
        "SCALED": True, "BLOCK_M": own.rows, "BLOCK_N": own.columns, "BLOCK_K": own.depth,
        "rows_k": 1,
    }
    of_rows |= {"rows": "*fp8e4nv", "matrices": "*fp8e4nv", "out": "*bf16"}
    options = {"num_warps": own.warps, "num_stages": own.stages}
    made = triton.compile(source(kernels.rows_by_matrices, of_rows, consts), target, options)
    print("fp8", made.metadata.shared, len(made.asm["cubin"]))
"""


@pytest.mark.parametrize(("generation", "shared"), [(80, 163), (90, 227), (100, 227)])
def test_they_are_compiled_for_gpus(generation: int, shared: int, tmp_path: Any) -> None:
    """And what a program has in the memory of its processor, which is `shared` KiB, fits."""
    there = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(generation)], capture_output=True, text=True,
        timeout=100, check=False, env=there | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [kind for kind, *_ in lines] == [
        "bf16", "bf16", "fp32", "fp32", *["fp8"] * (generation >= 89)
    ]  # fmt: skip
    for _, used, size in lines:
        assert int(used) <= shared << 10
        assert int(size) > 0

"""Low-bit moments: rounding against a slow reference, equal bits in every layout, predicted
costs."""

from __future__ import annotations

import math
import struct
from itertools import pairwise
from typing import Any

import pytest
import torch

from moesaic.dist.checkpoint.staging import Staging
from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.facts.job import Job, OptimizerConfig
from moesaic.facts.plan import plan_from_layout
from moesaic.facts.workload import memory, workload
from moesaic.facts.workload.ops import LOW_BIT_TRAFFIC
from moesaic.facts.workload.sizes import MOMENT_CHUNK
from moesaic.kernels.randomness import bits, make_key
from moesaic.models.kernel_counter import KernelCounter, KernelCounts
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.runs import start_run
from moesaic.testing.states import live_values
from moesaic.train.low_bit_adamw import (
    BF16Moments,
    Codebook,
    LowBitAdamW,
    dequantise,
    dynamic_codebook,
    quantise,
)
from moesaic.train.optim import AdamW, zero_moments

CPU = torch.device("cpu")
LOW_BIT = ["bf16", "8bit"]


def make_shard(values: torch.Tensor, rows: int | None = None, first: int = 0) -> TensorShard:
    """Return a shard of some rows of a tensor with `rows` rows."""
    shape = (rows or len(values), values.shape[1])
    return TensorShard.of_tensor(PARAMETER, "w", shape, (first, 0), values, (0,))


def optimizer(moments: str, **more: Any) -> LowBitAdamW:
    return LowBitAdamW(OptimizerConfig(moments=moments, **more), 3, CPU)


def attach(ours: LowBitAdamW, box: TensorShard) -> None:
    ours.moments[box.name] = ours._format.zeros(box)


def draws_like(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, values.shape, generator=generator).int()


def test_codebook_of_dynamic_quantisation() -> None:
    for signed, count, finest in ((True, 128, 0.9 / 64), (False, 256, 0.9 / 128)):
        found = dynamic_codebook(signed=signed).double()
        assert len(found) == count
        assert (found[0], found[-1]) == (0.0, 1.0)
        assert (found.diff() > 0).all()
        top = found[found > 0.1]
        assert top[:-1].diff() == pytest.approx(finest, rel=1e-4)
        for decade in range(6):  # Each decade further down has half as many.
            above, below = (
                int(((found > 10.0 ** -(d + 1)) & (found < 10.0**-d)).sum())
                for d in (decade, decade + 1)
            )
            assert above + (signed and decade == 0) == 2 * below


@pytest.mark.parametrize("signed", [True, False])
def test_lookup_tables_equal_a_search(signed: bool) -> None:
    levels = Codebook.from_values(dynamic_codebook(signed=signed), CPU)
    raw = torch.cat((levels.values, torch.rand(10_000) ** 8)).view(torch.int32)
    near = torch.cat((raw, raw - 1, raw + 1)).clamp_(min=0).view(torch.float32).clamp_(max=1.0)
    expected = torch.bucketize(near, levels.values, right=True) - 1
    assert torch.equal(levels.lower_codes(near[None])[0].long(), expected)


def slow_codes(
    values: list[float], draws: list[int], table: list[float]
) -> tuple[list[int], float]:
    """Return the codes and the scale of one block, one number at a time."""
    scale, codes = max(abs(v) for v in values), []
    for value, draw in zip(values, draws, strict=True):
        share = struct.unpack("f", struct.pack("f", abs(value) / scale))[0] if scale else 0.0
        below = max(i for i, level in enumerate(table) if level <= share)
        code = below
        if below + 1 < len(table):
            gap = table[below + 1] - table[below]
            code += (share - table[below]) > gap * ((draw & 0xFFF) + 0.5) / 4096
        codes.append(code)
    return codes, scale


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", [5, 128, 200])
def test_quantising_equals_the_reference(signed: bool, columns: int) -> None:
    torch.manual_seed(columns)
    values = torch.randn(4, columns).abs() * 10.0 ** torch.randint(-6, 3, (4, columns))
    values[1] = 0.0
    draws, levels = draws_like(values), Codebook.from_values(dynamic_codebook(signed=signed), CPU)
    table = levels.values
    scales = torch.empty(4, -(-columns // 128))
    codes = quantise(values, scales, levels, draws)
    wrong = 0
    for row in range(4):
        for block, start in enumerate(range(0, columns, 128)):
            part = slice(start, start + 128)
            expected, scale = slow_codes(
                values[row, part].tolist(), draws[row, part].tolist(), table.tolist()
            )
            assert scales[row, block] == scale
            wrong += sum(a != b for a, b in zip(codes[row, part].tolist(), expected, strict=True))
    # Thresholds are compared in fp32 here, in fp64 by the reference.
    assert wrong <= values.numel() // 500
    back = dequantise(codes, scales, levels)
    for row in range(4):
        for column in range(columns):
            value = table[codes[row, column]] * scales[row, column // 128]
            assert back[row, column] == value


@pytest.mark.parametrize("signed", [True, False])
def test_values_on_a_level_stay(signed: bool) -> None:
    levels, values = (
        Codebook.from_values(dynamic_codebook(signed=signed), CPU),
        torch.rand(40, 300) ** 6,
    )
    scales = torch.empty(40, 3)
    codes = quantise(values, scales, levels, draws_like(values))
    again, before = codes, scales.clone()
    for seed in range(5):
        back = dequantise(again, scales, levels)
        again = quantise(back, scales, levels, draws_like(values, seed))
        assert torch.equal(again, codes)
        assert torch.equal(scales, before)


def test_bfloat16_rounds_stochastically() -> None:
    form, wide = BF16Moments(torch.device("cpu")), torch.randn(50, 40)
    kept = form.zeros(make_shard(wide))
    draws = draws_like(wide)
    form.encode(wide, wide.square(), kept, draws)
    for values, narrow, shift in ((wide, kept[0], 0), (wide.square(), kept[1], 16)):
        for value, short, draw in zip(
            values.flatten().tolist(), narrow.flatten().tolist(), draws.flatten().tolist(),
            strict=True,
        ):  # fmt: skip
            (raw,) = struct.unpack("I", struct.pack("f", value))
            rounded = (raw + (draw >> shift & 0xFFFF)) & 0xFFFF0000
            assert struct.unpack("f", struct.pack("I", rounded))[0] == short
    exact = kept[0].clone()
    form.encode(exact.float(), kept[1].float(), kept, draws_like(wide, 1))
    assert torch.equal(kept[0], exact)


def test_bits_equal_the_reference_and_look_random() -> None:
    places = torch.tensor([0, 1, 2, 77, -1, -(1 << 31), (1 << 31) - 1], dtype=torch.int32)
    for step in (0, 5):
        key = make_key(9, f"what/{step}")[0]
        for place, found in zip(places.tolist(), bits(9, "what", step, places), strict=True):
            word = (place & 0xFFFFFFFF) ^ key
            for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B)):
                word = (word ^ word >> shift) * multiplier & 0xFFFFFFFF
            assert int(found) & 0xFFFFFFFF == word ^ word >> 16
    many = torch.stack([bits(9, "what", step, torch.arange(1 << 15).int()) for step in range(2)])
    for shift in range(32):
        ones = (many >> shift & 1).double()
        assert float(ones.mean()) == pytest.approx(0.5, abs=0.01)
        assert float(((ones[0] - 0.5) * (ones[1] - 0.5)).mean()) == pytest.approx(0.0, abs=0.01)


@pytest.mark.parametrize("moments", LOW_BIT)
def test_small_decays_are_not_lost(moments: str) -> None:
    """A change of 0.001 is below half a step of either format; rounding to nearest would not
    move."""
    ours = optimizer(moments, betas=[0.9, 0.999])
    values, grad = torch.zeros(8, 256), torch.rand(8, 256) + 0.1
    box = make_shard(values)
    attach(ours, box)
    ours.update_matrix(box, grad.clone(), 1, lr=0.0, clip=1.0)
    before = ours._format.decode(ours.moments["w"], torch.float32)[1].clone()
    steps = 700
    for step in range(2, steps + 2):
        ours.update_matrix(box, torch.zeros_like(grad), step, lr=0.0, clip=1.0)
    after = ours._format.decode(ours.moments["w"], torch.float32)[1]
    assert float(after.sum() / before.sum()) == pytest.approx(0.999**steps, rel=0.05)
    stuck = before.bfloat16()
    assert torch.equal((stuck.float() * 0.999).bfloat16(), stuck)


@pytest.mark.parametrize("moments", LOW_BIT)
@pytest.mark.parametrize("columns", [48, 304])
def test_updates_do_not_depend_on_layout(moments: str, columns: int) -> None:
    """Chunks, single rows and shards on several ranks give the same bits.

    The widths fill whole vector registers, because remainders may round differently.
    """
    rows = 2 * MOMENT_CHUNK // columns + 3
    torch.manual_seed(1)
    start, grads = torch.randn(rows, columns), torch.randn(3, rows, columns)
    whole, cuts = start.clone(), [0, 1, 50, rows - 1, rows, rows]
    ours = optimizer(moments)
    attach(ours, make_shard(whole))
    for step in range(3):
        ours.update_matrix(make_shard(whole), grads[step].clone(), step + 1, lr=0.1, clip=0.5)
    for first, last in pairwise(cuts):
        theirs, part = optimizer(moments), start[first:last].clone()
        box = make_shard(part, rows, first)
        attach(theirs, box)
        for step in range(3):
            grad = grads[step, first:last].clone()
            theirs.update_matrix(box, grad, step + 1, lr=0.1, clip=0.5)
        assert torch.equal(part, whole[first:last])
        for a, b in zip(theirs.moments["w"], ours.moments["w"], strict=True):
            assert torch.equal(a, b[first:last])


@pytest.mark.parametrize(("moments", "margin"), [("bf16", 0.01), ("8bit", 0.08)])
def test_an_update_is_near_that_of_full_moments(moments: str, margin: float) -> None:
    """Half of all moments are tiny compared with their block's."""
    torch.manual_seed(2)
    size = torch.where(torch.rand(64, 256) < 0.5, 1.0, 1e-3)
    values = torch.zeros(64, 256)
    ours, full, theirs = optimizer(moments), AdamW(OptimizerConfig()), values.clone()
    box = make_shard(values)
    attach(ours, box)
    kept = zero_moments(theirs)
    for step in range(1, 31):
        grad = (torch.randn(64, 256) + 1.0) * size
        ours.update_matrix(box, grad.clone(), step, lr=0.01, clip=1.0)
        full.update([theirs], [grad], [kept], step, lr=0.01, clip=1.0, decay=True)
    apart = torch.linalg.vector_norm(values - theirs) / torch.linalg.vector_norm(theirs)
    assert 0 < apart < margin


def test_nonzero_roots_stay_nonzero() -> None:
    values = torch.zeros(1, 128)
    ours, grad = optimizer("8bit"), torch.full((1, 128), 1e-9)
    grad[0, 0] = 1.0
    attach(ours, make_shard(values))
    ours.update_matrix(make_shard(values), grad, 1, lr=0.1, clip=1.0)
    _, second = ours._format.decode(ours.moments["w"], torch.float32)
    assert (second > 0).all()
    assert values.abs().max() <= 0.1 * 1.001


def test_an_update_bumps_version_counters() -> None:
    for moments in LOW_BIT:
        ours, values = optimizer(moments), torch.randn(4, 4)
        attach(ours, make_shard(values))
        tensors = (values, *ours.moments["w"])
        before = [tensor._version for tensor in tensors]
        ours.update_matrix(make_shard(values), torch.randn(4, 4), 1, lr=0.1, clip=1.0)
        assert all(t._version > b for t, b in zip(tensors, before, strict=True))


def test_blocks_are_not_cut() -> None:
    """Layouts may cut columns between blocks only."""
    values = torch.zeros(3, 128)
    ours = optimizer("8bit")
    fine = TensorShard.of_tensor(PARAMETER, "w", (3, 384), (0, 128), values, (0,))
    attach(ours, fine)
    found = list(ours._format.shards(fine, ours.moments["w"]))
    assert [(p.shape, p.offset, tuple(live_values(p).shape)) for p in found] == [
        ((3, 384), (0, 128), (3, 128)), ((3, 3), (0, 1), (3, 1)),
    ] * 2  # fmt: skip
    for shape, offset in (((3, 384), (0, 64)), ((3, 400), (0, 272))):
        box = TensorShard.of_tensor(PARAMETER, "w", shape, offset, values[:, :100], (0,))
        with pytest.raises(AssertionError, match=r"^w"):
            attach(ours, box)


def low_bit_job(moments: str, **tables: dict[str, Any]) -> Job:
    tables["optimizer"] = {"moments": moments, **tables.get("optimizer", {})}
    tables["train"] = {"precision": "fp32", **tables.get("train", {})}
    return tiny_job(**tables)


@pytest.mark.parametrize("moments", ["full", *LOW_BIT])
@pytest.mark.parametrize("tied", [False, True])
def test_bytes_equal_the_prediction(moments: str, tied: bool) -> None:
    sizes = {"hidden": 136, "ffn": 260, "tied": tied}
    job = low_bit_job(moments, model=sizes, checkpoint={"asynchronous": True})
    run = start_run(job)
    run.step(RandomSamples(job.model.vocab, job.data.sequence))
    needs = memory(job, run.plan)
    kept = [tensor for tensors in run.part.optimizer.moments.values() for tensor in tensors]
    assert needs.moments_bytes == sum(tensor.nbytes for tensor in kept)
    parts = Staging(0, CPU, 1 << 30).plan_files(run.state().shards).files
    assert needs.staging_bytes == sum(part.num_bytes for part in parts)
    full = memory(low_bit_job("full", model=sizes), run.plan).moments_bytes
    share = {"full": 1.0, "bf16": 0.5, "8bit": 0.25 + 1 / 128}
    assert needs.moments_bytes / full == pytest.approx(share[moments], rel=0.1)
    norms = [t for name, t in run.part.optimizer.moments.items() if "norm" in name]
    assert norms
    assert all(t.dtype == torch.float32 for pair in norms for t in pair)


@pytest.mark.parametrize("moments", LOW_BIT)
def test_traffic_of_an_update_equals_the_prediction(moments: str) -> None:
    seen, values = KernelCounts(), torch.randn(256, 128)
    ours = optimizer(moments)
    attach(ours, make_shard(values))
    with KernelCounter(lambda: seen):
        ours.update_matrix(make_shard(values), torch.randn_like(values), 1, lr=0.1, clip=1.0)
    moved, calls = LOW_BIT_TRAFFIC[moments]
    assert moved == pytest.approx(seen.moved_bytes / values.numel(), rel=0.05)
    assert calls == pytest.approx(seen.num_kernels, rel=0.1)
    job = low_bit_job(moments)
    updates = [op for block in workload(job, plan_from_layout(job.layout, job.model, 1))
               for op in block.update.ops]  # fmt: skip
    narrow = sum(op.moved_bytes for op in updates if op.name == "low-bit adamw")
    wide = sum(op.moved_bytes for op in updates if op.name == "adamw")
    run = start_run(job)
    elements = [item.local.numel() for item in run.part.trainable if item.has_weight_decay]
    assert narrow == moved * sum(elements)
    assert wide == 7 * 4 * sum(
        i.local.numel() for i in run.part.trainable if not i.has_weight_decay
    )


class Pattern(RandomSamples):
    """Samples in which each token determines the next, except one time in eight."""

    def _sample(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        noise = torch.randint(self._vocab, (self._sequence + 1,), generator=generator)
        odd = torch.rand(self._sequence + 1, generator=generator) < 1 / 8
        tokens = [int(noise[0])]
        for place in range(1, self._sequence + 1):
            follow = (5 * tokens[-1] + 7) % self._vocab
            tokens.append(int(noise[place]) if odd[place] else follow)
        row = torch.tensor(tokens)
        return torch.stack((row[:-1], row[1:], torch.zeros(self._sequence, dtype=torch.int64)))


def final_loss(seed: int, precision: str = "fp32", **optimizer: Any) -> float:
    """Return the mean loss of a run's last steps."""
    job = tiny_job(
        optimizer={"lr": 0.015, **optimizer}, schedule={"warmup": 10},
        train={"steps": STEPS, "precision": precision},
        model={"init_std": 0.1, "layers": 1, "experts": 4},
    )  # fmt: skip
    run = start_run(job.model_copy(update={"seed": seed}))
    samples = Pattern(job.model.vocab, job.data.sequence)
    losses = [run.step(samples).loss for _ in range(STEPS)]
    assert losses[0] > 3.8
    return sum(losses[-20:]) / 20


STEPS, SEEDS, MARGIN = 70, 2, 0.01


@pytest.fixture(scope="module")
def full_losses() -> list[float]:
    return [final_loss(seed) for seed in range(SEEDS)]


@pytest.mark.parametrize("kept", [{"moments": "bf16"}, {"moments": "8bit"}, {"precision": "fp16"}],
                         ids=lambda kept: next(iter(kept.values())))  # fmt: skip
def test_a_model_learns_as_well(full_losses: list[float], kept: dict[str, Any]) -> None:
    """Means over seeds agree within 1 percent, after the loss has come close to the noise."""
    found = [final_loss(seed, **kept) for seed in range(SEEDS)]
    wide, narrow = (math.fsum(losses) / SEEDS for losses in (full_losses, found))
    assert wide < 1.0
    assert narrow < wide * (1 + MARGIN)

"""Time one expert layer on this machine against its limit: a dense product of as many operations,
or reading the experts' weights. `moesaic bench layer` and the benchmarks both measure with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from moesaic.base.errors import ConfigError
from moesaic.dist.probe.timing import time_call
from moesaic.facts.job import ModelConfig, RoutingConfig
from moesaic.facts.job.train import MatmulBackend
from moesaic.facts.plan import Plan
from moesaic.facts.workload import block_specs
from moesaic.kernels import device as devices
from moesaic.kernels.grouped_mm import describe_backend, matmul
from moesaic.models.lm import LanguageModel
from moesaic.nn.inputs import LOW_PRECISION, Inputs, Rotary, autocast_to
from moesaic.nn.moe import MoE

_MIN_ROWS, _MAX_ROWS = 64, 4096
"""Rows of the dense products of which the fastest is the limit."""
_MAX_CPU_MULTIPLICATIONS = 1 << 35
"""Most multiplications of a product on a CPU: wider ones are no faster."""
_STD = 0.02
_MIN_PASSES = 13
"""Forward passes that a batch takes at least: the first one, three more, and three with backward,
which count threefold."""
_MAX_PASSES = 60
"""Passes after which the median is stable."""
_FIRST_PASS_FACTOR = 3
"""Factor by which a first pass may exceed a later one."""
_LIMIT_TIMEOUT_S = 10.0
"""Seconds for a limit in any case."""


@dataclass(frozen=True)
class DeviceLimit:
    """Best rates of a device in one dtype."""

    dtype: str
    flops_per_s: float
    """FLOP/s of the fastest dense product."""
    bytes_per_s: float
    """Bytes of weights read in a second."""


@dataclass(frozen=True)
class Roofline:
    """Least times of a batch of one size."""

    dtype: str
    tokens: int
    tokens_per_expert: float
    """Tokens an expert gets, on average."""
    forward_s: float
    step_s: float
    """Forward and backward."""
    bottleneck: str
    """Limit of the forward pass: matmul or memory."""


@dataclass(frozen=True)
class MeasuredSpeed:
    """Measured times of such a batch."""

    roofline: Roofline
    forward_s: float
    step_s: float

    @property
    def forward_efficiency(self) -> float:
        """Share of the limit, forward."""
        return self.roofline.forward_s / self.forward_s

    @property
    def step_efficiency(self) -> float:
        """Share of the limit, with backward."""
        return self.roofline.step_s / self.step_s


@dataclass(frozen=True)
class SkippedBatch:
    """A batch that is not measured."""

    roofline: Roofline
    reason: Literal["time", "memory"]
    """The resource that does not suffice."""
    needed: float
    """Least seconds of all its passes, or bytes beside the experts."""


def measure_speeds(
    layer: ExpertLayerBenchmark,
    limit: DeviceLimit,
    sizes: Sequence[int],
    budget_s: float,
    on_start: Callable[[int], object] = lambda _: None,
) -> Iterator[MeasuredSpeed | SkippedBatch]:
    """Yield the speeds of batches of these `sizes`, within about so many seconds; batches that need
    more time or memory are left out.

    Args:
        layer: the layer.
        limit: its limit.
        sizes: tokens of each batch.
        budget_s: seconds for all batches.
        on_start: called with the size of each before it is tried.
    """
    if layer.batch_bytes(1) <= layer.free_bytes:
        layer.passes(limit.dtype, 1).forward()  # The first pass imports and starts threads.
    left_s = budget_s
    for place, tokens in enumerate(sizes):
        on_start(tokens)
        least, size = layer.roofline(limit, tokens), layer.batch_bytes(tokens)
        if size > layer.free_bytes:
            yield SkippedBatch(least, "memory", size)
            continue
        least_s = _MIN_PASSES * least.forward_s
        if least_s > left_s:  # Not even at best: no need to try.
            yield SkippedBatch(least, "time", least_s)
            continue
        start, passes = layer.clock(), layer.passes(limit.dtype, tokens)
        first_s = _first_pass_s(passes, layer.clock, _FIRST_PASS_FACTOR * left_s / _MIN_PASSES)
        needs_s = _MIN_PASSES * first_s
        if needs_s > left_s:
            yield SkippedBatch(least, "time", needs_s)
        else:
            share_s = min(left_s / (len(sizes) - place), _MAX_PASSES * first_s)
            extra_s = max(0.0, share_s - needs_s)
            forward_s = time_call(passes.forward, layer.clock, extra_s / 3)
            step_s = time_call(passes.step, layer.clock, 2 * extra_s / 3)
            yield MeasuredSpeed(least, forward_s, step_s)
        left_s -= layer.clock() - start


def _first_pass_s(passes: Passes, clock: Callable[[], float], max_s: float) -> float:
    """Return the seconds of the first forward pass, or of the second, as the first may prepare
    much."""
    start = clock()
    passes.forward()
    first_s = clock() - start
    if first_s >= max_s:
        return first_s
    start = clock()
    passes.forward()
    return min(first_s, clock() - start)


class ExpertLayerBenchmark:
    """One expert layer of a model, with its router and shared experts; each expert gets as many
    tokens as any other."""

    def __init__(
        self,
        model: ModelConfig,
        device: torch.device,
        backend: Literal["auto"] | MatmulBackend = "auto",
        weights: str = "fp32",
    ) -> None:
        """Create the layer with weights of dtype `weights`; `backend` selects the GPU kernels."""
        self._model, self._device, self._weights = model, device, weights
        self._dtype = LOW_PRECISION.get(weights, torch.float32)
        self.arena_bytes = self._dtype.itemsize * model.experts * 3 * model.ffn * model.hidden
        self._check_fits()
        plan = Plan(ranks=1, ep=1, dp_shard=1, experts=model.experts)
        first = model.expert_layers[0]
        specs = [spec for spec in block_specs(model, plan) if spec.layer == first]
        with torch.device("meta"):
            whole = LanguageModel(model, specs, RoutingConfig(router="balanced"))
        whole.materialise(device)
        ((_, self.moe),) = whole.expert_layers()
        self.moe.bank.backend = backend
        self.moe.to(self._dtype)
        _init_parameters(self.moe)

    def grouped_mm_backends(self, dtypes: Sequence[str]) -> dict[str, str]:
        """Return the library that multiplies its experts, by dtype."""
        by = self.moe.bank.backend
        return {
            name: describe_backend(self._device, LOW_PRECISION.get(name, torch.float32), by)
            for name in dtypes
        }

    def measure_limits(self, dtypes: Sequence[str], budget_s: float) -> list[DeviceLimit]:
        """Measure the limits, each in about so many seconds."""
        arena, hidden = self.moe.bank.arena.detach(), self._model.hidden
        rows, one = arena.view(-1, hidden), arena.new_ones(hidden)
        # The faster layout depends on the device.
        reads = partial(self.read, slice(None)), partial(torch.mv, rows, one)
        read = arena.nbytes / min(self._time(read_once, budget_s / 2) for read_once in reads)
        return [DeviceLimit(dtype, self._measure_flops(dtype, budget_s), read) for dtype in dtypes]

    def read(self, slots: slice) -> None:
        """Read the weights of some experts as fast as memory gives them."""
        # Sums of bf16 wait for the processor, not for memory.
        self.moe.bank.arena.detach()[slots].view(torch.float32).sum()

    def dense(self, dtype: str, rows: int, inner: int = 0) -> Dense:
        """Return the limit by products: a matrix of all three of an expert's, or of `inner` rows,
        multiplied by as many `rows` as go through experts."""
        kind, hidden = LOW_PRECISION.get(dtype, torch.float32), self._model.hidden
        inner = inner or 3 * self._model.ffn
        left, right = (
            torch.randn(size, hidden, device=self._device).to(kind) for size in (rows, inner)
        )
        return Dense(left, right)

    def roofline(self, limit: DeviceLimit, tokens: int) -> Roofline:
        """Return the least times: products, or weights read once forward and once backward and
        gradients written."""
        model = self._model
        one = 3 * model.ffn * model.hidden
        products_s = 2 * tokens * (model.top_k + model.shared_experts) * one / limit.flops_per_s
        busy = min(model.experts, tokens * model.top_k) + model.shared_experts
        read_s = self._dtype.itemsize * busy * one / limit.bytes_per_s
        written_s = (
            self._dtype.itemsize * (model.experts + model.shared_experts) * one / limit.bytes_per_s
        )
        return Roofline(
            limit.dtype, tokens, tokens * model.top_k / model.experts,
            max(products_s, read_s), max(3 * products_s, 2 * read_s + written_s),
            "matmul" if products_s > read_s else "memory",
        )  # fmt: skip

    @property
    def free_bytes(self) -> int:
        """Bytes of the device beside experts and their gradients."""
        return devices.memory_bytes(self._device) - 2 * self.arena_bytes

    def batch_bytes(self, tokens: int) -> int:
        """Return bytes of a batch, forward and backward, about."""
        model, rows = self._model, tokens * self._model.top_k
        of_tokens = 5 * model.hidden + 3 * (model.experts + model.shared_experts * model.ffn)
        return 4 * (rows * (2 * model.hidden + 3 * model.ffn) + tokens * of_tokens)

    def clock(self) -> float:
        """Return seconds, after all work of the device has ended."""
        return devices.synchronized_time_s(self._device)

    def _check_fits(self) -> None:
        """Raise unless experts, their gradients and as much again for rows fit."""
        needed, there = 3 * self.arena_bytes, devices.memory_bytes(self._device)
        if needed > there:
            model, fits = self._model, self._model.experts * there // needed
            remedy = f"--set model.experts={fits}, or fewer"
            if fits < model.top_k:
                remedy = (
                    f"not even the {model.top_k} of a token fit, so lower model.hidden or model.ffn"
                )
            raise ConfigError(
                f"{model.experts} experts of model.hidden = {model.hidden} and "
                f"model.ffn = {model.ffn}, with their gradients, take {needed / 1e9:.0f} GB "
                f"and the device has {there / 1e9:.0f}: {remedy}"
            )

    def _time(self, work: Callable[[], object], budget_s: float) -> float:
        return time_call(work, self.clock, budget_s)

    def passes(self, dtype: str, tokens: int, *, training: bool = True) -> Passes:
        """Return passes of one batch, with products in `dtype`."""
        x = torch.randn(1, tokens, self._model.hidden, device=self._device).to(self._dtype)
        return Passes(self.moe, x, "fp32" if dtype == self._weights else dtype, training)

    def _measure_flops(self, dtype: str, budget_s: float) -> float:
        """Return the best of products of ever more rows while there is time. The largest is always
        tried, unless fewer rows show that it would take too long."""
        hidden, inner = self._model.hidden, 3 * self._model.ffn
        if self._device.type == "cpu":
            inner = max(_MIN_ROWS, min(inner, _MAX_CPU_MULTIPLICATIONS // (_MAX_ROWS * hidden)))
        dense = self.dense(dtype, _MAX_ROWS, inner)

        def flops(number: int) -> float:
            work = partial(dense.forward, number)
            return 2 * number * hidden * inner / self._time(work, 0.0)

        best, number, until = 0.0, _MIN_ROWS, self.clock() + budget_s
        while not best or (number < _MAX_ROWS and self.clock() < until):
            best = max(best, flops(number))
            number *= 4
        longest_s = 3 * 2 * _MAX_ROWS * hidden * inner / best
        return max(best, flops(_MAX_ROWS)) if longest_s < max(budget_s, _LIMIT_TIMEOUT_S) else best


class Dense:
    """One dense product, and the two of its backward."""

    def __init__(self, rows: Tensor, weight: Tensor) -> None:
        self._rows, self._weight = rows, weight

    def forward(self, rows: int | None = None) -> None:
        """Multiply so many rows, or all."""
        matmul(self._rows[:rows], self._weight, transposed=True)

    def step(self) -> None:
        """Multiply forward and backward."""
        self.forward()
        matmul(self._grad, self._weight, transposed=False)
        matmul(self._grad.T, self._rows, transposed=False)

    @cached_property
    def _grad(self) -> Tensor:
        return self._rows.new_ones(len(self._rows), len(self._weight))


class Passes:
    """Passes of one batch through an expert layer."""

    def __init__(self, moe: MoE, x: Tensor, precision: str, training: bool) -> None:
        self.x, self.grad = x.requires_grad_(), torch.randn_like(x)
        self._moe, self._precision = moe, precision
        self._inputs = Inputs(
            Rotary(x, x),  # The layer applies no rotary embedding.
            training=training,
            samples=torch.zeros(1, dtype=torch.int64, device=x.device),
            positions=torch.arange(x.shape[1], device=x.device),
        )
        self._leaves = [x, *moe.parameters()]

    def run(self) -> Tensor:
        """Go forward and return the sums by token, with their graph."""
        with autocast_to(self._precision, self.x.device):
            result: Tensor = self._moe(self.x, self._inputs)[0]
        return result

    def forward(self) -> None:
        """Go forward, without a graph."""
        with torch.no_grad():
            self.run()

    def step(self) -> None:
        """Go forward and backward, with new gradients."""
        self.run().backward(self.grad)
        for leaf in self._leaves:
            leaf.grad = None


def _init_parameters(moe: MoE) -> None:
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=_STD)
        for buffer in moe.buffers():
            buffer.zero_()

"""How fast one expert layer is on this machine, beside the least that its products and the bytes of
its experts can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moesaic.base.errors import ConfigError
from moesaic.dist import device as devices
from moesaic.dist.probe.timing import seconds
from moesaic.dist.products import engine, product
from moesaic.facts.job import ModelConfig, RoutingConfig
from moesaic.facts.plan import block_names
from moesaic.models.lm import LanguageModel
from moesaic.nn.context import NARROW, Context, Rotary, computing_in
from moesaic.nn.moe import MoE

_FEWEST_ROWS, _MOST_ROWS = 64, 4096
"""Of products, the fastest of which is the limit; as many as there is time for."""
_STD = 0.02


@dataclass(frozen=True)
class Limit:
    """What a device does at best in one type of numbers."""

    dtype: str
    flops: float
    """In a second, in one product of as many rows as it likes."""
    bytes: float
    """Of fp32 weights that it reads in a second."""


@dataclass(frozen=True)
class Least:
    """What a batch of one size takes at least."""

    dtype: str
    tokens: int
    each: float
    """Tokens of an expert, on average."""
    forward_s: float
    step_s: float
    """Forward and backward."""
    binds: str
    """What forward waits for: products, or memory."""


@dataclass(frozen=True)
class Speed:
    """What such a batch does take."""

    least: Least
    forward_s: float
    step_s: float


class ExpertLayer:
    """One expert layer of a model, with its router and shared experts; each expert gets as many
    tokens as any other."""

    def __init__(self, model: ModelConfig, device: torch.device) -> None:
        self._model, self._device = model, device
        self.arena_bytes = 4 * model.experts * 3 * model.ffn * model.hidden
        self._refuse_too_much()
        index = model.expert_layers[0]
        with torch.device("meta"):
            whole = LanguageModel(
                model, RoutingConfig(router="balanced"), names=[block_names(model)[1 + index]]
            )
        whole.materialise(device)
        ((_, self._moe),) = whole.expert_layers()
        _fill(self._moe)

    def engines(self, dtypes: Sequence[str]) -> dict[str, str]:
        """What multiplies its experts in each type of numbers, for a person."""
        return {name: engine(self._device, NARROW.get(name, torch.float32)) for name in dtypes}

    def limits(self, dtypes: Sequence[str], budget_s: float) -> list[Limit]:
        """What the device does at best, each found in about so many seconds."""
        arena = self._moe.bank.arena.detach()
        read = arena.nbytes / self._seconds(arena.sum, budget_s)
        return [Limit(dtype, self._flops(dtype, budget_s), read) for dtype in dtypes]

    def least(self, limit: Limit, tokens: int) -> Least:
        """Of the experts' own products and weights, each weight read once forward and once
        backward, and its gradient written."""
        model = self._model
        one = 3 * model.ffn * model.hidden
        products_s = 2 * tokens * (model.top_k + model.shared) * one / limit.flops
        busy = min(model.experts, tokens * model.top_k) + model.shared
        read_s = 4 * busy * one / limit.bytes
        written_s = 4 * (model.experts + model.shared) * one / limit.bytes
        return Least(
            limit.dtype, tokens, tokens * model.top_k / model.experts,
            max(products_s, read_s), max(3 * products_s, 2 * read_s + written_s),
            "products" if products_s > read_s else "memory",
        )  # fmt: skip

    def speed(self, least: Least, budget_s: float) -> Speed:
        """What a batch takes, found in about so many seconds."""
        forward, step = self._calls(least.dtype, least.tokens)
        return Speed(
            least, self._seconds(forward, budget_s / 3), self._seconds(step, 2 * budget_s / 3)
        )

    def _refuse_too_much(self) -> None:
        """Experts, their gradients, and as much again for rows and copies of a few experts."""
        needed, there = 3 * self.arena_bytes, devices.memory_bytes(self._device)
        if needed > there:
            fits = max(self._model.top_k, self._model.experts * there // needed)
            raise ConfigError(
                f"{self._model.experts} experts of model.hidden = {self._model.hidden} and "
                f"model.ffn = {self._model.ffn}, with their gradients, take {needed / 1e9:.0f} GB "
                f"and the device has {there / 1e9:.0f}: --set model.experts={fits}, or fewer"
            )

    def _seconds(self, work: Callable[[], object], budget_s: float) -> float:
        return seconds(work, lambda: devices.now(self._device), budget_s)

    def _calls(self, dtype: str, tokens: int) -> tuple[Callable[[], object], Callable[[], object]]:
        x = torch.randn(1, tokens, self._model.hidden, device=self._device)
        context = Context(Rotary(x, x))  # Nothing here turns anything.
        context.training = True
        context.samples = torch.zeros(1, dtype=torch.int64, device=self._device)
        context.positions = torch.arange(tokens, device=self._device)
        parameters = list(self._moe.parameters())

        def forward() -> Tensor:
            context.layers.clear()
            with computing_in(dtype, self._device):
                result: Tensor = self._moe(x, context)
            return result

        def alone() -> None:
            with torch.no_grad():
                forward()

        def step() -> None:
            forward().backward(grad)
            for leaf in (x, *parameters):
                leaf.grad = None

        with torch.no_grad():
            grad = torch.randn_like(forward())
        x.requires_grad_()
        return alone, step

    def _flops(self, dtype: str, budget_s: float) -> float:
        hidden, inner = self._model.hidden, 3 * self._model.ffn
        kind = NARROW.get(dtype, torch.float32)
        rows = torch.randn(_MOST_ROWS, hidden, device=self._device).to(kind)
        weight = torch.randn(inner, hidden, device=self._device).to(kind)
        best, number, until = 0.0, _FEWEST_ROWS, devices.now(self._device) + budget_s
        while not best or (number <= _MOST_ROWS and devices.now(self._device) < until):
            some = rows[:number]
            product_s = self._seconds(partial(product, some, weight, transposed=True), 0.0)
            best = max(best, 2 * number * hidden * inner / product_s)
            number *= 4
        return best


def _fill(moe: MoE) -> None:
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=_STD)
        for buffer in moe.buffers():
            buffer.zero_()

"""Experts without a gate: down(activation(up(x))), with biases on demand.

Upcycled models have such experts. Torch's own operations compute them, one slot after the other.
They have no replicas, and support neither tensor parallelism nor eviction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moesaic.base.errors import ConfigError
from moesaic.dist.clock import Clock
from moesaic.facts.job.train import MatmulBackend
from moesaic.nn.dispatch.permute import Permutation
from moesaic.nn.experts.bank import ExpertFunction
from moesaic.nn.experts.replicas import Replicas
from moesaic.nn.tensor_parallel import NO_TP

ActivationName = Literal["gelu", "gelu_tanh", "relu", "silu"]
ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "relu": F.relu,
    "silu": F.silu,
}  # fmt: skip
"""Activations by name."""


class MLPBank(nn.Module):
    """Experts of one layer that this rank owns, each a row of the arena."""

    tp = NO_TP

    def __init__(
        self,
        experts: Sequence[int],
        hidden: int,
        ffn: int,
        activation: ActivationName,
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.experts, self.hidden, self.ffn = list(experts), hidden, ffn
        self.activation, self.bias = activation, bias
        self.names = ("up.weight", "down.weight") + bias * ("up.bias", "down.bias")
        width = 2 * ffn * hidden + bias * (ffn + hidden)
        self.arena = nn.Parameter(torch.empty(len(self.experts), width))

    def matmul_backend(self, dtype: torch.dtype) -> MatmulBackend:
        """Return torch: the counts of slots stay on the host."""
        del dtype
        return "torch"

    def set_experts(self, experts: Sequence[int]) -> NoReturn:
        """Raise: these experts do not migrate."""
        raise ConfigError('experts migrate only with activation = "swiglu"')

    def whole_arena(self) -> NoReturn:
        """Raise: these experts have no replicas."""
        raise ConfigError('experts have replicas only with activation = "swiglu"')

    def matrices(self, rows: Sequence[Tensor] | Tensor) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (expert, name of the parameter, view) for every parameter in `rows`."""
        for slot, expert in enumerate(self.experts):
            for name, view in self._views(rows[slot]).items():
                yield expert, name, view

    def _views(self, row: Tensor) -> dict[str, Tensor]:
        """Return the parameters of one expert, from its row of the arena."""
        shapes: dict[str, tuple[int, ...]] = {
            "up.weight": (self.ffn, self.hidden),
            "down.weight": (self.hidden, self.ffn),
        }
        sizes = [self.ffn * self.hidden] * 2
        if self.bias:
            shapes |= {"up.bias": (self.ffn,), "down.bias": (self.hidden,)}
            sizes += [self.ffn, self.hidden]
        parts = row.split(sizes)
        return {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}

    @contextmanager
    def expert_function(
        self, num_calls: int = 1, replicas: Replicas | None = None, clock: Clock | None = None
    ) -> Iterator[ExpertFunction]:
        """Yield the expert function, for any number of calls."""
        del num_calls, clock
        assert replicas is None, "the bank refuses replicas"
        yield self._compute

    def _compute(
        self, tokens: Tensor, permutation: Permutation, weights_NK: Tensor | None
    ) -> Tensor:
        counts = permutation.counts.tolist()
        slots = zip(tokens[permutation.tokens_R].split(counts), self.arena.unbind(), strict=True)
        results = torch.cat([self._mlp(rows, arena_row) for rows, arena_row in slots])
        if permutation.rows_NK is None:
            return torch.zeros_like(tokens).index_copy(0, permutation.order_R, results)
        if weights_NK is None:
            weights_NK = torch.ones_like(permutation.rows_NK, dtype=tokens.dtype)
            if permutation.present_NK is not None:
                weights_NK = permutation.present_NK.to(tokens.dtype)
        if not len(results):
            return torch.zeros_like(tokens) + results.sum()
        return (results[permutation.rows_NK] * weights_NK[:, :, None]).sum(1)

    def _mlp(self, x: Tensor, arena_row: Tensor) -> Tensor:
        views = self._views(arena_row.to(x.dtype))
        inner = F.linear(x, views["up.weight"], views.get("up.bias"))
        activated = ACTIVATIONS[self.activation](inner)
        return F.linear(activated, views["down.weight"], views.get("down.bias"))

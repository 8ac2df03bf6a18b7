"""Expert bank: the parameters of one layer's experts on this rank, in one contiguous arena.

Each slot of the arena holds one expert, at an equal stride. FSDP does not see the arena; its
gradient is one tensor of the same shape. Replicas of other ranks' experts follow the own slots, for
one forward pass and its backward.

All experts are always in the arena, so `acquire` and `release` do nothing yet. Backward reads the
arena after `release`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from moesaic.dist.clock import Clock, timed
from moesaic.facts.job.train import MatmulBackend
from moesaic.kernels.grouped_mm import choose_backend
from moesaic.nn.dispatch.permute import Permutation
from moesaic.nn.experts.grouped import (
    FORWARD,
    ArenaGradient,
    GatedExperts,
    arena_views,
    gated_experts,
)
from moesaic.nn.experts.lora import AdaptedExperts, Adapters, AdapterShape
from moesaic.nn.experts.replicas import Replicas
from moesaic.nn.tensor_parallel import NO_TP, TensorParallel

ExpertFunction = Callable[[Tensor, Permutation, Tensor | None], Tensor]
"""Function of tokens, their permutation, and optional weights, that returns experts' results."""


class ExpertBank(nn.Module):
    """Experts of one layer that this rank owns; with tensor parallelism, a shard of their FFN
    channels."""

    def __init__(
        self,
        experts: Sequence[int],
        hidden: int,
        ffn: int,
        tp: TensorParallel = NO_TP,
        backend: Literal["auto"] | MatmulBackend = "auto",
    ) -> None:
        """Create the slots of `experts`; `backend` selects the grouped matmul on a GPU (see
        `choose_backend`)."""
        super().__init__()
        self.experts, self.tp, self.backend = list(experts), tp, backend
        self.hidden, self.ffn = hidden, ffn // tp.size
        self.arena = nn.Parameter(torch.empty(len(self.experts), 3 * self.ffn * hidden))
        self.adapters: Adapters | None = None

    def add_adapters(self, rank: int, scale: float) -> None:
        """Add low-rank adapters to all experts."""
        shape = AdapterShape(self.hidden, self.ffn, rank, scale)
        self.adapters = Adapters(self.experts, shape)

    def matmul_backend(self, dtype: torch.dtype) -> MatmulBackend:
        """Return the matmul backend for tokens of `dtype`."""
        return choose_backend(self.backend, self.arena.device, dtype)

    def set_experts(self, experts: Sequence[int]) -> None:
        """Set the expert of each slot; the caller has moved the parameters."""
        self.experts = list(experts)
        if self.adapters is not None:
            self.adapters.experts = list(experts)

    def acquire(self) -> Tensor:
        """Return the arena with every owned expert in its slot, for use until `release`."""
        return self.arena

    def release(self) -> None:
        """End the use of the slots in forward; backward may still read them."""

    @contextmanager
    def expert_function(
        self, num_calls: int = 1, replicas: Replicas | None = None, clock: Clock | None = None
    ) -> Iterator[ExpertFunction]:
        """Yield the expert function, to be called `num_calls` times in this forward pass.

        Args:
            num_calls: calls in one forward pass, which share one gradient of the arena.
            replicas: replicas of other ranks' experts, if there are any.
            clock: records the time of the experts, forward and backward.
        """
        if replicas is None:
            arena_grad = ArenaGradient(num_calls, clock=clock)
            yield partial(self._compute, self.acquire(), None, arena_grad)
        else:
            arena_grad = ArenaGradient(num_calls, replicas.all_to_alls, clock)
            yield partial(self._compute, replicas.arena, replicas.parameters, arena_grad)
        self.release()

    def _compute(
        self,
        arena: Tensor,
        replicas: Tensor | None,
        arena_grad: ArenaGradient,
        tokens: Tensor,
        permutation: Permutation,
        weights_NK: Tensor | None,
    ) -> Tensor:
        results: Tensor
        arena_grad.backend = self.matmul_backend(tokens.dtype)
        if self.adapters is None:
            if replicas is not None:  # `counts` is padded to the most replicas of any rank.
                num_slots = len(arena) + len(replicas)
                permutation = permutation._replace(counts=permutation.counts[:num_slots])
            apply = GatedExperts.apply if torch.is_grad_enabled() else gated_experts
            with timed(arena_grad.clock, FORWARD):
                results = apply(
                    tokens, arena, replicas, weights_NK, self.ffn, arena_grad, *permutation
                )
        else:
            assert replicas is None, "LoRA and expert replicas do not combine"
            adapter_arena, shape = (
                self.adapters.arena,
                self.adapters.shape._replace(backend=arena_grad.backend),
            )
            results = AdaptedExperts.apply(
                tokens, arena, adapter_arena, weights_NK, shape, *permutation
            )
        return results

    def matrices(self, arena: Tensor) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (expert, "gate" | "up" | "down", view) for every matrix in a tensor of the arena's
        shape."""
        gate_up, down = arena_views(arena, self.ffn, self.hidden)
        for slot, expert in enumerate(self.experts):
            yield expert, "gate", gate_up[slot, : self.ffn]
            yield expert, "up", gate_up[slot, self.ffn :]
            yield expert, "down", down[slot]

    def global_shape_and_offset(
        self, matrix: str, view: Tensor
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the full shape of a matrix, and the offset of this rank's `view` in it."""
        shard_dim = 1 if matrix == "down" else 0
        shape, offset = list(view.shape), [0, 0]
        offset[shard_dim] = self.tp.rank * shape[shard_dim]
        shape[shard_dim] *= self.tp.size
        return tuple(shape), tuple(offset)

"""Expert bank: the parameters of one layer's experts on this rank, in one contiguous arena.

Each slot of the arena holds one expert, at an equal stride. FSDP does not see the arena; its
gradient is one tensor of the same shape. Replicas of other ranks' experts follow the own slots, for
one forward pass and its backward.

With fewer places than experts, `Places` has parameters, and in training moments and gradients. The
arena then has no rows, but stays the parameter that graph, optimizer and state refer to. A forward
pass and its backward use experts through a lease.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from moesaic.base.errors import ConfigError
from moesaic.dist.clock import Clock, timed
from moesaic.facts.expert_blocks import BlockKind
from moesaic.facts.job.train import MatmulBackend
from moesaic.kernels.grouped_mm import choose_backend
from moesaic.nn.dispatch.permute import Permutation
from moesaic.nn.experts.grouped import FORWARD, GatedExperts, gated_experts
from moesaic.nn.experts.lease import Lease, PlacesLease, StateLease, arena_views
from moesaic.nn.experts.lora import Adapters, AdapterShape
from moesaic.nn.experts.places import Places, StatePlaces
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
        places: Places | None = None,
    ) -> None:
        """Create the slots of `experts`.

        Args:
            experts: experts that this rank owns.
            hidden: width of tokens.
            ffn: FFN channels of an expert over all TP ranks.
            tp: TP ranks that share the experts.
            backend: the grouped matmul on a GPU (see `choose_backend`).
            places: the experts, if not all of them are in memory.
        """
        super().__init__()
        self.experts, self.tp, self.backend = list(experts), tp, backend
        self.hidden, self.ffn, self.names = hidden, ffn // tp.size, ("gate", "up", "down")
        width, num_experts = 3 * self.ffn * hidden, len(self.experts)
        self.places = places
        """Places of the experts; None if the arena has all of them."""
        self.arena = nn.Parameter(torch.empty(num_experts if places is None else 0, width))
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

    def whole_arena(self) -> Tensor:
        """Return the arena with every owned expert in its slot, from which replicas are sent."""
        if self.places is not None:
            raise ConfigError(
                f"expert replicas need all {len(self.experts)} experts of a layer in memory, which "
                'has a budget ([memory]): set balance.policy = "none"'
            )
        return self.arena

    def acquire(
        self, slots: Iterable[int] = (), num_calls: int = 1, clock: Clock | None = None
    ) -> Lease:
        """Return a lease on experts for one forward pass and its backward.

        Args:
            slots: slots of the experts; each call of the pass adds those with tokens.
            num_calls: calls in the pass, which share one gradient of the arena.
            clock: records the time of the experts, forward and backward.
        """
        if self.places is None:
            return Lease(self.arena, self.ffn, num_calls, clock=clock)
        lease = (
            StateLease(self.arena, self.ffn, self.places, num_calls, clock)
            if isinstance(self.places, StatePlaces)
            else PlacesLease(self.arena, self.ffn, self.places, num_calls, clock)
        )
        lease.name(slots)
        return lease

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
            lease = self.acquire(num_calls=num_calls, clock=clock)
        else:
            assert self.adapters is None, "LoRA and expert replicas do not combine"
            lease = Lease(
                replicas.arena,
                self.ffn,
                num_calls,
                replicas.parameters,
                replicas.all_to_alls,
                clock,
            )
        yield partial(self._compute, lease)
        if not torch.is_grad_enabled():
            lease.release()

    def _compute(
        self, lease: Lease, tokens: Tensor, permutation: Permutation, weights_NK: Tensor | None
    ) -> Tensor:
        results: Tensor
        lease.backend = self.matmul_backend(tokens.dtype)
        arena, shape = lease.arena, None
        if self.adapters is not None:
            arena, shape = self.adapters.arena, self.adapters.shape
        with timed(lease.clock, FORWARD):
            if torch.is_grad_enabled():
                results = GatedExperts.apply(tokens, arena, weights_NK, lease, shape, *permutation)
            else:
                lora = None if shape is None else shape.pairs(arena)
                results, _ = gated_experts(tokens, weights_NK, lease, permutation, lora)
        return results

    def matrices(self, rows: Sequence[Tensor] | Tensor) -> Iterator[tuple[int, str, Tensor]]:
        """Yield (expert, "gate" | "up" | "down", view) for every matrix in `rows`, which have the
        layout of the experts' parameters by slot."""
        for slot, expert in enumerate(self.experts):
            for matrix, view in self.views(rows[slot]).items():
                yield expert, matrix, view

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Return the matrices of one expert's parameters."""
        gate_up, down = (views[0] for views in arena_views(row[None], self.ffn))
        return {"gate": gate_up[: self.ffn], "up": gate_up[self.ffn :], "down": down}

    def borrowed_matrices(
        self, kind: BlockKind
    ) -> Iterator[tuple[int, str, tuple[int, int], MatrixLender]]:
        """Yield (expert, matrix, shape, lender) for every matrix in the blocks of `kind`."""
        assert self.places is not None
        gate, down = (self.ffn, self.hidden), (self.hidden, self.ffn)
        for slot, expert in enumerate(self.experts):
            for matrix, shape in (("gate", gate), ("up", gate), ("down", down)):
                yield expert, matrix, shape, MatrixLender(self, self.places, slot, kind, matrix)

    def global_shape_and_offset(
        self, matrix: str, local_shape: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the full shape of a matrix, and the offset of this rank's part in it."""
        shard_dim = 1 if matrix == "down" else 0
        shape, offset = list(local_shape), [0, 0]
        offset[shard_dim] = self.tp.rank * shape[shard_dim]
        shape[shard_dim] *= self.tp.size
        return tuple(shape), tuple(offset)


@dataclass(frozen=True)
class MatrixLender:
    """Function that lends one matrix of an expert's block to read, or to write."""

    bank: ExpertBank
    places: Places
    slot: int
    kind: BlockKind
    matrix: str

    @property
    def block(self) -> int:
        """Block of the matrix."""
        return self.places.block(self.slot, self.kind)

    @contextmanager
    def __call__(self, writes: bool) -> Iterator[Tensor]:
        """Lend the matrix until the context ends."""
        with self.places.borrow(self.slot, self.kind, writes=writes) as row:
            yield self.bank.views(row)[self.matrix]

"""Work of one block of a model: operations and collectives of forward, backward and update."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from moesaic.facts.workload.collectives import RESULTS, BlockCollectives, CollectiveCall
from moesaic.facts.workload.ops import Op, OpPair

STEP = "step"
"""Name of the block for work outside all blocks."""
_NOT_RECOMPUTED = ("residual", "shared", "concat chunks")
"""Ops at the end of a layer that recomputation skips, as backward does not need their results."""


@dataclass(frozen=True)
class BlockWork:
    """Ops in order, and the collectives between them."""

    ops: tuple[Op, ...] = ()
    collectives: tuple[CollectiveCall, ...] = ()

    @property
    def flops(self) -> int:
        """FLOPs of all matmuls, in full."""
        return sum(op.flops for op in self.ops)

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written by elementwise kernels."""
        return sum(op.moved_bytes for op in self.ops)

    @property
    def num_kernels(self) -> int:
        """Kernel launches."""
        return sum(op.num_kernels for op in self.ops)


@dataclass(frozen=True)
class Block:
    """One block of the model on one rank."""

    name: str
    """Name: embed, layers.0.attention, layers.0.ffn or layers.0.moe, ..., head; `step` for work
    outside all blocks. It starts with the name of the model's block, which determines the pipeline
    stage."""
    forward: BlockWork
    """Work once per micro-batch."""
    backward: BlockWork
    """Work once per micro-batch; with `train.recompute` it starts with the recomputed forward."""
    update: BlockWork
    """Work once per step."""


def build_block(
    name: str,
    parts: Sequence[OpPair],
    block_collectives: BlockCollectives,
    *,
    recompute: bool = False,
    ends_with_reduction: bool = False,
    unused_ops: Container[str] = (),
) -> Block:
    """Return a block without its update; `recompute` starts backward with the forward it needs.

    Recomputation skips the last collective if the block `ends_with_reduction`. It also skips
    `unused_ops` and the collectives of their results.
    """
    forward = tuple(op for op, _ in parts)
    backward_ops = tuple(op for _, op in reversed(parts))
    recomputed: tuple[Op, ...] = ()
    recomputed_collectives: tuple[CollectiveCall, ...] = ()
    if recompute:
        # Backward does not need the result of the layer's last matmul (that of an adapter, if any).
        recomputed = tuple(
            replace(op, matmuls=op.matmuls[:-1])
            if op.name == ("shared down" if unused_ops else "down")
            else op
            for op in forward
            if op.name not in unused_ops
        )
        recomputed_collectives = block_collectives.forward
        if not name.endswith("attention"):
            recomputed = tuple(op for op in recomputed if op.name not in _NOT_RECOMPUTED)
        if ends_with_reduction:
            recomputed_collectives = recomputed_collectives[:-1]
        recomputed_collectives = tuple(
            call
            for call in recomputed_collectives
            if not (call.name == RESULTS and "combine" in unused_ops)
        )
    backward = BlockWork(
        (*recomputed, *backward_ops), (*recomputed_collectives, *block_collectives.backward)
    )
    return Block(name, BlockWork(forward, block_collectives.forward), backward, BlockWork())


def extend_block(
    block: Block,
    forward: BlockWork | None = None,
    backward: BlockWork | None = None,
    after: BlockWork | None = None,
    update: BlockWork | None = None,
) -> Block:
    """Return `block` with more work before its forward, around its backward, and in its update."""
    return Block(
        block.name,
        concat_work(forward, block.forward),
        concat_work(backward, block.backward, after),
        concat_work(block.update, update),
    )


def concat_work(*works: BlockWork | None) -> BlockWork:
    """Return the ops and collectives of all `works`, in order; None counts as no work."""
    present = [work for work in works if work is not None]
    return BlockWork(
        tuple(op for work in present for op in work.ops),
        tuple(call for work in present for call in work.collectives),
    )

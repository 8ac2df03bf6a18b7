"""Operations of a block: work of forward and backward, saved bytes, and collectives.

A block is a list of operations. Each has the work of one rank in one micro-batch, so blocks, memory
and costs all follow from the same list.

Matmuls are exact. Bytes of elementwise kernels are those of torch on a CPU, unfused, within 5%; a
norm on a GPU is one kernel. Kernel launches are rough estimates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moesaic.facts.workload.collectives import CollectiveCall
from moesaic.facts.workload.sizes import FloatType

GROUPED_MM = "grouped matmul"
"""Kind of an op that runs the matmuls of many experts together."""


@dataclass(frozen=True)
class MatmulShape:
    """`count` matmuls of [rows, inner] and [inner, columns]."""

    rows: int
    columns: int
    inner: int
    count: int = 1
    is_weight_gradient: bool = False
    """True if the result is the gradient of a weight."""

    @property
    def flops(self) -> int:
        """FLOPs, two per multiplication."""
        return 2 * self.rows * self.columns * self.inner * self.count

    @property
    def elements(self) -> int:
        """Elements of both operands and the result."""
        rows, columns, inner = self.rows, self.columns, self.inner
        return (rows * inner + inner * columns + rows * columns) * self.count


@dataclass(frozen=True)
class Op:
    """Work of an operation in one direction, forward or backward."""

    name: str
    matmuls: tuple[MatmulShape, ...] = ()
    """Matmuls in full, as torch counts them."""
    moved_bytes: int = 0
    """Bytes read and written by elementwise kernels; matmuls do not count."""
    num_kernels: int = 0
    """Estimated kernel launches."""
    dtype: FloatType = "fp32"
    """Data type of the matmul operands."""
    num_transcendentals: int = 0
    """Elements of exponentials and the like."""
    kind: str = ""
    """Kind of kernels with measured times of their own: attention, grouped matmuls, or one of
    `Device.elementwise`."""
    causal_fraction: float = 1.0
    """Fraction of `matmuls` that remains if a kernel skips causally masked scores."""

    @property
    def flops(self) -> int:
        """FLOPs of all matmuls, in full."""
        return sum(matmul.flops for matmul in self.matmuls)

    def merged(self, other: Op) -> Op:
        """Return one op with the work of both."""
        return replace(
            self,
            matmuls=self.matmuls + other.matmuls,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            num_kernels=self.num_kernels + other.num_kernels,
        )


@dataclass(frozen=True)
class Operation:
    """One operation of a block on one rank, in one micro-batch."""

    forward: Op | None = None
    """None if it only communicates."""
    backward: Op | None = None
    saved_bytes: int = 0
    """Bytes that autograd saves for backward, without parameters."""
    captured_bytes: int = 0
    """Bytes of gradients of results that a split backward keeps for its weights."""
    forward_calls: tuple[CollectiveCall, ...] = ()
    """Collectives of forward, in issue order."""
    backward_calls: tuple[CollectiveCall, ...] = ()
    recompute: Literal["all", "input", "nothing"] = "all"
    """Part of forward that recomputation repeats; input: all but the last matmul."""

    @property
    def recomputed(self) -> Op | None:
        """Forward as recomputation repeats it."""
        if self.forward is None or self.recompute == "all":
            return self.forward
        return replace(self.forward, matmuls=self.forward.matmuls[:-1])

"""Counter of torch kernels that also knows this project's own operations."""

from __future__ import annotations

from collections import Counter
from typing import Any

from moesaic.models.kernel_counter import (
    KernelCounter,
    Kwargs,
    OpCounts,
    matmul,
    named_arguments,
)


class MoesaicKernelCounter(KernelCounter):
    """Kernel counter with the shapes of this project's matmuls, from token counts of experts."""

    def find_matmuls(
        self, func: Any, name: str, args: Any, kwargs: Kwargs, out: Any
    ) -> OpCounts | None:
        """Return the matmuls of one call; None if it is not a matmul."""
        if func.namespace != "moesaic":
            return super().find_matmuls(func, name, args, kwargs, out)
        arguments = named_arguments(func, args, kwargs)
        if name in ("matmul", "matmul_into"):
            (rows, inner), weight = arguments["rows"].shape, arguments["weight"].shape
            return iter([matmul(rows, weight[0 if arguments["transposed"] else 1], inner)])
        if name == "grouped_wgrad":
            self._count_weight_gradients(args)
            rows, columns = arguments["left"].shape[1], arguments["right"].shape[1]
            return (matmul(count, rows, columns, times) for count, times in _busy_slots(arguments))
        if name in ("grouped_mm", "grouped_mm_into"):
            self._count_weight_casts(args)
            tokens, weight = arguments["rows"], arguments["weight"]
            columns = weight.shape[1] if arguments["transposed"] else weight.shape[2]
            return (
                matmul(count, columns, tokens.shape[1], times)
                for count, times in _busy_slots(arguments)
            )
        return None

    def _count_weight_gradients(self, args: Any) -> None:
        """Count zero-filled slots without tokens, and casts of gradients to another dtype than the
        factors'."""
        left, num_busy, out, counts = args[0], int((args[2] > 0).sum()), args[3], self.counts()
        size = out[0].numel()
        counts.moved_bytes += (len(out) - num_busy) * size * out.itemsize
        if left.dtype != out.dtype:
            counts.num_kernels += num_busy
            counts.moved_bytes += num_busy * size * (left.itemsize + out.itemsize)

    def _count_weight_casts(self, args: Any) -> None:
        """Count casts of the weights of slots with tokens to the dtype of the tokens."""
        rows, weight, num_busy, counts = args[0], args[1], int((args[2] > 0).sum()), self.counts()
        if rows.dtype != weight.dtype:
            counts.num_kernels += num_busy
            counts.moved_bytes += num_busy * weight[0].numel() * (rows.itemsize + weight.itemsize)


def _busy_slots(arguments: Kwargs) -> list[tuple[int, int]]:
    """Return token counts and their number of slots, without empty slots."""
    counts: list[int] = arguments["counts"].tolist()
    return [(count, times) for count, times in Counter(counts).items() if count]

"""Tiles of the grouped expert network: ranges of slots, their rows, and the threads that compute
them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.facts.job.train import MatmulBackend
from moesaic.kernels import fused, threads
from moesaic.kernels.cpu_gemv import is_memory_bound
from moesaic.kernels.grouped_mm import grouped_mm, grouped_swiglu, grouped_wgrad
from moesaic.nn.dispatch.permute import Permutation

_RANGE_BYTES = 1 << 20
"""Largest intermediate result of a range on the CPU, so that it stays in the cache."""
_SINGLE_SLOT_FACTOR = 2
"""A range of a single slot may be this many times larger and still use one thread."""
_MIN_RANGES_PER_THREAD = 2
"""Minimum number of ranges per thread; a larger range uses all threads."""
_MIN_THREADED_BYTES = 8 << 20
"""Minimum bytes of rows and matrices; below, waking threads costs more than they save."""


Matrices = Sequence[Tensor]
"""Matrices of all slots, by arena: own experts, then replicas."""


@dataclass(frozen=True)
class SlotRange:
    """Consecutive slots of one arena, and their rows."""

    slots: slice
    rows: slice
    counts: Tensor
    single_thread: bool
    """True if one thread computes the range: it is at most half of a thread's share, and its
    intermediate results fit one core's cache."""
    arena: int = 0
    """0: own experts, 1: replicas."""
    backend: MatmulBackend = "torch"
    """Grouped matmul on a GPU."""
    places: slice | None = None
    """Rows of the arena that hold the slots' experts; None: the slots themselves."""

    @property
    def slot_indices(self) -> range:
        """The slots."""
        return range(self.slots.start, self.slots.stop)

    def select(self, weights: Matrices) -> Tensor:
        """Return the range's matrices among `weights`."""
        return weights[self.arena][self.slots if self.places is None else self.places]

    def matmul(
        self, rows: Tensor, weights: Matrices, *, transposed: bool, out: Tensor | None = None
    ) -> Tensor:
        """Return the range's `rows` times its slots of `weights`, in the dtype of `rows`."""
        weight = self.select(weights)
        return grouped_mm(rows, weight, self.counts, transposed, out, self.backend)

    def swiglu(self, rows: Tensor, gate_up: Matrices, inner: Tensor | None) -> Tensor:
        """Return silu(gate) * up of the range's `rows` from the project's kernels.

        Gate and up are kept in `inner`, if given.
        """
        weight = self.select(gate_up)
        activated = rows.new_empty((rows.shape[0], weight.shape[1] // 2))
        grouped_swiglu(rows, weight, self.counts, activated, inner, self.backend)
        return activated

    def wgrad(self, left: Tensor, right: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
        """Write left.T @ right of each slot's rows to its place in `out`, or add it with
        `accumulate`."""
        grouped_wgrad(left, right, self.counts, out, accumulate, self.backend)

    @property
    def of_adapters(self) -> SlotRange:
        """This range of adapters, which are all in memory."""
        return replace(self, places=None)


class RangeResults:
    """Results of all ranges in one tensor, without copies."""

    tensor: Tensor

    def __init__(
        self, ranges: Sequence[SlotRange], like: Tensor, width: int, *, keep: bool = True
    ) -> None:
        """Prepare results of `width` columns, in the dtype and on the device of `like`.

        Without `keep`, results are not stored.
        """
        self._keep, self._is_split = keep, keep and len(ranges) > 1
        if self._is_split:
            self.tensor = like.new_empty((ranges[-1].rows.stop, width))

    def output_view(self, slot_range: SlotRange) -> Tensor | None:
        """Return the part of the tensor for the range's results; None: the caller allocates."""
        return self.tensor[slot_range.rows] if self._is_split else None

    def store(self, slot_range: SlotRange, results: Tensor) -> None:
        """Keep `results`, if they are not in the range's `output_view` already."""
        del slot_range
        if self._keep and not self._is_split:
            self.tensor = results

    def matmul(
        self,
        slot_range: SlotRange,
        rows: Tensor,
        weights: Matrices,
        *,
        transposed: bool,
        add: Tensor | None = None,
    ) -> Tensor:
        """Multiply as `SlotRange.matmul`, add `add`, and store the results."""
        results = slot_range.matmul(
            rows, weights, transposed=transposed, out=self.output_view(slot_range)
        )
        if add is not None:
            results += add
        self.store(slot_range, results)
        return results

    def swiglu(self, slot_range: SlotRange, rows: Tensor, gate_up: Matrices) -> Tensor:
        """Compute as `SlotRange.swiglu`, and store gate and up."""
        inner = self.output_view(slot_range)
        if inner is None and self._keep:
            inner = rows.new_empty((rows.shape[0], gate_up[slot_range.arena].shape[1]))
        activated = slot_range.swiglu(rows, gate_up, inner)
        if inner is not None:
            self.store(slot_range, inner)
        return activated


class TokenResults(RangeResults):
    """Results of all ranges, as wide as tokens, to be summed by token."""

    def __init__(
        self, ranges: Sequence[SlotRange], tokens: Tensor, permutation: Permutation
    ) -> None:
        self._permutation, self._is_one_to_one = permutation, permutation.rows_NK is None
        self._backend: MatmulBackend = ranges[0].backend if ranges else "torch"
        super().__init__(() if self._is_one_to_one else ranges, tokens, tokens.shape[1])
        if self._is_one_to_one:  # One row per token: scatter results straight to tokens.
            self.tensor = torch.empty_like(tokens)

    def output_view(self, slot_range: SlotRange) -> Tensor | None:
        """Return the part of the tensor for the range's results; None if they are scattered to
        tokens."""
        return None if self._is_one_to_one else super().output_view(slot_range)

    def store(self, slot_range: SlotRange, results: Tensor) -> None:
        """Keep or scatter `results`, if they are not in the range's `output_view` already."""
        if self._is_one_to_one:
            self.tensor.index_put_((self._permutation.order_R[slot_range.rows],), results)
        else:
            super().store(slot_range, results)

    def unpermute(self, weights_NK: Tensor | None = None) -> Tensor:
        """Return the sums by token, weighted if given."""
        return (
            self.tensor
            if self._is_one_to_one
            else self._permutation.unpermute(self.tensor, weights_NK, self._backend)
        )


class PermutedRows:
    """Rows of ranges, gathered from tokens on access."""

    def __init__(
        self, tokens: Tensor, permutation: Permutation, backend: MatmulBackend = "torch"
    ) -> None:
        """Select fused kernels if `backend` supports them."""
        self._tokens, self._permutation, self._is_fused = (
            tokens,
            permutation,
            fused.is_supported(tokens, backend),
        )
        if not self._is_fused:
            self._tokens_R = permutation.tokens_R

    def __getitem__(self, slot_range: SlotRange) -> Tensor:
        """Return the rows of one range."""
        if self._is_fused:
            choices = 1 if self._permutation.rows_NK is None else self._permutation.rows_NK.shape[1]
            return fused.permute(self._tokens, self._permutation.order_R[slot_range.rows], choices)
        return self._tokens.index_select(0, self._tokens_R[slot_range.rows])


def split_slots(
    tokens: Tensor,
    permutation: Permutation,
    ffn: int,
    num_owned: int | None = None,
    backend: MatmulBackend = "torch",
) -> list[SlotRange]:
    """Split all slots into ranges.

    A GPU gets one range. On the CPU a range has few enough rows for the cache, or a single slot.
    The first `num_owned` slots are own experts (by default all); replicas follow.
    """
    counts = permutation.counts
    if counts.device.type != "cpu":  # Counts stay on the device, and there are no replicas.
        rows = slice(0, len(permutation.order_R))
        return [
            SlotRange(slice(0, len(counts)), rows, counts, single_thread=False, backend=backend)
        ]
    max_rows, single_thread_rows = int(counts.sum()), 0
    if tokens.device.type == "cpu":
        pool = _thread_pool_for(tokens, counts, ffn)
        cache_rows = _RANGE_BYTES // (2 * ffn * tokens.element_size())
        if pool is not None:
            max_rows = max(1, max_rows // (_MIN_RANGES_PER_THREAD * pool.size))
            single_thread_rows = min(max_rows, _SINGLE_SLOT_FACTOR * cache_rows)
        max_rows = min(max_rows, cache_rows)
    ranges, row = list[SlotRange](), 0
    for arena, slots in enumerate(
        (counts[:num_owned], counts[len(counts) if num_owned is None else num_owned :])
    ):
        if arena and not len(slots):
            break
        for first, stop, num_rows in _split_counts(slots.tolist(), max_rows):
            rows = slice(row, row + num_rows)
            single = num_rows <= single_thread_rows
            own_counts = slots[first:stop]
            if backend != "torch":  # Kernels read counts on the device.
                own_counts = own_counts.to(tokens.device, non_blocking=True)
            ranges.append(SlotRange(slice(first, stop), rows, own_counts, single, arena, backend))
            row += num_rows
    return ranges


def memory_bound_range(
    tokens: Tensor, counts: Tensor, down: Matrices, num_owned: int
) -> SlotRange | None:
    """Return one range of all slots if reading the matrices limits the matmuls, else None.

    `down` has the smaller matrices, which decides. Replicas are computed apart.
    """
    if len(down) > 1 or not num_owned or not is_memory_bound(tokens, down[0], 1):
        return None
    if not is_memory_bound(tokens, down[0], int(counts.max())):
        return None
    rows = slice(0, int(counts.sum()))
    return SlotRange(slice(0, num_owned), rows, counts, single_thread=False)


def single_slot_ranges(ranges: Sequence[SlotRange]) -> list[SlotRange]:
    """Return one range for each slot with rows; if there is none, one without slots."""
    result = []
    for one in ranges:
        row = one.rows.start
        for index, count in enumerate(one.counts.tolist()):
            if count:
                slot = one.slots.start + index
                result.append(
                    replace(
                        one,
                        slots=slice(slot, slot + 1),
                        rows=slice(row, row + count),
                        counts=one.counts[index : index + 1],
                    )
                )
            row += count
    none = slice(0, 0)
    return result or [replace(ranges[0], slots=none, rows=none, counts=ranges[0].counts[:0])]


def _split_counts(counts: Sequence[int], max_rows: int) -> Iterable[tuple[int, int, int]]:
    """Yield (first slot, end slot, rows) of runs with at most `max_rows` rows, or a single slot."""
    first, rows = 0, 0
    for slot, count in enumerate(counts):
        if rows and rows + count > max_rows:
            yield first, slot, rows
            first, rows = slot, 0
        rows += count
    yield first, len(counts), rows


def _thread_pool_for(tokens: Tensor, counts: Tensor, ffn: int) -> threads.ThreadPool | None:
    """Return the thread pool, or None if there is too little work to wake its threads."""
    num_busy, num_rows = int(counts.count_nonzero()), int(counts.sum())
    num_bytes = (3 * ffn * num_busy + num_rows) * tokens.shape[1] * tokens.element_size()
    return threads.thread_pool() if num_bytes >= _MIN_THREADED_BYTES else None


def replicas_have_rows(ranges: Sequence[SlotRange]) -> bool:
    """Return whether some range needs a replica's parameters."""
    return any(one.arena and one.rows.stop > one.rows.start for one in ranges)


def for_each_arena(
    ranges: Sequence[SlotRange],
    compute: Callable[[int], None],
    between: Callable[[], None] | None = None,
    *,
    replicas_first: bool = False,
) -> None:
    """Call `compute` with the index of each range, `between` between experts and replicas."""
    num_owned = sum(not one.arena for one in ranges)
    groups = list(range(num_owned)), list(range(num_owned, len(ranges)))
    first, second = groups[::-1] if replicas_first else groups
    for_each_range(ranges, compute, first)
    if between is not None:
        between()
    for_each_range(ranges, compute, second)


def for_each_range(
    ranges: Sequence[SlotRange], compute: Callable[[int], None], indices: list[int]
) -> None:
    """Call `compute` with each of `indices`.

    Ranges for all threads come first. Single-thread ranges follow, the largest first.
    """
    pool, single = threads.thread_pool(), list[int]()
    for index in indices:
        if ranges[index].single_thread and pool is not None:
            single.append(index)
        else:
            compute(index)
    if pool is not None and single:
        single.sort(key=lambda index: ranges[index].rows.start - ranges[index].rows.stop)
        pool.run_each(compute, single)

"""Which slots are taken through products together and by how many threads; where their rows come
from and results go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moesaic.dist import passes, threads
from moesaic.dist.loops import only_reads
from moesaic.dist.products import grouped_activated, grouped_gated, grouped_mm, grouped_outer
from moesaic.facts.job.train import GroupedMM
from moesaic.nn.routes import Routes

_SHARE_BYTES = 1 << 20
"""Between two products of a share of slots, on the CPU."""
_CACHED = 2
"""As many times that, the rows of a single slot, are still for one thread."""
_LARGE = 2
"""Shares for each thread, at least: a larger one is for all threads."""
_LEAST_BYTES = 8 << 20
"""Of rows and matrices: below, waking threads takes longer than they save."""


Matrices = Sequence[Tensor]
"""Of all slots of an arena, arena by arena."""


@dataclass(frozen=True)
class Share:
    """Consecutive slots of an arena and their rows."""

    slots: slice
    rows: slice
    counts: Tensor
    alone: bool
    """Whether one thread takes it: it is no more than half of a thread's part, and the cache of one
    core holds what stands between its products."""
    arena: int = 0
    """1: of guests."""
    by: GroupedMM = "torch"
    """What multiplies on a GPU."""

    def multiply(
        self, rows: Tensor, weights: Matrices, *, transposed: bool, out: Tensor | None = None
    ) -> Tensor:
        """The share's `rows` times its slots of `weights`, in the dtype of `rows`."""
        weight = weights[self.arena][self.slots]
        return grouped_mm(rows, weight, self.counts, transposed, out, self.by)

    def activated(self, rows: Tensor, gate_up: Matrices, inner: Tensor | None) -> Tensor:
        """silu(gate) * up of the share's `rows` times its slots, by kernels of our own; gates and
        ups stay in `inner`, if that is wanted."""
        weight = gate_up[self.arena][self.slots]
        activated = rows.new_empty((rows.shape[0], weight.shape[1] // 2))
        grouped_activated(rows, weight, self.counts, activated, inner, self.by)
        return activated

    def outer(self, left: Tensor, right: Tensor, out: Tensor, *, added: bool = False) -> None:
        """left.T @ right of every slot's rows into its place in `out`, or `added` to it."""
        grouped_outer(left, right, self.counts, out, added, self.by)

    @property
    def whole(self) -> Share:
        """The same with nothing narrowed below the type of the rows."""
        return replace(self, by="triton") if self.by == "fp8" else self

    def network(
        self, rows: Tensor, gate_up: Matrices, down: Matrices, out: Tensor | None
    ) -> Tensor:
        """The share's `rows` through their slots' networks, in the dtype of `rows`."""
        out = torch.empty_like(rows) if out is None else out
        own = gate_up[self.arena][self.slots], down[self.arena][self.slots]
        grouped_gated(rows, *own, self.counts, out)
        return out


class Joined:
    """Results of all shares in one tensor, each written where it belongs."""

    whole: Tensor

    def __init__(self, parts: Sequence[Share], like: Tensor, width: int) -> None:
        """For results as wide as `width`, in dtype and place of `like`."""
        self._several = len(parts) > 1
        if self._several:
            self.whole = like.new_empty((parts[-1].rows.stop, width))

    def place(self, share: Share) -> Tensor | None:
        """Where the share's results belong, if there is such a place."""
        return self.whole[share.rows] if self._several else None

    def put(self, share: Share, results: Tensor) -> None:
        """Results that have been written to their place, or have none yet."""
        del share
        if not self._several:
            self.whole = results

    def multiply(
        self, share: Share, rows: Tensor, weights: Matrices, *, transposed: bool
    ) -> Tensor:
        """As the share does; its results are where they belong."""
        results = share.multiply(rows, weights, transposed=transposed, out=self.place(share))
        self.put(share, results)
        return results

    def activated(self, share: Share, rows: Tensor, gate_up: Matrices) -> Tensor:
        """As the share does; gates and ups are where they belong."""
        inner = self.place(share)
        if inner is None:
            inner = rows.new_empty((rows.shape[0], gate_up[share.arena].shape[1]))
        activated = share.activated(rows, gate_up, inner)
        self.put(share, inner)
        return activated


class Returned(Joined):
    """Results of all shares, as wide as tokens, for the tokens whose rows they come from."""

    def __init__(self, parts: Sequence[Share], tokens: Tensor, way: Routes) -> None:
        self._way, self._moved = way, way.rows_NK is None
        self._by: GroupedMM = parts[0].by if parts else "torch"
        super().__init__(() if self._moved else parts, tokens, tokens.shape[1])
        if self._moved:  # Each token has one: its results go straight there.
            self.whole = torch.empty_like(tokens)

    def place(self, share: Share) -> Tensor | None:
        """None where results have another order than rows."""
        return None if self._moved else super().place(share)

    def put(self, share: Share, results: Tensor) -> None:
        """Results that have been written to their place, or have none yet."""
        if self._moved:
            self.whole.index_put_((self._way.order_R[share.rows],), results)
        else:
            super().put(share, results)

    def add_up(self, weights_NK: Tensor | None = None) -> Tensor:
        """Sums by token, weighted if there are weights."""
        return self.whole if self._moved else self._way.add_up(self.whole, weights_NK, self._by)


class Copies:
    """Rows of shares, copied from tokens when they are asked for."""

    def __init__(self, tokens: Tensor, way: Routes, by: GroupedMM = "torch") -> None:
        """By what multiplies."""
        self._tokens, self._way, self._at_once = tokens, way, passes.serve(tokens, by)
        if not self._at_once:
            self._tokens_R = way.tokens_R

    def __getitem__(self, share: Share) -> Tensor:
        """The rows of one share."""
        if self._at_once:
            choices = 1 if self._way.rows_NK is None else self._way.rows_NK.shape[1]
            return passes.copies(self._tokens, self._way.order_R[share.rows], choices)
        return self._tokens.index_select(0, self._tokens_R[share.rows])


def shares(
    tokens: Tensor, way: Routes, ffn: int, own: int | None = None, by: GroupedMM = "torch"
) -> list[Share]:
    """All slots of an arena at once on a GPU; on the CPU as many as have few enough rows, or one.
    The first slots are `own`, if not all are, and guests' follow."""
    counts = way.counts
    if counts.device.type != "cpu":  # Nobody waits for these numbers, and there are no guests.
        every = slice(0, len(way.order_R))
        return [Share(slice(0, len(counts)), every, counts, alone=False, by=by)]
    limit, most_alone = int(counts.sum()), 0
    if tokens.device.type == "cpu":
        crew = _crew_for(tokens, counts, ffn)
        fitting = _SHARE_BYTES // (2 * ffn * tokens.element_size())
        if crew is not None:
            limit = max(1, limit // (_LARGE * crew.size))
            most_alone = min(limit, _CACHED * fitting)
        limit = min(limit, fitting)
    found, row = list[Share](), 0
    for arena, slots in enumerate((counts[:own], counts[len(counts) if own is None else own :])):
        if arena and not len(slots):
            break
        for first, stop, num_rows in _cut(slots.tolist(), limit):
            rows = slice(row, row + num_rows)
            alone = num_rows <= most_alone
            own_counts = slots[first:stop]
            if by != "torch":  # Kernels look there.
                own_counts = own_counts.to(tokens.device, non_blocking=True)
            found.append(Share(slice(first, stop), rows, own_counts, alone, arena, by))
            row += num_rows
    return found


def shares_forward(
    tokens: Tensor, way: Routes, ffn: int, down: Matrices, by: GroupedMM = "torch"
) -> list[Share]:
    """Shares for products forward alone: all slots are in one where these only read matrices, of
    which those of `down` are the smaller."""
    own, counts = len(down[0]), way.counts
    may = by == "torch" and len(down) == 1 and own > 0 and only_reads(tokens, down[0], 1)
    if may and only_reads(tokens, down[0], int(counts.max())):
        return [Share(slice(0, own), slice(0, int(counts.sum())), counts, alone=False)]
    return shares(tokens, way, ffn, own, by)


def _cut(counts: Sequence[int], limit: int) -> Iterable[tuple[int, int, int]]:
    """Runs of slots, from one to another, and their rows: as many as have so many, or one."""
    first, rows = 0, 0
    for slot, count in enumerate(counts):
        if rows and rows + count > limit:
            yield first, slot, rows
            first, rows = slot, 0
        rows += count
    yield first, len(counts), rows


def _crew_for(tokens: Tensor, counts: Tensor, ffn: int) -> threads.Crew | None:
    """Threads for the experts, if there is enough to do for them to be woken."""
    busy, num_rows = int(counts.count_nonzero()), int(counts.sum())
    touched = (3 * ffn * busy + num_rows) * tokens.shape[1] * tokens.element_size()
    return threads.crew() if touched >= _LEAST_BYTES else None


def guests_have_rows(parts: Sequence[Share]) -> bool:
    """Whether some of the shares cannot be computed before guests are there."""
    return any(part.arena and part.rows.stop > part.rows.start for part in parts)


def for_both(
    parts: Sequence[Share],
    compute: Callable[[int], None],
    between: Callable[[], None] | None = None,
    *,
    guests_first: bool = False,
) -> None:
    """Have `compute` take shares of the arena and those of guests, by their places, after another
    in either order, and call `between` in between."""
    own = sum(not share.arena for share in parts)
    runs = list(range(own)), list(range(own, len(parts)))
    first, then = runs[::-1] if guests_first else runs
    for_each(parts, compute, first)
    if between is not None:
        between()
    for_each(parts, compute, then)


def for_each(parts: Sequence[Share], compute: Callable[[int], None], places: list[int]) -> None:
    """Have `compute` take shares, by their places: those of one thread each, the largest first,
    after those that all threads take."""
    crew, alone = threads.crew(), list[int]()
    for place in places:
        if parts[place].alone and crew is not None:
            alone.append(place)
        else:
            compute(place)
    if crew is not None and alone:
        alone.sort(key=lambda place: parts[place].rows.start - parts[place].rows.stop)
        crew.each(compute, alone)

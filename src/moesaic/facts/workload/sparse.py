"""What an expert layer does to its numbers, part by part, as `ops` has it of other layers."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.facts.workload.loads import Routed
from moesaic.facts.workload.ops import SLOTS, Op, Part, Product, both
from moesaic.facts.workload.sizes import INDEX_BYTES, Sizes

EXPERTS = "experts"
"""Name of what experts compute, chunk by chunk of their tokens."""

_DISPATCH_BYTES = 132
"""Per token and choice, read and written as indices, masks and counts: an estimate."""
_PIECE_BYTES = 90
"""The same of each piece of what is local."""


def router(s: Sizes) -> Part:
    """Scores and choices in the wide type, and the auxiliary losses."""
    model, t = s.model, s.run
    scores, chosen = t * model.experts, t * model.top_k
    forward = (5 * scores + 3 * chosen + 4 * t) * s.wide + 2 * chosen * INDEX_BYTES
    backward = (17 * scores + chosen + 8 * t) * s.wide + chosen * INDEX_BYTES
    if model.renormalise:
        forward += (3 * chosen + 2 * t) * s.wide
        backward += (14 * chosen + 5 * t) * s.wide
    more = int(model.renormalise)
    calls = [20 + 2 * more, 16 + 7 * more]
    if model.score == "sigmoid":  # Odds, the bias and the scale; and what is never quite zero.
        forward += (5 * scores + 2 * chosen + (4 + 2 * more) * t) * s.wide
        backward += (13 * scores + 2 * chosen + 5 * t) * s.wide
        calls = [calls[0] + 5 + more, calls[1] + 8]
    if model.top_groups < model.groups:
        offers, taken = t * model.groups, t * model.top_groups
        forward += (3 * scores + 6 * offers + taken) * s.wide
        forward += 2 * (offers + taken) * INDEX_BYTES + 4 * offers
        calls[0] += 6
    products = s.learning.routers * (Product(model.experts, model.hidden, t),)
    products += (not s.begins) * (Product(t, model.hidden, model.experts),)
    back = Op("router", products, backward, calls[1] - 2 + len(products), s.wide_type)
    return (
        Op("router", (Product(t, model.experts, model.hidden),), forward, calls[0], s.wide_type,
           specials=2 * scores),
        back if products else Op("router"),
    )  # fmt: skip


def dispatch(s: Sizes, routed: Routed) -> Part:
    """Which rows stand where in the order of slots; tokens that travel copied once for each of
    their experts, or, trip by trip, for each rank that they visit."""
    found = _visits(s, routed) if routed.visits else _rows(s, routed)
    if not routed.local:
        return found
    return both(found[0], _local_ahead(s, routed)), both(found[1], _local_behind(s, routed))


def _local_ahead(s: Sizes, routed: Routed) -> Op:
    """What is local told from what travels, and which rows stand where, of all and piece by
    piece."""
    chosen, pieces = s.sent * s.model.top_k, routed.pieces
    each = _DISPATCH_BYTES + _PIECE_BYTES * pieces - 20 + 30 * routed.visits
    moved = chosen * each + s.cast(chosen) * pieces
    again = 4 + 2 * (len(routed.trips) - 1) if routed.visits else 0
    return Op("", (), moved, 19 + 14 * pieces + s.casts * (pieces - 1) + again)


def _local_behind(s: Sizes, routed: Routed) -> Op:
    """Gradients of each piece, added to those of what travels."""
    if s.begins and not s.learning.routers:
        return Op("")
    width = (not s.begins) * s.model.hidden + s.learning.routers * s.model.top_k
    pieces, chosen = routed.pieces, s.sent * s.model.top_k
    moved = pieces * (3 * s.sent * width + (chosen + s.sent) * s.model.hidden) * s.narrow
    moved += (pieces - 1) * chosen * _PIECE_BYTES // 2
    return Op("", (), moved, 4 * pieces + s.casts * (pieces - 1))


def _rows(s: Sizes, routed: Routed) -> Part:
    hidden, chosen, travels = s.model.hidden, s.sent * s.model.top_k, routed.by_rows
    rows, arrived = routed.leaving * hidden * s.narrow, travels * sum(routed.slots)
    turned, more = _turned(s, routed)
    passing = sum(trip.arriving for trip in routed.trips[:-1])
    named = (13 * arrived + 17 * passing) * INDEX_BYTES
    summed = _rows_read(s, routed) + s.sent * hidden * s.narrow
    joined, cats = _joined(s, routed, hidden + s.model.top_k), 2 * (routed.chunks > 1)
    calls = 14 + s.casts + routed.chunks * (6 + 18 * travels + 29 * more)
    return (
        Op("dispatch", (), chosen * _DISPATCH_BYTES + s.cast(s.stream) + 2 * travels * rows + turned
           + named, calls),
        Op("dispatch") if s.begins else
        Op("dispatch", (), summed + turned + s.cast(s.stream) + joined,
           3 + s.casts + routed.chunks * more + cats),
    )  # fmt: skip


def _rows_read(s: Sizes, routed: Routed) -> int:
    """Bytes of results that sums over all choices read; what is not there is a row as well."""
    rows = s.sent * s.model.top_k if routed.partly else routed.leaving
    return rows * s.model.hidden * s.narrow


def _joined(s: Sizes, routed: Routed, width: int) -> int:
    """Bytes of putting chunks together of which tokens have so many numbers."""
    return 2 * (routed.chunks > 1) * s.sent * width * s.narrow


def _turned(s: Sizes, routed: Routed) -> tuple[int, int]:
    """Bytes of rows that are put into another order on their way, and how often that is."""
    passing = routed.trips[:-1]
    rows = sum(trip.arriving for trip in passing)
    return 2 * rows * s.model.hidden * s.narrow, len(passing)


def _visits(s: Sizes, routed: Routed) -> Part:
    """Tokens copied once for each rank, with weights and slots; where those stand on arrival.

    Backward gradients of the rows of a visit are added up there, and those of visits where they set
    out.
    """
    trips, rows, top_k, w = routed.trips, sum(routed.slots), s.model.top_k, s.narrow
    row, arriving, more = s.model.hidden * w, trips[-1].arriving, len(trips) - 1
    ahead = s.cast(s.stream) + s.sent * top_k * (77 + 2 * s.wide) + s.cast(s.sent * top_k)
    first, last = len(trips[0].group), len(trips[-1].group)
    for stops in (first, first * last)[: 1 + more]:
        ahead += s.sent * (3 * (stops + 1) + 3 * stops + 24 * top_k)
    ahead += arriving * top_k * 41 + rows * (32 + 96 * more) + 41 * more * s.sent * top_k
    behind = s.cast(s.stream) + _added_up(arriving, top_k, row, w) + rows * (8 + 2 * w)
    behind += arriving * top_k * (w + 12)
    for trip in trips:
        pairs = trip.tokens * len(trip.group)
        ahead += 45 * pairs + trip.leaving * (64 + (99 + 6 * w) * top_k + 2 * row)
        ahead += trip.arriving * top_k * (2 * w + 12)
        both = row + top_k * w
        behind += 2 * trip.arriving * both + _added_up(trip.tokens, len(trip.group), both, w)
    for trip in trips[1:]:
        ahead += trip.tokens * (40 * top_k + 3 * (len(trip.group) + 1))
        ahead += trip.arriving * (48 + 16 * top_k)
    behind += _joined(s, routed, s.model.hidden + top_k)
    cats = 2 * (routed.chunks > 1)
    back = Op("dispatch", (), behind, 3 + s.casts + routed.chunks * (6 + 6 * more) + cats)
    ends = s.begins and not s.learning.routers
    calls = 21 + 3 * more + s.casts + routed.chunks * (34 + 51 * more)
    return Op("dispatch", (), ahead, calls), Op("dispatch") if ends else back


def _added_up(tokens: int, each: int, row: int, weight: int) -> int:
    """Bytes of sums of `each` rows a token, some of which may be missing, and their masks."""
    return tokens * (each * (1 + 2 * weight + row + INDEX_BYTES) + row + 2 * INDEX_BYTES)


def experts(s: Sizes, slots: Sequence[int], *, travels: bool) -> Part:
    """The products of each slot's rows with its expert, gate and up in one; rows are copied from
    tokens, or from where they arrived, as they are needed, and weighed if they have not travelled.

    A product's rows are the slot's, though those of gradients of weights are summed over: the grid
    of what slots take has few rows, and many columns.
    """
    hidden, ffn = s.model.hidden, s.ffn
    rows = sum(slots)
    busy = _busy(slots)
    num_busy = sum(busy.values())
    arena = 3 * ffn * hidden
    inner = rows * ffn * s.narrow
    learns, rank = s.learning.experts, s.learning.beside("experts")
    of_tokens = not s.begins or (s.learning.routers and not travels)
    forward, backward = list[Product](), list[Product]()
    for count, times in busy.items():
        forward += [Product(count, 2 * ffn, hidden, times), Product(count, hidden, ffn, times)]
        backward += [Product(count, ffn, hidden, times)]
        if learns:
            backward += [
                Product(count, hidden, ffn, times, of_weights=True),
                Product(count, 2 * ffn, hidden, times, of_weights=True),
            ]
        if of_tokens:
            backward += [Product(count, hidden, 2 * ffn, times)]
    narrowed, casts = _narrowed(s, slots)
    cast = s.cast(narrowed * arena)
    written = s.cast(num_busy * arena) + (len(slots) - num_busy) * arena * s.wide
    copied = rows * (2 * hidden * s.narrow + INDEX_BYTES)
    named, stays = 2 * rows * INDEX_BYTES, 1 - travels
    ahead = Op(
        EXPERTS, tuple(forward), cast + 5 * inner + (1 + travels) * copied + stays * named,
        6 + 2 * casts, s.precision, kind=SLOTS, specials=rows * ffn,
    )  # fmt: skip
    behind = Op(
        EXPERTS, tuple(backward), s.cast(narrowed * arena * (1 + 2 * of_tokens) // 3)
        + learns * written + (14 + (6 + 2 * learns) * stays) * inner
        + (1 + learns + travels) * copied
        + 2 * stays * named,
        11 + 4 * learns + 6 * stays + (1 + of_tokens) * casts
        + 2 * num_busy * learns * s.casts, s.precision,
        kind=SLOTS, specials=2 * rows * ffn,
    )  # fmt: skip
    if rank:
        more, back = _adapted_experts(s, slots, rank, of_tokens)
        return both(ahead, more), both(behind, back)
    return ahead, behind if learns or of_tokens else Op(EXPERTS)


def _busy(slots: Sequence[int]) -> dict[int, int]:
    """How many slots have so many rows, of those that have some."""
    return {count: slots.count(count) for count in sorted(set(slots)) if count}


def _narrowed(s: Sizes, slots: Sequence[int]) -> tuple[int, int]:
    """How many slots' matrices are narrowed for a product, and in how many calls: those that have
    rows, one by one; on a GPU all at once."""
    busy = sum(_busy(slots).values())
    return (busy, s.casts * busy) if s.on_cpu else (len(slots), s.casts)


def _adapted_experts(s: Sizes, slots: Sequence[int], rank: int, of_tokens: bool) -> Part:
    """What adapters beside the matrices of experts add; `slots` by their rows."""
    hidden, ffn, rows, busy = s.model.hidden, s.ffn, sum(slots), _busy(slots)
    ahead, behind = list[Product](), list[Product]()
    for columns, inner in ((ffn, hidden), (ffn, hidden), (hidden, ffn)):
        for count, times in busy.items():
            thin, wide = Product(count, rank, inner, times), Product(count, columns, rank, times)
            ahead += [thin, wide]
            behind += [
                thin, Product(count, rank, columns, times),
                Product(count, columns, rank, times, of_weights=True),
                Product(count, rank, inner, times, of_weights=True),
                Product(count, inner, rank, times),
            ]  # fmt: skip
    num_busy, (narrowed, casts) = sum(busy.values()), _narrowed(s, slots)
    own = s.cast(3 * narrowed * rank * (hidden + ffn))
    again = s.cast(narrowed * rank * (2 * hidden + ffn))  # A is read twice.
    written = s.cast(3 * num_busy * rank * (hidden + ffn))
    scaled, outputs = 3 * 2 * rows * rank, 3 * rows * (2 * ffn + hidden)
    # Its own copy of rows, and what is between the products weighed in a tensor of its own.
    copied = rows * (2 * hidden * s.narrow + INDEX_BYTES) + 2 * rows * ffn * s.narrow
    inputs = 3 * rows * (ffn + hidden + of_tokens * hidden)
    return (
        Op("", tuple(ahead), own + (scaled + outputs) * s.narrow, 12 + 6 * casts),
        Op("", tuple(behind), own + again + written + (2 * scaled + inputs) * s.narrow + copied,
           27 + of_tokens + 9 * casts + 6 * num_busy * s.casts),
    )  # fmt: skip


def combine(s: Sizes, routed: Routed) -> Part:
    """Results added up by token, by weight; of visits where they are, and where they set out."""
    if routed.local:
        found, (ahead, behind) = _combine(s, routed), _combine(s, routed.all_local())
        more = (routed.pieces - 1) * (s.model.top_k + 1) * s.sent * s.model.hidden * s.narrow
        ahead = both(ahead, Op("", (), more))
        return both(found[0], ahead), both(found[1], behind)
    return _combine(s, routed)


def _combine(s: Sizes, routed: Routed) -> Part:
    hidden, chosen, trips = s.model.hidden, s.sent * s.model.top_k, routed.trips
    chunks = routed.chunks
    if routed.visits:
        row, visits, more = hidden * s.narrow, trips[-1].arriving, len(trips) - 1
        ahead = visits * (s.model.top_k * (row + INDEX_BYTES + s.narrow) + row + 2 * INDEX_BYTES)
        ahead += sum(_added_up(one.tokens, len(one.group), row, s.narrow) for one in trips)
        behind = sum(one.leaving * (2 * row + INDEX_BYTES) for one in trips)
        return (
            Op("combine", (), ahead, chunks * (8 + 2 * more)),
            Op("combine", (), behind, chunks * (6 + more)),
        )  # fmt: skip
    travels, (turned, more) = routed.by_rows, _turned(s, routed)
    rows = routed.leaving * hidden * s.narrow
    weighed = routed.leaving if routed.partly else chosen
    weights = chosen * 2 * s.wide + weighed * (2 * s.narrow + 3 * INDEX_BYTES) + s.cast(chosen)
    back = Op(
        "combine", (), 8 * travels * rows + turned + 2 * weights,
        s.casts + chunks * (5 + 6 * travels + more),
    )  # fmt: skip
    idle = s.begins and not travels and not s.learning.routers
    return (
        Op("combine", (), _rows_read(s, routed) + turned + s.sent * hidden * s.narrow + weights,
           s.casts + chunks * (5 + more)),
        Op("combine") if idle else back,
    )  # fmt: skip


def joined(s: Sizes, routed: Routed) -> Part:
    """Chunks of results put together, and what is local added; gradients are cut as they are."""
    moved, adds = _joined(s, routed, s.model.hidden), routed.pieces
    moved += 3 * adds * s.sent * s.model.hidden * s.narrow
    return Op("joined", (), moved, (routed.chunks > 1) + adds), Op("joined")


def beside(s: Sizes) -> Part:
    """What the shared experts say added to what the others do."""
    return Op("shared", (), 3 * s.stream * s.narrow, 1), Op("shared")

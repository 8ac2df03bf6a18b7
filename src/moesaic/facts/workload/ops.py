"""What a part of a layer does to its numbers: matrix products, and the passes between them.

Every function returns the forward and the backward operation of one part. Products are those that
the layers ask for. Passes are counted as torch makes them on a CPU, one kernel after another: what
an elementwise kernel reads and writes, whole tensors each time. On a GPU norms are one kernel each
way; what else is fused there is not known here. `calls` is how many kernels start, an estimate too.

Of several slices each does its part of a layer: norms, routers and the residual stream over its own
run of tokens, what has heads, inner channels or words over all of them, with matrices as narrow as
the slice. What messages copy on their way is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moesaic.facts.job.finetune import Target
from moesaic.facts.workload.sizes import INDEX_BYTES, NORM_BYTES, Sizes, Type

PASSED_BYTES = {"norm": 1, "scale": 2, "adamw": 7}
"""What kernels of a kind read and write, as a multiple of their tensor. AdamW reads values,
gradient and two moments, and writes all but the gradient."""
NARROW_PASSED = {"bf16": (225, 34), "8bit": (612, 80)}
"""Bytes of an element that kernels of an update with narrow moments read and write, and how many
kernels it starts for each chunk of a matrix, by `optimizer.moments`. As on a CPU, in whose
cache most of them stay."""


@dataclass(frozen=True)
class Product:
    """`count` matrix products of [rows, inner] and [inner, columns]."""

    rows: int
    columns: int
    inner: int
    count: int = 1
    of_weights: bool = False
    """Of slots: whether they are gradients of weights, which sum over what is called rows here."""

    @property
    def flops(self) -> int:
        """Two for each multiplication."""
        return 2 * self.rows * self.columns * self.inner * self.count

    @property
    def elements(self) -> int:
        """Of both factors and the result."""
        rows, columns, inner = self.rows, self.columns, self.inner
        return (rows * inner + inner * columns + rows * columns) * self.count


SLOTS = "slots"
"""The kind of an operation whose products, those of many experts, are done together."""


@dataclass(frozen=True)
class Op:
    """One part of a block, one way."""

    name: str
    products: tuple[Product, ...] = ()
    """In full, as torch counts them."""
    moved_bytes: int = 0
    """Read and written by elementwise passes: what products read and write is not in it."""
    calls: int = 0
    """Kernels started: an estimate."""
    type: Type = "fp32"
    """Of the factors of `products`."""
    specials: int = 0
    """Numbers of which an exponential, or the like, is taken."""
    kind: str = ""
    """What kernels it is made by, where they are unlike most: attention, products of slots, and
    those that `Device.passes` names."""
    causal_share: float = 1.0
    """Share of `products` that is left to a kernel that skips what causality hides."""

    @property
    def flops(self) -> int:
        """Of all products, in full."""
        return sum(product.flops for product in self.products)


Part = tuple[Op, Op]
"""Forward and backward."""


def embedding(s: Sizes, *, tied: bool) -> Part:
    """Rows of a table; backward adds them up in a table of zeros, and to the gradient that a `tied`
    head has left. Of several slices each has zeros where a word is another's; of columns all words
    are looked up, and what comes of this rank's is put in order, and out of it again.
    """
    table, ids = s.table, s.tokens * INDEX_BYTES
    if s.columns > 1:
        asked = s.asked * INDEX_BYTES
        forward = 2 * (s.looked_up + s.joined) * s.wide + asked + (s.columns + 1) * ids
        backward = (table * (1 + 3 * tied) + 3 * s.looked_up + 2 * s.joined) * s.wide + asked
        back = Op("lookup", (), backward, 2 + tied) if s.learning.weights else Op("lookup")
        return Op("lookup", (), forward, 3), back
    forward = 2 * s.joined * s.wide + ids
    backward = (table * (1 + 3 * tied) + 3 * s.joined) * s.wide + ids
    calls = [1, 1 + tied]
    if s.slices > 1:
        zeros = 2 * s.joined * s.wide + s.tokens
        forward, backward = forward + zeros + 6 * (ids + s.tokens), backward + zeros
        calls = [calls[0] + 6, calls[1] + 1]
    back = Op("lookup", (), backward, calls[1]) if s.learning.weights else Op("lookup")
    return Op("lookup", (), forward, calls[0]), back


def join_columns(s: Sizes) -> list[Part]:
    """What is done about messages that bring a head the columns of its tied weight: they are put in
    order, and so are those of the gradient for its way back."""
    if not s.joins_table:
        return []
    batches, moved = len(s.table_batches), 2 * s.vocab * s.model.hidden * s.wide
    back = Op("join columns", (), moved, batches) if s.learning.weights else Op("join columns")
    return [(Op("join columns", (), moved, batches), back)]


def join_runs(s: Sizes, width: int, *, uses: int = 1, split: bool = False) -> list[Part]:
    """What is done about a message that joins the slices' runs, `width` channels a token.

    It brings tokens in the type of products. Backward adds up the gradients of its result's `uses`.

    Args:
        s: sizes.
        width: channels.
        uses: how many read the result.
        split: whether it is put together of parts, and cut up again.
    """
    if s.slices == 1:
        return []
    run, joined = s.run * width, s.tokens * width
    forward = s.cast(run) + split * 2 * run * s.wide
    if s.begins:
        return [(Op("join runs", (), forward, s.casts + split), Op("join runs"))]
    backward = s.cast(run) + 2 * run * s.wide + (3 * (uses - 1) + 2 * split) * joined * s.narrow
    return [
        (
            Op("join runs", (), forward, s.casts + split),
            Op("join runs", (), backward, s.casts + uses + split),
        )
    ]


def norm(
    s: Sizes,
    width: int,
    name: str = "norm",
    *,
    rows: int | None = None,
    uses: int = 1,
    within: bool = True,
) -> Part:
    """RMS norm over `width`; backward first adds up the gradients of its result's `uses`.

    Args:
        s: sizes.
        width: elements of a row.
        name: of the operations.
        rows: how many; absent: one for each token of the slice's run.
        uses: how many read the result.
        within: whether the input goes on beside the norm, in the residual stream: backward then
            adds another gradient.
    """
    t, adds = s.run if rows is None else rows, uses - 1 + within
    n = t * width
    if within and s.begins:  # Its input has no gradient.
        forward, _ = norm(replace(s, begins=False), width, name, rows=rows, uses=uses)
        return forward, Op(name)
    if not s.on_cpu:
        return (
            Op(name, (), (2 * n + t + width) * s.wide, 1),
            Op(name, (), ((3 + 3 * adds) * n + t + 2 * width) * s.wide, 2 + adds),
        )
    times = -(-t // max(1, NORM_BYTES // (width * s.wide)))
    return (
        Op(name, (), (5 * n + 10 * t + width * times) * s.wide, 7 * times),
        Op(name, (), ((16 + 3 * adds) * n + 11 * t + (1 + 6 * times) * width) * s.wide,
           1 + 12 * times + adds),
    )  # fmt: skip


def head_norms(s: Sizes) -> list[Part]:
    """Norms of queries and keys, which take them out of the type of products."""
    parts = []
    for width in (s.queries, s.keys):
        if s.model.normed == "whole" and s.slices > 1:
            forward, backward = _sliced_norm(s, width)
        else:
            rows = width // s.model.head_dim if s.model.normed == "heads" else 1
            forward, backward = norm(s, width // rows, rows=s.tokens * rows, within=False)
        casts = s.cast(s.tokens * width)
        parts.append(
            (
                Op("head norm", (), forward.moved_bytes + casts, forward.calls + s.casts),
                Op("head norm", (), backward.moved_bytes + casts, backward.calls + s.casts),
            )
        )
    return parts


def _sliced_norm(s: Sizes, width: int) -> Part:
    """A norm over the channels of all slices, of which `width` are this one's; squares are summed
    over slices in between.
    """
    t, n = s.tokens, s.tokens * width
    return (
        Op("norm", (), (7 * n + 10 * t + width) * s.wide, 8),
        Op("norm", (), (21 * n + 14 * t + 2 * width) * s.wide, 15),
    )


def linear(
    name: str,
    s: Sizes,
    columns: int,
    inner: int,
    *,
    wide_input: bool,
    rows: int | None = None,
    target: Target = "attention",
    first: bool = False,
) -> Part:
    """Tokens times a weight; weights, and wide inputs, are cast to the type of products.

    Args:
        name: of the operations.
        s: sizes.
        columns: of the result.
        inner: channels of a token.
        wide_input: whether those are wide.
        rows: how many tokens; absent: all of them.
        target: what adapters call the weight.
        first: whether the tokens are those that come into the block.
    """
    t = s.tokens if rows is None else rows
    of_tokens, of_weight = not (first and s.begins), s.learning.weights
    cast = s.cast(t * inner) if wide_input else 0
    moved, calls = s.cast(columns * inner) + cast, s.casts * (1 + wide_input)
    back = of_weight * s.cast(columns * inner) + of_tokens * cast
    products = of_tokens * (Product(t, inner, columns),)
    products += of_weight * (Product(columns, inner, t),)
    forward = Op(name, (Product(t, columns, inner),), moved, 1 + calls, s.precision)
    casts = s.casts * (of_weight + of_tokens * wide_input)
    backward = Op(name, products, back, len(products) + casts, s.precision)
    rank = s.learning.beside(target)
    if rank:
        ahead, behind = _adapted(s, t, columns, inner, rank, wide_input, of_tokens)
        forward, backward = both(forward, ahead), both(backward, behind)
    return forward, backward


def _adapted(
    s: Sizes, t: int, columns: int, inner: int, rank: int, wide_input: bool, of_tokens: bool
) -> Part:
    """What an adapter beside a weight adds: A and B on the way, and their gradients."""
    own = s.cast(rank * inner) + s.cast(columns * rank)
    cast = s.cast(t * inner) if wide_input else 0
    thin, width = 2 * t * rank * s.narrow, s.wide if wide_input else s.narrow
    ahead = (Product(t, rank, inner), Product(t, columns, rank))
    behind: tuple[Product, ...] = (
        Product(t, rank, columns), Product(columns, rank, t), Product(rank, inner, t),
    )  # fmt: skip
    behind += of_tokens * (Product(t, inner, rank),)
    calls, more = s.casts * (2 + wide_input), of_tokens * (cast + 3 * t * inner * width)
    return (
        Op("", ahead, own + cast + thin + 3 * t * columns * s.narrow, 4 + calls),
        Op("", behind, own + thin + more, len(behind) + 1 + of_tokens
           + s.casts * (2 + wide_input * of_tokens)),
    )  # fmt: skip


def both(one: Op, other: Op) -> Op:
    """One operation that does what two do."""
    return replace(
        one,
        products=one.products + other.products,
        moved_bytes=one.moved_bytes + other.moved_bytes,
        calls=one.calls + other.calls,
    )


def rotary(s: Sizes, width: int) -> Part:
    """Turned channel pairs; normed queries and keys come in wide."""
    n, angles = s.tokens * width, s.tokens * s.model.head_dim // 2
    into = s.wide if s.model.normed is not None else s.narrow
    casts = 1 + (into != s.wide)
    moved, calls = (5 * n + 4 * angles) * s.wide + casts * s.cast(n), 4 + casts * s.casts
    return Op("rotary", (), moved, calls), Op("rotary", (), moved, calls)


def clamp(s: Sizes) -> Part:
    """Queries, keys and values kept within bounds; backward by a mask."""
    wide, narrow = s.tokens * (s.queries + s.keys), s.tokens * s.keys
    elements = wide * s.wide + narrow * s.narrow
    masks = 6 * (wide + narrow)
    return Op("clamp", (), 2 * elements, 3), Op("clamp", (), 4 * elements + masks, 12)


def attend(s: Sizes) -> Part:
    """Two batched products forward and five backward (one is done again); no scores are kept."""
    model, length = s.model, s.sequence
    batch = s.batch * s.heads
    scores = Product(length, length, model.head_dim, batch)
    mixed = Product(length, model.head_dim, length, batch)
    q, k = s.tokens * s.queries, s.tokens * s.keys
    repeats = int(s.heads != s.kv_heads)
    # Gradients of what was repeated; of one head, heads stand in the order of tokens already.
    moved_k = int(s.kv_heads > 1) * repeats
    repeated = 2 * repeats * (q + k) * s.narrow
    share = 1.0 if s.masked else (length + 1) / (2 * length)
    turned = s.wide if model.normed is not None else s.narrow
    masking = s.mask * (1 + s.narrow)
    specials = round(batch * length**2 * share)
    return (
        Op("attend", (scores, mixed), repeated + masking,
           1 + 2 * repeats + 3 * s.masked, s.precision, specials, "attention", share),
        Op("attend", (scores, scores, mixed, mixed, mixed),
           repeated + 2 * moved_k * k * turned + 2 * repeats * moved_k * k * s.narrow,
           1 + moved_k + repeats * (2 + moved_k), s.precision, specials,
           "attention backward", share),
    )  # fmt: skip


def residual(s: Sizes) -> Part:
    """A layer's result added to the stream."""
    return (
        Op("residual", (), s.stream * (2 * s.wide + s.narrow), 1),
        Op("residual", (), s.cast(s.stream), s.casts),
    )


def gate(s: Sizes, ffn: int, name: str = "gate") -> Part:
    """silu(gate) * up of a dense feed-forward network of inner width `ffn`."""
    elements = s.tokens * ffn
    n = elements * s.narrow
    return (
        Op(name, (), 5 * n, 2, specials=elements),
        Op(name, (), 9 * n, 3, specials=elements),
    )


def loss(s: Sizes) -> Part:
    """Logits, loss and both gradients, a chunk of tokens at a time; backward hands them on.

    Of several slices each has logits of its own words, for tokens that come in the type of
    products, and looks for targets among its words.
    """
    vocab, hidden, t, learns = s.vocab, s.model.hidden, s.tokens, s.learning.weights
    products: list[Product] = []
    for rows, times in s.chunks:
        products += [Product(rows, vocab, hidden, times), Product(rows, hidden, vocab, times)]
        products += learns * [Product(vocab, hidden, rows, times)]
    num_chunks = sum(times for _, times in s.chunks)
    weight, logits, sliced = vocab * hidden, t * vocab, int(s.slices > 1)
    casts, read = s.casts * (2 - sliced), (1 - sliced) * s.cast(s.joined)
    forward = read + s.cast(weight) + learns * weight * s.wide + (6 + sliced) * logits * s.wide
    forward += 2 * s.cast(logits) + t * (59 + 12 * s.wide)
    forward += sliced * t * (38 + (5 + s.slices) * s.wide)
    forward += learns * s.casts * num_chunks * weight * (2 * s.wide + s.narrow)
    backward = 2 * s.joined * s.narrow + learns * 2 * weight * s.wide + read
    return (
        Op(
            "loss",
            tuple(products),
            forward,
            2 + learns + casts + (17 + learns + (2 + learns) * s.casts + 7 * sliced) * num_chunks,
            s.precision,
            specials=2 * logits,
        ),
        Op("loss", (), backward, 1 + learns + casts),
    )


def update(
    num_bytes: int,
    tensors: int,
    *,
    normed_bytes: int | None = None,
    pieces: int | None = None,
    clips: bool = True,
) -> tuple[Op, ...]:
    """The gradient's norm, clipping and AdamW, once a step.

    Args:
        num_bytes: of all that is updated.
        tensors: in how many tensors it lies.
        normed_bytes: what counts in the norm here; absent: all of it.
        pieces: as how many the optimizer sees them, as some lie side by side; absent: each is one.
        clips: whether the gradient is scaled.
    """
    normed = num_bytes if normed_bytes is None else normed_bytes
    pieces = tensors if pieces is None else pieces
    return (
        Op("norm", (), PASSED_BYTES["norm"] * normed, tensors, kind="norm"),
        Op("clip", (), PASSED_BYTES["scale"] * clips * num_bytes, clips * pieces, kind="scale"),
        adamw(num_bytes, pieces),
    )


def adamw(num_bytes: int, tensors: int) -> Op:
    """AdamW of `tensors` tensors, `num_bytes` in all."""
    return Op("adamw", (), PASSED_BYTES["adamw"] * num_bytes, tensors, kind="adamw")


def narrow_adamw(matrices: Sequence[int], moments: str, chunk: int) -> Op:
    """AdamW of matrices of so many elements each, whose moments are narrow, a `chunk` at a time."""
    moved, calls = NARROW_PASSED[moments]
    chunks = sum(-(-size // chunk) for size in matrices)
    return Op("narrow adamw", (), moved * sum(matrices), calls * chunks)

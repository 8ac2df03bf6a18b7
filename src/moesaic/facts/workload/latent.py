"""What latent attention does to its numbers, part by part, as `ops` has it of other layers."""

from __future__ import annotations

from dataclasses import replace

from moesaic.facts.job.model import Latent
from moesaic.facts.workload import ops
from moesaic.facts.workload.ops import Op, Part, Product
from moesaic.facts.workload.sizes import Sizes


def attention(s: Sizes, latent: Latent) -> list[Part]:
    """All of a layer's attention, in order."""
    hidden, width, values = s.model.hidden, latent.width, s.heads * latent.value
    wide_input = s.slices == 1
    asking: list[Part] = []
    if latent.queries is not None:
        asking = [
            ops.linear(
                "q_down", s, latent.queries, hidden, wide_input=True, rows=s.run, first=True
            ),
            _norm(s, latent.queries),
        ]
    way_up = "q" if latent.queries is None else "q_up"
    down = width + latent.rotary
    return [
        ops.norm(s, hidden, uses=2),
        ops.linear("kv_down", s, down, hidden, wide_input=True, rows=s.run, first=True),
        (Op("split"), Op("split", (), 2 * s.run * down * s.narrow, 1)),
        *asking,
        _norm(s, width),
        *_join_runs(s, latent),
        ops.linear(
            way_up, s, s.queries, asked(s, latent), wide_input=wide_input, first=way_up == "q"
        ),
        _turn(s, s.heads * latent.rotary),
        _turn(s, latent.rotary),
        ops.linear("kv_up", s, unturned(s) + values, width, wide_input=wide_input),
        _join(s, latent),
        *_attend(s, latent),
        ops.linear("o", s, hidden, values, wide_input=False),
        ops.residual(s),
    ]


def asked(s: Sizes, latent: Latent) -> int:
    """Width of what queries are made from."""
    return s.model.hidden if latent.queries is None else latent.queries


def travelling(s: Sizes, latent: Latent) -> int:
    """Channels of a token that go from slice to slice: all that heads are made from."""
    return asked(s, latent) + latent.width + latent.rotary


def unturned(s: Sizes) -> int:
    """Width of what no head of this slice turns."""
    return s.queries - s.heads * s.model.turned


def attended(s: Sizes, latent: Latent) -> int:
    """Width of a head while it attends: the narrower of keys and values are filled up."""
    return max(s.model.head_dim, latent.value)


def _norm(s: Sizes, width: int) -> Part:
    """Of what a product made of this slice's run, which it takes out of the type of products."""
    forward, backward = ops.norm(s, width, within=False)
    casts = s.cast(s.run * width)
    return (
        Op("norm", (), forward.moved_bytes + casts, forward.calls + s.casts),
        Op("norm", (), backward.moved_bytes + casts, backward.calls + s.casts),
    )


def _join_runs(s: Sizes, latent: Latent) -> list[Part]:
    """All in one message; the one part of it that is in the type of products is widened first."""
    if s.slices == 1:
        return []
    widened = s.cast(s.run * latent.rotary)
    return [
        (Op("widen", (), widened, s.casts), Op("widen", (), widened, s.casts)),
        *ops.join_runs(replace(s, begins=False), travelling(s, latent), split=True),
    ]


def _turn(s: Sizes, width: int) -> Part:
    """Neighbouring channels turned, in the wide type."""
    n, angles = s.tokens * width, s.tokens * s.model.turned // 2
    return (
        Op("rotary", (), (7 * n + 4 * angles) * s.wide + 2 * s.cast(n), 6 + 3 * s.casts),
        Op("rotary", (), (10 * n + 4 * angles) * s.wide + 2 * s.cast(n), 8 + 3 * s.casts),
    )


def _join(s: Sizes, latent: Latent) -> Part:
    """Queries and keys put together of what is turned, for keys of all heads, and what is not."""
    q, turned = s.tokens * s.queries, s.tokens * latent.rotary
    straight, all_turned = s.tokens * unturned(s), turned * s.heads
    values = s.tokens * s.heads * latent.value
    forward = 2 * q + (straight + turned + q)
    backward = 2 * q + (all_turned + turned) + 2 * (straight + values)
    return Op("join", (), forward * s.narrow, 2), Op("join", (), backward * s.narrow, 4)


def _attend(s: Sizes, latent: Latent) -> list[Part]:
    """As `ops.attend` has it, over heads that are filled up to one width."""
    head, length, width = s.model.head_dim, s.sequence, attended(s, latent)
    heads, batch = s.tokens * s.heads, s.batch * s.heads
    # Values are filled up and results cut, or queries and keys are filled up.
    tensors = (latent.value < width) + 2 * (head < width)
    filled = tensors * heads * (min(head, latent.value) + width) * s.narrow
    cut = int(latent.value < width)
    scores, mixed = Product(length, length, width, batch), Product(length, width, length, batch)
    share = 1.0 if s.masked else (length + 1) / (2 * length)
    specials = round(batch * length**2 * share)
    return [
        (Op("fill", (), filled, tensors), Op("fill", (), filled, tensors)),
        (
            Op("attend", (scores, mixed),
               cut * 2 * heads * latent.value * s.narrow + s.mask * (1 + s.narrow),
               1 + cut + 3 * s.masked, s.precision, specials, "attention", share),
            Op("attend", (scores, scores, mixed, mixed, mixed),
               cut * heads * (latent.value + width) * s.narrow, 1 + cut, s.precision, specials,
               "attention backward", share),
        ),
    ]  # fmt: skip

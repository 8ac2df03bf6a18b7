"""What autograd keeps of a micro-batch, block by block.

Exact for torch's kernels on a CPU, and for whatever a GPU computes with the same ones; it depends
on routing only through the rows that arrive. Of slices, norms and routers keep a run of tokens, and
products the joined tokens of all runs, in the type that products take.
"""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from moesaic.facts.job import Job
from moesaic.facts.job.model import Latent
from moesaic.facts.plan import Plan
from moesaic.facts.workload.holdings import blocks_on
from moesaic.facts.workload.latent import attended
from moesaic.facts.workload.loads import Routed, routed, visit_bytes
from moesaic.facts.workload.sizes import HEAD_ROWS, INDEX_BYTES, Sizes


def activations(
    job: Job, plan: Plan, rank: int, loads: Sequence[ArrayLike] | None = None
) -> dict[str, int]:
    """Bytes that autograd keeps of one micro-batch: context, and each of the rank's own blocks.

    Parameters are not in it, nor what checkpointing saves (`train.recompute`): that leaves each
    layer its input, and in backward one layer at a time all of it.
    """
    s = Sizes.of(job, plan, rank)
    sparse = job.model.expert_layers
    inner = [_dense_bytes(s, index) for index in range(job.model.layers - len(sparse))]
    if sparse:
        inner += [_moe_bytes(s, plan, one) for one in routed(job, plan, rank, loads)]
    kept = {
        "embed": _embedding_bytes(s),
        **{f"layers.{index}": _attention_bytes(s) + one for index, one in enumerate(inner)},
        "head": _head_bytes(s),
    }
    angles = s.tokens * job.model.turned * s.wide
    own = {name: kept[name] for name in blocks_on(job.model, plan, rank)}
    return {"context": angles + s.mask, **own}


def _embedding_bytes(s: Sizes) -> int:
    """Which words; of slices, which words of theirs, and which tokens have another's; of columns,
    which words of all ranks."""
    if s.columns > 1:
        return s.asked * INDEX_BYTES
    return s.tokens * (INDEX_BYTES + (s.slices > 1))


def _norm_bytes(s: Sizes) -> int:
    """Its input, and a factor a row."""
    return (s.stream + s.run) * s.wide


def joined_bytes(s: Sizes) -> int:
    """The residual stream of all slices as products take it."""
    return s.joined * s.narrow


def _inputs_bytes(s: Sizes, num: int, weights: int) -> int:
    """What `num` products read of one wide tensor, and casts of `weights` elements of weights."""
    cast = s.casts * weights * s.narrow
    if s.slices > 1:
        return joined_bytes(s) + cast
    return (num * s.stream * s.narrow if s.casts else s.stream * s.wide) + cast


def _attention_bytes(s: Sizes) -> int:
    q, k, model = s.tokens * s.queries, s.tokens * s.keys, s.model
    if model.latent is not None:
        return _latent_bytes(s, model.latent)
    kept = _norm_bytes(s) + _inputs_bytes(s, 3, 2 * (s.queries + s.keys) * model.hidden)
    if model.normed is not None:
        rows = s.heads + s.kv_heads if model.normed == "heads" else 2
        sliced = model.normed == "whole" and s.slices > 1  # It keeps what it has normed, too.
        kept += ((1 + sliced) * (q + k) + rows * s.tokens) * s.wide
    if model.clip_qkv is not None:
        kept += (q + k) * s.wide + k * s.narrow
    # Turned queries, keys and values as often as they are repeated; the result.
    kept += 4 * q * s.narrow + s.tokens * s.heads * s.wide
    return kept + s.mask * s.narrow


def _latent_bytes(s: Sizes, latent: Latent) -> int:
    model, t, width = s.model, s.tokens, attended(s, latent)
    values, down = s.heads * latent.value, latent.width + latent.rotary
    up = s.queries - s.heads * latent.rotary + values
    weights = down * model.hidden + latent.width * up + values * model.hidden
    # A norm keeps its input and a factor a row. A norm of part of a result that is not cast keeps
    # all of that.
    norms = (latent.width + 1 + (1 - s.casts) * latent.rotary) * s.wide
    if latent.queries is None:
        weights += s.queries * model.hidden
        asking = model.hidden
    else:
        weights += latent.queries * (model.hidden + s.queries)
        norms += (latent.queries + 1) * s.wide
        asking = latent.queries
    if s.slices > 1:  # One tensor has all that the ways up read of joined tokens.
        reading = 1 + (latent.queries is not None)
        kept = (reading * s.stream * s.narrow) if s.casts else s.stream * s.wide
        kept += s.casts * weights * s.narrow + t * (asking + down) * s.narrow
    else:
        kept = _inputs_bytes(s, 2, weights)
        kept += t * (latent.width + (latent.queries or 0)) * s.narrow
    # Queries, keys and result; values, and what is cut of the result, or all that came up.
    cut = latent.value < width
    heads = 3 * s.heads * width + (s.heads * width + values if cut else up)
    kept += _norm_bytes(s) + s.run * norms
    return kept + (t * heads + s.mask) * s.narrow + t * s.heads * s.wide


def _dense_bytes(s: Sizes, layer: int) -> int:
    ffn = s.inner(layer)
    return _norm_bytes(s) + _inputs_bytes(s, 2, 3 * ffn * s.model.hidden) + _gated_bytes(s, ffn)


def _gated_bytes(s: Sizes, ffn: int) -> int:
    """Both products, silu of the first, and what goes into the last."""
    return 4 * s.tokens * ffn * s.narrow


def _moe_bytes(s: Sizes, plan: Plan, routed: Routed) -> int:
    model, t, (leaving, slots, trips, visits, chunks, local, _) = s.model, s.run, routed
    arriving = sum(slots)
    scores, chosen, sent = t * model.experts, t * model.top_k, s.sent * model.top_k
    routing = (2 * scores + t + model.experts) * s.wide
    if model.score == "sigmoid":  # What makes odds of them.
        routing += t * s.wide
    if model.renormalise:
        routing += (chosen + t) * s.wide
    # Counts of its slots are cut from those of all places, unless several ones' are added up.
    counts = chunks * len(slots) * (plan.span // plan.etp if plan.ep == 1 else 1)
    # An order of rows is that of all choices, of which those that were dropped are the last.
    indices = (3 * sent + counts) * INDEX_BYTES + sent
    rows = 2 * arriving * s.ffn
    if visits:
        choices = trips[-1].arriving * model.top_k
        ways = sum(trip.tokens * len(trip.group) for trip in trips)
        there = sum(trip.leaving for trip in trips)
        order = arriving if len(trips) > 1 else choices
        indices = (sent + counts + order + choices + 2 * there + ways) * INDEX_BYTES
        indices += sent + choices + ways
        if len(trips) > 1:  # Where tokens stop lies beside the ranks, and beside nowhere.
            indices += trips[0].tokens * plan.ep + trips[1].tokens
        indices += trips[-1].arriving * visit_bytes(model.hidden, model.top_k, s.narrow)[0]
        rows += choices - sent
    elif trips:
        passing = 2 * sum(trip.arriving for trip in trips[:-1])
        indices += (arriving + passing) * INDEX_BYTES
        rows += (arriving + leaving) * model.hidden
    if local:  # Pieces of one order of rows are each told from others, and weighed.
        indices += (sent + routed.pieces * (sent + len(slots))) * INDEX_BYTES
        indices += routed.pieces * sent
        rows += 2 * sum(local) * s.ffn + routed.pieces * sent
    if (local or not trips) and (s.casts or s.expert_slices > 1):
        rows += s.sent * model.hidden  # Else it is the stream, which the router has kept.
    kept = _norm_bytes(s) + s.stream * s.wide + routing + indices + (rows + sent) * s.narrow
    if model.shared:
        weights = 3 * s.shared * model.hidden
        if s.slices > 1 or s.casts:  # Else it is the stream, which the router has kept already.
            kept += _inputs_bytes(s, 2, weights)
        kept += _gated_bytes(s, s.shared)
    return kept


def _head_bytes(s: Sizes) -> int:
    """What its norm keeps, and the gradients that forward forms: of its input and its weight."""
    return _norm_bytes(s) + joined_bytes(s) + s.vocab * s.model.hidden * s.wide


def logits_bytes(s: Sizes) -> int:
    """What the head reads, and logits and their logarithms of some rows.

    In narrow types a copy of the weight is there too; and later, beside the gradient of logits, its
    narrow copy and an addend of the weight's gradient.
    """
    read = s.stream * (s.wide + s.casts * s.narrow) if s.slices == 1 else joined_bytes(s)
    weight = s.casts * s.vocab * s.model.hidden * s.narrow
    logits = min(s.tokens, HEAD_ROWS) * s.vocab
    return read + weight + max(2 * logits * s.wide, logits * (s.wide + s.narrow) + weight)


def captured_attention(s: Sizes) -> int:
    """Gradients that backward in halves keeps for the weights of attention: those of the results of
    its products and norms."""
    model, latent = s.model, s.model.latent
    kept = s.stream * s.wide + joined_bytes(s)
    if latent is None:
        kept += s.tokens * (s.queries + 2 * s.keys) * s.narrow
        if model.normed is not None:
            kept += s.tokens * (s.queries + s.keys) * s.wide
        return kept
    up = s.queries + s.heads * (latent.value + model.head_dim - latent.rotary)
    kept += s.tokens * up * s.narrow + s.run * latent.rotary * s.narrow
    return kept + s.run * (latent.width + (latent.queries or 0)) * (s.wide + s.narrow)


def captured_network(s: Sizes, layer: int, routed: Routed | None, *, learns: bool) -> int:
    """The same of a layer's network; `routed`: rows of its experts, if it has some, and whether
    those experts learn."""
    model, joined = s.model, joined_bytes(s)
    kept = s.stream * s.wide
    if routed is None:
        return kept + joined + 2 * s.tokens * s.inner(layer) * s.narrow
    kept += s.run * model.experts * s.wide
    graded = sum(routed.slots) if routed.by_rows else s.sent
    if routed.visits:
        graded = routed.trips[-1].arriving
    graded += bool(routed.local) * s.sent
    kept += learns * (graded * model.hidden + 2 * s.ffn * routed.num_rows) * s.narrow
    if model.shared:
        kept += joined + 2 * s.tokens * s.shared * s.narrow
    return kept

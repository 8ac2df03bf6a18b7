"""Peaks of temporary memory in backward of routed experts, with our grouped matmuls."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.facts.workload.loads import RoutedTokens
from moesaic.facts.workload.sizes import EXPERT_CHUNK_BYTES, INDEX_BYTES, Sizes


def expert_backward_bytes(s: Sizes, routed: RoutedTokens, *, on_cpu: bool) -> int:
    """Return peak bytes beside the experts' gradient in backward, less freed activations."""
    peak = _dispatched_bytes(s, routed, on_cpu)
    if routed.local_slot_tokens:
        peak = max(peak - _freed_bytes(s, routed), _local_bytes(s, routed, on_cpu))
    return peak


def _dispatched_bytes(s: Sizes, routed: RoutedTokens, on_cpu: bool) -> int:
    """Return bytes beside the experts' gradient while backward is in a dispatched chunk."""
    model, chunk = s.model, routed.split_chunks()[0]
    num_tokens = sum(chunk.slot_tokens)
    if routed.is_all_to_all:
        gradient_elements, index_bytes = (num_tokens - chunk.num_sent) * model.hidden, 0
    else:  # Gradients for the tokens of all expert TP ranks; token and weight of each row.
        num_received = chunk.exchanges[-1].num_received if chunk.is_dedup else s.dispatched_tokens
        has_gradients = s.etp > 1 or chunk.is_dedup
        gradient_elements = has_gradients * num_received * model.hidden + 2 * num_tokens
        index_bytes = 2 * num_tokens * INDEX_BYTES
    if routed.num_chunks > 1:  # Gradients of the next chunk arrive.
        exchange = chunk.exchanges[0]
        num_arriving = exchange.num_received + chunk.is_dedup * exchange.num_sent
        gradient_elements += num_arriving * model.hidden
    elements = gradient_elements + peak_expert_elements(s, chunk, on_cpu=on_cpu)
    return elements * s.compute_bytes + index_bytes


def _local_bytes(s: Sizes, routed: RoutedTokens, on_cpu: bool) -> int:
    """Return bytes beside the experts' gradient in the last local chunk, which backward computes
    first.

    Meanwhile the gradients of the last dispatched chunk's results arrive.
    """
    chunk, last = routed.split_chunks()[-1], routed.local_chunks()[-1]
    num_arriving = chunk.exchanges[-1].num_received + chunk.is_dedup * chunk.exchanges[0].num_sent
    elements = num_arriving * s.model.hidden + 2 * last.num_sent
    elements += peak_expert_elements(s, last, on_cpu=on_cpu)
    return elements * s.compute_bytes + 2 * last.num_sent * INDEX_BYTES


def _freed_bytes(s: Sizes, routed: RoutedTokens) -> int:
    """Return bytes that the last local chunk has freed before dispatched chunks, less its tokens'
    gradients."""
    freed_elements = 2 * s.expert_width * routed.local_chunks()[-1].num_sent
    return (freed_elements - s.dispatched_tokens * s.model.hidden) * s.compute_bytes


def peak_expert_elements(
    s: Sizes, routed: RoutedTokens, *, on_cpu: bool, gradients_stay: bool = False
) -> int:
    """Return peak elements of an expert layer's tokens in backward, beside the gradients of its
    results.

    Chunks run one by one; with `gradients_stay`, gradients between the matmuls remain.
    """
    hidden, ffn, chunks = (
        s.model.hidden,
        s.expert_width,
        _slot_chunks(s, routed.slot_tokens, on_cpu),
    )
    result_elements, peak, num_done = sum(routed.slot_tokens) * hidden, 0, 0
    keeps_inputs, kept_width = routed.is_all_to_all or len(chunks) > 1, 2 * ffn * gradients_stay
    for num_slots, num_rows in chunks:
        inner, copied = num_rows * ffn, num_rows * hidden
        before = num_done * kept_width + keeps_inputs * result_elements
        num_done += num_rows
        after = result_elements + num_done * kept_width + routed.is_all_to_all * copied
        after += (not gradients_stay) * 2 * inner
        # A slot's matrix or its gradient may be cast beside them; on a GPU the matrices of all
        # slots.
        matrix = s.num_casts * 2 * ffn * hidden
        weights = matrix if on_cpu else num_slots * matrix
        peak = max(peak, before + copied + max(5 * inner, 4 * inner + matrix), after + weights)
    if not routed.is_all_to_all:  # Last are the sums by token.
        num_sums = routed.exchanges[-1].num_received if routed.is_dedup else s.dispatched_tokens
        peak = max(peak, result_elements + num_done * kept_width + num_sums * hidden)
    return peak


def _slot_chunks(s: Sizes, slot_tokens: Sequence[int], on_cpu: bool) -> list[tuple[int, int]]:
    """Return slots and tokens of each chunk that an expert layer computes at a time; one on a
    GPU."""
    chunk_tokens = EXPERT_CHUNK_BYTES // (2 * s.expert_width * s.compute_bytes)
    limit = chunk_tokens if on_cpu else sum(slot_tokens)
    chunks = [(0, 0)]
    for num_tokens in slot_tokens:
        num_slots, num_rows = chunks[-1]
        if num_rows and num_rows + num_tokens > limit:
            chunks.append((1, num_tokens))
        else:
            chunks[-1] = (num_slots + 1, num_rows + num_tokens)
    return chunks

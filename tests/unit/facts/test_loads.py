"""Destinations of dispatched tokens, and their number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.facts.plan import plan_from_layout
from moesaic.facts.workload.loads import RoutedTokens, routed_by_layer
from moesaic.testing.jobs import tiny_job

OVERLAP = {"overlap_local": True}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"ep": 2}), (4, {"ep": 4}), (8, {"ep": 4}), (4, {"ep": 4, "dispatch_hosts": 2}),
    (8, {"ep": 8, "dispatch_hosts": 2}), (8, {"ep": 8, "dispatch_hosts": 4}),
    (16, {"ep": 8, "dispatch_hosts": 2, "tp": 2}),
    (8, {"ep": 4, "dispatch_hosts": 4}), (8, {"ep": 4, "dispatch_hosts": 2, "tp": 2, "etp": 2}),
    (8, {"ep": 4, **OVERLAP}), (8, {"ep": 8, "dispatch_hosts": 2, **OVERLAP}),
    (8, {"ep": 4, "dispatch_hosts": 2, "tp": 2, "etp": 2, "chunks": 2, **OVERLAP}),
]  # fmt: skip


def route_all_ranks(
    size: int, layout: dict[str, Any], load: Any, **more: object
) -> tuple[list[RoutedTokens], int]:
    """Return the routed tokens of each rank in one expert layer, and the number of all tokens."""
    model = {"layers": 1, "kv_heads": 4, "vocab": 64, "top_k": 3, **more}
    job = tiny_job(model=model, layout=layout, train={"batch": 16})
    plan = plan_from_layout(job.layout, job.model, size)
    routed = [routed_by_layer(job, plan, rank, load)[0] for rank in range(size)]
    return routed, 16 * job.data.sequence * plan.etp


@pytest.mark.parametrize("dispatch", ["all_to_all", "dedup"])
@pytest.mark.parametrize(("size", "layout"), LAYOUTS)
@given(
    weights=st.lists(st.integers(0, 40), min_size=8, max_size=8).filter(
        lambda weights: 0 < 3 * max(weights) <= sum(weights)
    )
)
def test_sent_tokens_match_received_tokens(
    size: int, layout: dict[str, Any], dispatch: str, weights: list[int]
) -> None:
    routed_by_rank, tokens = route_all_ranks(size, {**layout, "dispatch": dispatch}, [weights])
    for rank, routed in enumerate(routed_by_rank):
        for number, exchange in enumerate(routed.exchanges):
            assert rank in exchange.group
            for other, rows in zip(exchange.group, exchange.send_tokens, strict=True):
                assert (
                    routed_by_rank[other]
                    .exchanges[number]
                    .receive_tokens[exchange.group.index(rank)]
                    == rows
                )
            if dispatch == "dedup":  # Expected numbers are rounded one by one.
                assert max(exchange.send_tokens) <= exchange.num_tokens + size
                if "overlap_local" not in layout:
                    assert exchange.num_sent >= exchange.num_tokens * (number > 0) - size
        if dispatch == "all_to_all":
            assert routed.exchanges[-1].num_received == sum(routed.slot_tokens)
        if "overlap_local" in layout:
            last = routed.exchanges[-1] if len(routed.exchanges) == 1 else routed.exchanges[0]
            assert len(routed.exchanges) > 1 or last.send_tokens[last.group.index(rank)] == 0
            chunks = routed.compute_order()
            assert len(chunks) == 2 * routed.num_chunks + 1
            num_tokens = sum(routed.slot_tokens) + sum(routed.local_slot_tokens)
            assert sum(sum(chunk.slot_tokens) for chunk in chunks) == num_tokens
            number = [sum(chunk.slot_tokens) for chunk in chunks[::2]]
            assert max(number) - min(number) <= 1
            slot_tokens = np.array([chunk.slot_tokens for chunk in chunks[::2]])
            assert slot_tokens.sum(axis=0).tolist() == list(routed.local_slot_tokens)
            # Chunks fill slot by slot: later chunks have no slot before the last one of this chunk.
            assert all(
                not slot_tokens[at + 1 :, : int(np.flatnonzero(row)[-1])].any()
                for at, row in enumerate(slot_tokens)
                if row.any()
            )
    first_exchanges = [routed.exchanges[0] for routed in routed_by_rank]
    num_sent = sum(routed.num_sent for routed in routed_by_rank)
    assert num_sent + sum(sum(routed.local_slot_tokens) for routed in routed_by_rank) == tokens * 3
    if dispatch == "all_to_all":
        assert sum(exchange.num_tokens for exchange in first_exchanges) == num_sent
    else:
        assert sum(exchange.num_tokens for exchange in first_exchanges) == tokens


def test_even_dedup_counts_match_random_choices() -> None:
    (routed, *_), tokens = route_all_ranks(
        4, {"ep": 4, "dispatch_hosts": 2, "dispatch": "dedup"}, None
    )
    inter_host, intra_host = routed.exchanges
    # Each host has four of eight experts, each rank two; a token chooses three.
    none_on_host = 4 * 3 * 2 / (8 * 7 * 6)
    assert inter_host.send_tokens == [round(tokens / 4 * (1 - none_on_host))] * 2
    assert inter_host.group == (0, 2)
    assert intra_host.group == (0, 1)
    none_on_rank = 6 * 5 * 4 / (8 * 7 * 6)
    assert intra_host.send_tokens == [2 * round(tokens / 4 * (1 - none_on_rank))] * 2


def test_even_dedup_counts_know_that_tokens_choose_among_few_groups() -> None:
    latent = {"kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    model = {"family": "deepseek_v3", "latent": latent, "expert_groups": 4, "top_expert_groups": 2}
    (routed, *_), tokens = route_all_ranks(
        4, {"ep": 4, "dispatch_hosts": 2, "dispatch": "dedup"}, None, **model
    )
    inter_host, intra_host = routed.exchanges
    # A rank has one of four groups. Of two groups with two experts each, a token chooses three.
    assert intra_host.send_tokens == [2 * round(tokens / 4 / 2)] * 2
    # One of six pairs of groups is on the other host alone.
    assert inter_host.send_tokens == [round(tokens / 4 * 5 / 6)] * 2


def test_even_dedup_counts_leave_out_overlapped_local_tokens() -> None:
    layout = {"ep": 4, "dispatch_hosts": 2, "dispatch": "dedup", **OVERLAP}
    (routed, *_), tokens = route_all_ranks(4, layout, None)
    inter_host, intra_host = routed.exchanges
    # On this host, tokens go to the other rank's two experts.
    none_on_host, none_on_rank = 4 * 3 * 2 / (8 * 7 * 6), 6 * 5 * 4 / (8 * 7 * 6)
    same_host, other_host = (
        round(tokens / 4 * (1 - none)) for none in (none_on_rank, none_on_host)
    )
    assert inter_host.send_tokens == inter_host.receive_tokens == [same_host, other_host]
    # The other host's tokens go to both ranks, this host's to the other rank.
    assert intra_host.send_tokens == [same_host, 2 * same_host]

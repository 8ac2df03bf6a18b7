"""Two hosts of two ranks: what goes over the link between them, and what stays on a host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from benchmarks import layer
from torch import Tensor

from moesaic.dist.world import World
from moesaic.testing.hosts import impossible, met, two_hosts
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import ranks_of

TOLERANCE = 0.03
"""Of bytes without headers: counts of tokens, and what ranks agree on."""


@pytest.fixture
def own_ranks() -> Iterator[Ranks]:
    """Ranks that nobody else needs: they stay on their hosts."""
    pool = Ranks()
    yield pool
    pool.close()


Seen = dict[str, tuple[list[str], Tensor, tuple[int, int]]]


def exchange(world: World, hosts: tuple[str, str]) -> Seen:
    """By form: what carries tokens, what comes back, bytes counted and due."""
    found: Seen = {}
    with met(world, hosts) as world:
        for form, layout in layer.FORMS.items():
            job = layer.layer_job(layout)
            plan = layer.plan_of(job, world)
            one = layer.Pass(job, plan, world)
            names = [carrier.name for carrier in ranks_of(plan, world).carriers]
            found[form] = (names, one(), one.counted())
    return found


@pytest.mark.skipif(bool(impossible()), reason=f"no two hosts here: {impossible()}")
def test_a_token_goes_over_the_link_once(own_ranks: Ranks) -> None:
    with two_hosts() as hosts:
        results = own_ranks.run(4, exchange, hosts)
    for found in results:
        assert [names for names, _, _ in found.values()] == [
            ["gloo"], ["gloo", "memory"], ["gloo"], ["gloo", "memory"],
        ]  # fmt: skip
        straight, *others = (tokens for _, tokens, _ in found.values())
        assert torch.equal(straight, others[0])
        for tokens in others[1:]:
            torch.testing.assert_close(tokens, straight)
    for found in (results[0], results[2]):
        due = {form: due for form, (_, _, (_, due)) in found.items()}
        for form, (_, _, (counted, _)) in found.items():
            assert due[form] <= counted <= (1 + TOLERANCE) * due[form], form
        assert due["by hosts"] == due["straight"]
        # Four of eight experts are on the other host, and hardly a token has none of them there.
        assert due["visits by hosts"] < due["straight"] / 3.5

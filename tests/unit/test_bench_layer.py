"""Theme `layer`: everybody's layer is the dense one, and rows arrive whoever carries them."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from benchmarks import decoding_on_gpu, exchange, measure, on_gpu, peers
from benchmarks import experts as of_experts
from benchmarks.__main__ import main
from benchmarks.peers import DEEPSPEED, LIMITED, OURS, PLAIN, TUTEL, Case, Contender, Work
from torch import Tensor

from moesaic.dist.world import World
from moesaic.testing.ranks import RankFailed, Ranks

SMALL = {
    "even": Case("even", 4, 10, tokens=24, hidden=16),
    "skewed": Case("skewed", 6, 8, skew=2.0, tokens=20, hidden=12),
}


def found_on(world: World, case: Case) -> list[dict[str, Tensor]]:
    work = Work(case, world.rank)
    return [one.found(work) for one in (peers.ours(work, world), peers.plain(work))]


def dense(case: Case) -> list[dict[str, Tensor]]:
    """By rank, what is found where every expert sees every token, in fp64."""
    works = [Work(case, rank) for rank in range(peers.RANKS)]
    gate_up, down = (
        torch.cat([getattr(work, name) for work in works]).double().requires_grad_()
        for name in ("gate_up", "down")
    )
    results = []
    for work in works:
        tokens = work.tokens.detach().double().requires_grad_()
        router = work.gate.double().requires_grad_()
        odds = F.linear(tokens, router).softmax(dim=-1)
        best = torch.zeros_like(odds).scatter(1, odds.topk(peers.TOP_K, dim=-1).indices, 1.0)
        weights = odds * best / (odds * best).sum(dim=-1, keepdim=True)
        gate, up = torch.einsum("th,eih->tei", tokens, gate_up).chunk(2, dim=-1)
        out = torch.einsum("tei,ehi,te->th", F.silu(gate) * up, down, weights)
        out.backward(work.cotangent.double())
        results.append([out.detach(), tokens.grad, router.grad])
    assert gate_up.grad is not None
    assert down.grad is not None
    names = ["tokens' sums", "gradients of tokens", "that of the router"]
    names += ["those of gate and up", "those of down"]
    parts = zip(results, gate_up.grad.chunk(2), down.grad.chunk(2), strict=True)
    return [dict(zip(names, [*one, *grads], strict=True)) for one, *grads in parts]


@pytest.mark.parametrize("name", SMALL)
def test_ours_and_the_plain_loop_are_the_dense_layer(ranks: Ranks, name: str) -> None:
    case = SMALL[name]
    due = dense(case)
    for rank, contenders in enumerate(ranks.run(peers.RANKS, found_on, case)):
        for found in contenders:
            assert found.keys() == due[rank].keys()
            for what, value in found.items():
                far = (value.double() - due[rank][what]).norm() / due[rank][what].norm()
                assert far <= 1e-5, what


@pytest.mark.parametrize("case", peers.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("rank", range(peers.RANKS))
def test_routers_spread_tokens_as_they_say(case: Case, rank: int) -> None:
    found, even = Work(case, rank).loads(), case.tokens * peers.TOP_K // case.experts
    if case.skew:
        assert found.max() > 4 * even
    else:
        assert found.tolist() == [even] * case.experts


def test_the_hottest_expert_is_said() -> None:
    hottest, mean = peers.hottest_of(peers.CASES[-1])
    assert mean == peers.RANKS * 1024 * peers.TOP_K / 16
    assert 7.0 < hottest / mean < 7.5


def test_tokens_go_to_experts_of_both_ranks_and_to_all_pairs() -> None:
    case = peers.CASES[0]
    pairs = {tuple(sorted(pair)) for pair in peers._even(case).tolist()}
    assert len(pairs) == case.experts * (case.experts - 1) // 2


def drops_are_judged(world: World, wrong: bool, dropped: int) -> float:
    """What is said of a plain loop whose router may be another one, and that drops so many."""
    case = SMALL["even"]
    work = Work(case, world.rank)
    other = peers.plain(work)
    if wrong:
        with torch.no_grad():
            other.router.mul_(1.5)
    other.lost = lambda: torch.tensor(dropped)
    both: dict[str, Contender] = {OURS: peers.ours(work, world), PLAIN: other}
    return peers.dropped_by(work, both)[PLAIN]


def test_nobody_is_timed_who_drops_nothing_and_finds_something_else(ranks: Ranks) -> None:
    assert ranks.run(peers.RANKS, drops_are_judged, False, 0) == [0.0, 0.0]
    assigned = SMALL["even"].tokens * peers.TOP_K
    assert ranks.run(peers.RANKS, drops_are_judged, True, 3) == [3 / assigned] * 2
    with pytest.raises(RankFailed, match="Unlike: even, a plain loop: "):
        ranks.run(peers.RANKS, drops_are_judged, True, 0)


def test_the_goal_is_for_the_quickest_that_drops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda: [])
    monkeypatch.setattr(peers, "version", lambda name: name)
    seconds = {OURS: 1.0, PLAIN: 3.0, DEEPSPEED: 2.0, TUTEL: 4.0}
    seconds |= {DEEPSPEED + LIMITED: 0.5, TUTEL + LIMITED: 2.5}
    dropped = {name: 0.25 if name == DEEPSPEED + LIMITED else 0.0 for name in seconds}
    times = measure.Times({name: [one] * 3 for name, one in seconds.items()})
    case = replace(SMALL["even"], bar=">= 1.5", bars=((TUTEL, ">= 5.0"),))
    first, *each = peers.rows_of(case, times, dropped, 3)
    assert (first.value, first.holds) == (2.0, True)
    assert first.against.startswith("DeepSpeed, the quickest of 4 that drop nothing")
    assert [row.value for row in each] == [3.0, 2.0, 0.5, 4.0, 2.5]
    assert [row.holds for row in each] == [None, None, None, False, None]
    assert "capacity factor 1, 25% of assignments dropped" in each[2].against


def test_a_peer_that_is_not_there_is_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda: [DEEPSPEED, TUTEL])
    times = measure.Times({OURS: [1.0] * 3, PLAIN: [3.0] * 3})
    case = replace(SMALL["even"], bar=">= 1.5", bars=((TUTEL, ">= 5.0"),))
    first, plain, *others = peers.rows_of(case, times, {OURS: 0.0, PLAIN: 0.0}, 3)
    assert plain.value == 3.0
    for row in (first, *others):
        assert (row.value, row.holds) == (None, None)
        assert "not installed; benchmarks/layer.md says how" in row.against
    assert [row.bar for row in (first, *others)] == [">= 1.5", "", "", ">= 5.0", ""]


def test_a_rank_sends_what_its_case_says() -> None:
    every = list(exchange.cases())
    assert len({case.name for case in every}) == len(every) == 16
    for case in every:
        assert 4 * exchange.WIDTH * sum(case.send()) == case.bytes
        assert (len(set(case.send())) == 1) == case.even


def exchanged(world: World, case: exchange.Case, memory: str, spoilt: str) -> None:
    carrier = world.carrier([range(world.size)])
    assert carrier is not None
    assert carrier.name == "memory"
    one = exchange.Exchange(world, carrier, case, Path(memory))
    if spoilt == "rows":
        one._rows.add_(1.0)
    elif spoilt == "copies":
        one._put.clear()
    one.check()


@pytest.mark.parametrize("size", exchange.WORLDS)
@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize(("spoilt", "way"), [("", ""), ("rows", "ours"), ("copies", "copies")])
def test_all_ways_bring_the_same_rows(
    ranks: Ranks, size: int, even: bool, spoilt: str, way: str
) -> None:
    case = exchange.Case("small", size, 64 * 4 * exchange.WIDTH, even)
    with tempfile.TemporaryDirectory(dir=exchange.SHARED) as memory:
        if not spoilt:
            ranks.run(size, exchanged, case, memory, spoilt)
            return
        with pytest.raises(RankFailed, match=rf"Unlike: rank \d: {way} brought other rows"):
            ranks.run(size, exchanged, case, memory, spoilt)


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["layer", "--parts", "peers", "--rounds", "0"])
    assert "--rounds 0: a figure needs 1 or more" in capsys.readouterr().err


@pytest.mark.parametrize("skewed", [False, True])
def test_grouped_products_as_a_person_calls_them_are_the_layer(skewed: bool) -> None:
    shape = of_experts.Shape("small", 16, 24, 6, 2)
    layer = of_experts.Layer(of_experts.Case(shape, torch.float32, 20, skewed))
    found = []
    for forward in (layer.ours, lambda: on_gpu.plain(layer)):
        out = forward()
        leaves = layer.tokens, layer.weights, layer.bank.arena
        found.append((out, *torch.autograd.grad(out, leaves, layer.grad)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_decoding_reads_what_its_calls_multiply(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = of_experts.Shape("small", 16, 24, 12, 2)
    case = of_experts.Case(shape, torch.float32, tokens, steps=of_experts.NUMBERS)
    layer, read = of_experts.Layer(case), list[torch.Tensor]()
    monkeypatch.setattr(decoding_on_gpu, "read_over", read.append)
    reading = decoding_on_gpu.reading(layer)
    for choices in case.choices():
        reading()
        assert torch.equal(read[-1], layer.bank.arena[choices.unique()])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_its_figures_are_untried() -> None:
    rows = list(on_gpu.rows(3))
    assert len({row.name for row in rows}) == len(rows) == 4 * 3 * 2 * 2 * 5
    assert {row.value for row in rows} == {None}
    assert {row.against for row in rows} == {"untried: no GPU here"}
    assert sorted({row.bar for row in rows}) == ["", ">= 0.65", ">= 0.75"]
    rows = list(decoding_on_gpu.rows(3))
    assert len({row.name for row in rows}) == len(rows) == 4 * 4 * 3
    assert {row.against for row in rows} == {"untried: no GPU here"}

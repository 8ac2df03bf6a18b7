"""Theme `layer`: everybody's layer is the dense one, and rows arrive whoever carries them."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from benchmarks import exchange, experts, hosts, measure, on_gpu, overlap, peers
from benchmarks.peers import DEEPSPEED, OURS, PLAIN, TUTEL, Case, Contender, Work
from torch import Tensor

from moesaic.dist.world import World
from moesaic.testing.ranks import RankFailed, RankPool

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
def test_ours_and_the_plain_loop_are_the_dense_layer(ranks: RankPool, name: str) -> None:
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


def compared(world: World, wrong: bool) -> None:
    """Compare ours with a plain loop whose router may be another one."""
    case = SMALL["even"]
    work = Work(case, world.rank)
    other = peers.plain(work)
    if wrong:
        with torch.no_grad():
            other.router.mul_(1.5)
    both: dict[str, Contender] = {OURS: peers.ours(work, world), PLAIN: other}
    peers.compare(work, both)


def test_contenders_that_find_something_else_are_refused(ranks: RankPool) -> None:
    ranks.run(peers.RANKS, compared, False)
    with pytest.raises(RankFailed, match="Unlike: even, a plain loop: "):
        ranks.run(peers.RANKS, compared, True)


def test_claims_are_for_the_quickest_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda: [])
    monkeypatch.setattr(peers, "version", lambda name: name)
    seconds = {OURS: 1.0, PLAIN: 1.5, DEEPSPEED: 2.0, TUTEL: 6.0}
    times = measure.Times({name: [one] * 3 for name, one in seconds.items()})
    each = list(peers.rows_of(SMALL["even"], times))
    assert [row.value for row in each] == [1.5, 2.0, 6.0]
    even, skewed = peers.claims(each, list(peers.rows_of(SMALL["skewed"], times)))
    assert (even.value, even.bar, even.holds) == (1.5, peers.EVEN_BAR, True)
    assert (skewed.value, skewed.bar, skewed.holds) == (2.0, peers.SKEWED_BAR, False)


def test_a_peer_that_is_not_there_is_untried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "missing", lambda: [DEEPSPEED, TUTEL])
    times = measure.Times({OURS: [1.0] * 3, PLAIN: [3.0] * 3})
    plain, *others = each = list(peers.rows_of(SMALL["even"], times))
    assert plain.value == 3.0
    for row in (*others, *peers.claims(each, each)):
        assert (row.value, row.holds) == (None, None)
        assert "not installed; benchmarks/layer.md says how" in row.against


def exchanged(world: World, case: exchange.Case, memory: str, spoilt: str) -> None:
    carrier = world.transport([range(world.size)])
    assert carrier is not None
    assert carrier.name == "memory"
    one = exchange.Exchange(world, carrier, case, Path(memory))
    if spoilt == "rows":
        one._rows.add_(1.0)
    elif spoilt == "replicas":
        one._put.clear()
    one.check()


@pytest.mark.parametrize(
    ("size", "even", "spoilt", "way"),
    [
        (2, False, "", ""), (4, True, "", ""), (2, False, "rows", "ours"),
        (4, True, "replicas", "copies"),
    ],
)  # fmt: skip
def test_all_ways_bring_the_same_rows(
    ranks: RankPool, size: int, even: bool, spoilt: str, way: str
) -> None:
    case = exchange.Case("small", size, 64 * 4 * exchange.WIDTH, even)
    with tempfile.TemporaryDirectory(dir=exchange.SHARED) as memory:
        if not spoilt:
            ranks.run(size, exchanged, case, memory, spoilt)
            return
        with pytest.raises(RankFailed, match=rf"Unlike: rank \d: {way} brought other rows"):
            ranks.run(size, exchanged, case, memory, spoilt)


@pytest.mark.parametrize(("dtype", "skewed"), [("fp32", False), ("bf16", True)])
def test_a_case_is_held_against_its_limit_and_transformers(dtype: str, skewed: bool) -> None:
    """Both sides step with the same choices, which are others in every step."""
    shape = experts.Shape("small", 16, 24, 6, 2)
    work = experts.Work(experts.Case(shape, dtype, 20, skewed, steps=3))
    for _ in range(2):
        ours, theirs = work.passes.run()[0].detach(), work.theirs("eager").detach()
        assert (ours - theirs).norm() <= experts.CLOSE * theirs.norm()
    limit, peer = experts.rows_of(work, "small", 1, patience_s=0.0)
    assert limit.name == "small, forward and backward, of a dense product"
    assert peer.name == "small, forward and backward, against transformers"
    assert min(limit.value, peer.value) > 0
    assert work.passes.x.grad is None
    assert work.layer.moe.bank.arena.grad is None


def test_decoding_reads_what_its_calls_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, read = experts.Shape("small", 16, 24, 12, 2), list[slice]()
    monkeypatch.setattr(measure, "FOREIGN_SHARE", 9.0)  # No round is repeated.
    monkeypatch.setattr(experts.ExpertLayer, "read", lambda _, slots: read.append(slots))
    row = experts._decoding(shape, "fp32", 1)
    assert row.name == "small experts, fp32, one token at a time, of reading their weights"
    case = experts.Case(shape, "fp32", 1, steps=experts.DECODED)
    for choices, slots in zip(case.choices(), read[: experts.DECODED], strict=True):
        assert choices[0].tolist() == list(range(12))[slots]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_its_figures_are_untried() -> None:
    rows = list(on_gpu.rows(3))
    assert len({row.name for row in rows}) == len(rows) == 1 + 4 * 3
    assert {row.value for row in rows} == {None}
    assert {row.against for row in rows} == {"untried: no GPU here"}
    assert [row.bar for row in rows] == [on_gpu.BAR] + [""] * 12


@pytest.mark.parametrize(("module", "bar"), [(hosts, hosts.BAR), (overlap, overlap.HIDDEN_BAR)])
def test_without_two_hosts_figures_are_untried(
    module: ModuleType, bar: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "unsupported_reason", lambda: "no namespaces")
    claim, *details = module.rows(3)
    assert (claim.value, claim.bar, claim.holds) == (None, bar, None)
    assert all(row.value is None for row in details)

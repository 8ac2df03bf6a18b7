"""What multiplies experts on devices that leave a choice: what all ranks find, whatever befalls one
of them, and what a run goes on with. Where kernels are tried for real, Triton interprets them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moesaic.base.errors import UserError
from moesaic.base.events import read_events
from moesaic.dist.products import engine
from moesaic.dist.world import World
from moesaic.facts.job.train import Products
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.nn import trial
from moesaic.nn.bank import Bank
from moesaic.nn.trial import Load, Trial
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.testing.watch import Silent
from moesaic.train import products
from moesaic.train.assemble import assemble
from moesaic.train.jobfile import LoadedJob
from moesaic.train.trainer import train

CPU = torch.device("cpu")
TRYING = (
    "experts: trying kernels of our own, where they can be used "
    '(layout.products = "torch" does without)'
)
TORCH = (
    f"experts: so this run has {engine(CPU, torch.float32)}, also when it goes on in this layout; "
    "a new run tries again"
)
DENSE = {"family": "llama", "experts": 0, "top_k": 0}
LATE = {
    "family": "deepseek_v3", "kv_heads": 4, "layers": 2, "dense_layers": 1, "shared": 1,
    "groups": 4, "top_groups": 2, "latent": {"width": 10, "rotary": 4, "value": 6},
}  # fmt: skip
"""A model whose first layer has no experts."""


@dataclass(frozen=True)
class Rank:
    """What a rank is to find."""

    torch: float = 3e-3
    triton: float = 1e-3
    fault: str | Exception | None = None
    late: Exception | None = None
    """Raised while it is timed."""


@contextmanager
def a_choice(rank: Rank) -> Iterator[list[tuple[str, int]]]:
    """As on devices that leave one, where that is found; what was asked, with how many tokens."""
    asked = list[tuple[str, int]]()

    class Found:
        def __init__(self, bank: Bank, loads: list[Load]) -> None:
            self.tokens = loads[0].tokens

        def fault(self) -> str | None:
            asked.append(("fault", self.tokens))
            if isinstance(rank.fault, Exception):
                raise rank.fault
            return rank.fault

        def seconds(self) -> dict[Products, float]:
            asked.append(("seconds", self.tokens))
            if rank.late is not None:
                raise rank.late
            return {"torch": rank.torch, "triton": rank.triton}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "leaves_choice", lambda _: True)
        patch.setattr(products, "obstacle", lambda _: None)
        patch.setattr(products, "Trial", Found)
        yield asked


def begun(
    world: World, tables: dict[str, Any], found: list[Rank], before: str | None = None
) -> tuple[Any, ...]:
    """What multiplies, by the plan and by the layers' banks; what was found, told and asked."""
    told = list[str]()
    tables = {"train": {"precision": "fp32", "micro_batches": 2}, **tables}
    job = tiny_job(**tables)
    plan, source = lay_out(job.layout, job.model, world.size), InitialSource(job.seed, 0.2)
    with a_choice(found[world.rank]) as asked:
        run = assemble(job, plan, world, source, say=told.append, before=before)
    by = {moe.bank.by for _, moe in run.model.expert_layers()}
    run.close()
    return run.plan.products, by, run.tried.seconds, run.tried.faults, told, asked


@pytest.mark.parametrize(
    ("layout", "found", "taken", "times"),
    [
        ({"ep": 2}, [Rank(3e-3, 2e-3), Rank(3e-3, 1e-3)], "triton", (3e-3, 2e-3)),
        ({"ep": 2}, [Rank(3e-3, 1e-3), Rank(2e-3, 4e-3)], "torch", (3e-3, 4e-3)),
        ({"pp": 2}, [Rank(3e-3, 1e-3), Rank(4e-3, 1e-3)], "triton", (4e-3, 1e-3)),
        ({}, [Rank(1e-3, 1.02e-3), Rank(1e-3, 1e-3)], "triton", (1e-3, 1.02e-3)),
    ],
)
def test_the_slowest_rank_says_it_for_all(
    ranks: Ranks, layout: dict[str, Any], found: list[Rank], taken: str, times: tuple[float, float]
) -> None:
    names = [engine(CPU, torch.float32, by) for by in ("torch", "triton")]
    each = [f"{1e3 * s:.3g} ms by {name}" for s, name in zip(times, names, strict=True)]
    # Of eight samples of 12 tokens, in two micro-batches, on two ranks or in two parts; where
    # experts are shared out, a token of two rows is two.
    tokens = 24 if not layout else 48
    for plan, banks, seconds, faults, told, asked in ranks.run(2, begun, {"layout": layout}, found):
        assert (plan, banks) == (taken, {taken})
        assert (seconds, faults) == (dict(zip(("torch", "triton"), times, strict=True)), {})
        assert asked == [("fault", tokens), ("seconds", tokens)]
        assert told == [TRYING, f"experts of a layer, there and back: {', '.join(each)}"]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([Rank(fault="no room"), Rank()], {"no room": [0]}),
        ([Rank(), Rank(fault="no room")], {"no room": [1]}),
        ([Rank(), Rank(fault=OSError("full"))], {"OSError: full": [1]}),
        ([Rank(late=RuntimeError("lost")), Rank()], {"RuntimeError: lost": [0]}),
        ([Rank(fault="a"), Rank(fault="b")], {"a": [0], "b": [1]}),
        ([Rank(fault="a"), Rank(fault="a")], {"a": [0, 1]}),
    ],
)
def test_what_is_wrong_on_one_rank_is_taken_on_none(
    ranks: Ranks, found: list[Rank], why: dict[str, list[int]]
) -> None:
    """And it is told by all, of which a person sees the first; nobody waits for anybody."""
    for plan, banks, seconds, faults, told, _ in ranks.run(2, begun, {}, found):
        assert (plan, banks, seconds, faults) == ("torch", {"torch"}, {}, why)
        where = ["" if len(on) == 2 else f"on rank {on[0]}: " for on in why.values()]
        assert told == [
            TRYING,
            *(
                f"experts: kernels of our own are not taken: {on}{fault}"
                for on, fault in zip(where, why, strict=True)
            ),
            TORCH,
        ]


def test_many_words_are_few_lines(ranks: Ranks) -> None:
    """Of ranks that tell of their own memory each, or of a compiler, whose words are pages and end
    with what is wrong; all of them are kept."""
    each = [
        RuntimeError(f"at {rank}:\n" + "  tl.dot(a, b)\n" * 40 + "no room") for rank in range(4)
    ]
    *_, faults, told, _ = ranks.run(4, begun, {}, [Rank(fault=one) for one in each])[0]
    first, *firsts, more, torchs = told
    assert (first, torchs) == (TRYING, TORCH)
    for rank, line in enumerate(firsts):
        about = f"on rank {rank}: RuntimeError: at {rank}: tl.dot"
        assert line.startswith(f"experts: kernels of our own are not taken: {about}")
        assert line.endswith(" no room")
        assert len(line) < 400
    assert len(firsts) == 3
    assert more == "experts: 1 more such faults are in the event run_start"
    assert list(faults.values()) == [[0], [1], [2], [3]]
    assert all(words.count("tl.dot") == 40 for words in faults)


@pytest.mark.parametrize("found", ["RuntimeError: lost", RuntimeError("lost"), None])
def test_a_device_that_is_lost_is_told_with_the_remedy(
    found: str | Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever met it first: kernels, or who waited for them."""

    def work() -> str | None:
        if isinstance(found, Exception):
            raise found
        return found

    def lost(_: torch.device) -> float:
        raise RuntimeError("lost")

    monkeypatch.setattr(products.devices, "now", lost)
    words = r'rank 0 unusable \(RuntimeError: lost\): set layout.products = "torch"'
    with pytest.raises(UserError, match=words):
        products._on_all(World.solo(), work)


def test_a_peer_that_is_gone_is_no_fault_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(products.dist, "all_gather_object", gone)
    world = replace(World.solo(), everyone=object())
    with pytest.raises(RuntimeError, match="closed by peer"):
        products._on_all(world, lambda: "no room")


def test_ranks_without_experts_have_no_say(ranks: Ranks) -> None:
    tables = {"model": LATE, "layout": {"pp": 2}}
    first, second = ranks.run(2, begun, tables, [Rank(9.0, 9.0, fault="none"), Rank()])
    times = {"torch": 3e-3, "triton": 1e-3}
    assert first[:4] == ("triton", set(), times, {})
    assert second[:4] == ("triton", {"triton"}, times, {})
    assert first[-2] == second[-2] != []
    assert (first[-1], second[-1]) == ([], [("fault", 48), ("seconds", 48)])


@pytest.mark.parametrize(
    "tables",
    [{"layout": {"products": "torch"}}, {"model": DENSE}, {"train": {"precision": "fp64"}}],
)
def test_what_is_said_or_not_there_is_not_tried(ranks: Ranks, tables: dict[str, Any]) -> None:
    said = tables.get("layout", {}).get("products", "auto")
    ((plan, banks, *found),) = ranks.run(1, begun, tables, [Rank()])
    assert (plan, found) == (said, [{}, {}, [], []])
    assert banks <= {said}


@pytest.mark.parametrize(
    ("before", "fault", "taken", "asks"),
    [
        ("torch", None, "torch", []),
        ("triton", None, "triton", ["fault"]),
        ("triton", "wrong", "torch", ["fault"]),
        ("fp8", None, "triton", ["fault", "seconds"]),
        ("auto", None, "triton", ["fault", "seconds"]),
    ],
)
def test_what_was_before_is_kept_where_it_is_right(
    ranks: Ranks, before: str, fault: str | None, taken: str, asks: list[str]
) -> None:
    found = [Rank(fault=fault), Rank()]
    each = ranks.run(2, begun, {}, found, before)
    assert [(one[0], [what for what, _ in one[-1]]) for one in each] == [(taken, asks)] * 2


def trained(
    world: World, text: str, out: str, resume: str | None, found: Rank, changes: dict[str, Any]
) -> list[str]:
    """What was asked in a run of two steps, or of two more; torch multiplies, for here is no
    other."""
    job = tiny_job(
        model={"vocab": 260},
        data={"path": text, "sequence": 16, "cache": str(Path(text).parent / "cache")},
        train={"steps": 4 if resume else 2, "batch": 8, "precision": "fp32"},
        log={"tensorboard": False}, **changes,
    )  # fmt: skip
    with a_choice(found) as asked:
        train(LoadedJob(job, "", []), Path(out), resume, world, Silent())
    return [what for what, _ in asked]


def test_a_run_goes_on_with_what_it_had(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    """In the same layout; else it is tried anew. Its plan and its events say so."""
    out, slower, faster = tmp_path / "run", Rank(1e-3, 3e-3), Rank(3e-3, 1e-3)
    both = ["fault", "seconds"]
    assert ranks.run(2, trained, str(text), str(out), None, slower, {}) == [both] * 2
    saved = str(out / "checkpoints" / "step-00000002")
    assert ranks.run(2, trained, str(text), str(out), "auto", faster, {}) == [[]] * 2
    assert json.loads((out / "plan.json").read_text())["products"] == "torch"
    for layout in ({"ep": 2}, {"products": "torch"}):
        other, changes = tmp_path / "-".join(layout), {"layout": layout}
        again = ranks.run(2, trained, str(text), str(other), saved, slower, changes)
        assert again == [both if "ep" in layout else []] * 2
    # What a job had named says nothing of what is fast.
    other, named = tmp_path / "named", {"layout": {"products": "torch"}}
    assert ranks.run(2, trained, str(text), str(other), None, slower, named) == [[]] * 2
    assert ranks.run(2, trained, str(text), str(other), "auto", slower, {}) == [both] * 2
    starts = [
        one["products"]
        for one in read_events(out / "events" / "rank-0.jsonl")
        if one["event"] == "run_start"
    ]
    assert [one["seconds"] for one in starts] == [{"torch": 1e-3, "triton": 3e-3}, {}]


def few(self: Trial, load: Load) -> Iterator[tuple[Any, Any]]:
    """Of what is tried: interpreted it takes long."""
    some = replace(load, tokens=load.tokens | 1)
    yield self._uneven(some, {0}), self._uneven(some, {1})


def stepped(world: World, tables: dict[str, Any]) -> tuple[Any, ...]:
    """What kernels are found to be, for real, and two steps of a run that then takes torch; the
    same of a run that has tried nothing."""
    job, found, ends = tiny_job(**tables), [], []
    plan, source = lay_out(job.layout, job.model, world.size), InitialSource(job.seed, 0.2)
    samples = RandomSamples(job.model.vocab, job.data.sequence)
    for tried in (True, False):
        torch.manual_seed(3)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(products, "leaves_choice", lambda _, so=tried: so)
            patch.setattr(products, "obstacle", lambda _: None)
            patch.setattr(products, "fastest", lambda _: "torch")
            patch.setattr(trial, "_ROUNDS", 1)
            patch.setattr(Trial, "_tries", few)
            run = assemble(job, plan, world, source)
        losses = [run.step(samples).loss for _ in range(2)]
        pieces = {piece.key: piece.tensor.clone() for piece in run.state().pieces}
        run.close()
        found.append((run.tried.faults, sorted(run.tried.seconds)))
        ends.append((losses, pieces, torch.get_rng_state()))
    (losses, pieces, chances), (due, due_pieces, due_chances) = ends
    alike = all(one.equal(due_pieces[key]) for key, one in pieces.items())
    return found, losses == due, alike, chances.equal(due_chances)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        pytest.param({}, "fp16", id="copies"),
        pytest.param({"shard": 2}, "fp32", id="sharded", marks=pytest.mark.soak),
        pytest.param({"ep": 2, "chunks": 2}, "fp32", id="chunks"),
        pytest.param({"pp": 2}, "fp32", id="two parts", marks=pytest.mark.soak),
        pytest.param({"tp": 2, "etp": 2}, "fp32", id="sliced", marks=pytest.mark.soak),
    ],
)
def test_a_trial_leaves_no_trace(ranks: Ranks, layout: dict[str, Any], precision: str) -> None:
    """Kernels are right in every layout, and the run is the same to the bit as without."""
    pytest.importorskip("triton")
    recompute = "pp" not in layout
    train = {"precision": precision, "micro_batches": 2, "recompute": recompute}
    tables = {"layout": layout, "train": train, "model": {"vocab": 60}}
    for found, *alike in ranks.run(2, stepped, tables):
        assert found == [({}, ["torch", "triton"]), ({}, [])]
        assert alike == [True, True, True]

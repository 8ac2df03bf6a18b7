"""What multiplies experts on devices that leave a choice: what the slowest rank says, on all of
them, and what a run goes on with. Which is the faster is said here: no device here has both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from moesaic.base.events import read_events
from moesaic.dist.products import engine
from moesaic.dist.world import World
from moesaic.facts.job.train import Products
from moesaic.facts.plan import lay_out
from moesaic.models.initial import InitialSource
from moesaic.nn.trial import Load, Tried
from moesaic.testing.jobs import tiny_job
from moesaic.testing.ranks import Ranks
from moesaic.testing.watch import Silent
from moesaic.train import products
from moesaic.train.assemble import assemble
from moesaic.train.jobfile import LoadedJob
from moesaic.train.trainer import train

ONLY_TORCH = Tried({"torch": 1.0}, {"triton": "no room"})
NO_CHOICE = Tried()
CPU = torch.device("cpu")
DENSE = {"family": "llama", "experts": 0, "top_k": 0}


LATE = {
    "family": "deepseek_v3", "kv_heads": 4, "layers": 2, "dense_layers": 1, "shared": 1,
    "groups": 4, "top_groups": 2, "latent": {"width": 10, "rotary": 4, "value": 6},
}  # fmt: skip
"""A model whose first layer has no experts."""


@contextmanager
def a_choice(found: Tried) -> Iterator[list[int]]:
    """As on devices that leave one, of which that was found; tokens that were tried."""
    tokens = list[int]()

    def tried(_: object, load: Load) -> Tried:
        tokens.append(load.tokens)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "leaves_choice", lambda _: True)
        patch.setattr(products, "tried", tried)
        yield tokens


def begun(
    world: World, tables: dict[str, Any], found: list[Tried]
) -> tuple[str, set[str], dict[str, float], list[str], list[int]]:
    """What multiplies, by the plan and by the layers' banks; what the slowest rank takes; what was
    told; tokens that were tried."""
    told = list[str]()
    job = tiny_job(train={"precision": "fp32", "micro_batches": 2}, **tables)
    plan, source = lay_out(job.layout, job.model, world.size), InitialSource(job.seed, 0.2)
    with a_choice(found[world.rank]) as tokens:
        run = assemble(job, plan, world, source, say=told.append)
    by = {moe.bank.by for _, moe in run.model.expert_layers()}
    run.close()
    return run.plan.products, by, dict(run.tried_s), told, tokens


def of(torch: float, triton: float) -> Tried:
    return Tried({"torch": torch, "triton": triton})


@pytest.mark.parametrize(
    ("layout", "found", "taken", "times"),
    [
        ({"ep": 2}, [of(3e-3, 2e-3), of(3e-3, 1e-3)], "triton", {"torch": 3e-3, "triton": 2e-3}),
        ({"ep": 2}, [of(3e-3, 1e-3), of(2e-3, 4e-3)], "torch", {"torch": 3e-3, "triton": 4e-3}),
        ({"pp": 2}, [of(3e-3, 1e-3), of(4e-3, 1e-3)], "triton", {"torch": 4e-3, "triton": 1e-3}),
        ({}, [of(3e-3, 1e-3), ONLY_TORCH], "torch", {"torch": 1.0}),
        ({}, [of(3e-3, 1e-3), NO_CHOICE], "torch", {"torch": 3e-3}),
        ({}, [NO_CHOICE, NO_CHOICE], "torch", {}),
    ],
)
def test_the_slowest_rank_says_it_for_all(
    ranks: Ranks, layout: dict[str, Any], found: list[Tried], taken: str, times: dict[str, float]
) -> None:
    names = {by: engine(CPU, torch.float32, by) for by in times}
    each = [f"{1e3 * seconds:.3g} ms by {names[by]}" for by, seconds in times.items()]
    for rank, (plan, banks, seconds, told, tokens) in enumerate(
        ranks.run(2, begun, {"layout": layout}, found)
    ):
        assert (plan, banks, seconds) == (taken, {taken}, times)
        # Of eight samples of 12 tokens, in two micro-batches, on two ranks or in two parts; where
        # experts are shared out, a token of two rows is two.
        assert tokens == [{"ep": 48, "pp": 48}.get(next(iter(layout), ""), 24)]
        assert told == [
            *("experts: kernels of our own cannot be taken here: no room" for _ in
              found[rank].faults),
            *[f"experts of a layer, there and back: {', '.join(each)}"] * (len(each) > 1),
        ]  # fmt: skip


def test_ranks_without_experts_have_no_say(ranks: Ranks) -> None:
    tables = {"model": LATE, "layout": {"pp": 2}}
    found = ranks.run(2, begun, tables, [of(1.0, 1.0), of(3e-3, 1e-3)])
    assert [one[:3] for one in found] == [
        ("triton", banks, {"torch": 3e-3, "triton": 1e-3}) for banks in (set(), {"triton"})
    ]
    assert [tokens for *_, tokens in found] == [[], [48]]


@pytest.mark.parametrize("tables", [{"layout": {"products": "torch"}}, {"model": DENSE}])
def test_what_is_said_or_not_there_is_not_tried(ranks: Ranks, tables: dict[str, Any]) -> None:
    said = tables.get("layout", {}).get("products", "auto")
    for plan, banks, seconds, told, tokens in ranks.run(1, begun, tables, [of(3e-3, 1e-3)]):
        assert (plan, seconds, told, tokens) == (said, {}, [], [])
        assert banks <= {said}


def trained(
    world: World, text: str, out: str, resume: str | None, found: Tried, changes: dict[str, Any]
) -> list[int]:
    """Tokens that were tried in a run of two steps, or of two more; torch multiplies, for here is
    no other."""
    job = tiny_job(
        model={"vocab": 260},
        data={"path": text, "sequence": 16, "cache": str(Path(text).parent / "cache")},
        train={"steps": 4 if resume else 2, "batch": 8, "precision": "fp32"},
        log={"tensorboard": False}, **changes,
    )  # fmt: skip
    with a_choice(found) as tokens:
        train(LoadedJob(job, "", []), Path(out), resume, world, Silent())
    return tokens


def test_a_run_goes_on_with_what_it_had(ranks: Ranks, text: Path, tmp_path: Path) -> None:
    """In the same layout; else it is tried anew. Its plan and its events say so."""
    out = tmp_path / "run"
    torch_is, kernels_are = of(1e-3, 3e-3), of(3e-3, 1e-3)
    assert ranks.run(2, trained, str(text), str(out), None, torch_is, {}) == [[64]] * 2
    saved = str(out / "checkpoints" / "step-00000002")
    assert ranks.run(2, trained, str(text), str(out), "auto", kernels_are, {}) == [[]] * 2
    assert json.loads((out / "plan.json").read_text())["products"] == "torch"
    other = tmp_path / "other"
    changes = {"layout": {"ep": 2}}
    again = ranks.run(2, trained, str(text), str(other), saved, torch_is, changes)
    assert again == [[128]] * 2
    starts = [
        one["experts_s"]
        for one in read_events(out / "events" / "rank-0.jsonl")
        if one["event"] == "run_start"
    ]
    assert starts == [torch_is.seconds, {}]


def test_a_run_that_has_left_eight_bits_tries_anew() -> None:
    """What is kept is what may be taken unasked."""
    job = tiny_job()
    plan = lay_out(job.layout, job.model, 1)
    with a_choice(NO_CHOICE):
        kept = {one: products.as_left(plan, one, CPU).products for one in get_args(Products)}
        pinned = plan.model_copy(update={"products": "torch"})
        assert products.as_left(pinned, "triton", CPU) == pinned
    assert kept == {"torch": "torch", "triton": "triton", "fp8": "auto"}
    assert products.as_left(plan, "triton", CPU) == plan  # Which knows no other than its own.

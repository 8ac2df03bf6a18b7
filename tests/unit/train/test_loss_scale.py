"""Loss scale of fp16: every layer skips an overflow alike, and only the step is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moesaic.base.errors import DivergedError
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.runs import overflow_gradients, start_run
from moesaic.testing.states import live_values
from moesaic.train import loss_scale
from moesaic.train.assemble import LMRun
from moesaic.train.optim import learning_rate

SIGMOID = {"family": "deepseek_v3", "kv_heads": 4, "dense_layers": 1, "shared_experts": 1,
           "latent": {"kv_lora_rank": 10, "qk_rope_head_dim": 4, "v_head_dim": 6}}  # fmt: skip


def start(counters: dict[str, int] | None = None, **tables: dict[str, Any]) -> LMRun:
    tables["train"] = {"precision": "fp16", **tables.get("train", {})}
    return start_run(tiny_job(**tables), counters=counters)


def samples() -> RandomSamples:
    return RandomSamples(61, 12)


def copy_state(run: LMRun) -> dict[str, torch.Tensor]:
    return {shard.key: live_values(shard).clone() for shard in run.state().shards}


def counters_at(exponent: int, **more: int) -> dict[str, int]:
    return {"step": 0, "samples": 0, "tokens": 0, "loss_scale_exponent": exponent, **more}


def test_an_overflow_changes_nothing_but_counters() -> None:
    run = start(counters_at(60, loss_scale_growth_tracker=7), model=SIGMOID)
    before = copy_state(run)
    facts = run.step(samples())
    assert (facts.is_skipped, facts.loss_scale) == (True, 2.0**60)
    assert not torch.tensor(facts.grad_norm).isfinite()
    assert torch.tensor(facts.loss).isfinite(), "the loss of a skipped step is still reported"
    after = copy_state(run)
    assert all(torch.equal(after[key], before[key]) for key in before)
    assert run.counters == counters_at(59, loss_scale_growth_tracker=0, skipped=1) | {
        "step": 1, "samples": 8, "tokens": facts.tokens,
    }  # fmt: skip
    assert all(item.parameter.grad is None for item in run.part.trainable)


def test_the_first_update_after_skipped_steps_equals_an_unskipped_one() -> None:
    """Adam counts updates; the schedule and the data count steps."""
    lost, clean = start(counters_at(30), train={"clip": 0.0}), start(train={"clip": 0.0})
    steps = 0
    while lost.step(samples()).is_skipped:
        steps += 1
    assert steps == lost.counters["skipped"] > 3
    assert lost.counters["loss_scale_exponent"] == 30 - steps
    job = clean.job
    rate = learning_rate(steps + 1, job.train.steps, job.optimizer.lr, job.schedule)
    clean.counters |= {"samples": 8 * steps, "step": steps, "skipped": steps}
    facts = clean.step(samples())
    assert facts.lr == rate
    a, b = copy_state(lost), copy_state(clean)
    # Scales are powers of two, so updates agree except for values that underflow in fp16.
    for key in a:
        assert torch.linalg.vector_norm(a[key] - b[key]) <= 2e-3 * torch.linalg.vector_norm(b[key])
    again = start(counters_at(30 - steps, skipped=steps), train={"clip": 0.0})
    again.counters |= {"samples": 8 * steps, "step": steps}
    again.step(samples())
    c = copy_state(again)
    assert all(torch.equal(a[key], c[key]) for key in a)


def test_recomputation_gives_the_same_steps() -> None:
    """Compare runs that skip some steps."""
    kept, again = (start(counters_at(22), train={"recompute": value}) for value in (False, True))
    skipped = [[run.step(samples()).is_skipped for _ in range(5)] for run in (kept, again)]
    assert skipped[0] == skipped[1]
    assert 0 < sum(skipped[0]) < 5
    a, b = copy_state(kept), copy_state(again)
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_scale_doubles_after_many_updates() -> None:
    run = start(counters_at(8, loss_scale_growth_tracker=loss_scale.GROWTH_INTERVAL - 2))
    scales = [run.step(samples()).loss_scale for _ in range(3)]
    assert scales == [2.0**8, 2.0**8, 2.0**9]
    assert run.counters["loss_scale_growth_tracker"] == 1


def test_a_nan_loss_raises() -> None:
    run = start(counters_at(16))
    with torch.no_grad():
        run.part.model.embed.weight[3, 0] = torch.nan
    words = r'step 1: .* as the loss is nan, for which no .* train.precision = "bf16" or "fp32"'
    with pytest.raises(DivergedError, match=words):
        run.step(samples())
    assert run.counters == counters_at(16, loss_scale_growth_tracker=0, skipped=0)


def test_an_overflow_at_scale_1_raises() -> None:
    """The gradient is not finite although the loss is."""
    run = start(counters_at(1))
    overflow_gradients(run.part.model.layers[1])
    run.step(samples())
    with pytest.raises(DivergedError, match=r'scale, 1, .* train.precision = "bf16" or "fp32"'):
        run.step(samples())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_other_precisions_have_no_scale_and_skip_nothing(precision: str) -> None:
    run = start(counters_at(9, skipped=2), train={"precision": precision})
    assert run.counters == {"step": 0, "samples": 0, "tokens": 0, "skipped": 2}
    facts = run.step(samples())
    assert (facts.loss_scale, facts.is_skipped) == (None, False)
    with torch.no_grad():
        run.part.model.embed.weight.fill_(torch.inf)
    with pytest.raises(DivergedError, match="norm is nan, and nothing was updated"):
        run.step(samples())


@pytest.mark.parametrize("exponent", [0, 12])
@pytest.mark.parametrize("model", [{}, SIGMOID], ids=["softmax", "sigmoid"])
def test_gradients_are_those_of_fp32(exponent: int, model: dict[str, Any]) -> None:
    """All losses are scaled, auxiliary ones too; the scale is divided out after clipping."""
    routing = {"balance_loss": 0.5, "z_loss": 0.1}
    tables: dict[str, Any] = {"model": model, "routing": routing}
    narrow = start(counters_at(exponent), **tables)
    wide = start(train={"precision": "fp32"}, **tables)
    for run in (narrow, wide):
        run.compute_gradients(samples())
    factor = 2.0**exponent
    for a, b in zip(narrow.part.trainable, wide.part.trainable, strict=True):
        apart = torch.linalg.vector_norm(a.grad / factor - b.grad)
        assert apart <= 0.05 * torch.linalg.vector_norm(b.grad), a.name
    norms = []
    for run in (narrow, wide):
        for item in run.part.trainable:
            item.parameter.grad = None
        facts = run.step(samples())
        norms.append((facts.grad_norm, facts.total_loss))
    assert norms[0] == pytest.approx(norms[1], rel=0.01)

"""`moesaic.MoE` in a plain DDP loop on two ranks, against a layer written by hand and against the
same layer inside a job's run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import moesaic
from benchmarks import measure
from benchmarks.on_ranks import in_turn, on_ranks
from benchmarks.training import olmoe
from moesaic.api.ddp import exclude_from_ddp
from moesaic.dist.world import World
from moesaic.facts.plan import plan_from_layout
from moesaic.models.init import InitialSource
from moesaic.nn.aux_loss import AuxLoss
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.train.assemble import assemble

RANKS, TOKENS = 2, 2048


def rows(rounds: int) -> Iterator[measure.Row]:
    """Measure both ratios in one run."""
    times = on_ranks(RANKS, timed, rounds)
    title = "step time of moesaic.MoE in a DDP loop, two ranks"
    sizes = f"forward and backward, top 8 of 64, {TOKENS} tokens a rank, 512 x 256, fp32"
    for name, bar in (("written by hand", "<= 1.0"), ("in a run", "<= 1.05")):
        ratio, interval = times.ratio("moesaic.MoE", name)
        yield measure.row(
            f"{title}, over the layer {name}", ratio, "ratio", bar=bar, interval=interval,
            against=f"{AGAINST[name]}; {sizes}", repeats=times.rounds,
        )  # fmt: skip


AGAINST = {
    "written by hand": "the same DDP loop with all_to_all_single and a loop over experts",
    "in a run": "the layer that a job's run assembles, without DDP",
}


class Exchange(torch.autograd.Function):
    """All-to-all of rows; backward sends gradients the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.sizes = send, receive
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows, receive, send)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        send, receive = ctx.sizes
        out = grads[0].new_empty(sum(send), grads[0].shape[1])
        dist.all_to_all_single(out, grads[0].contiguous(), send, receive)
        return out, None, None


class ByHand(nn.Module):
    """Expert-parallel layer as one writes it in an afternoon."""

    def __init__(self, like: moesaic.MoE) -> None:
        super().__init__()
        self.top_k, self.num_experts = like.router.top_k, like.num_experts
        self.router = nn.Parameter(like.router.weight.detach().clone())
        weights = [parameter.detach() for parameter in like.experts.parameters()]
        self.gate, self.up, self.down = (nn.Parameter(torch.stack(weights[i::3])) for i in range(3))

    def forward(self, x: Tensor) -> Tensor:
        probabilities = (x @ self.router.T).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.num_experts)
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts)
        by_rank = received.view(dist.get_world_size(), -1)
        send = counts.view(dist.get_world_size(), -1).sum(1).tolist()
        receive = by_rank.sum(1).tolist()
        rows = Exchange.apply(x[order // self.top_k], send, receive)
        experts = torch.arange(by_rank.shape[1]).repeat(len(by_rank))
        by_expert = experts.repeat_interleave(by_rank.flatten()).argsort(stable=True)
        parts = rows[by_expert].split(by_rank.sum(0).tolist())
        results = [
            (F.silu(part @ gate.T) * (part @ up.T)) @ down.T
            for part, gate, up, down in zip(parts, self.gate, self.up, self.down, strict=True)
        ]
        back = torch.empty_like(rows).index_copy(0, by_expert, torch.cat(results))
        back = Exchange.apply(back, receive, send)
        out = torch.zeros_like(x).index_add(
            0, order // self.top_k, back * weights.flatten()[order, None]
        )
        fraction = counts / counts.sum()
        self.aux_loss = 0.01 * self.num_experts * (fraction * probabilities.mean(0)).sum()
        return out


def timed(world: World, rounds: int, root: int) -> measure.Times | None:
    """On each rank: check that the layers agree, then time them in turn."""
    job = olmoe(8, 256, layout={"ep": RANKS, "dispatch": "all_to_all"})
    plan = plan_from_layout(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(0, 0.02))
    run.part.buckets.close()
    _, inner = next(iter(run.part.model.expert_layers()))
    model = job.model
    layer = moesaic.MoE(
        model.hidden, model.ffn, model.experts, model.top_k, group=world.group,
        renormalise=model.renormalise,
    )  # fmt: skip
    with torch.no_grad():
        layer.router.weight.copy_(inner.router.weight)
        for parameter, (*_, view) in zip(
            layer.experts.parameters(), inner.bank.matrices(inner.bank.arena), strict=True
        ):
            parameter.copy_(view)
    by_hand = ByHand(layer)
    moesaic.exclude_experts(layer)
    ddp = DistributedDataParallel(layer)
    exclude_from_ddp(by_hand, ("gate", "up", "down"))
    by_hand_ddp = DistributedDataParallel(by_hand)
    draw = torch.Generator().manual_seed(world.rank)
    x = torch.randn(TOKENS, model.hidden, generator=draw, requires_grad=True)

    def step(module: nn.Module, with_loss: Any) -> Callable[[], Tensor]:
        def call() -> Tensor:
            x.grad = None
            out = module(x)
            (out.square().mean() + with_loss.aux_loss).backward()
            for parameter in module.parameters():
                parameter.grad = None
            assert x.grad is not None
            return x.grad

        return call

    def step_of_run() -> Tensor:
        x.grad = None
        out, report = inner(x, Inputs(Rotary(torch.empty(0), torch.empty(0)), training=True))
        AuxLoss([report], world.group).attach(out.square().mean(), 0.01, 0.0).backward()
        for parameter in inner.parameters():
            parameter.grad = None
        assert x.grad is not None
        return x.grad

    calls: dict[str, Callable[[], object]] = {
        "moesaic.MoE": step(ddp, layer), "written by hand": step(by_hand_ddp, by_hand),
        "in a run": step_of_run,
    }  # fmt: skip
    expected = step_of_run().clone()
    torch.testing.assert_close(calls["moesaic.MoE"](), expected, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(calls["written by hand"](), expected, rtol=1e-2, atol=1e-5)
    return in_turn(world, calls, rounds, root)

"""One expert layer over two ranks, forward and backward: ours, DeepSpeed's, Tutel's, a plain loop.

All get the same tokens, router and experts on the same ranks, one thread each. Results and
gradients are compared before anything is timed. layer.md says how to install the peers.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import measure
from benchmarks.on_ranks import Unlike, in_turn, on_ranks, plan_of
from benchmarks.training import olmoe
from moesaic.dist.world import World
from moesaic.models.build import make_dispatch_ranks
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.nn.moe import MoE
from moesaic.nn.router import Router

RANKS, TOP_K = 2, 2
OURS, PLAIN, DEEPSPEED, TUTEL = "moesaic", "a plain loop", "DeepSpeed", "Tutel"
PACKAGES = {DEEPSPEED: "deepspeed", TUTEL: "tutel"}
TOLERANCE = 1e-5
"""Norm of a difference, over the norm."""
EVEN_BAR, SKEWED_BAR = ">= 1.1", ">= 5.0"
_FIRST, _SECOND = 2.0, 1.0
"""Scores of a token's two experts where routing is even; all others are 0."""


@dataclass(frozen=True)
class Case:
    """A layer, and how its router spreads tokens."""

    name: str
    experts: int
    ffn: int
    skew: float = 0.0
    """Length of a vector, the same for all, that is added to every token; 0: routing is even."""
    tokens: int = 1024
    """Tokens of each rank."""
    hidden: int = 512
    seed: int = 0
    """Seed of the router, the experts and that vector."""


CASES = (
    Case("8 experts, even", 8, 1024),
    Case("64 experts, even", 64, 256),
    # Of 24 seeds, one whose hottest expert and fuller rank have about as many as in the median.
    Case("16 experts, skewed", 16, 512, skew=2.0, seed=2),
)


class Work:
    """Tokens, router and experts of a rank, the same for all contenders."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.local = case, case.experts // RANKS
        draw, own = (torch.Generator().manual_seed(seed) for seed in (case.seed, 1 + rank))
        sizes = case.experts, case.hidden
        self.tokens = torch.randn(case.tokens, case.hidden, generator=own)
        self.cotangent = torch.randn(case.tokens, case.hidden, generator=own)
        if case.skew:
            self.gate = torch.empty(sizes).uniform_(-1, 1, generator=draw) * case.hidden**-0.5
            self.tokens += case.skew * torch.randn(case.hidden, generator=draw)
        else:
            self.gate = torch.linalg.qr(torch.randn(*sizes[::-1], generator=draw)).Q.T.contiguous()
            first, second = _even(case)[torch.randperm(case.tokens, generator=own)].T
            self.tokens -= self.tokens @ self.gate.T @ self.gate
            self.tokens += _FIRST * self.gate[first] + _SECOND * self.gate[second]
        self.tokens.requires_grad_()
        whole = case.experts, 2 * case.ffn, case.hidden
        mine = slice(rank * self.local, (rank + 1) * self.local)
        # Every rank draws the experts of all, to have its own the same wherever they are.
        self.gate_up = torch.randn(whole, generator=draw)[mine] * case.hidden**-0.5
        whole = case.experts, case.hidden, case.ffn
        self.down = torch.randn(whole, generator=draw)[mine] * case.ffn**-0.5

    def loads(self) -> Tensor:
        """Return this rank's assignments by expert."""
        scores = F.linear(self.tokens.detach(), self.gate)
        chosen = scores.topk(TOP_K, dim=-1).indices.flatten()
        return chosen.bincount(minlength=self.case.experts)


def _even(case: Case) -> Tensor:
    """Return two experts a token: all experts get as many, and every pair occurs."""
    token = torch.arange(case.tokens)
    apart = 1 + token // case.experts % (case.experts - 1)
    return torch.stack((token, token + apart), dim=1) % case.experts


@dataclass
class Contender:
    """One system's layer."""

    layer: nn.Module
    forward: Callable[[Tensor], Tensor]
    router: nn.Parameter
    experts: Callable[[], tuple[Tensor, Tensor]]
    """Gradients of this rank's gate and up, side by side, and down; [experts, out, in] each."""

    def once(self, work: Work) -> Tensor:
        """Go forward and backward with new gradients; return the output."""
        work.tokens.grad = None
        for parameter in self.layer.parameters():
            parameter.grad = None
        out = self.forward(work.tokens)
        out.backward(work.cotangent)
        return out

    def found(self, work: Work) -> dict[str, Tensor]:
        """Return the results of a pass, by name."""
        out, (gate_up, down) = self.once(work).detach(), self.experts()
        tokens, router = work.tokens.grad, self.router.grad
        assert tokens is not None
        assert router is not None
        return {
            "tokens' sums": out, "gradients of tokens": tokens, "that of the router": router,
            "those of gate and up": gate_up, "those of down": down,
        }  # fmt: skip


def ours(work: Work, world: World) -> Contender:
    """Return moesaic's layer, as in a model."""
    case = work.case
    sizes = {
        "hidden": case.hidden, "layers": 1, "ffn": case.ffn, "experts": case.experts,
        "top_k": TOP_K,
    }  # fmt: skip
    model = {**olmoe(1, 8).model.model_dump(exclude_none=True), **sizes}
    plan = plan_of(olmoe(RANKS, case.tokens, model=model, layout={"ep": RANKS}), world)
    ranks = make_dispatch_ranks(plan, world)
    layer = MoE(
        Router(0, case.hidden, case.experts, TOP_K, renormalise=True),
        ExpertBank(plan.experts_at(ranks.ep_rank, 0), case.hidden, case.ffn),
        Dispatcher(
            case.experts, ranks, slot_experts=plan.slot_experts(0), dedup=plan.dispatch == "dedup",
            num_chunks=plan.chunks,
        ),
    )  # fmt: skip
    bank, router = layer.bank, layer.router.weight
    with torch.no_grad():
        router.copy_(work.gate)
        for arena, given in zip(_parts(bank, bank.arena), (work.gate_up, work.down), strict=True):
            for view, matrix in zip(arena, given, strict=True):
                view.copy_(matrix)

    def forward(tokens: Tensor) -> Tensor:
        inputs = Inputs(Rotary(torch.empty(0), torch.empty(0)), training=True)
        result: Tensor = layer(tokens, inputs)[0]
        return result

    def gradients() -> tuple[Tensor, Tensor]:
        assert bank.arena.grad is not None
        gate_up, down = _parts(bank, bank.arena.grad)
        return torch.stack(gate_up), torch.stack(down)

    return Contender(layer, forward, router, gradients)


def _parts(bank: ExpertBank, arena: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Return each expert's gate and up as one matrix, and down."""
    gate_up, down = arena.split((2 * bank.ffn * bank.hidden, bank.hidden * bank.ffn), dim=1)
    return (
        list(gate_up.view(-1, 2 * bank.ffn, bank.hidden)),
        list(down.view(-1, bank.hidden, bank.ffn)),
    )


class Gated(nn.Module):
    """One expert as a module of its own."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())

    def forward(self, rows: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        gate, up = F.linear(rows, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


def _gradients_of(experts: Sequence[Gated]) -> tuple[Tensor, Tensor]:
    def of(weight: nn.Parameter) -> Tensor:
        return torch.zeros_like(weight) if weight.grad is None else weight.grad

    return (
        torch.stack([of(one.gate_up) for one in experts]),
        torch.stack([of(one.down) for one in experts]),
    )


class AllToAll(torch.autograd.Function):
    """Rows to other ranks, and their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.way = send, receive
        return _exchanged(rows, send, receive)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        send, receive = ctx.way
        return _exchanged(grads[0], receive, send), None, None


def _exchanged(rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
    out = rows.new_empty(sum(receive), rows.shape[1])
    dist.all_to_all_single(out, rows.contiguous(), receive, send)
    return out


class Plain(nn.Module):
    """The shortest code: rows sorted by expert, all-to-all, experts in turn, and back."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.router = nn.Parameter(work.gate.clone())
        self.experts = nn.ModuleList(map(Gated, work.gate_up, work.down))

    def forward(self, tokens: Tensor) -> Tensor:
        """Send each token through its experts."""
        odds = F.linear(tokens, self.router).softmax(dim=-1)
        weights, chosen = odds.topk(TOP_K, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        going = chosen.flatten().bincount(minlength=len(self.router))
        coming = torch.empty_like(going)
        dist.all_to_all_single(coming, going)
        send, receive = (n.view(dist.get_world_size(), -1).sum(1).tolist() for n in (going, coming))
        rows = AllToAll.apply(tokens[order // TOP_K], send, receive)
        pieces, local = rows.split(coming.tolist()), len(self.experts)
        results: list[Tensor] = list(pieces)
        for place, expert in enumerate(self.experts):
            mine = pieces[place::local]
            results[place::local] = expert(torch.cat(mine)).split([len(one) for one in mine])
        back = AllToAll.apply(torch.cat(results), receive, send)
        back = back * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // TOP_K, back)


def plain(work: Work) -> Contender:
    """Return the plain loop."""
    layer = Plain(work)
    return Contender(layer, layer, layer.router, lambda: _gradients_of(list(layer.experts)))


def deepspeed(work: Work) -> Contender:
    """Return DeepSpeed's layer without drops; its experts are copies of one module."""
    import deepspeed as engine
    from deepspeed.moe.layer import MoE as Theirs

    engine.utils.logger.setLevel(logging.ERROR)
    engine.init_distributed("gloo", verbose=False)
    case = work.case
    layer = Theirs(
        case.hidden, Gated(work.gate_up[0], work.down[0]), case.experts, ep_size=RANKS, k=TOP_K,
        drop_tokens=False, use_rts=False, top2_2nd_expert_sampling=False,
    )  # fmt: skip
    layer.set_deepspeed_parallelism()
    inner = layer.deepspeed_moe
    experts = list(inner.experts.deepspeed_experts)
    with torch.no_grad():
        inner.gate.wg.weight.copy_(work.gate)
        for expert, gate_up, down in zip(experts, work.gate_up, work.down, strict=True):
            expert.gate_up.copy_(gate_up)
            expert.down.copy_(down)
    return Contender(
        layer, lambda tokens: layer(tokens)[0], inner.gate.wg.weight,
        lambda: _gradients_of(experts),
    )  # fmt: skip


def tutel(work: Work) -> Contender:
    """Return Tutel's layer without drops, with its own gated experts."""
    from tutel import moe

    case = work.case
    layer = moe.moe_layer(
        gate_type={"type": "top", "k": TOP_K, "fp32_gate": True, "capacity_factor": 0.0},
        experts={
            "type": "llama_ffn", "num_experts_per_device": work.local,
            "hidden_size_per_expert": case.ffn,
        },
        model_dim=case.hidden,
    )  # fmt: skip
    experts, router = layer.experts, layer.gates[0].wg.weight
    turned = work.gate_up.chunk(2, dim=1)
    matrices = (experts.W_fc1, experts.W_fc2, experts.W_fc3)
    shapes = [(work.local, case.hidden, case.ffn)] * 2 + [(work.local, case.ffn, case.hidden)]
    with torch.no_grad():
        router.copy_(work.gate)
        for flat, shape, matrix in zip(matrices, shapes, (*turned, work.down), strict=True):
            flat.view(shape).copy_(matrix.mT)

    def gradients() -> tuple[Tensor, Tensor]:
        grads = [flat.grad.view(shape).mT for flat, shape in zip(matrices, shapes, strict=True)]
        return torch.cat(grads[:2], dim=1), grads[2]

    return Contender(layer, lambda tokens: layer(tokens[None])[0], router, gradients)


@contextlib.contextmanager
def launched(world: World) -> Iterator[None]:
    """Set what the peers' launchers set: ranks in the environment, this Python's programs (ninja)
    on the path. Hide what peers print."""
    before = dict(os.environ)
    os.environ.update(
        RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.rank),
        LOCAL_SIZE=str(world.size), MASTER_ADDR="127.0.0.1", DS_ACCELERATOR="cpu",
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    )  # fmt: skip
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def missing() -> list[str]:
    """Return peers that are not installed."""
    return [peer for peer, package in PACKAGES.items() if find_spec(package) is None]


def contenders(work: Work, world: World) -> dict[str, Contender]:
    """Return ours, the plain loop and all peers that are installed."""
    found = {OURS: ours(work, world), PLAIN: plain(work)}
    absent = missing()
    with launched(world):
        for peer, make in ((DEEPSPEED, deepspeed), (TUTEL, tutel)):
            if peer not in absent:
                found[peer] = make(work)
        for one in found.values():
            one.once(work)  # Peers print and compile in the first pass.
    return found


def compare(work: Work, contenders: dict[str, Contender]) -> None:
    """Raise unless all results and gradients are ours."""
    first, *others = contenders
    due = contenders[first].found(work)
    for name in others:
        for what, value in contenders[name].found(work).items():
            far = float((value - due[what]).norm() / due[what].norm())
            if not far <= TOLERANCE:
                raise Unlike(f"{work.case.name}, {name}: {what} are {far:.2e} from those of ours")


def timed(world: World, case: Case, rounds: int, root: int) -> measure.Times | None:
    """On each rank: compare all, then time them in turn."""
    work = Work(case, world.rank)
    found = contenders(work, world)
    compare(work, found)

    def call(one: Contender) -> Callable[[], object]:
        return lambda: one.once(work)

    return in_turn(world, {name: call(one) for name, one in found.items()}, rounds, root)


def rows(rounds: int, cases: Sequence[Case] = CASES) -> Iterator[measure.Row]:
    """Measure all cases; claims are the worst ones."""
    even, skewed = list[measure.Row](), list[measure.Row]()
    for case in cases:
        times = on_ranks(RANKS, timed, case, rounds)
        (skewed if case.skew else even).extend(rows_of(case, times))
    yield from claims(even, skewed)
    yield from (*even, *skewed)


def claims(even: Sequence[measure.Row], skewed: Sequence[measure.Row]) -> Iterator[measure.Row]:
    """Yield the worst of the cases: no peer is left out with even routing, the plain loop is with
    skewed routing, as it makes no room for the hottest expert either."""
    what = "expert layer over two ranks against the quickest of"
    absent = missing()
    whole = measure.worst(
        f"{what} DeepSpeed, Tutel and a plain loop, even routing, worst of 8 and 64 experts",
        even, EVEN_BAR,
    )  # fmt: skip
    yield measure.untried(whole.name, EVEN_BAR, _absent(absent)) if absent else whole
    peers = [row for row in skewed if not row.name.endswith(PLAIN)]
    yield measure.worst(f"{what} DeepSpeed and Tutel, skewed routing", peers, SKEWED_BAR)


def rows_of(case: Case, times: measure.Times) -> Iterator[measure.Row]:
    """Yield a case's figure against each peer."""
    absent = missing()
    sizes = f"top {TOP_K} of {case.experts}, {case.tokens} tokens a rank"
    sizes += f" of {case.hidden} channels, experts of {case.ffn}"
    if case.skew:
        hottest, mean = hottest_of(case)
        sizes += f", the hottest with {hottest / mean:.1f} times the mean"
    for name in (PLAIN, *PACKAGES):
        title = f"expert layer over two ranks, forward and backward, {case.name}, {name}"
        if name not in times.seconds:
            yield measure.untried(title, "", _absent([peer for peer in absent if peer == name]))
            continue
        yield measure.compare(title, times, name, OURS, against=f"{version(name)}; {sizes}")


def hottest_of(case: Case) -> tuple[int, float]:
    """Return assignments to the hottest expert over all ranks, and to one on average."""
    loads = sum(Work(case, rank).loads() for rank in range(RANKS))
    assert isinstance(loads, Tensor)
    return int(loads.max()), float(loads.double().mean())


def _absent(peers: Sequence[str]) -> str:
    return f"{' and '.join(peers)} not installed; benchmarks/layer.md says how"


def version(name: str) -> str:
    """Return a contender's name, and its version where it has one."""
    if name in PACKAGES:
        return f"{name} {metadata.version(PACKAGES[name])}"
    return f"{name} over gloo's all_to_all_single"

"""Traces of models against torch's own counters and hooks, with real and with meta tensors."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from itertools import accumulate
from operator import itemgetter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from moesaic.base.errors import ConfigError, UserError
from moesaic.facts.workload import TracedModel, traced_memory
from moesaic.facts.workload.traced import TracedBlock
from moesaic.models.kernel_counter import KernelCounter, KernelCounts
from moesaic.models.trace import OUTSIDE, block_names, trace
from moesaic.testing.flops import CUSTOM_FLOPS

Made = tuple[nn.Module, Any]


def mlp() -> Made:
    layers = (nn.Linear(12, 40), nn.GELU(), nn.Dropout(0.1), nn.Linear(40, 7, bias=False))
    return nn.Sequential(*layers), torch.randn(5, 12)


def cnn() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, (3, 1), dilation=2), nn.MaxPool2d(2), nn.ConvTranspose2d(16, 6, 3),
        nn.Flatten(), nn.Linear(6 * 5 * 4, 10),
    )  # fmt: skip
    return model, torch.randn(4, 3, 16, 11)


def tokens() -> dict[str, Tensor]:
    ids = torch.ones(2, 16, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=97, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config), tokens()


def olmoe(experts: str = "grouped_mm") -> Made:
    from transformers import OlmoeConfig, OlmoeForCausalLM

    config = OlmoeConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, vocab_size=97, num_experts=4, num_experts_per_tok=2,
        pad_token_id=0, bos_token_id=0, eos_token_id=0, experts_implementation=experts,
    )  # fmt: skip
    return OlmoeForCausalLM(config), tokens()


def eager_olmoe() -> Made:
    return olmoe("eager")


def on_meta(make: Callable[[], Made]) -> Made:
    with torch.device("meta"):
        return make()


def run(model: nn.Module, inputs: Any) -> Tensor:
    out = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    loss: Tensor = out.loss if hasattr(out, "loss") else out
    return loss


def flops(traced: TracedModel, direction: str) -> int:
    return sum(getattr(one.block(), direction).flops for one in traced.blocks)


def named(traced: TracedModel) -> dict[str, TracedBlock]:
    return {block.name: block for block in traced.blocks}


@pytest.mark.parametrize("make", [mlp, cnn, gpt2, eager_olmoe])
def test_flops_match_torch(make: Callable[[], Made]) -> None:
    model, inputs = make()
    with FlopCounterMode(display=False, custom_mapping=CUSTOM_FLOPS) as forward:
        loss = run(model, inputs)
    with FlopCounterMode(display=False, custom_mapping=CUSTOM_FLOPS) as backward:
        loss.backward(torch.ones_like(loss))
    traced = trace(model, inputs)
    assert flops(traced, "forward") == forward.get_total_flops() > 0
    assert flops(traced, "backward") == backward.get_total_flops() > 0


@pytest.mark.parametrize("make", [mlp, cnn, gpt2, olmoe])
def test_meta_model_gives_the_same_trace(make: Callable[[], Made]) -> None:
    assert trace(*on_meta(make)) == trace(*make())


def test_meta_model_allocates_nothing() -> None:
    """Trace a model with eight terabytes of weights, and as much of gradients."""
    with torch.device("meta"):
        model, x = nn.Linear(1 << 20, 1 << 21, bias=False), torch.randn(1 << 12, 1 << 20)
    traced = trace(model, x)
    assert traced.flops == 2 * 2 * (1 << 53)
    assert traced.parameters == 1 << 41
    assert all(one.is_meta for one in model.parameters())


@pytest.mark.parametrize("make", [mlp, cnn, gpt2, olmoe])
def test_saved_bytes_match_autograd(make: Callable[[], Made]) -> None:
    model, inputs = make()
    own = [*model.parameters(), *model.buffers()]
    known = {one.untyped_storage().data_ptr() for one in own}
    saved: dict[int, int] = {}
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = run(model, inputs)
    assert sum(b.saved_bytes for b in trace(model, inputs).blocks) == sum(saved.values()) > 0
    del out


def wide_end() -> Made:
    """Return a model whose last gradients coexist with its first activations."""
    layers = (
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 16 * 16, 1024),
    )  # fmt: skip
    return nn.Sequential(*layers), torch.randn(128, 3, 16, 16)


def wide_start() -> Made:
    """Return a model whose gradients appear after its activations are freed."""
    rest = [nn.Sequential(nn.Linear(2048, 32), nn.GELU(), nn.Linear(32, 2048)) for _ in range(3)]
    return nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), *rest), torch.randn(64, 2048)


def equal_parts() -> Made:
    """Return a model whose peak is its activations alone."""
    parts = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)]
    return nn.Sequential(*parts), torch.randn(2048, 64)


@pytest.mark.parametrize("make", [wide_end, wide_start, equal_parts])
def test_peak_memory_matches_torch(make: Callable[[], Made]) -> None:
    """Compare the predicted peak, within the workspace of convolution kernels, which is not
    predicted."""
    gc.collect()  # Objects freed during the measurement would count as free memory.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        model, x = make()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    events = watched.profiler.kineto_results.events()  # type: ignore[union-attr]
    moments = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    allocated = max(accumulate(num_bytes for _, num_bytes in sorted(moments, key=itemgetter(0))))
    assert traced_memory(trace(model, x)).peak_bytes == pytest.approx(allocated, rel=0.05)


def test_blocks_have_separate_counts() -> None:
    blocks = trace(*mlp()).blocks
    assert [block.name for block in blocks] == ["0", "1", "2", "3"]
    first, gelu, dropout, last = blocks
    assert (first.parameters, first.gradients) == (520, [1920, 160])
    assert first.block().forward.flops == first.block().backward.flops == 2 * 5 * 12 * 40
    assert last.block().forward.flops * 2 == last.block().backward.flops == 4 * 5 * 40 * 7
    assert (first.output_bytes, last.output_bytes) == (800, 140)
    assert [block.saved_bytes for block in blocks] == [240, 800, 800, 800]
    assert gelu.block().forward.moved_bytes == 1600
    assert gelu.forward[-1].num_transcendentals == gelu.backward[-1].num_transcendentals == 200
    assert first.forward[-1].num_transcendentals == dropout.forward[-1].num_transcendentals == 0
    assert gelu.forward[-1].num_kernels == gelu.backward[-1].num_kernels == 1
    assert [op.name for op in dropout.forward] == ["elementwise"]


def test_trace_leaves_the_model_unchanged() -> None:
    model, x = cnn()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    trace(model, x)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(one.grad is None for one in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in model.modules())


@settings(deadline=None, max_examples=40)
@given(
    groups=st.sampled_from([1, 2, 4]), kernel=st.integers(1, 3), stride=st.integers(1, 3),
    padding=st.integers(0, 2), dilation=st.integers(1, 2), sides=st.integers(1, 3),
    transposed=st.booleans(),
)  # fmt: skip
def test_convolutions_count_as_matmuls(
    groups: int, kernel: int, stride: int, padding: int, dilation: int, sides: int, transposed: bool
) -> None:
    kinds = {
        (1, False): nn.Conv1d, (2, False): nn.Conv2d, (3, False): nn.Conv3d,
        (1, True): nn.ConvTranspose1d, (2, True): nn.ConvTranspose2d, (3, True): nn.ConvTranspose3d,
    }  # fmt: skip
    with torch.device("meta"):
        model = kinds[sides, transposed](
            4, 8, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups
        )
        x = torch.randn(2, 4, *[9] * sides, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            out = model(x)
    traced = trace(model, x)
    forward, backward = flops(traced, "forward"), flops(traced, "backward")
    places = math.prod(x.shape[2:] if transposed else out.shape[2:])
    assert forward == 2 * 2 * places * model.weight.numel() == counter.get_total_flops()
    assert backward == 2 * forward  # Torch ignores groups in the weight gradient.


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh())
        self.second = nn.Linear(8, 8, bias=False)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(self.first, x, use_reentrant=self.reentrant)
        result: Tensor = self.second(inner)
        return result


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_recomputation_counts_for_its_block(reentrant: bool, device: str) -> None:
    with torch.device(device):
        model, x = Recomputed(reentrant), torch.randn(3, 8, requires_grad=True)
    blocks = named(trace(model, x))
    one = 2 * 3 * 8 * 8
    assert blocks["first"].block().forward.flops == blocks["second"].block().forward.flops == one
    assert blocks["first"].block().backward.flops == 3 * one
    assert blocks["second"].block().backward.flops == 2 * one


def test_causal_attention_fraction() -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    (block,) = trace(Attends(), torch.randn(2, 3, 8, 4, requires_grad=True)).blocks
    assert block.name == OUTSIDE
    (forward, _), (backward, _) = block.block().forward.ops, block.block().backward.ops
    assert [forward.kind, backward.kind] == ["attention", "attention backward"]
    assert forward.causal_fraction == backward.causal_fraction == 9 / 16
    assert 2 * backward.flops == 5 * forward.flops == 5 * 2 * 2 * 6 * 8 * 8 * 4
    assert forward.num_transcendentals == 6 * 8 * 8 * 9 // 16


TABLE, ROWS, SOURCE = torch.zeros(1000, 8), torch.arange(4), torch.ones(4, 8)
PLACED = 4 * 8 + 2 * 4 * 8 * 4
"""Bytes of four indices, four rows read and four rows written."""


@pytest.mark.parametrize(
    ("call", "moved_bytes"),
    [
        (lambda: TABLE.index_add_(0, ROWS, SOURCE), PLACED),
        (lambda: TABLE.index_copy_(0, ROWS, SOURCE), PLACED),
        (lambda: TABLE.index_put_((ROWS,), SOURCE), PLACED),
        (lambda: TABLE.zero_(), TABLE.nbytes),
        (lambda: TABLE.fill_(3.0), TABLE.nbytes),
        (lambda: TABLE.normal_(), TABLE.nbytes),
        (lambda: TABLE.copy_(TABLE + 1), 4 * TABLE.nbytes),
        (lambda: TABLE.add_(1.0), 2 * TABLE.nbytes),
    ],
)
def test_moved_bytes_of_writes(call: Callable[[], Tensor], moved_bytes: int) -> None:
    seen = KernelCounts()
    with KernelCounter(lambda: seen):
        call()
    assert seen.moved_bytes == moved_bytes


def test_custom_op_shape_comes_from_its_flops() -> None:
    from torch.utils.flop_counter import register_flop_formula

    library = torch.library.Library("test_trace", "DEF")
    library.define("twice(Tensor a, Tensor b) -> Tensor")
    library.impl("twice", lambda a, b: a @ b, "CompositeExplicitAutograd")

    @register_flop_formula(torch.ops.test_trace.twice)
    def _(a: Any, b: Any, *_: Any, **__: Any) -> int:
        return 2 * a[0] * a[1] * b[1]

    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.ops.test_trace.twice(x.detach(), x.detach())

    (block,) = trace(Uses(), torch.randn(6, 6, requires_grad=True)).blocks
    (product,) = block.forward[0].matmuls
    assert (product.rows, product.columns, product.inner) == (6, 6, 6)
    library._destroy()


def test_blocks_are_children_or_patterns() -> None:
    model, inputs = on_meta(gpt2)
    default = ["transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0"]
    assert block_names(model)[:4] == default
    assert block_names(model)[4:] == ["transformer.h.1", "transformer.ln_f", "lm_head"]
    blocks = named(trace(model, inputs, blocks=["transformer.h.*", "transformer.h.1.mlp"]))
    assert list(blocks) == ["transformer.h.0", "transformer.h.1", "transformer.h.1.mlp", OUTSIDE]
    whole, outer = blocks["transformer.h.0"], blocks["transformer.h.1"]
    inner = blocks["transformer.h.1.mlp"]
    assert whole.parameters == outer.parameters + inner.parameters
    assert whole.block().forward.flops == outer.block().forward.flops + inner.block().forward.flops
    assert (
        whole.block().backward.flops == outer.block().backward.flops + inner.block().backward.flops
    )
    # A tied weight counts once.
    total = sum(one.numel() for one in model.parameters())
    assert sum(block.parameters for block in blocks.values()) == total


def test_containers_of_module_lists_are_expanded() -> None:
    inner = nn.Module()
    inner.layer = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))])
    encoder = nn.Module()
    encoder.norm, encoder.stack = nn.LayerNorm(2), inner
    model = nn.Module()
    model.embed, model.encoder = nn.Sequential(nn.Linear(2, 2)), encoder
    names = ["embed", "encoder.norm", "encoder.stack.layer.0", "encoder.stack.layer.1"]
    assert block_names(model) == names


def test_custom_loss_and_frozen_parameters() -> None:
    model, x = mlp()
    model[0].requires_grad_(False)
    target = torch.randint(7, (5,))
    traced = trace(model, x, loss=lambda out: nn.functional.cross_entropy(out, target), name="mine")
    blocks = named(traced)
    assert traced.name == "mine"
    assert (blocks["0"].parameters, blocks["0"].gradients) == (520, [])
    assert blocks["0"].block().backward.flops == 0
    assert blocks["3"].block().backward.flops == 2 * 5 * 40 * 7
    assert blocks[OUTSIDE].block().forward.ops[-1].num_kernels > 0


class Asks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


class Picks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0]


@pytest.mark.parametrize(
    ("model", "x", "options", "words"),
    [
        (nn.Linear(2, 2), torch.ones(1, 2), {"blocks": ["h.0"]}, "blocks = 'h.0' is no module"),
        (nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2), {"blocks": ["1"]}, "one such as 0"),
        (nn.LSTM(2, 2), torch.ones(1, 1, 2), {}, "mkldnn_rnn_layer multiplies matrices in a way"),
        (
            nn.ModuleDict({"step": nn.Linear(2, 2)}), torch.ones(1, 2), {},
            "the block of module 'step' has the name of work outside all blocks: give the module",
        ),
        (nn.Flatten(), torch.ones(1, 2), {}, "no output of the model has a gradient"),
        (Asks(), torch.ones(2, device="meta"), {}, "asks for values of a tensor"),
        (Picks(), torch.ones(2, device="meta"), {}, "asks for values of a tensor"),
        (
            nn.Linear(2, 2, dtype=torch.complex64), torch.ones(1, 2, dtype=torch.complex64), {},
            "multiplies torch.complex64",
        ),
    ],
)  # fmt: skip
def test_trace_errors(model: nn.Module, x: Tensor, options: dict[str, Any], words: str) -> None:
    if x.is_meta:
        model.register_buffer("there", torch.ones(1, device="meta"))
        x.requires_grad_()
    error = ConfigError if options else UserError
    with pytest.raises(error, match=r".") as caught:
        trace(model, x, **options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)

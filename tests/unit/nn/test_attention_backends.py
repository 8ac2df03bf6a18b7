"""Attention backends against softmax over a dense mask, pair by pair, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from moesaic.facts.job.model import LatentConfig
from moesaic.nn import attention_backends
from moesaic.nn.attention_backends import (
    AttentionBackend,
    AttentionMetadata,
    CpuFlashKernel,
    RecomputingKernel,
    Segment,
    attend,
    attend_blocks,
    attend_pool,
    attend_varlen,
    choose_backend,
)
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.nn.latent_attention import LatentAttention
from moesaic.testing.memory import peak_allocated

PLAIN = torch.zeros(3, 9, dtype=torch.int32)
PACKED = torch.tensor([[0] * 9, [0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1, 1, 1, 1]])
ALIKE = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2]] * 3)
DOCUMENTS = {"plain": PLAIN, "packed": PACKED, "alike": ALIKE}
WINDOWS = [None, 1, 2, 5, 8, 9, 100]


def dense_mask(documents: Tensor, window: int | None) -> Tensor:
    """Return whether a query attends to a key, [rows, queries, keys], decided pair by pair."""
    length = documents.shape[1]
    return torch.tensor([
        [
            [
                key <= query and row[key] == row[query] and (window is None or query - key < window)
                for key in range(length)
            ]
            for query in range(length)
        ]
        for row in documents.tolist()
    ])  # fmt: skip


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return softmax(q k^T * scale) v under a mask, [rows, queries, keys]; 0 where it is empty."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~mask[:, None], -torch.inf)
    return scores.softmax(-1).masked_fill(~mask.any(-1)[:, None, :, None], 0.0) @ v


def tensors(
    rows: int, heads: int, kv_heads: int, length: int, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v that require gradients, in token order in memory."""
    q, k, v = (
        torch.randn(rows, length, n, width, dtype=dtype).transpose(1, 2).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    )
    return q, k, v


def with_gradients(
    compute: Callable[[Tensor, Tensor, Tensor], Tensor], *inputs: Tensor
) -> list[Tensor]:
    """Return the result and the gradients of q, k and v."""
    q, k, v = inputs
    result = compute(q, k, v)
    cotangent = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(result, inputs, cotangent.to(result))
    return [result.detach(), *grads]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        if a.dtype == torch.float64:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        else:
            assert (a - b).norm() <= 1e-5 * (1 + b.norm())  # With one key, q has no gradient.


@pytest.fixture(params=[CpuFlashKernel, RecomputingKernel], ids=["flash", "recomputing"])
def small_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let blocks have two queries, in either kernel."""
    monkeypatch.setattr(attention_backends, "ATTENTION_QUERY_BLOCK", 2)
    monkeypatch.setattr(attention_backends, "_block_kernel", lambda _: request.param)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize(("kv_heads", "dtype"), [(2, torch.float64), (4, torch.float32)], ids=str)
def test_packed_documents_equal_a_dense_mask(
    documents: str, window: int | None, kv_heads: int, dtype: torch.dtype
) -> None:
    inputs = tensors(3, 4, kv_heads, 9, 8, dtype)
    metadata = AttentionMetadata.packed(DOCUMENTS[documents], window)
    mask = dense_mask(DOCUMENTS[documents], window)
    actual = with_gradients(lambda q, k, v: attend(q, k, v, metadata, 0.3), *inputs)
    assert_close(actual, with_gradients(lambda q, k, v: reference(q, k, v, mask, 0.3), *inputs))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_requests_in_one_row_equal_a_dense_mask(kv_heads: int, window: int | None) -> None:
    """Keys are ranges of a pool, position-major in memory, with gaps that nothing reads."""
    starts, lengths, news = [20, 2, 9, 15], [5, 7, 4, 1], [1, 3, 4, 1]
    q, k, v = tensors(1, 4, kv_heads, 26, 8, torch.float64)
    mask, segments, index = torch.zeros(1, 26, 26, dtype=torch.bool), [], 0
    for start, length, new in zip(starts, lengths, news, strict=True):
        queries = range(index, index + new)
        segments.append(Segment(range(1), queries, range(start, start + length)))
        visible = dense_mask(PLAIN[:1, :length], window)[0, length - new :]
        mask[0, queries.start : queries.stop, start : start + length] = visible
        index += new
    metadata = AttentionMetadata(tuple(segments), window)
    queries_only = q[:, :, :index].detach()
    assert choose_backend(queries_only, k, metadata) is attend_pool
    expected = reference(queries_only, k, v, mask[:, :index], 0.3)
    keys = mask.any(1)[0]
    k, v = (x.detach().masked_fill(~keys[:, None], torch.nan) for x in (k, v))
    for _ in range(2):  # Layers share the metadata.
        result = attend(queries_only, k, v, metadata, 0.3)
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
    with torch.no_grad():  # The first request takes another kernel.
        metadata = AttentionMetadata(metadata.segments, window)
        narrow = attend(*(x.bfloat16() for x in (queries_only, k, v)), metadata, 0.3)
    assert narrow.dtype == torch.bfloat16
    assert (narrow - expected).norm() <= 0.01 * expected.norm()


def test_attention_is_causal_by_default() -> None:
    q, k, v = tensors(2, 4, 2, 6, 8, torch.float64)
    whole = attend(q, k, v)
    expected = reference(q, k, v, dense_mask(PLAIN[:2, :6], None), 8**-0.5)
    torch.testing.assert_close(whole, expected, rtol=1e-9, atol=1e-9)
    for first in (0, 2, 5):
        end = attend(q[:, :, first:], k, v)
        torch.testing.assert_close(end, whole[:, :, first:], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("metadata", [None, AttentionMetadata.packed(PLAIN[:0], 3)], ids=str)
def test_no_rows_give_empty_gradients(metadata: AttentionMetadata | None) -> None:
    inputs = tensors(0, 4, 2, 9, 8, torch.float32)
    result, *grads = with_gradients(lambda q, k, v: attend(q, k, v, metadata), *inputs)
    assert result.shape == inputs[0].shape
    assert [grad.shape for grad in grads] == [x.shape for x in inputs]


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_does_not_depend_on_other_rows(dtype: torch.dtype, window: int | None) -> None:
    """Bit for bit, although equal rows share kernel calls."""
    documents = torch.zeros(4, 600, dtype=torch.int32)
    documents[1, 300:] = 1
    documents[2:, 200:] = 1
    inputs = tensors(4, 4, 2, 600, 16, dtype)

    def run(rows: list[int]) -> list[Tensor]:
        metadata = AttentionMetadata.packed(documents[rows], window)
        part = [x[rows].detach().requires_grad_() for x in inputs]
        result = attend(part[0], part[1], part[2], metadata)
        return [result, *torch.autograd.grad(result.square().sum(), part)]

    together = run([0, 1, 2, 3])
    for rows in ([0], [1], [2], [3], [2, 0], [3, 2, 1]):
        for a, b in zip(run(rows), together, strict=True):
            assert torch.equal(a, b[rows])


def test_metadata_names_documents_once() -> None:
    metadata = AttentionMetadata.packed(torch.cat((ALIKE[:2], PLAIN)), 4)
    same, whole = range(2), Segment(range(2, 5), range(9), range(9))
    parts = [range(4), range(4, 7), range(7, 9)]
    assert metadata.segments == (*(Segment(same, part, part) for part in parts), whole)
    assert metadata.offsets is not None
    assert metadata.offsets.dtype == torch.int32
    assert metadata.offsets.tolist() == [0, 4, 7, 9, 13, 16, 18, 27, 36, 45]
    assert metadata == AttentionMetadata.packed(torch.cat((ALIKE[:2], PLAIN)), 4)


def test_backends_are_chosen_by_device_dtype_and_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, _ = tensors(3, 4, 2, 9, 8, torch.bfloat16)
    packed, causal = AttentionMetadata.packed(PACKED), AttentionMetadata.causal(3, 9)

    def choices(x: Tensor) -> list[AttentionBackend]:
        return [choose_backend(x, q, packed), choose_backend(x, q, causal)]

    assert choices(q) == [attend_blocks, attend_blocks]
    assert choose_backend(q[:1, :, -1:], q[:1], causal) is attend_pool
    capability = attention_backends.devices
    monkeypatch.setattr(capability, "compute_capability", lambda _: (9, 0))
    assert choices(q) == [attend_varlen, attend_blocks]
    assert choices(q.float()) == [attend_blocks, attend_blocks]
    assert choices(q[..., :6]) == [attend_blocks, attend_blocks]
    monkeypatch.setattr(capability, "compute_capability", lambda _: (7, 5))
    assert choices(q) == [attend_blocks, attend_blocks]


def memory_cases() -> dict[str, Callable[[int], Callable[[], object]]]:
    """Return functions from a sequence length to a forward and backward pass."""

    def case(
        heads: int, kv_heads: int, width: int, window: int | None, documents: int
    ) -> Callable[[int], Callable[[], object]]:
        def passes(length: int) -> Callable[[], object]:
            numbers = torch.arange(length)[None] * documents // length
            metadata = AttentionMetadata.packed(numbers, window)

            def run() -> None:
                q, k, v = tensors(1, heads, kv_heads, length, width, torch.float32)
                attend(q, k, v, metadata).sum().backward()

            return run

        return passes

    def latent(length: int) -> Callable[[], object]:
        config = LatentConfig(kv_lora_rank=4, qk_rope_head_dim=2, v_head_dim=4)
        layer = LatentAttention(0, 8, 2, 6, config)
        for parameter in layer.parameters():
            torch.nn.init.ones_(parameter)
        rotary = Rotary.at_positions(torch.arange(length)[None], 2, 100.0, torch.float32)
        inputs = Inputs(rotary)
        return lambda: layer(torch.zeros(1, length, 8), inputs)[0].sum().backward()

    return {
        "latent": latent,
        "grouped": case(4, 1, 8, None, 1),
        "documents": case(4, 2, 8, None, 5),
        "window": case(2, 1, 8, 100, 1),
    }


@pytest.mark.parametrize("name", memory_cases())
@pytest.mark.parametrize("length", [2048, pytest.param(16384, marks=pytest.mark.soak)])
def test_memory_is_linear_in_the_sequence(name: str, length: int) -> None:
    passes = memory_cases()[name]
    half, whole = peak_allocated(passes(length // 2), passes(length))
    assert whole <= 2.1 * half
    assert length < 16384 or whole < length**2 / 4  # A byte per causal pair is twice as much.


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_equals_blocks(dtype: torch.dtype, kv_heads: int, window: int | None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    device = torch.device("cuda")
    documents = torch.zeros(3, 300, dtype=torch.int32)
    documents[0, 100:], documents[2, 1:] = 1, 1
    metadata = AttentionMetadata.packed(documents, window, device)
    inputs = [
        x.detach().to(device).requires_grad_() for x in tensors(3, 4, kv_heads, 300, 64, dtype)
    ]
    assert choose_backend(inputs[0], inputs[1], metadata) is attend_varlen
    fast, slow = (
        with_gradients(partial(backend, metadata=metadata, scale=0.1), *inputs)
        for backend in (attend_varlen, attend_blocks)
    )
    for name, a, b in zip(("result", "q", "k", "v"), fast, slow, strict=True):
        if window == 1 and name in ("q", "k"):
            # The softmax of one key is constant: these gradients are zero but for rounding.
            assert max(a.float().norm(), b.float().norm()) <= 1e-3
        else:
            assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()

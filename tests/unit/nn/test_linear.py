"""Matmuls with one weight against PyTorch, with and without oneDNN."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from moesaic.kernels import cpu_gemv
from moesaic.kernels import device as devices
from moesaic.kernels.grouped_mm import matmul
from moesaic.nn.attention import linear


@pytest.fixture(params=[False, True], ids=["torch", "onednn"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Select oneDNN (True) or PyTorch."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(devices, "prefers_onednn", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("rows", [0, 1, 33])
@pytest.mark.parametrize("transposed", [False, True])
def test_matmul_equals_torch(engine: bool, rows: int, transposed: bool) -> None:
    left, weight = torch.randn(rows, 20)[:, 2:18], torch.randn(24, 16)
    weight = weight if transposed else weight.T.contiguous()
    expected = left @ (weight.T if transposed else weight)
    torch.testing.assert_close(matmul(left, weight, transposed=transposed), expected)
    out = torch.empty(2 * rows, 24)[::2]
    assert matmul(left, weight, transposed=transposed, out=out) is out
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("shape", [(3, 16), (2, 5, 16), (0, 16)])
def test_gradients_equal_torch(engine: bool, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape, requires_grad=True), torch.randn(24, 16, requires_grad=True)
    ours, theirs = linear(x, weight), F.linear(x, weight)
    assert ours.shape == theirs.shape
    cotangent = torch.randn_like(ours)
    grads = torch.autograd.grad(ours, (x, weight), cotangent, retain_graph=True)
    expected = torch.autograd.grad(theirs, (x, weight), cotangent)
    for a, b in zip((ours, *grads), (theirs, *expected), strict=True):
        torch.testing.assert_close(a, b)
    for tensor, expected_grad in zip((x, weight), grads, strict=True):
        with FlopCounterMode(display=False) as counter:
            (single_grad,) = torch.autograd.grad(ours, tensor, cotangent, retain_graph=True)
        assert torch.equal(single_grad, expected_grad)
        assert counter.get_total_flops() == 2 * x.numel() * 24


def test_bf16_and_fp64_use_torch(engine: bool) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        x = torch.randn(3, 16, dtype=dtype, requires_grad=True)
        weight = torch.randn(8, 16, dtype=dtype)
        assert torch.equal(linear(x, weight), F.linear(x, weight))
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(8, 16)
    with torch.autocast("cpu"):
        assert linear(x, weight).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(0, 64), (1, 64), (1, 2, 64), (2, 5, 64)])
@pytest.mark.parametrize("is_large", [False, True])
def test_inference_equals_torch(
    engine: bool, dtype: torch.dtype, shape: tuple[int, ...], is_large: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cpu_gemv, "_MIN_ELEMENTS", 1 if is_large else 1 << 30)
    x, weight = torch.randn(*shape[:-1], 70).to(dtype)[..., 3:67], torch.randn(24, 64).to(dtype)
    with torch.inference_mode():
        product = linear(x, weight)
    assert product.dtype == dtype
    torch.testing.assert_close(product, F.linear(x, weight))

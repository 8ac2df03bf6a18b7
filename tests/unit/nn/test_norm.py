"""RMS norm and rotary rotation against their definitions in PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moesaic.nn import norm
from moesaic.nn.attention import rotate
from moesaic.nn.inputs import Rotary
from moesaic.nn.norm import RMSNorm

EPSILON = 1e-5


def make_norm(width: int, dtype: torch.dtype) -> RMSNorm:
    layer = RMSNorm(width, EPSILON).to(dtype)
    torch.nn.init.normal_(layer.weight)
    return layer


@pytest.mark.parametrize("shape", [(2, 7, 12), (5, 12), (3, 2, 4, 12), (0, 12)])
@pytest.mark.parametrize("block_rows", [1, 3, 1000])
def test_rms_norm_equals_torch(
    shape: tuple[int, ...], block_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(norm, "NORM_CHUNK_BYTES", block_rows * 12 * 8)
    layer = make_norm(12, torch.float64)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    ours, theirs = layer(x), F.rms_norm(x, (12,), layer.weight, EPSILON)
    cotangent = torch.randn_like(ours)
    grads = [torch.autograd.grad(one, (x, layer.weight), cotangent) for one in (ours, theirs)]
    for a, b in zip((ours, *grads[0]), (theirs, *grads[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(layer, (x,))


def test_strided_rows() -> None:
    layer, wide_rows = make_norm(12, torch.float64), torch.randn(4, 20, dtype=torch.float64)
    strided = wide_rows[:, 3:15]
    torch.testing.assert_close(layer(strided), layer(strided.contiguous()), rtol=0, atol=0)


def test_bf16_rows_are_normalised_in_fp32() -> None:
    layer, x = make_norm(16, torch.float32), torch.randn(3, 16).bfloat16().requires_grad_()
    out = layer(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, F.rms_norm(x.float(), (16,), layer.weight, EPSILON))
    assert torch.autograd.grad(out.sum(), x)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_sum_in_fp32(dtype: torch.dtype) -> None:
    layer, x = make_norm(2048, dtype), (30 * torch.randn(4, 2048)).to(dtype)
    exact = F.rms_norm(x.double(), (2048,), layer.weight.double(), EPSILON)
    torch.testing.assert_close(layer(x).double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-3)


def test_double_backward_raises() -> None:
    layer, x = (
        make_norm(6, torch.float64),
        torch.randn(3, 6, dtype=torch.float64, requires_grad=True),
    )
    (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rotation_equals_its_definition(dtype: torch.dtype) -> None:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rotary = Rotary.at_positions(torch.arange(5)[None], 8, 100.0, wide)
    x = torch.randn(2, 5, 3, 8, dtype=dtype).transpose(1, 2).requires_grad_()
    left, right = x.chunk(2, dim=-1)
    cosine, sine = rotary.cosine, rotary.sine
    expected = torch.cat((left * cosine - right * sine, right * cosine + left * sine), dim=-1)
    rotated, cotangent = rotate(x, rotary), torch.randn_like(expected)
    assert rotated.dtype == expected.dtype
    assert rotated.stride() == x.stride()
    torch.testing.assert_close(rotated, expected)
    ours, theirs = (torch.autograd.grad(one, x, cotangent)[0] for one in (rotated, expected))
    # Autograd sums narrow terms; `rotate` sums wide ones, then narrows.
    atol = 1e-12 if dtype == torch.float64 else 0.02
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=atol)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda t: rotate(t, rotary), (x,))

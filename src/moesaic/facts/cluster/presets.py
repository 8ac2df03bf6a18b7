"""Common nodes, from their makers' data sheets: peaks, to be replaced by what `probe` measures.

A data sheet's speed is what no program reaches; `policy.cost` takes a share of it. Bandwidths of
links count one way.
"""

from __future__ import annotations

from typing import Any

_GB, _TERA = 1e9, 1e12


def _accelerator(
    kind: str, model: str, memory: float, bandwidth: float, **tera: float
) -> dict[str, Any]:
    speeds = [{"dtype": dtype, "flops": value * _TERA} for dtype, value in tera.items()]
    return {
        "kind": kind, "model": model, "memory_bytes": memory * _GB,
        "memory_bandwidth": bandwidth * _GB, "matmul": speeds,
    }  # fmt: skip


DEVICES: dict[str, dict[str, Any]] = {
    "v100": _accelerator("cuda", "NVIDIA V100 SXM2 32GB", 32, 900, fp64=7.8, fp32=15.7, fp16=125),
    "a100": _accelerator(
        "cuda", "NVIDIA A100 SXM 80GB", 80, 2039, fp64=19.5, fp32=19.5, tf32=156, bf16=312, fp16=312
    ),
    "h100": _accelerator(
        "cuda", "NVIDIA H100 SXM", 80, 3350, fp64=67, fp32=67, tf32=494.7, bf16=989.4, fp16=989.4,
        fp8=1978.9,
    ),
    "h200": _accelerator(
        "cuda", "NVIDIA H200 SXM", 141, 4800, fp64=67, fp32=67, tf32=494.7, bf16=989.4, fp16=989.4,
        fp8=1978.9,
    ),
    "ascend910": _accelerator("npu", "Huawei Ascend 910", 32, 1200, fp16=256),
    "kunlun1": _accelerator("xpu", "Baidu Kunlun K200", 16, 512, fp32=16, fp16=64),
    "cpu": _accelerator("cpu", "server CPU, 32 cores with AVX-512", 256, 200, fp64=1.2, fp32=2.4),
}  # fmt: skip
"""Devices by the names that a file may use."""

SOURCES = {
    "v100": "NVIDIA V100 data sheet (2020): SXM2, tensor cores for fp16",
    "a100": "NVIDIA A100 data sheet (2021): 80GB SXM, dense",
    "h100": "NVIDIA H100 data sheet (2023): SXM, dense (half of the sparse figures)",
    "h200": "NVIDIA H200 data sheet (2024): SXM, dense (half of the sparse figures)",
    "ascend910": "Huawei at Hot Chips 31 (2019): 256 TFLOPS fp16, 1.2 TB/s",
    "kunlun1": "Baidu at Hot Chips 32 (2020): 64 TFLOPS fp16, 512 GB/s",
    "cpu": "32 cores x 2 x 16 fp32 multiply-adds at 2.3 GHz; 8 channels of DDR4-3200",
}
"""Where each device's figures are from."""

"""Common hosts by their data sheets, until they are measured.

The figures are peaks that no program reaches; the cost model takes a share of them. Bandwidths of
links are for one direction. A GB is 1e9 bytes, slightly less than the real memory. Figures that no
data sheet has (latencies, main memory) are rough guesses.
"""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal[
    "v100-8", "a100-8", "h100-8", "h200-8", "ascend910-8", "kunlun1-8", "cpu"
]  # fmt: skip
"""Names of presets in a cluster's file."""

_GB, _TERA = 1e9, 1e12


def _device(
    kind: str, model: str, count: int, memory_gb: float, bandwidth_gb: float, **tera: float
) -> dict[str, Any]:
    speeds = [{"dtype": dtype, "flops": value * _TERA} for dtype, value in tera.items()]
    return {
        "kind": kind, "model": model, "count": count, "memory_bytes": memory_gb * _GB,
        "memory_bandwidth": bandwidth_gb * _GB, "matmul": speeds,
    }  # fmt: skip


def _host(
    memory_gb: float, devices: list[dict[str, Any]], link_kind: str, latency_s: float, gb: float
) -> dict[str, Any]:
    link = {"kind": link_kind, "latency_s": latency_s, "bandwidth": gb * _GB}
    return {"memory_bytes": memory_gb * _GB, "devices": devices, "link": link}


def _cpu(cores: int, memory_gb: float, bandwidth_gb: float, **tera: float) -> list[dict[str, Any]]:
    """Return the ways to share `cores`: by one rank, by two, by four, ..., by one rank per core."""
    rank_counts = [2**power for power in range(cores.bit_length()) if cores % 2**power == 0]
    return [
        {
            **_device(
                "cpu", f"Xeon (Ice Lake), {cores} cores", ranks, memory_gb / ranks,
                bandwidth_gb / ranks, **{dtype: value / ranks for dtype, value in tera.items()},
            ),
            "threads": cores // ranks,
        }
        for ranks in rank_counts
    ]  # fmt: skip


_HOPPER = {"fp64": 67, "fp32": 67, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}

PRESETS: dict[str, dict[str, Any]] = {
    "v100-8": _host(
        512, [_device("gpu", "NVIDIA V100 SXM2", 8, 32, 900, fp64=7.8, fp32=15.7, fp16=125)],
        "nvlink", 3e-6, 150,
    ),
    "a100-8": _host(
        2000,
        [_device("gpu", "NVIDIA A100 SXM4", 8, 80, 2039,
                 fp64=19.5, fp32=19.5, tf32=156, bf16=312, fp16=312)],
        "nvlink", 3e-6, 300,
    ),
    "h100-8": _host(
        2000, [_device("gpu", "NVIDIA H100 SXM5", 8, 80, 3350, **_HOPPER)], "nvlink", 3e-6, 450
    ),
    "h200-8": _host(
        2000, [_device("gpu", "NVIDIA H200 SXM5", 8, 141, 4800, **_HOPPER)], "nvlink", 3e-6, 450
    ),
    "ascend910-8": _host(
        1000, [_device("npu", "Huawei Ascend 910", 8, 32, 1200, fp16=256)], "hccs", 5e-6, 30
    ),
    "kunlun1-8": _host(
        512, [_device("xpu", "Baidu Kunlun K200", 8, 16, 512, fp32=16, fp16=64)],
        "pcie", 10e-6, 15.75,
    ),
    "cpu": _host(256, _cpu(32, 256, 204.8, fp64=2.36, fp32=4.71), "loopback", 30e-6, 3),
}  # fmt: skip
"""Hosts by preset name, as a file would describe them."""

PUBLISHED: dict[str, Any] = {
    "runs": 15, "devices": ["NVIDIA A100 SXM4", "NVIDIA H100 SXM5"], "matmul": 1.0,
    "elementwise": 1.0, "collectives": 1.0, "error": None, "ratios": [0.70, 1.27],
    "source": "other trainers in bf16",
}  # fmt: skip
"""Published runs that presets are held against, as `benchmarks/planner_published.py` compares
them. Nothing is fitted to them."""
PUBLISHED_PRESETS = frozenset({"a100-8", "h100-8"})
"""Presets with published runs."""

NETWORKS: dict[str, float] = {
    "v100-8": 50 * _GB, "a100-8": 200 * _GB, "h100-8": 400 * _GB, "h200-8": 400 * _GB,
    "ascend910-8": 100 * _GB, "kunlun1-8": 12.5 * _GB, "cpu": 12.5 * _GB,
}  # fmt: skip
"""Bytes per second of each preset's host to other hosts, all adapters together, one way.

DGX-1 has 4 adapters of 100 Gbit/s, DGX A100 8 of 200, DGX H100 and H200 8 of 400; the Ascend 910
has one of 100 Gbit/s itself. One adapter of 100 Gbit/s is a guess for the others.
"""

SOURCES: dict[str, str] = {
    "v100-8": "NVIDIA data sheets: V100 SXM2 32 GB (2020; fp16 on tensor cores; NVLink 300 GB/s "
    "both ways together), DGX-1",
    "a100-8": "NVIDIA data sheets: A100 SXM 80 GB (2021; dense; fp64 on tensor cores; NVLink "
    "600 GB/s both ways together), DGX A100 640 GB",
    "h100-8": "NVIDIA data sheets: H100 SXM (2023; dense, half of the sparse figures; fp64 on "
    "tensor cores; NVLink 900 GB/s both ways together), DGX H100",
    "h200-8": "NVIDIA data sheets: H200 SXM (2024; dense, half of the sparse figures; NVLink "
    "900 GB/s both ways together), DGX H200",
    "ascend910-8": "Huawei at Hot Chips 31 (2019): 256 TFLOPS fp16, 1.2 TB/s, an HCCS link of "
    "240 Gbit/s between two of four; halves of a host meet over PCIe 4.0 x16, hardly faster. No "
    "fp32 products are stated; main memory is a guess",
    "kunlun1-8": "Baidu at Hot Chips 32 (2020): K200, 64 TFLOPS fp16, 16 TFLOPS fp32, 2 x 8 GB at "
    "512 GB/s, PCIe 4.0 x8. Main memory is a guess",
    "cpu": "Worked out: 32 cores x 2 units x 16 fp32 (8 fp64) multiply-adds of AVX-512 x 2 flops "
    "at 2.3 GHz; 8 channels of DDR4-3200; loopback and main memory are guesses",
}
"""Source of each preset's figures."""

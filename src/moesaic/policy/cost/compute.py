"""Seconds of computing on one device: matmuls, elementwise kernels and launches.

A matmul takes the time of the device's measured grid. Without a grid, it takes the longer of two
bounds: its flops at a fraction of the peak, and its operands at memory bandwidth.
"""

from __future__ import annotations

import math

from moesaic.facts.cluster import Calibration, Device
from moesaic.facts.workload import GROUPED_MM, MatmulShape, Op

ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes per element by dtype."""

PEAK_FRACTION = 0.75
"""Fraction of the data sheet's flops that large matmuls reach, if no measurement exists."""


def matmul_s(device: Device, dtype: str, matmul: MatmulShape, *, is_grouped: bool = False) -> float:
    """Return the seconds of `matmul.count` equal matmuls in sequence, without their launches.

    `is_grouped` matmuls run in one kernel if that was measured, else with one launch each.
    """
    speed = device.matmul_speed(dtype)
    rows, columns, inner = matmul.rows, matmul.columns, matmul.inner
    if not (rows and columns and inner):
        return 0.0
    if is_grouped and speed.grouped_times is not None:
        return matmul.count * speed.grouped_times.at(rows, columns, inner)
    launch_s = matmul.count * device.launch_s if is_grouped else 0.0
    if speed.times is not None:
        if matmul.is_weight_gradient and not is_grouped:
            # The grid has means over the matmuls of a weight, by the shape of its forward.
            rows, columns, inner = inner, rows, columns
        return launch_s + matmul.count * speed.times.at(rows, columns, inner)
    arithmetic_s = matmul.flops / (PEAK_FRACTION * speed.flops)
    memory_s = matmul.elements * ITEM_BYTES[dtype] / device.memory_bandwidth
    return launch_s + max(arithmetic_s, memory_s)


def elementwise_s(device: Device, moved_bytes: float, num_calls: int, kind: str = "") -> float:
    """Return the seconds of `num_calls` kernels of `kind` that move `moved_bytes` in total."""
    if not num_calls or not moved_bytes:
        return num_calls * device.launch_s
    each = moved_bytes / num_calls
    times = device.elementwise_times(kind)
    if times is not None:
        # The measurement includes the launch.
        return num_calls * max(device.launch_s, times.at(each))
    return num_calls * (device.launch_s + each / device.memory_bandwidth)


def attention_s(device: Device, op: Op) -> float | None:
    """Return the measured seconds of attention without its elementwise kernels, or None."""
    times = device.matmul_speed(op.dtype).attention
    if times is None:
        return None
    backward = op.kind == "attention backward"
    num_blocks = len(op.matmuls) // (5 if backward else 2)  # The first matmuls make scores.
    return sum(
        scores.count * times.at(
            math.sqrt(scores.rows * scores.columns), scores.inner, backward=backward,
            masked=op.causal_fraction == 1.0,
        )
        for scores in op.matmuls[:num_blocks]
        if scores.flops
    )  # fmt: skip


def op_s(device: Device, op: Op, calibration: Calibration | None = None) -> float:
    """Return the seconds of one operation, multiplied by the factors of `calibration`."""
    return sum(matmul_and_elementwise_s(device, op, calibration))


def matmul_and_elementwise_s(
    device: Device, op: Op, calibration: Calibration | None = None
) -> tuple[float, float]:
    """Return the seconds of an operation's matmuls, in sequence, and of its elementwise kernels."""
    matmul_factor = 1.0 if calibration is None else calibration.matmul
    elementwise_factor = 1.0 if calibration is None else calibration.elementwise
    if op.kind.startswith("attention"):
        seconds = attention_s(device, op)
        if seconds is not None:
            elementwise_seconds = elementwise_s(device, op.moved_bytes, op.num_kernels)
            return matmul_factor * seconds, elementwise_factor * elementwise_seconds
    is_grouped = op.kind == GROUPED_MM
    matmul_seconds = sum(
        matmul_s(device, op.dtype, matmul, is_grouped=is_grouped) for matmul in op.matmuls
    )
    elementwise_seconds = elementwise_s(device, op.moved_bytes, op.num_kernels, op.kind)
    transcendental_seconds = op.num_transcendentals * device.transcendental_s
    return matmul_factor * matmul_seconds * op.causal_fraction, elementwise_factor * (
        elementwise_seconds + transcendental_seconds
    )

"""Seconds of computing on one device: matrix products, passes over memory, calls.

A product takes what the device's measured grid says. Where none was measured it takes the longer of
two floors: its flops at a share of the peak, its operands at the memory's bandwidth.
"""

from __future__ import annotations

from moesaic.facts.cluster import Calibration, Device
from moesaic.facts.workload import SLOTS, Op, Product

ITEM_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
"""Bytes of a number by its type."""

PEAK_SHARE = 0.75
"""Share of a data sheet's speed that large products reach, where none were measured."""


def product_s(device: Device, dtype: str, product: Product, *, slots: bool = False) -> float:
    """Seconds of `product.count` equal products, one after another, without starting them; those
    of `slots` are done together, or, where that was not measured, started one by one."""
    speed = device.speed(dtype)
    rows, columns, inner = product.rows, product.columns, product.inner
    if not (rows and columns and inner):
        return 0.0
    if slots and speed.slots is not None:
        return product.count * speed.slots.at(rows, columns, inner)
    starting_s = product.count * device.call_s if slots else 0.0
    if speed.products is not None:
        return starting_s + product.count * speed.products.at(rows, columns, inner)
    arithmetic_s = product.flops / (PEAK_SHARE * speed.flops)
    memory_s = product.elements * ITEM_BYTES[dtype] / device.memory_bandwidth
    return starting_s + max(arithmetic_s, memory_s)


def passes_s(device: Device, moved_bytes: float, calls: int, kind: str = "") -> float:
    """Seconds of `calls` passes of `kind` that read and write `moved_bytes` in all."""
    if not calls or not moved_bytes:
        return calls * device.call_s
    each = moved_bytes / calls
    times = device.times_of(kind)
    if times is not None:
        return calls * max(device.call_s, times.at(each))  # A call is in what was measured.
    return calls * (device.call_s + each / device.memory_bandwidth)


def attention_s(device: Device, op: Op) -> float | None:
    """Seconds of attention, where it was measured; without what it passes over before and after."""
    measured = device.speed(op.type).attention
    if measured is None:
        return None
    scores = op.products[0]
    if not scores.flops:
        return 0.0
    return scores.count * measured.at(
        scores.rows, scores.inner, backward=op.kind == "attention backward",
        masked=op.causal_share == 1.0,
    )  # fmt: skip


def op_s(device: Device, op: Op, slower: Calibration | None = None) -> float:
    """Seconds of one operation; `slower` is what runs have shown of the device."""
    return sum(apart_s(device, op, slower))


def apart_s(device: Device, op: Op, slower: Calibration | None = None) -> tuple[float, float]:
    """Seconds of its products, one after another, and of its passes and functions."""
    products_by = 1.0 if slower is None else slower.products
    passes_by = 1.0 if slower is None else slower.passes
    if op.kind.startswith("attention"):
        seconds = attention_s(device, op)
        if seconds is not None:
            passes = passes_s(device, op.moved_bytes, op.calls)
            return products_by * seconds, passes_by * passes
    slots = op.kind == SLOTS
    products = sum(product_s(device, op.type, product, slots=slots) for product in op.products)
    passes = passes_s(device, op.moved_bytes, op.calls, op.kind)
    specials = op.specials * device.special_s
    return products_by * products * op.causal_share, passes_by * (passes + specials)

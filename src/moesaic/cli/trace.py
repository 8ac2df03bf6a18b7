"""`moesaic trace`: a torch model as a workload file, which `moesaic plan --workload` predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.api.tracing import import_factory, trace_factory
from moesaic.base.units import format_bytes, format_quantity
from moesaic.cli import flags, screen
from moesaic.cli.flags import Json
from moesaic.facts.workload import TracedModel

Factory = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="Function that returns (model, inputs) or (model, inputs, loss function).",
        show_default=False,
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch", metavar="N", min=1, show_default=False,
        help="For another batch size: call FACTORY(batch=N).",
    ),
]  # fmt: skip
Blocks = Annotated[
    list[str] | None,
    typer.Option(
        "--block", metavar="NAME", show_default=False,
        help="For other blocks than the model's children: name of a module, as in h.*; repeatable.",
    ),
]  # fmt: skip
Real = Annotated[
    bool,
    typer.Option(
        "--real", metavar="",
        help="For models that read values of tensors: build and run with real ones.",
    ),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", metavar="FILE", show_default=False,
        help="To predict the model: write it for `moesaic plan --workload FILE`.",
    ),
]  # fmt: skip


def trace(
    factory: Factory = None,
    batch: Batch = None,
    block: Blocks = None,
    real: Real = False,
    out: Out = None,
    as_json: Json = False,
) -> int:
    """Write the operations and memory of any torch model, by block, for plan --workload.

    MODULE is imported from the current directory. The model runs one micro-batch, forward and
    backward, in its current mode (train or eval).
    """
    make = import_factory(factory)
    if out is not None:
        flags.check_new_file("--out", out, "workload.json")
    traced = trace_factory(make, batch, block, real=real)
    if out is not None:
        flags.write_new_file("--out", out, traced.to_json())
    if as_json:
        screen.print_json(traced.model_dump(mode="json"))
    else:
        _print_blocks(traced, out)
    return 0


def _print_blocks(traced: TracedModel, out: Path | None) -> None:
    shapes = ", ".join(f"{'x'.join(map(str, one.shape))} {one.dtype}" for one in traced.inputs)
    saved = sum(one.saved_bytes for one in traced.blocks)
    flops = format_quantity(traced.flops, "FLOP")
    screen.print_line(
        f"{traced.name}: {traced.parameters:,} parameters, {flops} and {format_bytes(saved)} of "
        f"activations per micro-batch of {shapes or 'no tensors'}\n"
    )
    rows = [
        (
            one.name,
            f"{one.parameters:,}",
            format_quantity(one.block().forward.flops, "FLOP"),
            format_quantity(one.block().backward.flops, "FLOP"),
            format_bytes(one.saved_bytes),
        )
        for one in traced.blocks
    ]
    screen.print_table(("block", "parameters", "forward", "backward", "activations"), rows)
    if out is not None:
        screen.print_line(f"\nwrote {out}")

"""`moesaic trace`: a torch model as a workload file, which `moesaic plan --workload` predicts."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.base.errors import UserError
from moesaic.base.units import format_bytes
from moesaic.cli import flags, screen
from moesaic.cli.flags import DryRun, Json, Out
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
        help="Passed to FACTORY as batch=N; unset: not passed.",
    ),
]  # fmt: skip
Blocks = Annotated[
    list[str] | None,
    typer.Option(
        "--block", metavar="NAME", show_default=False,
        help="Name of a module that is a block, as in h.*; repeatable. Unset: the model's "
        "children, and the items of lists within them.",
    ),
]  # fmt: skip
Real = Annotated[
    bool,
    typer.Option(
        "--real", metavar="",
        help="Build and run the model with real tensors, for models that read values; unset: "
        "meta tensors, which take no memory.",
    ),
]  # fmt: skip


def trace(
    factory: Factory = None,
    batch: Batch = None,
    block: Blocks = None,
    real: Real = False,
    out: Out = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> int:
    """Write the operations and memory of any torch model, by block, for plan --workload.

    MODULE is imported from the current directory. The model runs one micro-batch, forward and
    backward, in its current mode (train or eval).
    """
    make = _import_factory(factory)
    if out is None and not (dry_run or as_json):
        raise UserError("--out is missing: name the file to write, such as workload.json")
    if out is not None:
        flags.check_new_file("--out", out, "workload.json")
    traced = _run_trace(make, batch, block, real)
    if out is not None and not dry_run:
        flags.write_new_file("--out", out, traced.to_json())
    if as_json:
        screen.print_json(traced.model_dump(mode="json"))
    else:
        _print_blocks(traced, out if not dry_run else None)
    return 0


def _import_factory(factory: str | None) -> Callable[..., Any]:
    """Return the function that MODULE:FACTORY names."""
    if factory is None:
        raise UserError("MODULE:FACTORY is missing: moesaic trace MODULE:FACTORY --out FILE")
    name, _, attribute = factory.partition(":")
    if not name or not attribute or name.startswith("."):
        raise UserError(f"'{factory}' is not of the form MODULE:FACTORY, as in nets.vision:make")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{name} needs {error.name}, which is not installed: install it"
            ) from None
        raise UserError(
            f"there is no module '{name}' in {Path.cwd()} or among installed packages: run "
            "moesaic in the directory of MODULE"
        ) from None
    except (Exception, SystemExit) as error:
        raise _user_code_error(f"importing {name}", error) from error
    finally:
        sys.path.pop(0)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise UserError(f"module '{name}' has no function '{attribute}': give the name of one")
    return function  # type: ignore[no-any-return]


def _run_trace(
    make: Callable[..., Any], batch: int | None, blocks: list[str] | None, real: bool
) -> TracedModel:
    if batch is not None and not _accepts(make, "batch"):
        raise UserError(f"--batch {batch}: {make.__name__} takes no argument called batch")
    import torch
    from torch import nn

    from moesaic.models.trace import trace as trace_model

    with nullcontext() if real else torch.device("meta"):
        try:
            result = make(**({} if batch is None else {"batch": batch}))
        except (Exception, SystemExit) as error:
            raise _user_code_error(
                f"{make.__name__}()", error, "" if real else _REAL_HINT
            ) from error
    if (
        not isinstance(result, tuple)
        or len(result) not in (2, 3)
        or not isinstance(result[0], nn.Module)
    ):
        raise UserError(
            f"{make.__name__}() returned {type(result).__name__}: return (model, inputs) or "
            "(model, inputs, loss), where model is a torch.nn.Module"
        )
    model, inputs, *loss = result
    try:
        return trace_model(model, inputs, blocks=blocks, loss=loss[0] if loss else None)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _user_code_error("running the model", error, "" if real else _REAL_HINT) from error


_REAL_HINT = ", or use --real, which gives tensors values"


def _accepts(make: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(make).parameters.values()
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def _user_code_error(what: str, error: BaseException, hint: str = "") -> UserError:
    """Return an error about the user's code, with its place."""
    frames = traceback.extract_tb(error.__traceback__)
    at = next((one for one in reversed(frames) if one.filename.startswith(str(Path.cwd()))), None)
    where = f" at {Path(at.filename).name}:{at.lineno}" if at is not None else ""
    words = " ".join(str(error).split())
    words = words if len(words) <= 300 else f"{words[:297]}..."
    return UserError(f"{what} raised {type(error).__name__}{where}: {words}; fix it{hint}")


def _print_blocks(traced: TracedModel, out: Path | None) -> None:
    shapes = ", ".join(f"{'x'.join(map(str, one.shape))} {one.dtype}" for one in traced.inputs)
    saved = sum(one.saved_bytes for one in traced.blocks)
    screen.print_line(
        f"{traced.name}: {traced.parameters:,} parameters, {_format_flops(traced.flops)} and "
        f"{format_bytes(saved)} of activations per micro-batch of "
        f"{shapes or 'no tensors'}\n"
    )
    rows = [
        (
            one.name,
            f"{one.parameters:,}",
            _format_flops(one.forward.flops),
            _format_flops(one.backward.flops),
            format_bytes(one.saved_bytes),
        )
        for one in traced.blocks
    ]
    screen.print_table(("block", "parameters", "forward", "backward", "activations"), rows)
    if out is not None:
        screen.print_line(f"\nwrote {out}")


def _format_flops(flops: float) -> str:
    """Return flops as text: 3.2 GFLOP."""
    for unit in ("", "k", "M", "G", "T"):
        if flops < 1000:
            return f"{flops:.0f} FLOP" if not unit else f"{flops:.1f} {unit}FLOP"
        flops /= 1000
    return f"{flops:.1f} PFLOP"

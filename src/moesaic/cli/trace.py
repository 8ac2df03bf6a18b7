"""`moesaic trace`: a foreign model as a file of its work; and what `moesaic plan` makes of one."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from moesaic.base.errors import ConfigError, UserError
from moesaic.cli import flags, outlook, screen
from moesaic.cli.flags import DryRun, Json, Out
from moesaic.facts.cluster import Cluster, device_at, place
from moesaic.facts.workload import Traced, load_traced, traced_blocks, traced_memory

Factory = Annotated[
    str | None,
    typer.Argument(
        metavar="MODULE:FACTORY",
        help="A function that returns (model, inputs) or (model, inputs, loss of the output).",
        show_default=False,
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(
        "--batch", metavar="N", min=1, show_default=False,
        help="Handed to FACTORY as batch=N; unset: it is called without.",
    ),
]  # fmt: skip
Blocks = Annotated[
    list[str] | None,
    typer.Option(
        "--block", metavar="NAME", show_default=False,
        help="A module that is a block, as in h.*; may be given again. Unset: the model's "
        "children, and the items of lists within them.",
    ),
]  # fmt: skip
Real = Annotated[
    bool,
    typer.Option(
        "--real", metavar="",
        help="Build and run the model with real numbers, where it asks for values; unset: no "
        "memory is taken.",
    ),
]  # fmt: skip
Workload = Annotated[
    Path | None,
    typer.Option(
        "--workload", metavar="FILE", show_default=False,
        help="Instead of JOB.toml: a model that `moesaic trace` wrote, all of it on every rank.",
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
    """Write what one micro-batch of any torch model takes, block by block, for plan --workload.

    MODULE is imported from the current directory. The model runs once, forward and backward, in
    the mode (train or eval) that it comes in.
    """
    make = _imported(factory)
    if out is None and not (dry_run or as_json):
        raise UserError("--out is missing: name the file to write, such as workload.json")
    if out is not None:
        flags.check_new("--out", out, "workload.json")
    traced = _traced(make, batch, block, real)
    if out is not None and not dry_run:
        flags.write_new("--out", out, traced.to_json())
    if as_json:
        screen.as_json(traced.model_dump(mode="json"))
    else:
        _show(traced, out if not dry_run else None)
    return 0


def _imported(factory: str | None) -> Callable[..., Any]:
    """What MODULE:FACTORY names."""
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
            raise UserError(f"{name} needs {error.name}, which is not there: install it") from None
        raise UserError(
            f"there is no module '{name}' in {Path.cwd()} or among installed packages: give "
            "MODULE:FACTORY from the directory that holds MODULE"
        ) from None
    except (Exception, SystemExit) as error:
        raise _theirs(f"importing {name}", error) from error
    finally:
        sys.path.pop(0)
    made = getattr(module, attribute, None)
    if not callable(made):
        raise UserError(f"module '{name}' has no function '{attribute}': give the name of one")
    return made  # type: ignore[no-any-return]


def _traced(
    make: Callable[..., Any], batch: int | None, blocks: list[str] | None, real: bool
) -> Traced:
    if batch is not None and not _takes(make, "batch"):
        raise UserError(f"--batch {batch}: {make.__name__} takes no argument called batch")
    import torch
    from torch import nn

    from moesaic.models.trace import trace as engine

    with nullcontext() if real else torch.device("meta"):
        try:
            given = make(**({} if batch is None else {"batch": batch}))
        except (Exception, SystemExit) as error:
            raise _theirs(f"{make.__name__}()", error, "" if real else _HINT) from error
    if (
        not isinstance(given, tuple)
        or len(given) not in (2, 3)
        or not isinstance(given[0], nn.Module)
    ):
        raise UserError(
            f"{make.__name__}() returned {type(given).__name__}: return (model, inputs) or "
            "(model, inputs, loss), the model a torch.nn.Module"
        )
    model, inputs, *loss = given
    try:
        return engine(model, inputs, blocks=blocks, loss=loss[0] if loss else None)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise _theirs("running the model", error, "" if real else _HINT) from error


_HINT = ", or try --real, which gives tensors values"


def _takes(make: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(make).parameters.values()
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def _theirs(what: str, error: BaseException, hint: str = "") -> UserError:
    """A mistake in the user's code: which, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    at = next((one for one in reversed(frames) if one.filename.startswith(str(Path.cwd()))), None)
    where = f" at {Path(at.filename).name}:{at.lineno}" if at is not None else ""
    words = " ".join(str(error).split())
    words = words if len(words) <= 300 else f"{words[:297]}..."
    return UserError(f"{what} raised {type(error).__name__}{where}: {words}; mend it{hint}")


def _show(traced: Traced, out: Path | None) -> None:
    shapes = ", ".join(f"{'x'.join(map(str, one.shape))} {one.dtype}" for one in traced.inputs)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("block", overflow="fold", no_wrap=True)
    for title in ("parameters", "forward", "backward", "activations"):
        table.add_column(title, justify="right")
    for one in traced.blocks:
        table.add_row(
            one.name, f"{one.parameters:,}", _flops(one.forward.flops), _flops(one.backward.flops),
            screen.size(one.saved_bytes),
        )  # fmt: skip
    saved = sum(one.saved_bytes for one in traced.blocks)
    screen.say(
        f"{traced.name}: {traced.parameters:,} parameters, {_flops(traced.flops)} and "
        f"{screen.size(saved)} of activations a micro-batch of {shapes or 'no tensors'}\n"
    )
    screen.show(table)
    if out is not None:
        screen.say(f"\nwrote {out}")


def _flops(flops: float) -> str:
    """Flops for people: 3.2 GFLOP."""
    for unit in ("", "k", "M", "G", "T"):
        if flops < 1000:
            return f"{flops:.0f} FLOP" if not unit else f"{flops:.1f} {unit}FLOP"
        flops /= 1000
    return f"{flops:.1f} PFLOP"


def tell(
    path: Path, cluster: Cluster, ranks: int, as_json: bool, beside: Mapping[str, object]
) -> int:
    """What `moesaic plan --workload PATH` says: time by phase, and memory, of `ranks` copies.

    Of what is said of a job, `beside`, nothing may be given.
    """
    for flag, value in beside.items():
        if value:
            raise ConfigError(f"--workload {path} goes without {flag}, which is for jobs: drop one")
    facts = predict(load_traced(path), cluster, ranks)
    if as_json:
        screen.as_json(facts)
    else:
        _print(facts)
    return 0


def predict(traced: Traced, cluster: Cluster, ranks: int) -> dict[str, Any]:
    """What is to be expected of a traced model, as plain data."""
    from moesaic.policy.cost.step import replicated
    from moesaic.sim.timeline import run

    timeline = run(replicated(traced_blocks(traced, ranks), ranks, cluster), ranks)
    outlook.check(cluster.name, timeline.step_s)
    slowest = timeline.slowest
    devices = [device_at(cluster, one) for one in place(cluster, ranks)]
    smallest = min(device.memory_bytes for device in devices)
    needs, learnt = traced_memory(traced), cluster.calibration
    return {
        "cluster": cluster.name, "calibration": learnt and learnt.model_dump(),
        "model": traced.name, "ranks": ranks, "device": devices[slowest].model,
        "parameters": traced.parameters, "flops": traced.flops,
        "memory_per_rank": {**needs.by_kind(), "peak_bytes": needs.peak_bytes},
        "memory_bytes": smallest,
        "fits": needs.peak_bytes <= smallest,
        "step_s": timeline.step_s, "phases_s": timeline.by_phase(slowest),
        "blocks_s": timeline.by_block(slowest),
        "samples_per_s": ranks * traced.batch / timeline.step_s,
    }  # fmt: skip


def _print(facts: dict[str, Any]) -> None:
    outlook.tell(
        f"{facts['model']} whole on each of {facts['ranks']} ranks on {facts['cluster']} "
        f"({facts['device']})",
        facts,
        {"samples": f"{facts['samples_per_s']:,.1f} a second"},
        "" if facts["fits"] else ": it does not fit, trace a smaller batch",
    )

"""Traces of any torch model that a user's function makes."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from textwrap import shorten
from typing import Any

from moesaic.base.errors import ConfigError, UserError
from moesaic.facts.workload import TracedModel


def import_factory(factory: str | None) -> Callable[..., Any]:
    """Return the function that MODULE:FACTORY names."""
    if factory is None:
        raise ConfigError("MODULE:FACTORY is missing: moesaic trace MODULE:FACTORY")
    name, _, attribute = factory.partition(":")
    if not name or not attribute or name.startswith("."):
        raise ConfigError(f"'{factory}' is not of the form MODULE:FACTORY, as in nets.vision:make")
    sys.path.insert(0, str(Path.cwd()))
    try:
        with _blaming_user_code(f"importing {name}", is_import=True):
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{name} needs {error.name}, which is not installed: install it"
            ) from None
        raise ConfigError(
            f"there is no module '{name}' in {Path.cwd()} or among installed packages: run "
            "moesaic in the directory of MODULE"
        ) from None
    finally:
        sys.path.pop(0)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"module '{name}' has no function '{attribute}': give the name of one")
    return function  # type: ignore[no-any-return]


def trace_factory(
    make: Callable[..., Any], batch: int | None, blocks: list[str] | None, *, real: bool
) -> TracedModel:
    """Return the operations and memory of the model that `make` returns, by block.

    Args:
        make: function that returns (model, inputs) or (model, inputs, loss function).
        batch: argument of `make` for another batch size.
        blocks: names of modules; None: the model's children.
        real: give tensors values, instead of shapes alone.
    """
    if batch is not None and not _accepts(make, "batch"):
        raise ConfigError(f"--batch {batch}: {make.__name__} takes no argument called batch")
    import torch
    from torch import nn

    from moesaic.models.trace import trace as trace_model

    hint = "" if real else ", or use --real, which gives tensors values"
    device = nullcontext() if real else torch.device("meta")
    with device, _blaming_user_code(f"{make.__name__}()", hint):
        result = make(**({} if batch is None else {"batch": batch}))
    if (
        not isinstance(result, tuple)
        or len(result) not in (2, 3)
        or not isinstance(result[0], nn.Module)
    ):
        raise ConfigError(
            f"{make.__name__}() returned {type(result).__name__}: return (model, inputs) or "
            "(model, inputs, loss), where model is a torch.nn.Module"
        )
    model, inputs, *loss = result
    with _blaming_user_code("running the model", hint):
        return trace_model(model, inputs, blocks=blocks, loss=loss[0] if loss else None)


def _accepts(make: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(make).parameters.values()
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


@contextmanager
def _blaming_user_code(what: str, hint: str = "", *, is_import: bool = False) -> Iterator[None]:
    """Turn an exception of the user's code into one sentence with its place; an import may also
    raise ModuleNotFoundError."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and is_import:
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [one for one in frames if one.filename.startswith(str(Path.cwd()))]
        where = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        words = shorten(str(error), 300, placeholder="...")
        raise ConfigError(
            f"{what} raised {type(error).__name__}{where}: {words}; fix it{hint}"
        ) from error

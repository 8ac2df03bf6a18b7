"""Arguments of the Python API under names of other frameworks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from typing import ParamSpec, TypeVar

from moesaic.base.unknown_keys import by_other_name
from moesaic.facts.job import Job

P = ParamSpec("P")
R = TypeVar("R")


def explains_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function` with a TypeError for an unknown argument that names the one meant."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in known:
                meant = [key.rpartition(".")[2] for key in by_other_name(Job, name).keys]
                near = [one for one in meant if one in known] or get_close_matches(name, known, n=1)
                remedy = f"did you mean '{near[0]}'?" if near else f"it has {', '.join(known)}"
                where = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{where} has no argument '{name}': {remedy}")
        return function(*args, **kwargs)

    return call

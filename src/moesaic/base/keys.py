"""The tree of keys under a section: what each is called, takes and means.

A key is named as a file names it (`train.steps`, `model.from`). `locate` finds one and explains a
miss; `walk` and `explain` describe them for people; `expects` says what a value must look like.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import itertools
import json
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from datetime import date, time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moesaic.base.errors import ConfigError


class Key(NamedTuple):
    """One key, in words."""

    path: str
    """Dotted, from the root of the file."""
    kind: str
    """What it takes; `table` for a section, `list of tables` for a list of them."""
    default: str
    """As TOML writes it; `required`, `unset`, or empty for tables."""
    meaning: str


def fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of a section by the names that a file uses; `file_keys` come first."""
    _describe(section)
    also = getattr(section, "file_keys", None)
    hidden: frozenset[str] = getattr(section, "resolved_keys", frozenset())
    own = {field.alias or name: field for name, field in section.model_fields.items()}
    first = fields(also) if also is not None else {}
    return {**first, **{name: field for name, field in own.items() if name not in hidden}}


def _describe(section: type[BaseModel]) -> None:
    """Give the fields of a section the words that stand below each in the code.

    Pydantic would do so as classes are made, for every command; reading the code takes longer than
    most of them, and only those that explain a key have to.
    """
    for owner in itertools.takewhile(lambda one: one is not BaseModel, section.__mro__):
        words = _words_of(owner.__module__)
        for name, field in section.model_fields.items():
            field.description = field.description or words.get(f"{owner.__qualname__}.{name}")


@cache
def _words_of(module: str) -> dict[str, str]:
    """The text below each annotated name of a module's classes, by where it stands; none, if the
    code is not at hand."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # There is bytecode alone.
        return {}
    return dict(_words_in(ast.parse(source).body, ""))


def _words_in(body: Sequence[ast.stmt], at: str) -> Iterator[tuple[str, str]]:
    for one, below in itertools.pairwise([*body, ast.Pass()]):
        if isinstance(one, ast.ClassDef):
            yield from _words_in(one.body, f"{at}{one.name}.")
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            match below:
                case ast.Expr(ast.Constant(str(text))):
                    yield f"{at}{one.target.id}", inspect.cleandoc(text)


def locate(root: type[BaseModel], key: str) -> FieldInfo:
    """The field that the dotted `key` names; a key that does not exist is an error that helps."""
    section, parts = root, key.split(".")
    for depth, part in enumerate(parts):
        known = fields(section)
        if part not in known:
            raise ConfigError(unknown(root, parts[: depth + 1]))
        if depth == len(parts) - 1:
            return known[part]
        inner = section_of(known[part].annotation)
        if inner is None:
            where = ".".join(parts[: depth + 1])
            raise ConfigError(
                f"unknown key '{key}': '{where}' is a value and has no keys of its own"
            )
        section = inner
    raise AssertionError("str.split gives at least one part")


def walk(root: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Every key of a section and of the sections below it, in the order of the code."""
    for name, field in fields(root).items():
        key, inner = f"{prefix}{name}", section_of(field.annotation)
        if inner is None:
            yield Key(key, expects(field), default(field), meaning(field))
        else:
            kind = "list of tables" if is_list(field.annotation) else "table"
            yield Key(key, kind, "", meaning(field))
            yield from walk(inner, f"{key}.")


def explain(root: type[BaseModel], key: str) -> str:
    """What `key` means, takes and is by default, in a few lines; for a table, its keys."""
    field = locate(root, key)
    inner = section_of(field.annotation)
    if inner is None:
        lines = [f"{key}: {expects(field)}", f"  {meaning(field)}"]
        return "\n".join(
            [*lines, f"  default: {default(field)}".replace("default: required", "required")]
        )
    kind = "list of tables" if is_list(field.annotation) else "table"
    lines = [f"{key}: {kind}", f"  {meaning(field)}"]
    return "\n".join(
        [*lines, *(f"  .{name}: {meaning(child)}" for name, child in fields(inner).items())]
    )


def meaning(field: FieldInfo) -> str:
    """The documentation of a field, on one line."""
    return " ".join((field.description or "").split())


def default(field: FieldInfo) -> str:
    """The default of a field as TOML writes it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "unset" if value is None else show(value)


def expects(field: FieldInfo) -> str:
    """What a field takes, in words: `an integer from 1`, `"a", "b" or "c"`."""
    return _phrase(field.annotation, field.metadata)


def element(field: FieldInfo, depth: int) -> str:
    """What stands `depth` lists or tables deep in a field, in words."""
    kind = _inside(field, depth)
    return "a value" if kind is None else _phrase(kind, ())


def _inside(field: FieldInfo, depth: int) -> Any:
    kind: Any = field.annotation
    for _ in range(depth):
        if typing.get_origin(kind) in (types.UnionType, typing.Union):
            kind = next(one for one in typing.get_args(kind) if one is not type(None))
        kind = typing.get_args(kind)[-1] if typing.get_args(kind) else None
    return kind


def is_table(annotation: object) -> bool:
    """Whether a field holds a table whose keys are free."""
    return typing.get_origin(annotation) is dict


def choices(field: FieldInfo, depth: int) -> list[str]:
    """The words that may stand `depth` lists or tables deep in a field, if it takes words only."""
    return [value for value in _literals(_inside(field, depth)) if isinstance(value, str)]


def section_of(annotation: object) -> type[BaseModel] | None:
    """The section that a field holds, or None for a value."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def is_list(annotation: object) -> bool:
    """Whether a field holds a list (of sections, where `section_of` finds one)."""
    return typing.get_origin(annotation) is list


def unknown(root: type[BaseModel], parts: Sequence[str | int]) -> str:
    """What to say about a key that does not exist; all of it but the last part does.

    A number among `parts` is a place in a list of tables.
    """
    key, names = dotted(parts), [part for part in parts if isinstance(part, str)]
    above = ".".join(names[:-1])
    hint = nearest(root, names)
    if hint:
        return f"unknown key '{key}': did you mean '{hint}'?"
    known = [path[2] for path in _paths(root) if path[0] == above]
    if not known:
        return f"unknown key '{key}': there are no keys"
    where = f"'{above}' has the keys" if above else "the keys at the top are"
    return f"unknown key '{key}': {where} {', '.join(known)}"


def nearest(root: type[BaseModel], parts: Sequence[str]) -> str | None:
    """The key that was probably meant: the same word elsewhere, or a like one.

    One that differs by a letter or so and stands beside it goes before both.
    """
    *_, word = parts
    above, known = ".".join(parts[:-1]), _paths(root)
    here = [path[2] for path in known if path[0] == above]
    elsewhere = [path for path in known if path[2] == word]
    nearly = difflib.get_close_matches(word, here, n=1, cutoff=0.85)
    if len(elsewhere) == 1 and not nearly:
        return "".join(elsewhere[0])
    beside = nearly or difflib.get_close_matches(word, here, n=1)
    if beside:
        return f"{above}.{beside[0]}" if above else beside[0]
    like = difflib.get_close_matches(word, {path[2] for path in known}, n=1, cutoff=0.8)
    places = [path for path in known if path[2] in like]
    return "".join(places[0]) if len(places) == 1 else None


def dotted(parts: Iterable[str | int]) -> str:
    """A key as TOML writes it; a place in a list of tables stands in brackets."""
    key = ""
    for part in parts:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", part)
            key += ("." if key else "") + (part if bare else json.dumps(part))
    return key


def _paths(root: type[BaseModel]) -> list[tuple[str, str, str]]:
    """Every key, cut in what stands before its last dot, the dot, and its last part."""
    return [entry.path.rpartition(".") for entry in walk(root)]


def choose(value: str, words: Sequence[str], expected: str) -> str:
    """The remedy for a word that is none of `words`; `expected` names all that may stand there."""
    near = difflib.get_close_matches(value.lower(), words, n=1)
    return f"did you mean {show(near[0])} (it takes {expected})?" if near else f"give {expected}"


def listed(words: Sequence[str], last: str = "or") -> str:
    """`a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def show(value: object) -> str:
    """A value as TOML writes it, cut short where it is long."""
    text = toml(value)
    return text if len(text) <= 80 else text[:77] + "..."


def toml(value: object) -> str:
    """A value as TOML writes it, on one line; in a table, keys without a value are left out."""
    if isinstance(value, float):
        return str(value)
    if isinstance(value, dict):
        items = {dotted([str(key)]): item for key, item in value.items() if item is not None}
        inner = ", ".join(f"{key} = {toml(item)}" for key, item in items.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, date | time):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _phrase(annotation: object, constraints: Iterable[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = [extra for one in arguments[1:] for extra in getattr(one, "metadata", [one])]
        return _phrase(arguments[0], inner)
    if origin is typing.Literal:
        return listed([show(value) for value in arguments])
    if origin in (types.UnionType, typing.Union):
        kinds = [argument for argument in arguments if argument is not type(None)]
        return listed([_phrase(kind, constraints) for kind in kinds])
    if origin is list:
        return _list_phrase(arguments[0], constraints)
    names: dict[object, str] = {
        int: "an integer", float: "a number", str: "a string", bool: "true or false",
        Path: "a path",
    }  # fmt: skip
    return names.get(annotation, "a table") + _range(constraints)


def _list_phrase(kind: object, constraints: Iterable[Any]) -> str:
    shortest = [limit.min_length for limit in constraints if hasattr(limit, "min_length")]
    longest = [limit.max_length for limit in constraints if hasattr(limit, "max_length")]
    size = f"{shortest[0]} " if shortest and shortest == longest else ""
    one = _phrase(kind, ()).removeprefix("an ").removeprefix("a ")
    if typing.get_origin(kind) is typing.Literal:
        size = "one or more of " if shortest and not longest else size
        return f"a list of {size}{one}"
    word, space, rest = one.partition(" ")
    return f"a list of {size}{word}s{space}{rest}"


def _range(constraints: Iterable[Any]) -> str:
    words = (("ge", "from"), ("gt", "above"), ("le", "up to"), ("lt", "below"))
    found = [
        f" {word} {_number(getattr(limit, name))}"
        for name, word in words
        for limit in constraints
        if getattr(limit, name, None) is not None
    ]
    return " and".join(found)


def _number(value: float) -> str:
    """A limit; large powers of two as such."""
    power = int(value).bit_length() - 1
    return f"2^{power}" if power > 20 and value == 2**power else str(value)


def _literals(annotation: object) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(value for one in typing.get_args(annotation) for value in _literals(one))
    return ()

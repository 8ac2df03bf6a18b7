"""Key tree of a section: the name, type, default and meaning of every key.

A key has the name that a file uses (`train.steps`, `model.from`). `locate` finds a key or explains
why it is unknown. `walk` and `explain` describe keys; `describe_type` says which values a key
takes.
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
    """One key, described in words."""

    path: str
    """Dotted path from the root of the file."""
    kind: str
    """Type of the value; `table` for a section, `list of tables` for a list of sections."""
    default: str
    """Default as TOML; `required`, `unset`, or empty for tables."""
    meaning: str


def fields(section: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section by the names that a file uses; `file_keys` come first."""
    _fill_descriptions(section)
    also = getattr(section, "file_keys", None)
    hidden: frozenset[str] = getattr(section, "resolved_keys", frozenset())
    own = {field.alias or name: field for name, field in section.model_fields.items()}
    first = fields(also) if also is not None else {}
    return {**first, **{name: field for name, field in own.items() if name not in hidden}}


def _fill_descriptions(section: type[BaseModel]) -> None:
    """Set the descriptions of a section's fields from the docstrings below them.

    Pydantic would parse the source whenever a class is made. Parsing takes longer than most
    commands, so it happens only when a key is explained.
    """
    for owner in itertools.takewhile(lambda one: one is not BaseModel, section.__mro__):
        words = _docstrings_of(owner.__module__)
        for name, field in section.model_fields.items():
            field.description = field.description or words.get(f"{owner.__qualname__}.{name}")


@cache
def _docstrings_of(module: str) -> dict[str, str]:
    """Return a module's field docstrings by `Class.field`; empty if there is no source."""
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # Only bytecode is installed.
        return {}
    return dict(_field_docstrings(ast.parse(source).body, ""))


def _field_docstrings(body: Sequence[ast.stmt], at: str) -> Iterator[tuple[str, str]]:
    for one, below in itertools.pairwise([*body, ast.Pass()]):
        if isinstance(one, ast.ClassDef):
            yield from _field_docstrings(one.body, f"{at}{one.name}.")
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            match below:
                case ast.Expr(ast.Constant(str(text))):
                    yield f"{at}{one.target.id}", inspect.cleandoc(text)


def locate(root: type[BaseModel], key: str) -> FieldInfo:
    """Return the field of the dotted `key`; raise ConfigError with a suggestion if unknown."""
    section, parts = root, key.split(".")
    for depth, part in enumerate(parts):
        known = fields(section)
        if part not in known:
            raise ConfigError(unknown_key_message(root, parts[: depth + 1]))
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
    """Yield every key of a section and of its subsections, in source order."""
    for name, field in fields(root).items():
        key, inner = f"{prefix}{name}", section_of(field.annotation)
        if inner is None:
            yield Key(key, describe_type(field), default(field), meaning(field))
        else:
            kind = "list of tables" if is_list(field.annotation) else "table"
            yield Key(key, kind, "", meaning(field))
            yield from walk(inner, f"{key}.")


def explain(root: type[BaseModel], key: str) -> str:
    """Return the meaning, type and default of `key` in a few lines; for a table, its keys."""
    field = locate(root, key)
    inner = section_of(field.annotation)
    if inner is None:
        lines = [f"{key}: {describe_type(field)}", f"  {meaning(field)}"]
        return "\n".join(
            [*lines, f"  default: {default(field)}".replace("default: required", "required")]
        )
    kind = "list of tables" if is_list(field.annotation) else "table"
    lines = [f"{key}: {kind}", f"  {meaning(field)}"]
    return "\n".join(
        [*lines, *(f"  .{name}: {meaning(child)}" for name, child in fields(inner).items())]
    )


def meaning(field: FieldInfo) -> str:
    """Return the documentation of a field as one line."""
    return " ".join((field.description or "").split())


def default(field: FieldInfo) -> str:
    """Return the default of a field as TOML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "unset" if value is None else show(value)


def describe_type(field: FieldInfo) -> str:
    """Return the type of a field in words: `an integer from 1`, `"a", "b" or "c"`."""
    return _describe_annotation(field.annotation, field.metadata)


def describe_element_type(field: FieldInfo, depth: int) -> str:
    """Return the type of the values `depth` lists or tables deep in a field, in words."""
    kind = _element_type(field, depth)
    return "a value" if kind is None else _describe_annotation(kind, ())


def _element_type(field: FieldInfo, depth: int) -> Any:
    kind: Any = field.annotation
    for _ in range(depth):
        if typing.get_origin(kind) in (types.UnionType, typing.Union):
            kind = next(one for one in typing.get_args(kind) if one is not type(None))
        kind = typing.get_args(kind)[-1] if typing.get_args(kind) else None
    return kind


def is_table(annotation: object) -> bool:
    """Return True if a field holds a table with free keys."""
    return typing.get_origin(annotation) is dict


def choices(field: FieldInfo, depth: int) -> list[str]:
    """Return the strings that a field lists as choices, `depth` lists or tables deep."""
    return [value for value in _literals(_element_type(field, depth)) if isinstance(value, str)]


def section_of(annotation: object) -> type[BaseModel] | None:
    """Return the section class of a field, or None for a value."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def is_list(annotation: object) -> bool:
    """Return True if a field holds a list (of sections, where `section_of` finds one)."""
    return typing.get_origin(annotation) is list


def unknown_key_message(root: type[BaseModel], parts: Sequence[str | int]) -> str:
    """Return the message for an unknown key, of which only the last part is unknown.

    A number among `parts` is an index in a list of tables.
    """
    key, names = dotted_key(parts), [part for part in parts if isinstance(part, str)]
    above = ".".join(names[:-1])
    hint = nearest_key(root, names)
    if hint:
        return f"unknown key '{key}': did you mean '{hint}'?"
    known = [path[2] for path in _paths(root) if path[0] == above]
    if not known:
        return f"unknown key '{key}': there are no keys"
    where = f"'{above}' has the keys" if above else "the keys at the top are"
    return f"unknown key '{key}': {where} {', '.join(known)}"


def nearest_key(root: type[BaseModel], parts: Sequence[str]) -> str | None:
    """Return the key that was probably meant: the same name elsewhere, or a similar one.

    A sibling that differs by about one letter comes first.
    """
    *_, word = parts
    above, known = ".".join(parts[:-1]), _paths(root)
    siblings = [path[2] for path in known if path[0] == above]
    elsewhere = [path for path in known if path[2] == word]
    near = difflib.get_close_matches(word, siblings, n=1, cutoff=0.85)
    if len(elsewhere) == 1 and not near:
        return "".join(elsewhere[0])
    similar = near or difflib.get_close_matches(word, siblings, n=1)
    if similar:
        return f"{above}.{similar[0]}" if above else similar[0]
    others = difflib.get_close_matches(word, {path[2] for path in known}, n=1, cutoff=0.8)
    places = [path for path in known if path[2] in others]
    return "".join(places[0]) if len(places) == 1 else None


def dotted_key(parts: Iterable[str | int]) -> str:
    """Return a key as TOML writes it, with list indices in brackets."""
    key = ""
    for part in parts:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", part)
            key += ("." if key else "") + (part if bare else json.dumps(part))
    return key


def _paths(root: type[BaseModel]) -> list[tuple[str, str, str]]:
    """Return every key as (parent, dot, name)."""
    return [entry.path.rpartition(".") for entry in walk(root)]


def suggest_choice(value: str, words: Sequence[str], expected: str) -> str:
    """Return the remedy for a value that is none of `words`; `expected` lists all valid ones."""
    near = difflib.get_close_matches(value.lower(), words, n=1)
    return f"did you mean {show(near[0])} (it takes {expected})?" if near else f"give {expected}"


def join_words(words: Sequence[str], last: str = "or") -> str:
    """Join words: `a, b or c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def show(value: object) -> str:
    """Return a value as TOML, truncated to 80 characters."""
    text = toml(value)
    return text if len(text) <= 80 else text[:77] + "..."


def toml(value: object) -> str:
    """Return a value as TOML on one line; tables leave out keys without a value."""
    if isinstance(value, float):
        return str(value)
    if isinstance(value, dict):
        items = {dotted_key([str(key)]): item for key, item in value.items() if item is not None}
        inner = ", ".join(f"{key} = {toml(item)}" for key, item in items.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, date | time):
        return value.isoformat()
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _describe_annotation(annotation: object, constraints: Iterable[Any]) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        inner = [extra for one in arguments[1:] for extra in getattr(one, "metadata", [one])]
        return _describe_annotation(arguments[0], inner)
    if origin is typing.Literal:
        return join_words([show(value) for value in arguments])
    if origin in (types.UnionType, typing.Union):
        kinds = [argument for argument in arguments if argument is not type(None)]
        return join_words([_describe_annotation(kind, constraints) for kind in kinds])
    if origin is list:
        return _describe_list(arguments[0], constraints)
    names: dict[object, str] = {
        int: "an integer", float: "a number", str: "a string", bool: "true or false",
        Path: "a path",
    }  # fmt: skip
    return names.get(annotation, "a table") + _describe_range(constraints)


def _describe_list(kind: object, constraints: Iterable[Any]) -> str:
    shortest = [limit.min_length for limit in constraints if hasattr(limit, "min_length")]
    longest = [limit.max_length for limit in constraints if hasattr(limit, "max_length")]
    size = f"{shortest[0]} " if shortest and shortest == longest else ""
    one = _describe_annotation(kind, ()).removeprefix("an ").removeprefix("a ")
    if typing.get_origin(kind) is typing.Literal:
        size = "one or more of " if shortest and not longest else size
        return f"a list of {size}{one}"
    word, space, rest = one.partition(" ")
    return f"a list of {size}{word}s{space}{rest}"


def _describe_range(constraints: Iterable[Any]) -> str:
    words = (("ge", "from"), ("gt", "above"), ("le", "up to"), ("lt", "below"))
    found = [
        f" {word} {_number(getattr(limit, name))}"
        for name, word in words
        for limit in constraints
        if getattr(limit, name, None) is not None
    ]
    return " and".join(found)


def _number(value: float) -> str:
    """Return a limit as text; large powers of two as `2^n`."""
    power = int(value).bit_length() - 1
    return f"2^{power}" if power > 20 and value == 2**power else str(value)


def _literals(annotation: object) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return tuple(value for one in typing.get_args(annotation) for value in _literals(one))
    return ()

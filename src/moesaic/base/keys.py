"""Key tree of a section: the name, type, default and meaning of every key.

A key has the name that a file uses (`train.steps`, `model.from`). `walk` and `explain` describe
keys; `describe_type` says which values a key takes. `base.unknown_keys` finds a key by its name.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moesaic.base.errors import ConfigError

_MAX_LISTED_DIVISORS = 12


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
    """Return a module's field docstrings by `Class.field`."""
    source = inspect.getsource(sys.modules[module])
    return dict(_field_docstrings(ast.parse(source).body, ""))


def _field_docstrings(body: Sequence[ast.stmt], at: str) -> Iterator[tuple[str, str]]:
    for one, below in itertools.pairwise([*body, ast.Pass()]):
        if isinstance(one, ast.ClassDef):
            yield from _field_docstrings(one.body, f"{at}{one.name}.")
        elif isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            match below:
                case ast.Expr(ast.Constant(str(text))):
                    yield f"{at}{one.target.id}", inspect.cleandoc(text)


def walk(root: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield every key of a section and of its subsections, in source order."""
    for key, field in walk_fields(root, prefix):
        if section_of(field.annotation) is None:
            yield Key(key, describe_type(field), default(field), meaning(field))
        else:
            yield Key(key, table_kind(field), "", meaning(field))


def walk_fields(root: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield the dotted path and field of every key of a section and of its subsections."""
    for name, field in fields(root).items():
        yield f"{prefix}{name}", field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from walk_fields(inner, f"{prefix}{name}.")


def table_kind(field: FieldInfo) -> str:
    """Return `list of tables` or `table` for a field that holds sections."""
    return "list of tables" if typing.get_origin(field.annotation) is list else "table"


def explain(key: str, field: FieldInfo) -> str:
    """Return the meaning, type and default of a key in a few lines; for a table, its keys."""
    inner = section_of(field.annotation)
    if inner is None:
        lines = [f"{key}: {describe_type(field)}", f"  {meaning(field)}"]
        lines.append("  required" if field.is_required() else f"  default: {default(field)}")
    else:
        lines = [f"{key}: {table_kind(field)}", f"  {meaning(field)}"]
        lines += [f"  .{name}: {meaning(child)}" for name, child in fields(inner).items()]
    return "\n".join(lines)


def meaning(field: FieldInfo) -> str:
    """Return the documentation of a field as one line."""
    return " ".join((field.description or "").split())


def default(field: FieldInfo) -> str:
    """Return the default of a field as TOML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "unset" if value is None else show(value)


def describe_type(field: FieldInfo) -> str:
    """Return the type of a field in words: `an integer from 1`, `"a", "b" or "c"`."""
    inner = section_of(field.annotation)
    if inner is not None:
        kind = table_kind(field)
        if any(getattr(limit, "min_length", None) == 1 for limit in field.metadata):
            kind = kind.replace("list of", "list of one or more")
        return f"a {kind} with keys {', '.join(fields(inner))}"
    return _describe_annotation(field.annotation, field.metadata)


def describe_required(section: type[BaseModel]) -> str:
    """Return in words which keys make a section complete: ` with preset or all required keys`."""
    also = getattr(section, "file_keys", None)
    if also is not None:
        return f" with {join_words([*fields(also), 'all required keys'])}"
    own = required_keys(section)
    return f" with {join_words(own, 'and')}" if own else ""


def required_keys(section: type[BaseModel]) -> list[str]:
    """Return the required keys of a section."""
    return [name for name, field in fields(section).items() if field.is_required()]


def is_table(annotation: object) -> bool:
    """Return True if a field holds a table with free keys."""
    return typing.get_origin(annotation) is dict


def choices(annotation: object) -> list[str]:
    """Return the strings that a field's type lists as choices, at any depth."""
    if typing.get_origin(annotation) is typing.Literal:
        return [value for value in typing.get_args(annotation) if isinstance(value, str)]
    return [word for one in typing.get_args(annotation) for word in choices(one)]


def section_of(annotation: object) -> type[BaseModel] | None:
    """Return the section class of a field, or None for a value."""
    for candidate in (annotation, *typing.get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


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


def suggest_choice(value: str, words: Sequence[str], expected: str) -> str:
    """Return the remedy for a value that is none of `words`; `expected` lists all valid ones."""
    near = difflib.get_close_matches(value.lower(), words, n=1)
    return f"did you mean {show(near[0])} (it takes {expected})?" if near else f"give {expected}"


def check_choice(where: str, value: object, words: Sequence[str]) -> str:
    """Return `value` if it is one of `words`; raise ConfigError that starts with `where` if not."""
    if not isinstance(value, str) or value not in words:
        remedy = suggest_choice(str(value), words, join_words([show(word) for word in words]))
        raise ConfigError(f"{where} = {show(value)} is not known: {remedy}")
    return value


def join_words(words: Sequence[str], last: str = "or") -> str:
    """Join words: `a, b or c`."""
    return "".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def assignments(values: Mapping[str, Any]) -> str:
    """Return values by key in words: `layout.ep = 8 and train.recompute = true`."""
    return join_words([f"{key} = {toml(value)}" for key, value in values.items()], "and")


def list_divisors(total: int) -> str:
    """Return the divisors of `total` in words, if they are few."""
    found = [str(one) for one in range(1, total + 1) if total % one == 0]
    return join_words(found) if len(found) <= _MAX_LISTED_DIVISORS else "a divisor"


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
    if origin in (typing.Literal, types.UnionType, typing.Union):
        return join_words(list(_alternatives(annotation, constraints)))
    if origin is dict and arguments[1] is not Any:
        return f"a table of values, each {_describe_annotation(arguments[1], ())}"
    if origin is list:
        return _describe_list(arguments[0], constraints)
    names: dict[object, str] = {
        int: "an integer", float: "a number", str: "a string", bool: "true or false",
        Path: "a path",
    }  # fmt: skip
    return names.get(annotation, "a table") + _describe_range(constraints)


def _alternatives(annotation: object, constraints: Iterable[Any]) -> Iterator[str]:
    """Yield what a type allows, in words; the literals of a union one by one."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        yield from map(show, arguments)
    elif typing.get_origin(annotation) in (types.UnionType, typing.Union):
        for kind in arguments:
            if kind is not type(None):
                yield from _alternatives(kind, constraints)
    else:
        yield _describe_annotation(annotation, constraints)


def _describe_list(kind: object, constraints: Iterable[Any]) -> str:
    shortest = [limit.min_length for limit in constraints if hasattr(limit, "min_length")]
    longest = [limit.max_length for limit in constraints if hasattr(limit, "max_length")]
    size = f"{shortest[0]} " if shortest and shortest == longest else ""
    one = _describe_annotation(kind, ()).removeprefix("an ").removeprefix("a ")
    if shortest == [1] and not longest:
        size = "one or more "
    if typing.get_origin(kind) is typing.Literal:
        return f"a list of {size}{'of ' if size else ''}{one}"
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

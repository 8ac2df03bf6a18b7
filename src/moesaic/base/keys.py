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


def locate(root: type[BaseModel], key: str) -> FieldInfo:
    """Return the field of the dotted `key`; raise ConfigError with a suggestion if unknown."""
    found = _tree(root).fields.get(key)
    if found is None:
        parts = key.split(".")
        raise ConfigError(_unknown_key(root, parts, parts).message)
    return found


def walk(root: type[BaseModel], prefix: str = "") -> Iterator[Key]:
    """Yield every key of a section and of its subsections, in source order."""
    for key, field in _walk_fields(root, prefix):
        if section_of(field.annotation) is None:
            yield Key(key, describe_type(field), default(field), meaning(field))
        else:
            yield Key(key, _table_kind(field), "", meaning(field))


def _walk_fields(root: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in fields(root).items():
        yield f"{prefix}{name}", field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _walk_fields(inner, f"{prefix}{name}.")


class _Tree(NamedTuple):
    """Keys of a root by what unknown keys are compared with."""

    fields: dict[str, FieldInfo]
    """Fields by dotted path."""
    names: dict[str, dict[str, str]]
    """Paths by table, and by name in it."""
    tables: dict[str, list[str]]
    """Tables that have a key of this name."""
    lists: tuple[str, ...]
    """Starts of the paths in lists of tables."""
    other_names: dict[str, str]
    """Paths by other frameworks' names."""
    other_ways: dict[str, str]
    """How to say the same, by other frameworks' names."""


@cache
def _tree(root: type[BaseModel]) -> _Tree:
    found = dict(_walk_fields(root))
    names, tables = dict[str, dict[str, str]](), dict[str, list[str]]()
    for path in found:
        table, _, name = path.rpartition(".")
        names.setdefault(table, {})[name] = path
        tables.setdefault(name, []).append(table)
    lists = tuple(f"{path}." for path, field in found.items() if _is_list_of_tables(field))
    others: Mapping[str, str] = getattr(root, "other_names", None) or {}
    ways: Mapping[str, str] = getattr(root, "other_ways", None) or {}
    by_name = {_plain(name): key for name, key in others.items() if key in found}
    return _Tree(
        found, names, tables, lists, by_name, {_plain(name): way for name, way in ways.items()}
    )


def _table_kind(field: FieldInfo) -> str:
    return "list of tables" if typing.get_origin(field.annotation) is list else "table"


def _is_list_of_tables(field: FieldInfo) -> bool:
    return section_of(field.annotation) is not None and _table_kind(field) == "list of tables"


def explain(root: type[BaseModel], key: str) -> str:
    """Return the meaning, type and default of `key` in a few lines; for a table, its keys."""
    field = locate(root, key)
    inner = section_of(field.annotation)
    if inner is None:
        lines = [f"{key}: {describe_type(field)}", f"  {meaning(field)}"]
        lines.append("  required" if field.is_required() else f"  default: {default(field)}")
    else:
        lines = [f"{key}: {_table_kind(field)}", f"  {meaning(field)}"]
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
        kind = _table_kind(field)
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


class UnknownKey(NamedTuple):
    """A key that a section lacks."""

    path: str
    message: str
    """Sentence with the remedy."""
    meant: str | None
    """Key that was probably meant."""
    is_known: bool
    """True if the message says what to write instead."""


def unknown_keys(
    root: type[BaseModel], parts: Sequence[str | int], value: object
) -> list[UnknownKey]:
    """Return an unknown key, of which only the last part is unknown; for a table of another name,
    its keys if some of them are known.

    A number among `parts` is an index in a list of tables.
    """
    names = [part for part in parts if isinstance(part, str)]
    this = _unknown_key(root, parts, names)
    table, own = _table_at(root, this.meant)
    ends = [table.rpartition(".")[2]] if table else []
    is_misspelt = bool(difflib.get_close_matches(names[-1], ends, cutoff=0.8))
    if not isinstance(value, Mapping) or (is_misspelt and set(value) <= set(own)):
        return [this]
    above = table.split(".") if table else names
    inside = [
        _unknown_key(root, [*parts, name], [*names, name])
        if any(by_other_name(root, f"{names[-1]}.{name}"))
        else _unknown_key(root, [*parts, name], [*above, name], own)
        for name in value
    ]
    return inside if any(one.is_known for one in inside) else [this]


def _table_at(root: type[BaseModel], key: str | None) -> tuple[str, list[str]]:
    """Return the table that `key` is or is in, and its keys."""
    for table in () if key is None else (key, key.rpartition(".")[0]):
        section = section_of(_tree(root).fields[table].annotation) if table else None
        if section is not None:
            return table, list(fields(section))
    return "", []


def _unknown_key(
    root: type[BaseModel],
    parts: Sequence[str | int],
    names: Sequence[str],
    own: Sequence[str] = (),
) -> UnknownKey:
    """Return the unknown key at `parts`, which would be at `names` in a table with keys `own`."""
    path = dotted_key(parts)
    found, way = ([".".join(names)], None) if names[-1] in own else _meaning(root, names)
    meant = found[0] if names[-1] in own else _nearest(root, names, found, way)
    if way:
        return UnknownKey(path, f"unknown key '{path}': {way}", meant, is_known=True)
    if meant:
        return UnknownKey(path, f"unknown key '{path}': did you mean '{meant}'?", meant, True)
    return UnknownKey(path, f"unknown key '{path}': {_known_keys(root, names)}", None, False)


def _known_keys(root: type[BaseModel], names: Sequence[str]) -> str:
    """Return a clause about the keys of the table of an unknown key."""
    tree, above = _tree(root), ".".join(names[:-1])
    if above in tree.names:
        where = f"'{above}' has the keys" if above else "the keys at the top are"
        return f"{where} {', '.join(tree.names[above])}"
    tables = (".".join(names[:count]) for count in range(1, len(names)))
    value = next((one for one in tables if one in tree.fields and one not in tree.names), None)
    return "no table has such a key" if value is None else f"'{value}' is a value, no table"


def _meaning(root: type[BaseModel], parts: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the keys that an unknown key means, and how to say it if no key does alone.

    The name in its table comes first, then keys of the same name, then other frameworks' names.
    Keys in lists of tables come last, and are not meant in a table outside of lists.
    """
    *tables, word = parts
    tree, above = _tree(root), ".".join(tables)
    same = [tree.names[table][word] for table in tree.tables.get(word, ())]
    listed = [key for key in same if key.startswith(tree.lists)]
    readings = (
        by_other_name(root, ".".join(["", *parts][-2:])),
        ([key for key in same if key not in listed], None),
        by_other_name(root, word),
        ([] if _is_table_outside_lists(tree, above) else listed, None),
    )
    found, way = next((one for one in readings if any(one)), readings[-1])
    # A table of the same name in another one, such as the model of a student, has the key itself.
    ends = [key.rpartition(".")[0] for key in found]
    prefix = [above.removesuffix(at) if at and above.endswith(f".{at}") else "" for at in ends]
    return [f"{outer}{key}" for outer, key in zip(prefix, found, strict=True)], way


def _is_table_outside_lists(tree: _Tree, table: str) -> bool:
    return bool(table) and table in tree.names and not f"{table}.".startswith(tree.lists)


def by_other_name(root: type[BaseModel], name: str) -> tuple[list[str], str | None]:
    """Return the key that another framework gives this name, if any, and how else to say it."""
    tree, wanted = _tree(root), _plain(name)
    key = tree.other_names.get(wanted)
    return [] if key is None else [key], tree.other_ways.get(wanted)


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def meant_keys(root: type[BaseModel], parts: Sequence[str]) -> list[str]:
    """Return the keys that have this name in another table, or in another framework.

    None are meant if a key of the same table is nearly the same word.
    """
    return [] if _is_nearly_sibling(root, parts) else _meaning(root, parts)[0]


def _is_nearly_sibling(root: type[BaseModel], parts: Sequence[str]) -> bool:
    siblings = _tree(root).names.get(".".join(parts[:-1]), {})
    return bool(difflib.get_close_matches(parts[-1], siblings, n=1, cutoff=0.85))


def nearest_key(root: type[BaseModel], parts: Sequence[str]) -> str | None:
    """Return the key that was probably meant: the same name elsewhere, another framework's name, or
    a similar one."""
    return _nearest(root, parts, *_meaning(root, parts))


def _nearest(
    root: type[BaseModel], parts: Sequence[str], found: Sequence[str], way: str | None
) -> str | None:
    """Return the nearest key to one that means those `found`, or is said by `way`."""
    *tables, word = parts
    tree, above = _tree(root), ".".join(tables)
    meant = [] if _is_nearly_sibling(root, parts) else found
    if len(meant) == 1 or way:
        return meant[0] if meant else None
    elsewhere, listed = dict[str, str](), dict[str, str]()
    for path, field in tree.fields.items():
        table, _, name = path.rpartition(".")
        if table != above and section_of(field.annotation) is None:
            (listed if path.startswith(tree.lists) else elsewhere).setdefault(name, path)
    if _is_table_outside_lists(tree, above):
        listed = {}
    siblings = tree.names.get(above, {})
    places = ((siblings, 0.6 if above else 0.7), (elsewhere, 0.8), (listed, 0.8))
    for paths, cutoff in places:
        for name in difflib.get_close_matches(word, paths, n=1, cutoff=cutoff):
            return paths[name]
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

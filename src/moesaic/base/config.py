"""Configuration: TOML in, frozen typed sections, JSON out, and errors that a user can act on.

A *section* is a frozen pydantic model whose every field carries its own documentation. Unknown
keys are fatal and come with the nearest known one. `--set a.b=c` is applied to the raw TOML before
parsing, so it has no rules of its own; `explain` prints what a key means.
"""

from __future__ import annotations

import difflib
import json
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticUndefined

from moesaic.base.errors import ConfigError


class Section(BaseModel):
    """A frozen group of settings: unknown keys are errors, values are never coerced between kinds."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, populate_by_name=True
    )

    def to_json(self) -> str:
        """The section as JSON, indented, every default filled in."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=2) + "\n"


S = TypeVar("S", bound=Section)


def read_toml(path: Path) -> dict[str, Any]:
    """The raw tables of a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no file '{path}': give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' cannot be read as text ({error}): give a TOML file") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"'{path}' is not valid TOML: {error}") from None


def apply_sets(raw: Mapping[str, Any], sets: Iterable[str]) -> dict[str, Any]:
    """A copy of `raw` with every `a.b=value` of `sets` written over it; later ones win.

    A value is read as TOML (`0.1`, `true`, `[1, 2]`, `"text"`); what is not TOML is taken as a string.
    """
    result: dict[str, Any] = json.loads(json.dumps(raw))
    for item in sets:
        key, separator, text = item.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not separator or not all(parts):
            raise ConfigError(f"--set '{item}' is not of the form key.path=value")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text
        table = result
        for depth, part in enumerate(parts[:-1]):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                where = ".".join(parts[: depth + 1])
                raise ConfigError(f"--set '{item}': '{where}' is a value, not a table")
        table[parts[-1]] = value
    return result


def parse(kind: type[S], raw: Mapping[str, Any], origin: str) -> S:
    """`raw` as a section of `kind`; `origin` (a file, a flag) opens the message of any error."""
    try:
        return kind.model_validate(dict(raw))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ConfigError(f"{origin}: {_sentence(kind, first)}") from None


def field_path(kind: type[BaseModel], key: str) -> tuple[type[BaseModel], str]:
    """The section class that holds the last part of the dotted `key`, and that part."""
    parts = key.split(".")
    section = kind
    for depth, part in enumerate(parts):
        if part not in section.model_fields:
            where = ".".join(parts[:depth])
            raise ConfigError(_unknown(section, where, part))
        if depth == len(parts) - 1:
            return section, part
        inner = _section_of(section.model_fields[part].annotation)
        if inner is None:
            where = ".".join(parts[: depth + 1])
            raise ConfigError(f"'{where}' is a value and has no keys of its own")
        section = inner
    raise ConfigError("an empty key names nothing")


def explain(kind: type[BaseModel], key: str) -> str:
    """What `key` means, its type and its default, in a few lines; the keys of a table."""
    section, name = field_path(kind, key)
    field = section.model_fields[name]
    inner = _section_of(field.annotation)
    lines = [f"{key}: {type_name(field.annotation)}"]
    if field.description:
        lines.append(f"  {' '.join(field.description.split())}")
    if inner is not None:
        lines += [f"  .{child}: {_summary(info)}" for child, info in inner.model_fields.items()]
    elif field.is_required():
        lines.append("  required")
    else:
        lines.append(f"  default: {_default(field)}")
    return "\n".join(lines)


def walk(kind: type[BaseModel], prefix: str = "") -> Iterable[tuple[str, str, str, str]]:
    """(key, type, default, description) of every key of a section and of those below it."""
    for name, field in kind.model_fields.items():
        key = f"{prefix}{name}"
        inner = _section_of(field.annotation)
        if inner is not None:
            yield key, "table", "", " ".join((field.description or "").split())
            yield from walk(inner, f"{key}.")
        else:
            yield key, type_name(field.annotation), _default(field), _summary(field)


def type_name(annotation: object) -> str:
    """A type as a reader of TOML would call it."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(json.dumps(value) for value in args)
    if origin in (types.UnionType, typing.Union):
        return " | ".join(type_name(arg) for arg in args if arg is not type(None))
    if origin in (list, tuple):
        return f"list of {type_name(args[0])}"
    names: dict[object, str] = {
        int: "integer", float: "number", str: "string", bool: "true | false", Path: "path",
    }  # fmt: skip
    if _section_of(annotation) is not None:
        return "table"
    return names.get(annotation, str(annotation))


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "unset" if value is None or value is PydanticUndefined else json.dumps(value, default=str)


def _summary(field: Any) -> str:
    return " ".join((field.description or "").split())


def _section_of(annotation: object) -> type[BaseModel] | None:
    candidates = [annotation, *typing.get_args(annotation)]
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def _unknown(section: type[BaseModel], where: str, name: str) -> str:
    dotted = f"{where}.{name}" if where else name
    known = sorted(section.model_fields)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"known keys: {', '.join(known)}"
    return f"unknown key '{dotted}': {hint}"


def _sentence(kind: type[BaseModel], error: Any) -> str:
    parts = [str(part) for part in error["loc"] if not str(part).startswith("function-")]
    key, value = ".".join(parts), error.get("input")
    if error["type"] == "extra_forbidden":
        try:
            field_path(kind, key)
        except ConfigError as unknown:
            return str(unknown)
    if error["type"] == "missing":
        return f"'{key}' is required and not given: {_describe(kind, parts)}"
    if error["type"] == "value_error":
        reason = str(error["ctx"]["error"])
        return f"{key} = {_show(value)}: {reason}" if key else reason
    return f"{key} = {_show(value)}: {_lower(error['msg'])}; {_describe(kind, parts)}"


def _describe(kind: type[BaseModel], parts: list[str]) -> str:
    try:
        section, name = field_path(kind, ".".join(parts))
    except ConfigError:
        return "see --explain"
    field = section.model_fields[name]
    return f"it takes {type_name(field.annotation)} ({_summary(field)})"


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]


def _show(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."

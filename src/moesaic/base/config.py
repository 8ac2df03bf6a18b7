"""Configuration: TOML in, frozen typed sections, JSON out, and errors that a user can act on.

A *section* is a frozen pydantic model whose every field carries its own documentation. Unknown
keys are fatal and come with the nearest known one. `--set a.b=c` is applied to the raw TOML before
parsing, so it has no rules of its own. What the keys are called and mean: `base.keys`.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from moesaic.base import keys
from moesaic.base.errors import ConfigError


class Section(BaseModel):
    """A frozen group of settings: unknown keys are errors, values keep their kind."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, str_min_length=1,
        populate_by_name=True, defer_build=True,
    )  # fmt: skip

    file_keys: ClassVar[type[BaseModel] | None] = None
    """Keys that a file may use in this table besides the fields; resolved before parsing."""
    resolved_keys: ClassVar[frozenset[str]] = frozenset()
    """Fields that resolving fills in, and that no file may use."""

    @property
    def asked(self) -> frozenset[str]:
        """Fields that were given, with another value than they have by themselves."""
        fields = type(self).model_fields
        return frozenset(
            name
            for name in self.model_fields_set
            if getattr(self, name) != fields[name].get_default(call_default_factory=True)
        )

    def to_json(self) -> str:
        """The section as JSON, indented, every default filled in."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=2) + "\n"

    def to_toml(self) -> str:
        """The section as TOML; unset keys are left out, those no file may use are comments."""
        return "\n".join(_toml_lines(self, "")) + "\n"


S = TypeVar("S", bound=Section)

SETS = "--set"
"""The origin of settings that have no file: all that is said of them is there."""
_ADD = " add --set {}=VALUE ("


def _toml_lines(section: Section, path: str) -> Iterator[str]:
    values = {field.alias or name: getattr(section, name) for name, field in _own_fields(section)}
    for name, value in values.items():
        if value is not None and not _tables(value):
            mark = "# " if name in section.resolved_keys else ""
            yield f"{mark}{keys.dotted([name])} = {keys.toml(value)}"
    for name, value in values.items():
        for table in _tables(value):
            yield f"\n{_header(f'{path}{name}', isinstance(value, list))}"
            yield from _toml_lines(table, f"{path}{name}.")


def _tables(value: object) -> list[Section]:
    """The sections that a field holds: itself one, or a list of them."""
    held = value if isinstance(value, list) else [value]
    return [one for one in held if isinstance(one, Section)]


def _header(key: str, in_list: bool) -> str:
    """How a file opens the table `key`, without its places in lists."""
    return f"[[{_plain(key)}]]" if in_list else f"[{_plain(key)}]"


def _plain(key: str) -> str:
    """`key` without places in lists: `hosts[0].name` is `hosts.name`."""
    return re.sub(r"\[\d+\]", "", key)


def _own_fields(section: Section) -> Iterable[tuple[str, FieldInfo]]:
    return type(section).model_fields.items()


def read_toml(path: Path) -> dict[str, Any]:
    """The raw tables of a TOML file."""
    return parse_toml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a TOML file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"there is no file '{path}': give the path of a TOML file") from None
    except IsADirectoryError:
        raise ConfigError(f"'{path}' is a directory: give the path of a TOML file") from None
    except UnicodeDecodeError:
        raise ConfigError(f"'{path}' is not UTF-8 text: give a TOML file") from None
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be read ({error.strerror}): give a TOML file") from None


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """The raw tables of a TOML text; `origin` opens the message of an error."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        remedy = " (text needs quotes)" if str(error).startswith("Invalid value") else ""
        raise ConfigError(f"{origin}: not valid TOML: {_lower(str(error))}{remedy}") from None
    except (ValueError, RecursionError) as error:  # A number of thousands of digits, say.
        raise ConfigError(f"{origin}: not readable as TOML ({error}): simplify it") from None


def read_json(path: Path, origin: str, remedy: str) -> dict[str, Any]:
    """The object of a JSON file; `origin` opens the message of an error, `remedy` ends it."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_once)
    except FileNotFoundError:
        raise ConfigError(f"{origin}: there is no such file: {remedy}") from None
    except OSError as error:
        raise ConfigError(f"{origin} cannot be read ({error.strerror}): {remedy}") from None
    except KeyError as error:
        raise ConfigError(
            f"{origin} has the key '{error.args[0]}' twice in one object: remove one of the two"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin} is not readable JSON ({error}): {remedy}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin} holds no JSON object: {remedy}")
    return raw


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, none of whose keys stands there twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise KeyError(next(name for name in names if names.count(name) > 1))
    return result


def apply_sets(raw: Mapping[str, Any], sets: Iterable[str]) -> dict[str, Any]:
    """A copy of `raw` with every `a.b=value` of `sets` written over it; later ones win.

    A value is read as TOML (`0.1`, `true`, `[1, 2]`, `"text"`); what is not TOML is a string.
    """
    result = copy.deepcopy(dict(raw))
    for item in sets:
        key, separator, text = item.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not separator or not all(parts):
            raise ConfigError(
                f"--set '{item}' is not of the form key.path=value, as in train.steps=100"
            )
        table = result
        for depth, part in enumerate(parts[:-1]):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                where = ".".join(parts[: depth + 1])
                raise ConfigError(f"--set {item}: '{where}' is a value and has no keys of its own")
        table[parts[-1]] = _value(text)
    return result


def _value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return table["value"] if len(table) == 1 else text


def parse(kind: type[S], raw: Mapping[str, Any], origin: str, sets: Sequence[str] = ()) -> S:
    """`raw` as a section of `kind`.

    The message of an error opens with `origin` (a file, say), or with the item of `sets` that
    brought the key in.
    """
    try:
        return kind.model_validate(dict(raw), by_alias=True, by_name=False)
    except ValidationError as error:
        mistakes = _mistakes(kind, error)
    first = mistakes[0]
    others = len(mistakes) - 1
    more = f" (and {others} more mistake{'s'[: others > 1]})" if others else ""
    culprits = [item for item in sets if covers(item, first.key)]
    if origin == SETS and first.order == _MISSING:
        said = re.sub(r" add .* (to \[\S+\]|at the top) \(", _ADD.format(first.key), first.sentence)
        raise ConfigError(f"{said}{more}")
    where = f"--set {culprits[-1]}" if culprits else blame(origin, sets, first.sentence)
    raise ConfigError(f"{where}: {first.sentence}{more}")


def blame(origin: str, sets: Sequence[str], sentence: str) -> str:
    """Where a mistake between several keys may come from: `origin`, and items of `--set`."""
    named = [f"--set {s}" for s in sets if f"{s.partition('=')[0].strip()} = " in sentence]
    if origin == SETS and named:
        return " and ".join(named)
    return f"{origin} with {' and '.join(named)}" if named else origin


def covers(item: str, key: str) -> bool:
    """Whether an item of `--set` sets `key`, or a table that it is in."""
    named = item.partition("=")[0].strip()
    return bool(key) and f"{_plain(key)}.".startswith(f"{named}.")


class _Mistake(NamedTuple):
    order: int
    key: str
    sentence: str
    meant: str | None = None
    """The key that an unknown one stands for."""


def _mistakes(kind: type[BaseModel], error: ValidationError) -> list[_Mistake]:
    """One per place, unknown keys first: a misspelt key also shows up as a missing one."""
    found: dict[str, _Mistake] = {}
    for detail in error.errors(include_url=False):
        mistake = _mistake(kind, detail)
        found.setdefault(mistake.key, mistake)
    meant = {one.meant for one in found.values()}
    return sorted(
        (one for one in found.values() if one.order != _MISSING or _plain(one.key) not in meant),
        key=lambda one: one.order,
    )


_UNKNOWN, _WRONG, _MISSING = range(3)

_RANGE = {
    "greater_than_equal", "greater_than", "less_than", "less_than_equal", "finite_number",
    "too_short", "too_long", "string_too_short",
}  # fmt: skip


def _mistake(kind: type[BaseModel], detail: Any) -> _Mistake:
    value, reason = detail.get("input"), detail["type"]
    if reason == "extra_forbidden":
        parts = detail["loc"]
        meant = keys.nearest(kind, [part for part in parts if isinstance(part, str)])
        return _Mistake(_UNKNOWN, keys.dotted(parts), keys.unknown(kind, parts), meant)
    field, key, index = _place(kind, detail["loc"])
    if reason == "value_error":
        sentence = str(detail["ctx"]["error"])
        if field is not None and keys.section_of(field.annotation) is None:
            sentence = f"{key} = {keys.show(value)}: {sentence}"
        elif _plain(key) != key:  # A table in a list cannot say which it is.
            sentence = f"{key}: {sentence}"
        return _Mistake(_WRONG, key, sentence)
    if field is None:
        return _Mistake(
            _WRONG, key, f"{key or 'the whole'} = {keys.show(value)}: {_lower(detail['msg'])}"
        )
    if reason == "missing":
        return _Mistake(_MISSING, key, _missing(kind, field, key))
    depth = index.count("[") + index.startswith(".")
    return _Mistake(_WRONG, key, _wrong(field, key + index, depth, value, reason in _RANGE))


def _place(
    kind: type[BaseModel], location: Sequence[str | int]
) -> tuple[FieldInfo | None, str, str]:
    """The field that a pydantic location points at, its dotted key, and `[i]` inside a list.

    Inside a table whose keys are free it is `.key`.

    A place in a list of tables is a part of the key: `hosts[0].name`.
    """
    section: type[BaseModel] | None = kind
    field: FieldInfo | None = None
    names: list[str | int] = []
    index = ""
    for part in location:
        if isinstance(part, int) and section is not None:
            names.append(part)
        elif isinstance(part, int):
            index += f"[{part}]"
        elif field is not None and keys.is_table(field.annotation) and part != "[key]":
            index += f".{keys.dotted([part])}"
        elif section is not None and part in keys.fields(section):
            field = keys.fields(section)[part]
            section = keys.section_of(field.annotation)
            names.append(part)
    return field, keys.dotted(names), index


def _missing(kind: type[BaseModel], field: FieldInfo, key: str) -> str:
    table, _, name = key.rpartition(".")
    if keys.section_of(field.annotation) is not None:
        header = _header(key, keys.is_list(field.annotation))
        inside = f" to {table}" if _plain(table) != table else ""
        return f"table {header} is missing: add it{inside} ({_lower(_first(field))})"
    holder = keys.section_of(keys.locate(kind, _plain(table)).annotation) if table else kind
    also = getattr(holder, "file_keys", None)
    names = keys.listed([name, *keys.fields(also)] if also else [name])
    where = f"to {_header(table, table.endswith(']'))}" if table else "at the top"
    what = f"{keys.expects(field)}: {_lower(_first(field))}"
    return f"{key} is missing: add {names} {where} ({what})"


def _first(field: FieldInfo) -> str:
    return keys.meaning(field).partition(". ")[0].rstrip(".")


def _wrong(field: FieldInfo, place: str, depth: int, value: object, out_of_range: bool) -> str:
    section = keys.section_of(field.annotation)
    if section is not None:
        in_list = keys.is_list(field.annotation)
        header, names = _header(place, in_list), ", ".join(keys.fields(section))
        if out_of_range:
            return f"{place} = {keys.show(value)} is empty: write {header} with keys {names}"
        needed = "a list of tables" if in_list and not place.endswith("]") else "a table"
        return (
            f"{place} = {keys.show(value)} is {_kind(value)} where {needed} is needed: "
            f"write {header} with keys {names}"
        )
    expected = keys.element(field, depth) if depth else keys.expects(field)
    if isinstance(value, dict):
        return f"{place} is a table where a value is needed: give {expected}"
    shown, words = f"{place} = {keys.show(value)}", keys.choices(field, depth)
    if words and isinstance(value, str):
        return f"{shown} is not known: {keys.choose(value, words, expected)}"
    if value == "" or (value == [] and out_of_range):
        return f"{shown} is empty: give {expected}"
    if isinstance(value, list) and out_of_range:
        return f"{shown} is {len(value)} long: give {expected}"
    if out_of_range:
        return f"{shown} is out of range: give {expected}"
    return f"{shown} is {_kind(value)}: give {expected}"


def _kind(value: object) -> str:
    names: dict[type, str] = {
        bool: "a boolean", int: "an integer", float: "a number with a fraction", str: "a string",
        list: "a list", dict: "a table", type(None): "nothing",
    }  # fmt: skip
    return names.get(type(value), "a date or time")


def _lower(message: str) -> str:
    return message[:1].lower() + message[1:]

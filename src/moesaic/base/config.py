"""Configuration: TOML in, frozen typed sections, JSON out.

A *section* is a frozen pydantic model whose fields carry their documentation. Unknown keys are
errors that suggest the nearest known key. `--set a.b=c` edits the raw TOML before parsing, so it
needs no rules of its own. `base.keys` describes the keys.
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
    """A frozen group of settings; unknown keys are errors, and values are not coerced."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, str_min_length=1,
        populate_by_name=True, defer_build=True,
    )  # fmt: skip

    file_keys: ClassVar[type[BaseModel] | None] = None
    """Further keys that a file may use in this table; they are resolved before parsing."""
    resolved_keys: ClassVar[frozenset[str]] = frozenset()
    """Fields that the resolution fills in; no file may use them."""

    @property
    def non_default_fields(self) -> frozenset[str]:
        """Fields that were set to a value other than their default."""
        fields = type(self).model_fields
        return frozenset(
            name
            for name in self.model_fields_set
            if getattr(self, name) != fields[name].get_default(call_default_factory=True)
        )

    def to_json(self) -> str:
        """Return the section as indented JSON with every default filled in."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=2) + "\n"

    def to_toml(self) -> str:
        """Return the section as TOML without unset keys; `resolved_keys` are commented out."""
        return "\n".join(_toml_lines(self, "")) + "\n"


S = TypeVar("S", bound=Section)

SET_FLAG = "--set"
"""Origin of settings that have no file: `--set` is their only source."""
_ADD_SET_HINT = " add --set {}=VALUE ("


def _toml_lines(section: Section, path: str) -> Iterator[str]:
    values = {field.alias or name: getattr(section, name) for name, field in _own_fields(section)}
    for name, value in values.items():
        if value is not None and not _subsections(value):
            mark = "# " if name in section.resolved_keys else ""
            yield f"{mark}{keys.dotted_key([name])} = {keys.toml(value)}"
    for name, value in values.items():
        for table in _subsections(value):
            yield f"\n{_table_header(f'{path}{name}', isinstance(value, list))}"
            yield from _toml_lines(table, f"{path}{name}.")


def _subsections(value: object) -> list[Section]:
    """Return the sections that a field holds: itself, or the items of a list."""
    items = value if isinstance(value, list) else [value]
    return [one for one in items if isinstance(one, Section)]


def _table_header(key: str, in_list: bool) -> str:
    """Return the TOML header of table `key`, without list indices."""
    return f"[[{_without_indices(key)}]]" if in_list else f"[{_without_indices(key)}]"


def _without_indices(key: str) -> str:
    """Return `key` without list indices: `hosts[0].name` becomes `hosts.name`."""
    return re.sub(r"\[\d+\]", "", key)


def _own_fields(section: Section) -> Iterable[tuple[str, FieldInfo]]:
    return type(section).model_fields.items()


def tables_to_toml(raw: Mapping[str, Any]) -> str:
    """Return tables as the text of a TOML file; unset keys (None) are left out."""
    lines = [
        f"{keys.dotted_key([key])} = {keys.toml(value)}"
        for key, value in raw.items()
        if value is not None and not isinstance(value, Mapping)
    ]
    for table, values in raw.items():
        if isinstance(values, Mapping):
            lines.append(f"\n[{keys.dotted_key([table])}]")
            lines += [
                f"{keys.dotted_key([key])} = {keys.toml(value)}"
                for key, value in values.items()
                if value is not None
            ]
    return "\n".join(lines) + "\n"


def read_toml(path: Path) -> dict[str, Any]:
    """Return the raw tables of a TOML file."""
    return parse_toml(read_text(path), str(path))


def read_text(path: Path) -> str:
    """Return the text of a TOML file."""
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
    """Return the raw tables of a TOML text; error messages start with `origin`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        remedy = " (text needs quotes)" if str(error).startswith("Invalid value") else ""
        raise ConfigError(f"{origin}: not valid TOML: {_lower_first(str(error))}{remedy}") from None
    except (ValueError, RecursionError) as error:  # Such as a number with thousands of digits.
        raise ConfigError(f"{origin}: not readable as TOML ({error}): simplify it") from None


def read_json(path: Path, origin: str, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file; messages start with `origin` and end with `remedy`."""
    try:
        raw = json.loads(
            path.read_text(encoding="utf-8-sig"), object_pairs_hook=_reject_duplicate_keys
        )
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


def _reject_duplicate_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise KeyError if a key occurs twice."""
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [name for name, _ in pairs]
        raise KeyError(next(name for name in names if names.count(name) > 1))
    return result


def apply_sets(raw: Mapping[str, Any], sets: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `raw` with each `a.b=value` of `sets` applied; later ones win.

    A value is parsed as TOML (`0.1`, `true`, `[1, 2]`, `"text"`); anything else is a string.
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
        table[parts[-1]] = _parse_value(text)
    return result


def _parse_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return table["value"] if len(table) == 1 else text


def parse(kind: type[S], raw: Mapping[str, Any], origin: str, sets: Sequence[str] = ()) -> S:
    """Return `raw` parsed as a section of `kind`.

    Error messages start with `origin` (such as a file), or with the item of `sets` that set the
    key.
    """
    try:
        return kind.model_validate(dict(raw), by_alias=True, by_name=False)
    except ValidationError as error:
        mistakes = _mistakes(kind, error)
    first = mistakes[0]
    others = len(mistakes) - 1
    more = f" (and {others} more mistake{'s'[: others > 1]})" if others else ""
    culprits = [item for item in sets if sets_key(item, first.key)]
    if origin == SET_FLAG and first.order == _MISSING:
        sentence = re.sub(
            r" add .* (to \[\S+\]|at the top) \(", _ADD_SET_HINT.format(first.key), first.sentence
        )
        raise ConfigError(f"{sentence}{more}")
    where = f"--set {culprits[-1]}" if culprits else error_origin(origin, sets, first.sentence)
    raise ConfigError(f"{where}: {first.sentence}{more}")


def error_origin(origin: str, sets: Sequence[str], sentence: str) -> str:
    """Return the origin of a mistake that involves several keys: `origin` and items of `--set`."""
    named = [f"--set {s}" for s in sets if f"{s.partition('=')[0].strip()} = " in sentence]
    if origin == SET_FLAG and named:
        return " and ".join(named)
    return f"{origin} with {' and '.join(named)}" if named else origin


def sets_key(item: str, key: str) -> bool:
    """Return True if an item of `--set` sets `key` or a table that contains it."""
    named = item.partition("=")[0].strip()
    return bool(key) and f"{_without_indices(key)}.".startswith(f"{named}.")


class _Mistake(NamedTuple):
    order: int
    key: str
    sentence: str
    suggestion: str | None = None
    """Known key that an unknown one probably stands for."""


def _mistakes(kind: type[BaseModel], error: ValidationError) -> list[_Mistake]:
    """Return one mistake per key, unknown keys first.

    A misspelt key is also reported as missing; that second report is dropped."""
    by_key: dict[str, _Mistake] = {}
    for detail in error.errors(include_url=False):
        mistake = _mistake(kind, detail)
        by_key.setdefault(mistake.key, mistake)
    meant = {one.suggestion for one in by_key.values()}
    return sorted(
        (
            one
            for one in by_key.values()
            if one.order != _MISSING or _without_indices(one.key) not in meant
        ),
        key=lambda one: one.order,
    )


_UNKNOWN, _WRONG, _MISSING = range(3)

_RANGE_ERRORS = {
    "greater_than_equal", "greater_than", "less_than", "less_than_equal", "finite_number",
    "too_short", "too_long", "string_too_short",
}  # fmt: skip


def _mistake(kind: type[BaseModel], detail: Any) -> _Mistake:
    value, reason = detail.get("input"), detail["type"]
    if reason == "extra_forbidden":
        parts = detail["loc"]
        meant = keys.nearest_key(kind, [part for part in parts if isinstance(part, str)])
        return _Mistake(
            _UNKNOWN, keys.dotted_key(parts), keys.unknown_key_message(kind, parts), meant
        )
    field, key, index = _locate_error(kind, detail["loc"])
    if reason == "value_error":
        sentence = str(detail["ctx"]["error"])
        if field is not None and keys.section_of(field.annotation) is None:
            sentence = f"{key} = {keys.show(value)}: {sentence}"
        elif _without_indices(key) != key:  # A table in a list cannot name its own index.
            sentence = f"{key}: {sentence}"
        return _Mistake(_WRONG, key, sentence)
    if field is None:
        return _Mistake(
            _WRONG, key, f"{key or 'the whole'} = {keys.show(value)}: {_lower_first(detail['msg'])}"
        )
    if reason == "missing":
        return _Mistake(_MISSING, key, _describe_missing(kind, field, key))
    depth = index.count("[") + index.startswith(".")
    return _Mistake(
        _WRONG,
        key,
        _describe_wrong_value(field, key + index, depth, value, reason in _RANGE_ERRORS),
    )


def _locate_error(
    kind: type[BaseModel], location: Sequence[str | int]
) -> tuple[FieldInfo | None, str, str]:
    """Return the field at a pydantic location, its dotted key, and the index inside its value.

    An index in a list of tables belongs to the key: `hosts[0].name`. Inside a list of values the
    index is `[i]`, inside a table with free keys `.key`.
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
            index += f".{keys.dotted_key([part])}"
        elif section is not None and part in keys.fields(section):
            field = keys.fields(section)[part]
            section = keys.section_of(field.annotation)
            names.append(part)
    return field, keys.dotted_key(names), index


def _describe_missing(kind: type[BaseModel], field: FieldInfo, key: str) -> str:
    table, _, name = key.rpartition(".")
    if keys.section_of(field.annotation) is not None:
        header = _table_header(key, keys.is_list(field.annotation))
        inside = f" to {table}" if _without_indices(table) != table else ""
        return f"table {header} is missing: add it{inside} ({_lower_first(_first_sentence(field))})"
    holder = (
        keys.section_of(keys.locate(kind, _without_indices(table)).annotation) if table else kind
    )
    also = getattr(holder, "file_keys", None)
    names = keys.join_words([name, *keys.fields(also)] if also else [name])
    where = f"to {_table_header(table, table.endswith(']'))}" if table else "at the top"
    what = f"{keys.describe_type(field)}: {_lower_first(_first_sentence(field))}"
    return f"{key} is missing: add {names} {where} ({what})"


def _first_sentence(field: FieldInfo) -> str:
    return keys.meaning(field).partition(". ")[0].rstrip(".")


def _describe_wrong_value(
    field: FieldInfo, place: str, depth: int, value: object, out_of_range: bool
) -> str:
    section = keys.section_of(field.annotation)
    if section is not None:
        in_list = keys.is_list(field.annotation)
        header, names = _table_header(place, in_list), ", ".join(keys.fields(section))
        if out_of_range:
            return f"{place} = {keys.show(value)} is empty: write {header} with keys {names}"
        needed = "a list of tables" if in_list and not place.endswith("]") else "a table"
        return (
            f"{place} = {keys.show(value)} is {_type_name(value)} where {needed} is needed: "
            f"write {header} with keys {names}"
        )
    expected = keys.describe_element_type(field, depth) if depth else keys.describe_type(field)
    if isinstance(value, dict):
        return f"{place} is a table where a value is needed: give {expected}"
    shown, words = f"{place} = {keys.show(value)}", keys.choices(field, depth)
    if words and isinstance(value, str):
        return f"{shown} is not known: {keys.suggest_choice(value, words, expected)}"
    if value == "" or (value == [] and out_of_range):
        return f"{shown} is empty: give {expected}"
    if isinstance(value, list) and out_of_range:
        return f"{shown} is {len(value)} long: give {expected}"
    if out_of_range:
        return f"{shown} is out of range: give {expected}"
    return f"{shown} is {_type_name(value)}: give {expected}"


def _type_name(value: object) -> str:
    names: dict[type, str] = {
        bool: "a boolean", int: "an integer", float: "a number with a fraction", str: "a string",
        list: "a list", dict: "a table", type(None): "nothing",
    }  # fmt: skip
    return names.get(type(value), "a date or time")


def _lower_first(message: str) -> str:
    return message[:1].lower() + message[1:]

"""Configuration: TOML in, frozen typed sections, JSON out.

A *section* is a frozen pydantic model whose fields carry their documentation. Unknown keys are
errors that suggest the nearest known key. `--set a.b=c` edits the raw TOML before parsing, so it
needs no rules of its own. `base.keys` describes the keys, `base.unknown_keys` the unknown ones.
"""

from __future__ import annotations

import copy
import json
import re
import tomllib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from moesaic.base import keys, unknown_keys
from moesaic.base.errors import ConfigError, UserError


class Section(BaseModel):
    """A frozen group of settings; unknown keys are errors, and values are not coerced."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, str_min_length=1,
        populate_by_name=True, defer_build=True,
    )  # fmt: skip

    file_keys: ClassVar[type[BaseModel] | None] = None
    """Further keys that a file may use in this table; they are resolved before parsing."""
    other_names: ClassVar[Mapping[str, str] | None] = None
    """Keys of this section by the names that other frameworks give them."""
    other_ways: ClassVar[Mapping[str, str] | None] = None
    """Sentences by names of other frameworks that no key has: how to say the same."""
    resolved_keys: ClassVar[frozenset[str]] = frozenset()
    """Fields that the resolution fills in; no file may use them."""

    def conflicts(self) -> Iterator[str]:
        """Yield a sentence with a remedy for each set of keys that do not go together."""
        return iter(())

    @model_validator(mode="after")
    def _check_conflicts(self, info: ValidationInfo) -> Self:
        if info.context is not CONFLICTS_ALLOWED:
            for sentence in self.conflicts():
                raise ValueError(sentence)
        return self

    @property
    def non_default_fields(self) -> frozenset[str]:
        """Fields that were set to a value other than their default."""
        fields, values = type(self).model_fields, dict(self)
        return frozenset(
            name
            for name in self.model_fields_set
            if values[name]
            != fields[name].get_default(call_default_factory=True, validated_data=values)
        )

    def to_json(self) -> str:
        """Return the section as indented JSON with every default filled in."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=2) + "\n"

    def to_toml(self) -> str:
        """Return the section as TOML without unset keys; `resolved_keys` are commented out."""
        return "\n".join(_toml_lines(self, "")) + "\n"


S = TypeVar("S", bound=Section)

CONFLICTS_ALLOWED = object()
"""Context of a validation that accepts keys that do not go together."""
_NAMED_KEY = re.compile(r"\b([a-z_]+(?:\.[a-z_]+)+)(?= = )")
"""Keys with their values in a sentence."""
SET_FLAG = "--set"
"""Origin of settings that have no file: `--set` is their only source."""


def _toml_lines(section: Section, path: str) -> Iterator[str]:
    values = {field.alias or name: getattr(section, name) for name, field in _own_fields(section)}
    for name, value in values.items():
        is_resolved = name in section.resolved_keys
        if value is not None and not _subsections(value) and (value or not is_resolved):
            mark = "# " if is_resolved else ""
            yield f"{mark}{keys.dotted_key([name])} = {keys.toml(value)}"
    for name, value in values.items():
        for table in _subsections(value):
            header = f"[{path}{name}]"
            yield f"\n[{header}]" if isinstance(value, list) else f"\n{header}"
            yield from _toml_lines(table, f"{path}{name}.")


def _subsections(value: object) -> list[Section]:
    """Return the sections that a field holds: itself, or the items of a list."""
    items = value if isinstance(value, list) else [value]
    return [one for one in items if isinstance(one, Section)]


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
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"'{path}' cannot be read ({reason}): give a TOML file") from None


def parse_toml(text: str, origin: str) -> dict[str, Any]:
    """Return the raw tables of a TOML text; error messages start with `origin`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        remedies = {
            "Invalid value": " (text needs quotes)",
            "Cannot declare": " (each table of a list has double brackets: [[table]])",
        }
        remedy = next((one for start, one in remedies.items() if str(error).startswith(start)), "")
        raise ConfigError(f"{origin}: not valid TOML: {_lower_first(str(error))}{remedy}") from None
    except (ValueError, RecursionError) as error:  # Such as a number with thousands of digits.
        raise ConfigError(f"{origin}: not readable as TOML ({error}): simplify it") from None


def read_json(path: Path, origin: str, remedy: str) -> dict[str, Any]:
    """Return the object in a JSON file; messages start with `origin` and end with `remedy`."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{origin} cannot be read ({error.strerror}): {remedy}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{origin} is not readable JSON ({error}): {remedy}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{origin} holds no JSON object: {remedy}")
    return raw


def apply_sets(raw: Mapping[str, Any], sets: Iterable[str]) -> dict[str, Any]:
    """Return a copy of `raw` with each `a.b=value` of `sets` applied; later ones win.

    A value is parsed as TOML (`0.1`, `true`, `[1, 2]`, `"text"`); anything else is a string.
    `a.NAME.b=value` sets a key of the table with this `name` in a list of tables.
    """
    result = copy.deepcopy(dict(raw))
    for item in sets:
        key, separator, text = item.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not separator or not all(parts):
            raise ConfigError(f"'{item}' is not of the form key.path=value, as in train.steps=100")
        table: Any = result
        for depth, part in enumerate(parts):
            where = ".".join(parts[:depth])
            if isinstance(table, list):
                name = part if depth < len(parts) - 1 else None
                table = _choose_table(table, name, where, item)
            elif not isinstance(table, dict):
                raise ConfigError(f"{item}: '{where}' is a value and has no keys of its own")
            elif depth < len(parts) - 1:
                table = table.setdefault(part, {})
            else:
                table[part] = _parse_value(text)
    return result


def _choose_table(tables: list[Any], name: str | None, where: str, item: str) -> dict[str, Any]:
    """Return the table of the list at `where` that has this `name`; None has no table."""
    named = {str(one["name"]): one for one in tables if isinstance(one, dict) and "name" in one}
    if name in named:
        table: dict[str, Any] = named[name]
        return table
    remedy = "edit the file"
    if named:
        remedy = f"name one, as in {where}.{next(iter(named))}.KEY=VALUE ({', '.join(named)})"
    raise ConfigError(f"{item}: '{where}' is a list of tables: {remedy}")


def _parse_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return table["value"] if len(table) == 1 else text


def parse(
    kind: type[S],
    raw: Mapping[str, Any],
    origin: str,
    sets: Sequence[str] = (),
    found: Mapping[str, str] | None = None,
) -> S:
    """Return `raw` parsed as a section of `kind`.

    The error has every mistake, each on a line of its own if there are several. It starts with
    `origin` (such as a file), or with the item of `sets` that set the key. `found` has sentences
    about keys that the caller could not resolve; their tables are incomplete for that reason.
    """
    by_key, conflicts = dict(found or {}), list[tuple[str, str]]()
    try:
        section = kind.model_validate(dict(raw), by_alias=True, by_name=False)
        if not by_key:
            return section
    except ValidationError as error:
        # Another mistake causes `default_factory_not_called`.
        details = [
            detail for detail in error.errors(include_url=False)
            if detail["type"] != "default_factory_not_called"
        ]  # fmt: skip
        conflicts = _add_mistakes(kind, raw, details, by_key)
    raise ConfigError(list_mistakes([*by_key.items(), *conflicts], origin, sets, raw))


def _add_mistakes(
    kind: type[Section], raw: Mapping[str, Any], details: Sequence[Any], by_key: dict[str, str]
) -> list[tuple[str, str]]:
    """Add a sentence to `by_key` for each mistake that pydantic found in a key or value; return the
    conflicts beside them."""
    wrong = [detail for detail in details if detail["type"] != "value_error"]
    conflicts = [] if wrong else _find_conflicts(kind, raw)
    if conflicts:
        return conflicts
    meant, is_clear = set(map(_without_indices, by_key)), True
    for detail in details:
        if detail["type"] == "extra_forbidden":
            for one in _describe_unknown(kind, detail):
                by_key.setdefault(one.path, one.message)
                meant.add(_without_indices(one.meant or ""))
                is_clear &= one.meant is not None
    for detail in details:
        if detail["type"] != "extra_forbidden":
            key, sentence = _describe_mistake(kind, detail)
            if detail["type"] != "missing" or not _is_misspelt(kind, key, meant):
                by_key.setdefault(key, sentence)
    rest = _without(raw, [one["loc"] for one in wrong if one["type"] != "missing"])
    doubtful = meant | set(map(_without_indices, by_key))
    return [
        (path, sentence)
        for path, sentence in _find_conflicts(kind, rest)
        if sentence not in by_key.values()
        and not any(
            key in doubtful or not (is_clear or _stands_in(rest, key))
            for key in _NAMED_KEY.findall(sentence)
        )
    ]


def _find_conflicts(kind: type[Section], raw: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the path of a table and a sentence for all keys that do not go together; an empty list
    if a single value is wrong."""
    try:
        section = kind.model_validate(
            dict(raw), context=CONFLICTS_ALLOWED, by_alias=True, by_name=False
        )
    except ValidationError:
        return []
    return list(_conflicts_inside(section, ""))


def _without(raw: Mapping[str, Any], locations: Iterable[Sequence[str | int]]) -> dict[str, Any]:
    """Return tables without the values at these pydantic locations, and the lists around them."""
    rest = copy.deepcopy(dict(raw))
    for location in locations:
        last: tuple[dict[str, Any], str] | None = None
        inside: Any = rest
        for part in location:
            if not isinstance(inside, dict) or part not in inside:
                break
            last, inside = (inside, str(part)), inside[part]
        if last is not None:
            del last[0][last[1]]
    return rest


def _stands_in(raw: Mapping[str, Any], key: str) -> bool:
    """Return whether tables have a dotted key."""
    inside: Any = raw
    for part in key.split("."):
        if not isinstance(inside, Mapping) or part not in inside:
            return False
        inside = inside[part]
    return True


def _conflicts_inside(section: Section, path: str) -> Iterator[tuple[str, str]]:
    """Yield the path and the sentence of each conflict of a section and of those inside it."""
    for name, field in _own_fields(section):
        value, key = getattr(section, name), keys.dotted_key([field.alias or name])
        inner = f"{path}.{key}" if path else key
        for index, one in enumerate(_subsections(value)):
            place = f"[{index}]" if isinstance(value, list) else ""
            yield from _conflicts_inside(one, f"{inner}{place}")
    for sentence in section.conflicts():
        # A table in a list cannot name its own index.
        yield path, f"{path}: {sentence}" if "[" in path else sentence


def _describe_unknown(kind: type[BaseModel], detail: Any) -> list[unknown_keys.UnknownKey]:
    field, _, key = _locate_error(kind, detail["loc"])
    # A choice that only files use, such as a preset, is left here if its value is unknown.
    if key == keys.dotted_key(detail["loc"]) and field and keys.choices(field.annotation):
        return [unknown_keys.UnknownKey(*_describe_mistake(kind, detail), key, is_known=True)]
    return unknown_keys.unknown_keys(kind, detail["loc"], detail["input"])


def _is_misspelt(kind: type[BaseModel], key: str, meant: AbstractSet[str]) -> bool:
    """Return whether a missing key is among the `meant` ones: itself, a key of files that stands
    for it, or all that a table requires."""
    plain = _without_indices(key)
    table = plain.rpartition(".")[0]
    around = keys.section_of(unknown_keys.locate(kind, table).annotation) if table else kind
    inner = keys.section_of(unknown_keys.locate(kind, plain).annotation)
    for_files = getattr(around, "file_keys", None)
    others = [] if for_files is None else list(keys.fields(for_files))
    required = {f"{plain}.{name}" for name in (keys.required_keys(inner) if inner else ())}
    is_in_file_key = any(f"{table}.{name}" in meant for name in others)
    return plain in meant or is_in_file_key or (bool(required) and required <= meant)


def _without_indices(key: str) -> str:
    return re.sub(r"\[\d+\]", "", key)


@contextmanager
def noted(found: dict[str, str], key: str, origin: str = "") -> Iterator[None]:
    """Collect an error about `key` in `found`, without `origin`."""
    try:
        yield
    except UserError as error:
        found[key] = str(error).removeprefix(f"{origin}: ")


def list_mistakes(
    mistakes: Iterable[tuple[str, str]], origin: str, sets: Sequence[str], raw: Mapping[str, Any]
) -> str:
    """Return one sentence for a single mistake, else a heading with a line for each one.

    Mistakes are pairs of a key and a sentence."""
    lines = list[str]()
    for key, sentence in mistakes:
        spellings = (key, _name_tables(key, raw))
        culprits = [item for item in sets if any(sets_key(item, one) for one in spellings)]
        where = culprits[-1] if culprits else error_origin(origin, sets, sentence)
        lines.append(f"{where}: {sentence}")
    if len(lines) == 1:
        return lines[0]
    plain = [line.removeprefix(f"{origin}: ") for line in lines]
    return "\n  ".join([f"{origin}: {len(lines)} mistakes", *plain])


def _name_tables(key: str, raw: Mapping[str, Any]) -> str:
    """Return `key` as an item of `--set` spells it: student.small.lr for student[0].lr."""
    found: Any = raw
    named = list[str]()
    for part in key.split("."):
        name = part.partition("[")[0]
        found = found.get(name) if isinstance(found, Mapping) else None
        named.append(name)
        for index in map(int, re.findall(r"\[(\d+)\]", part)):
            found = found[index] if isinstance(found, list) and index < len(found) else None
            named += [str(found["name"])] if isinstance(found, Mapping) and "name" in found else []
    return ".".join(named)


def error_origin(origin: str, sets: Sequence[str], sentence: str) -> str:
    """Return the origin of a mistake that involves several keys: `origin` and items of `--set`.

    Without a file, items of the same table are named, such as a preset that set the key.
    """
    last = {item.partition("=")[0].strip(): item for item in sets}  # Earlier ones have no effect.
    named = [item for key, item in last.items() if f"{key} = " in sentence]
    if origin == SET_FLAG and not named:
        table, dot, _ = sentence.partition(" ")[0].partition(".")
        named = [s for s in sets if dot and s.strip().startswith(f"{table}.")]
    if origin == SET_FLAG and named:
        return " and ".join(named)
    return f"{origin} with {' and '.join(named)}" if named else origin


def sets_key(item: str, key: str) -> bool:
    """Return True if an item of `--set` sets `key` or a table that contains it."""
    named = item.partition("=")[0].strip()
    return bool(key) and f"{_without_indices(key)}.".startswith(f"{named}.")


def _describe_mistake(kind: type[BaseModel], detail: Any) -> tuple[str, str]:
    """Return the key of a mistake that pydantic found, and a sentence with a remedy."""
    value, reason = detail.get("input"), detail["type"]
    field, name, key = _locate_error(kind, detail["loc"])
    if reason == "value_error":
        sentence = str(detail["ctx"]["error"])
        # A table in a list cannot name its own index.
        return key, f"{key}: {sentence}" if "[" in key else sentence
    shown = f"{key} = {keys.show(value)}"
    if (
        reason == "list_type"
        and isinstance(value, dict)
        and keys.section_of(field and field.annotation)
    ):
        return key, f"[{key}] is one table, and the key takes a list of them: write [[{key}]]"
    if field is None:
        return key, f"{shown}: {_lower_first(detail['msg'])}"
    expected = keys.describe_type(field)
    if reason == "missing":
        meaning = keys.meaning(field).partition(". ")[0].rstrip(".")
        section = keys.section_of(field.annotation)
        remedy = f"give {expected}"
        if section is not None and typing.get_origin(field.annotation) is not list:
            remedy = f"add [{key}]{keys.describe_required(section)}"
        return key, f"{key} is missing: {remedy} ({_lower_first(meaning)})"
    if reason == "string_too_short":
        expected = expected.replace("a string", "a non-empty string")
    choices = keys.choices(field.annotation)
    if choices and isinstance(value, str):
        return key, f"{shown} is not known: {keys.suggest_choice(value, choices, expected)}"
    return key, f"{shown}: {'give' if key == name else f'{name} takes'} {expected}"


def _locate_error(
    kind: type[BaseModel], location: Sequence[str | int]
) -> tuple[FieldInfo | None, str, str]:
    """Return the field at a pydantic location, its dotted key, and the key of the value inside it.

    The location also names members of unions, which are no keys.
    """
    section: type[BaseModel] | None = kind
    field: FieldInfo | None = None
    names: list[str | int] = []
    depth = 0
    for part in location:
        if section is not None and part in keys.fields(section):
            field = keys.fields(section)[str(part)]
            section = keys.section_of(field.annotation)
            names.append(part)
            depth = len(names)
        elif isinstance(part, int) or (
            field is not None and keys.is_table(field.annotation) and part != "[key]"
        ):
            names.append(part)
    return field, keys.dotted_key(names[:depth]), keys.dotted_key(names)


def _lower_first(message: str) -> str:
    return message[:1].lower() + message[1:]

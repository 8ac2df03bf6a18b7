"""Unknown keys: find the keys that were meant by a name that no key has.

`locate` finds a key of a section or raises the error. `meant` compares a name with the keys of its
table, the keys of other tables and the names of other frameworks, misspelt or shortened.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from moesaic.base.errors import ConfigError
from moesaic.base.keys import dotted_key, fields, join_words, section_of, table_kind, walk_fields

_MAX_SUGGESTIONS = 4
_NEARLY_SAME, _SAME_TABLE, _OTHER_TABLE, _OTHER_NAME, _WORD = 0.85, 0.75, 0.8, 0.82, 0.65
"""Least similarity of misspelt names: 1 for equal letters, 0 for no letter in common."""
_PART = 0.55
"""Least similarity of a name to its part: about 0.4 of the letters."""
_MIN_PREFIX, _MIN_PART_OF_OTHER, _MIN_OTHER_NAME = 3, 4, 5
"""Least letters of names that are compared: short ones resemble too much."""


class UnknownKey(NamedTuple):
    """A key that a section lacks."""

    path: str
    message: str
    """Sentence with the remedy."""
    meant: str | None
    """Key that was probably meant, if there is one such key alone."""
    is_known: bool
    """True if the message says what to write instead."""


class Meant(NamedTuple):
    """Keys that an unknown name may mean."""

    keys: Sequence[str] = ()
    """Nearest first."""
    way: str | None = None
    """How to say the same, if no key says it alone."""
    is_misspelt: bool = False
    """True if the name is none of another key or framework, nor a part of one."""


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
    other_names: dict[str, Meant]
    """Meanings of other frameworks' names, and of keys with their table in the name:
    `train_steps`."""
    plain_names: dict[str, Meant]
    """The same by plain name."""


@cache
def _tree(root: type[BaseModel]) -> _Tree:
    found = dict(walk_fields(root))
    names, tables = dict[str, dict[str, str]](), dict[str, list[str]]()
    for path in found:
        table, _, name = path.rpartition(".")
        names.setdefault(table, {})[name] = path
        tables.setdefault(name, []).append(table)
    lists = tuple(f"{path}." for path, field in found.items() if _is_list_of_tables(field))
    keys: Mapping[str, str] = getattr(root, "other_names", None) or {}
    ways: Mapping[str, str] = getattr(root, "other_ways", None) or {}
    others = {
        path.replace(".", "_"): Meant([path])
        for path in found
        if "." in path and not path.startswith(lists)
    }
    for name in (*keys, *ways):
        others[name] = Meant([keys[name]] if keys.get(name) in found else [], ways.get(name))
    plain = {_plain(name): one for name, one in others.items()}
    return _Tree(found, names, tables, lists, others, plain)


def _is_list_of_tables(field: FieldInfo) -> bool:
    return section_of(field.annotation) is not None and table_kind(field) == "list of tables"


def locate(root: type[BaseModel], key: str) -> FieldInfo:
    """Return the field of the dotted `key`; raise ConfigError with a suggestion if unknown."""
    found = _tree(root).fields.get(key)
    if found is None:
        parts = key.split(".")
        raise ConfigError(_unknown_key(root, parts, parts).message)
    return found


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
    is_misspelt = bool(difflib.get_close_matches(names[-1], ends, cutoff=_OTHER_TABLE))
    if not isinstance(value, Mapping) or (is_misspelt and set(value) <= set(own)):
        return [this]
    above = table.split(".") if table else names
    inside = [
        _unknown_key(root, [*parts, name], [*names, name])
        if _is_known(by_other_name(root, f"{names[-1]}.{name}"))
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
    found = Meant([".".join(names)]) if names[-1] in own else meant(root, names)
    remedy = found.way or _known_keys(root, names)
    if found.keys and not found.way:
        quoted = [f"'{key}'" for key in found.keys]
        remedy = f"did you mean {join_words(quoted)}?"
    path, key = dotted_key(parts), found.keys[0] if len(found.keys) == 1 else None
    return UnknownKey(path, f"unknown key '{path}': {remedy}", key, _is_known(found))


def _known_keys(root: type[BaseModel], names: Sequence[str]) -> str:
    """Return a clause about the keys of the table of an unknown key."""
    tree, above = _tree(root), ".".join(names[:-1])
    if above in tree.names:
        where = f"'{above}' has the keys" if above else "the keys at the top are"
        return f"{where} {', '.join(tree.names[above])}"
    tables = (".".join(names[:count]) for count in range(1, len(names)))
    value = next((one for one in tables if one in tree.fields and one not in tree.names), None)
    return "no table has such a key" if value is None else f"'{value}' is a value, no table"


def meant(root: type[BaseModel], parts: Sequence[str]) -> Meant:
    """Return the keys that an unknown key means, or how to say it; nothing if it may be many."""
    found = next(filter(_is_known, _readings(root, parts)), Meant())
    most = _MAX_SUGGESTIONS if len(parts) == 1 else _MAX_SUGGESTIONS - 1
    return found if len(found.keys) <= most else Meant()


def _is_known(found: Meant) -> bool:
    return bool(found.keys or found.way)


def _readings(root: type[BaseModel], parts: Sequence[str]) -> Iterator[Meant]:
    """Yield what an unknown key may mean, the likeliest first."""
    *tables, word = parts
    tree, above = _tree(root), ".".join(tables)
    siblings = tree.names.get(above, {})
    alike, _, name = max(
        ((_likeness(word, name), _begins_alike(word, name), name) for name in siblings),
        default=(0.0, False, ""),
    )
    near = Meant([siblings[name]] if alike >= _SAME_TABLE else [], is_misspelt=True)
    if alike >= _NEARLY_SAME and not _is_known(by_other_name(root, word)):
        yield near
    if above:
        yield Meant([path for name, path in siblings.items() if _begins(word, name)])
    yield _same_name(root, parts)
    yield near
    yield _misspelt(tree, above, word, _NEARLY_SAME)
    yield _parts(tree, above, word)
    yield _misspelt(tree, above, word)
    values = [path for path in siblings.values() if path not in tree.names]
    yield Meant([path for path in values if _is_part(_last(path), word)])


def _same_name(root: type[BaseModel], parts: Sequence[str]) -> Meant:
    """Return the keys that have this name in another table, or in another framework.

    A framework's name in its table comes first, then keys of the same name, then any framework's
    name. Keys in lists of tables come last, and are not meant in a table outside of lists.
    """
    *tables, word = parts
    tree, above = _tree(root), ".".join(tables)
    own, listed = _split(tree, above, [tree.names[at][word] for at in tree.tables.get(word, ())])
    readings = (
        by_other_name(root, ".".join(["", *parts][-2:])),
        Meant(own),
        by_other_name(root, word),
        Meant(listed),
    )
    return _inside(tree, above, next(filter(_is_known, readings), Meant()))


def _split(tree: _Tree, above: str, paths: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the paths outside lists of tables, and those inside that a key of `above` may mean."""
    paths = list(paths)
    listed = [path for path in paths if path.startswith(tree.lists)]
    is_outside = bool(above) and above in tree.names and not f"{above}.".startswith(tree.lists)
    return [path for path in paths if path not in listed], [] if is_outside else listed


def _inside(tree: _Tree, above: str, found: Meant) -> Meant:
    """Return keys with the table `above` if it ends with their table, as the model of a student."""
    tables = [key.rpartition(".")[0] for key in found.keys]
    outer = [above.removesuffix(at) if at and above.endswith(f".{at}") else "" for at in tables]
    outer = [one if one.partition(".")[0] in tree.names else "" for one in outer]
    return found._replace(keys=[f"{at}{key}" for at, key in zip(outer, found.keys, strict=True)])


def by_other_name(root: type[BaseModel], name: str) -> Meant:
    """Return the key that another framework gives this name, and how else to say it."""
    return _tree(root).plain_names.get(_plain(name), Meant())


def _misspelt(tree: _Tree, above: str, word: str, least: float = 0.0) -> Meant:
    """Return the most similar key of another table or name of another framework, of a likeness from
    `least` on."""
    values = [path for path, field in tree.fields.items() if section_of(field.annotation) is None]
    own, listed = _split(tree, above, [one for one in values if one.rpartition(".")[0] != above])
    near = _most_alike(
        word, [(_last(path), Meant([path])) for path in own], max(_OTHER_TABLE, least)
    )
    others = [(name, one) for name, one in _others(tree, above) if len(name) >= _MIN_OTHER_NAME]
    other = _most_alike(word, others, max(_OTHER_NAME, least))
    _, best = max(near, other, key=lambda one: one[0])
    if not best:
        inside = [(_last(path), Meant([path])) for path in listed]
        _, best = _most_alike(word, inside, max(_OTHER_TABLE, least))
    found = Meant(list(dict.fromkeys(key for one in best for key in one.keys)))
    way = next((one.way for one in best if one.way), None)
    return _inside(tree, above, found._replace(way=way, is_misspelt=True))


def _most_alike(
    word: str, names: Iterable[tuple[str, Meant]], cutoff: float
) -> tuple[float, list[Meant]]:
    """Return the greatest likeness of `names` to a word, and the meanings of those that have it."""
    by_likeness = dict[float, list[Meant]]()
    for name, one in names:
        alike = _likeness(word, name, cutoff)
        if alike >= cutoff and _has_words(word, name):
            by_likeness.setdefault(alike, []).append(one)
    return max(by_likeness.items(), key=lambda one: one[0], default=(0.0, []))


def _others(tree: _Tree, above: str) -> Iterator[tuple[str, Meant]]:
    """Yield the names of other frameworks that a key of the table `above` may have."""
    for name, one in tree.other_names.items():
        table, dot, last = name.rpartition(".")
        if not dot or table == above:
            yield last, one


def _parts(tree: _Tree, above: str, word: str) -> Meant:
    """Return the keys of which the name, or that in another framework, has `word` as a part.

    In a known table, only its own keys are meant.
    """
    own, listed = list(tree.names.get(above, {}).values()), list[str]()
    if not above or not own:
        own, listed = _split(tree, above, tree.fields)
    begun = [path for path in own if _begins(word, _last(path))]
    found = dict.fromkeys([*begun, *(path for path in own if _is_part(word, _last(path)))])
    others = [
        key
        for name, one in _others(tree, above)
        for key in one.keys
        if not one.way and len(word) >= _MIN_PART_OF_OTHER and _is_part(word, name)
        if key in own
    ]
    all_found = found | dict.fromkeys(others)
    few = all_found if len(all_found) <= _MAX_SUGGESTIONS or not found else found
    return Meant(list(few) or [path for path in listed if _begins(word, _last(path))])


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _plain(name: str) -> str:
    return name.replace("_", "").replace("-", "").lower()


def _words(name: str) -> list[str]:
    return name.lower().replace("-", "_").split("_")


def _likeness(word: str, name: str, least: float = 0.0) -> float:
    """Return the similarity of two names, or 0 if it is below `least`."""
    match = difflib.SequenceMatcher(None, _plain(word), _plain(name))
    if match.real_quick_ratio() < least or match.quick_ratio() < least:
        return 0.0
    return match.ratio()


def _begins_alike(word: str, name: str) -> bool:
    return word[:1].lower() == name[:1].lower()


def _has_words(word: str, name: str) -> bool:
    """Return whether each word of a name is in the other name, perhaps misspelt after the
    first letter."""
    return _begins_alike(word, name) and all(
        one in _plain(name) or difflib.get_close_matches(one, _words(name), cutoff=_WORD)
        for one in _words(word)
    )


def _begins(word: str, name: str) -> bool:
    return len(word) >= _MIN_PREFIX and _plain(name).startswith(_plain(word))


def _is_part(word: str, name: str) -> bool:
    """Return whether a name has the words of another in a row, or begins with it."""
    is_inside = f"_{'_'.join(_words(word))}_" in f"_{'_'.join(_words(name))}_"
    return (is_inside or _begins(word, name)) and _likeness(word, name) >= _PART

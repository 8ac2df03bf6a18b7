from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, model_validator

from moesaic.base import keys, unknown_keys
from moesaic.base.config import Section, apply_sets, parse, parse_toml, read_toml
from moesaic.base.errors import ConfigError


class Choice(Section):
    """Instead of sizes."""

    preset: str | None = None
    """A name."""
    from_: str | None = Field(default=None, alias="from")
    """A directory
    of files."""


class Wheel(Section):
    """A wheel."""

    file_keys: ClassVar[type[BaseModel]] = Choice

    radius: float = Field(gt=0)
    """Hub to rim. In metres."""
    spokes: int = Field(default=24, ge=3, le=96)
    """How many."""


class Bicycle(Section):
    """A bicycle."""

    resolved_keys: ClassVar[frozenset[str]] = frozenset({"maker"})

    maker: str | None = None
    """Filled in."""
    gears: int = Field(ge=1)
    """How many gears. Fewer is lighter."""
    wheel: Wheel
    """Both wheels."""
    colour: Literal["red", "green"] = "red"
    """Its colour."""
    brake: Annotated[int, Field(ge=0)] | Literal["all"] = "all"
    """How many brakes."""
    bell: bool = True
    """Whether it rings."""
    tags: list[str] = []  # noqa: RUF012 - pydantic copies defaults
    """Words."""
    span: list[float] = Field(default=[0.0, 1.0], min_length=2, max_length=2)
    """From and to."""
    notes: dict[str, Any] = Field(default_factory=dict)
    """Anything."""
    lock: float | None = Field(default=None, ge=0)
    """Weight of the lock."""

    @model_validator(mode="after")
    def _consistent(self) -> Bicycle:
        if self.gears > 1 and self.colour == "green":
            raise ValueError(f"gears = {self.gears} of a green bicycle: give 1")
        return self


GOOD: dict[str, Any] = {"gears": 1, "wheel": {"radius": 0.3}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"gear": 3}, "unknown key 'gear': did you mean 'gears'?"),
        (
            {"zzz": 3},
            "unknown key 'zzz': the keys at the top are "
            "gears, wheel, colour, brake, bell, tags, span, notes, lock",
        ),
        (
            {"knol": 3},  # In the order of the file, whatever the word.
            "unknown key 'knol': the keys at the top are "
            "gears, wheel, colour, brake, bell, tags, span, notes, lock",
        ),
        ({"gears": "3"}, 'gears = "3": give an integer from 1'),
        ({"gears": True}, "gears = true: give an integer from 1"),
        ({"wheel": 3}, "wheel = 3: give a table with keys preset, from, radius, spokes"),
        ({"wheel": {"radius": float("inf")}}, "wheel.radius = inf: give a number above 0"),
        ({"wheel": {}}, "wheel.radius is missing: give a number above 0 (hub to rim)"),
        (
            {"colour": "rde"},
            'colour = "rde" is not known: did you mean "red" (it takes "red" or "green")?',
        ),
        ({"colour": "blue"}, 'colour = "blue" is not known: give "red" or "green"'),
        ({"brake": -1}, 'brake = -1: give an integer from 0 or "all"'),
        (
            {"brake": "al"},
            'brake = "al" is not known: did you mean "all" (it takes an integer from 0 or "all")?',
        ),
        ({"bell": "yes"}, 'bell = "yes": give true or false'),
        ({"tags": ["a", 2]}, "tags[1] = 2: tags takes a list of strings"),
        ({"span": [1.0]}, "span = [1.0]: give a list of 2 numbers"),
        ({"lock": "heavy"}, 'lock = "heavy": give a number from 0'),
        ({"gears": 2, "colour": "green"}, "gears = 2 of a green bicycle: give 1"),
        (
            {"gears": "x", "bell": 1},
            '2 mistakes\n  gears = "x": give an integer from 1\n  bell = 1: give true or false',
        ),
        ({"gears": "x" * 200}, f'gears = "{"x" * 76}...: give an integer from 1'),
    ],
)
def test_mistake_is_reported_in_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Bicycle, {**GOOD, **changes}, "bike.toml")
    assert str(caught.value) == f"bike.toml: {sentence}"


def test_missing_keys_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Bicycle, {"gaers": 1, "bell": 3}, "b")
    assert str(caught.value).splitlines() == [
        "b: 3 mistakes", "  unknown key 'gaers': did you mean 'gears'?",
        "  wheel is missing: add [wheel] with preset, from or all required keys (both wheels)",
        "  bell = 3: give true or false",
    ]  # fmt: skip
    sets = ["bell=3"]
    with pytest.raises(ConfigError) as caught:
        parse(Bicycle, apply_sets({"gears": "x"}, sets), "b", sets)
    lines = str(caught.value).splitlines()
    assert lines[:2] == ["b: 3 mistakes", '  gears = "x": give an integer from 1']
    assert "  bell=3: bell = 3: give true or false" in lines
    with pytest.raises(ConfigError) as caught:
        parse(Bicycle, {"gears": 1}, "b")
    assert str(caught.value) == (
        "b: wheel is missing: add [wheel] with preset, from or all required keys (both wheels)"
    )


def test_error_names_the_set_item() -> None:
    sets = ["wheel.spokes=5", "wheel.spokes=1", "gears=2"]
    with pytest.raises(ConfigError) as caught:
        parse(Bicycle, apply_sets(GOOD, sets), "b.toml", sets)
    assert str(caught.value).startswith("wheel.spokes=1: wheel.spokes = 1: give")
    sets = ["gears=2"]
    with pytest.raises(ConfigError) as caught:
        parse(Bicycle, apply_sets({"wheel": {"radius": "x"}}, sets), "b.toml", sets)
    assert str(caught.value).startswith("b.toml: wheel.radius")


@pytest.mark.parametrize(
    ("item", "key", "value"),
    [
        ("gears=3", "gears", 3),
        ("gears = 3", "gears", 3),
        ("a.b.c=true", "a", {"b": {"c": True}}),
        ("wheel.radius=0.5", "wheel", {"radius": 0.5}),
        ("name=plain words", "name", "plain words"),
        ('name="quoted"', "name", "quoted"),
        ("name=", "name", ""),
        ("name=a=b", "name", "a=b"),
        ("two=1\nthree=4", "two", "1\nthree=4"),
    ],
)
def test_set_value_is_toml_or_a_string(item: str, key: str, value: Any) -> None:
    assert apply_sets(GOOD, [item])[key] == value


def test_apply_sets_copies_and_the_last_item_wins() -> None:
    raw = {"wheel": {"radius": 1.0}, "day": parse_toml("x = 2020-01-02", "")["x"]}
    assert apply_sets(raw, ["wheel.radius=2.0", "wheel.radius=3.0"])["wheel"]["radius"] == 3.0
    assert raw["wheel"] == {"radius": 1.0}


@pytest.mark.parametrize("item", ["", "=3", "gears", "a..b=3", ".a=1", "a.=1"])
def test_malformed_set_is_rejected(item: str) -> None:
    with pytest.raises(ConfigError, match=r"is not of the form key\.path=value"):
        apply_sets(GOOD, [item])


def test_set_below_a_value_is_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        apply_sets(GOOD, ["gears.x=1"])
    assert str(caught.value) == "gears.x=1: 'gears' is a value and has no keys of its own"


def test_a_table_that_stands_twice_is_explained() -> None:
    with pytest.raises(ConfigError, match=r"twice .* has double brackets: \[\[table\]\]\)"):
        parse_toml("[bag]\n[bag]\n", "bags.toml")


def test_a_set_chooses_a_table_of_a_list_by_its_name() -> None:
    raw = {"bags": [{"name": "a", "wheel": {"radius": 1.0}}, {"name": "b"}], "sizes": [{}]}
    changed = apply_sets(raw, ["bags.a.wheel.radius=2.0", "bags.b.x=1"])
    assert changed["bags"] == [{"name": "a", "wheel": {"radius": 2.0}}, {"name": "b", "x": 1}]
    remedy = "is a list of tables: name one, as in bags.a.KEY=VALUE (a, b)"
    for item, words in (
        ("bags.x=1", remedy), ("bags.c.x=1", remedy), ("bags.a=1", remedy),
        ("sizes.x=1", "'sizes' is a list of tables: edit the file"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            apply_sets(raw, [item])
        assert str(caught.value).startswith(f"{item}: ")
        assert words in str(caught.value)


def test_unusable_file_is_explained(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    with pytest.raises(ConfigError, match=r"bad.toml' cannot be read \(No such file"):
        read_toml(bad)
    with pytest.raises(ConfigError, match="Is a directory"):
        read_toml(tmp_path)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        read_toml(bad)
    bad.write_text("a = 1\na = 2\n")
    with pytest.raises(
        ConfigError, match=r"bad.toml: not valid TOML: cannot overwrite a value .*line 2"
    ):
        read_toml(bad)
    bad.write_text("a = hello\n")
    with pytest.raises(
        ConfigError, match=r"invalid value \(at line 1, column 5\) \(text needs quotes\)"
    ):
        read_toml(bad)


def test_toml_round_trips() -> None:
    raw = {
        "gears": 1, "wheel": {"radius": 1e-7}, "maker": "us",
        "tags": ['"quoted"', "a\\b\x7f\u00e9"],
        "notes": {"a b": {"c": [1.5, True]}},
    }  # fmt: skip
    bicycle = parse(Bicycle, raw, "b")
    text = bicycle.to_toml()
    assert '# maker = "us"\n' in text
    assert parse(Bicycle, parse_toml(text, "b"), "b") == bicycle.model_copy(update={"maker": None})


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
names = st.sampled_from(
    ["gears", "wheel", "colour", "brake", "tags", "span", "notes", "lock", "xyz"]
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(names, values))
def test_any_table_is_parsed_or_rejected_in_one_line(raw: dict[str, Any]) -> None:
    try:
        bicycle = parse(Bicycle, raw, "b.toml")
    except ConfigError as error:
        message = str(error)
    else:
        message = "b.toml: "
        assert parse(Bicycle, json.loads(bicycle.to_json()), "b.json") == bicycle
    assert message.startswith("b.toml: ")
    assert "pydantic" not in message


class Pocket(Section):
    """A pocket."""

    zip: bool = True
    """Whether it closes."""
    litres: float = Field(gt=0)
    """How much it holds."""

    @model_validator(mode="after")
    def _consistent(self) -> Pocket:
        if self.zip and self.litres > 5:
            raise ValueError(f"litres = {self.litres} with a zip: give at most 5")
        return self


class Bag(Section):
    """A bag."""

    file_keys: ClassVar[type[BaseModel]] = Choice

    name: str
    """Its name."""
    pockets: list[Pocket] = Field(min_length=1)
    """Where things go."""
    wheel: Wheel | None = None
    """To roll on."""


class Luggage(Section):
    """Luggage."""

    bags: list[Bag] = Field(default_factory=list)
    """The bags. All of them."""
    owner: str
    """Whose it is."""


POCKETS = [{"litres": 1.5}, {"zip": False, "litres": 7}]


def test_lists_of_tables_round_trip() -> None:
    bags = [
        {"name": "a", "pockets": POCKETS, "wheel": {"radius": 0.1}},
        {"name": "b", "pockets": POCKETS[:1]},
    ]
    luggage = parse(Luggage, {"owner": "me", "bags": bags}, "l")
    text = luggage.to_toml()
    assert parse(Luggage, parse_toml(text, "l"), "l") == luggage
    headers = [line for line in text.splitlines() if line.startswith("[")]
    assert headers == [
        "[[bags]]", "[[bags.pockets]]", "[[bags.pockets]]", "[bags.wheel]",
        "[[bags]]", "[[bags.pockets]]",
    ]  # fmt: skip
    empty = parse(Luggage, {"owner": "me"}, "l")
    assert parse(Luggage, parse_toml(empty.to_toml(), "l"), "l") == empty


@pytest.mark.parametrize(
    ("bags", "sentence"),
    [
        (3, "bags = 3: give a list of tables with keys preset, from, name, pockets, wheel"),
        ({"name": "a"}, "[bags] is one table, and the key takes a list of them: write [[bags]]"),
        ([{"pockets": POCKETS}], "bags[0].name is missing: give a string (its name)"),
        ([{"name": "", "pockets": POCKETS}], 'bags[0].name = "": give a non-empty string'),
        ([{"name": "a", "pockets": []}], "bags[0].pockets = []: give a list of one or more tables"),
        (
            [{"name": "a", "pockets": [*POCKETS, {"litres": 0}]}],
            "bags[0].pockets[2].litres = 0: give a number above 0",
        ),
        (
            [{"name": "a", "pockets": [*POCKETS, {"litres": 9}]}],
            "bags[0].pockets[2]: litres = 9.0 with a zip: give at most 5",
        ),
        (
            [{"name": "a", "pockets": [{"litres": 1, "zzz": 2}]}],
            "unknown key 'bags[0].pockets[0].zzz': 'bags.pockets' has the keys zip, litres",
        ),
    ],
)
def test_mistake_in_a_list_of_tables_names_the_index(bags: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(Luggage, {"owner": "me", "bags": bags}, "l.toml")
    assert str(caught.value).startswith(f"l.toml: {sentence}")


# Descriptions of keys.


def test_all_keys_are_listed() -> None:
    assert list(keys.walk(Bicycle))[:6] == [
        ("gears", "an integer from 1", "required", "How many gears. Fewer is lighter."),
        ("wheel", "table", "", "Both wheels."),
        ("wheel.preset", "a string", "unset", "A name."),
        ("wheel.from", "a string", "unset", "A directory of files."),
        ("wheel.radius", "a number above 0", "required", "Hub to rim. In metres."),
        ("wheel.spokes", "an integer from 3 and up to 96", "24", "How many."),
    ]
    assert [(entry.path, entry.kind) for entry in keys.walk(Luggage)][:2] == [
        ("bags", "list of tables"), ("bags.preset", "a string"),
    ]  # fmt: skip
    expected = "bags: list of tables\n  The bags. All of them.\n  .preset: "
    assert keys.explain("bags", unknown_keys.locate(Luggage, "bags")).startswith(expected)


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("owners", "unknown key 'owners': did you mean 'owner'?"),
        ("bags.nam", "unknown key 'bags.nam': did you mean 'bags.name'?"),
        ("litres", "unknown key 'litres': did you mean 'bags.pockets.litres'?"),
        ("bag.litres", "unknown key 'bag.litres': did you mean 'bags.pockets.litres'?"),
        ("bags.pockets.x", "unknown key 'bags.pockets.x': 'bags.pockets' has the keys zip, litres"),
        ("owner.x", "unknown key 'owner.x': 'owner' is a value, no table"),
        ("", "unknown key '\"\"': the keys at the top are bags, owner"),
    ],
)
def test_unknown_key_is_explained(key: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        unknown_keys.locate(Luggage, key)
    assert str(caught.value) == sentence


def test_error_names_the_set_item_of_a_list_of_tables() -> None:
    item = 'bags=[{name="a", pockets=[{litres=0}]}]'
    with pytest.raises(ConfigError, match=r"^bags=.*: bags\[0\]\.pockets\[0\]\.litres = 0"):
        parse(Luggage, apply_sets({"owner": "me"}, [item]), "l.toml", [item])


def test_error_names_the_set_item_of_a_table_by_its_name() -> None:
    raw = {"owner": "me", "bags": [{"name": name, "pockets": [{"litres": 1}]} for name in "ab"]}
    item = "bags.b.pockets=[{litres=0}]"
    with pytest.raises(
        ConfigError, match=r"^bags\.b\.pockets=.*: bags\[1\]\.pockets\[0\]\.litres = 0"
    ):
        parse(Luggage, apply_sets(raw, [item]), "l.toml", ["bags.a.name=a", item])

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
from pydantic import BaseModel, Field

from moesaic.base import keys
from moesaic.base.config import Section
from moesaic.base.errors import ConfigError


class Start(Section):
    """Where from."""

    from_: str | None = Field(default=None, alias="from")
    """A directory
    of files."""


class Inner(Section):
    """Inner."""

    file_keys: ClassVar[type[BaseModel]] = Start

    size: int = Field(ge=1, lt=10)
    """How large."""
    kind: Literal["a", "b"] = "a"
    """Which."""


class Root(Section):
    """Root."""

    resolved_keys: ClassVar[frozenset[str]] = frozenset({"hidden"})

    hidden: str | None = None
    """Not for files."""
    inner: Inner
    """Inside."""
    share: float | None = Field(default=None, ge=0)
    """A share."""
    words: list[str] = Field(default_factory=list)
    """Words."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Anything."""


class Shelf(Section):
    """Shelf."""

    roots: list[Root] = Field(default_factory=list)
    """Many."""


def test_walk_lists_all_keys() -> None:
    assert list(keys.walk(Root)) == [
        ("inner", "table", "", "Inside."),
        ("inner.from", "a string", "unset", "A directory of files."),
        ("inner.size", "an integer from 1 and below 10", "required", "How large."),
        ("inner.kind", '"a" or "b"', '"a"', "Which."),
        ("share", "a number from 0", "unset", "A share."),
        ("words", "a list of strings", "[]", "Words."),
        ("extra", "a table", "{}", "Anything."),
    ]


def test_explain() -> None:
    assert keys.explain(Root, "inner.size") == (
        "inner.size: an integer from 1 and below 10\n  How large.\n  required"
    )
    assert keys.explain(Root, "inner.kind") == 'inner.kind: "a" or "b"\n  Which.\n  default: "a"'
    assert keys.explain(Root, "inner") == (
        "inner: table\n  Inside.\n"
        "  .from: A directory of files.\n  .size: How large.\n  .kind: Which."
    )


def test_list_of_tables_has_the_keys_of_its_tables() -> None:
    assert [(entry.path, entry.kind) for entry in keys.walk(Shelf)][:3] == [
        ("roots", "list of tables"), ("roots.inner", "table"), ("roots.inner.from", "a string"),
    ]  # fmt: skip
    assert keys.explain(Shelf, "roots").startswith("roots: list of tables\n  Many.\n  .inner: ")
    with pytest.raises(ConfigError, match=r"unknown key 'roots\.inner\.sise': did you mean"):
        keys.explain(Shelf, "roots.inner.sise")


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("iner", "unknown key 'iner': did you mean 'inner'?"),
        ("inner.sise", "unknown key 'inner.sise': did you mean 'inner.size'?"),
        ("size", "unknown key 'size': did you mean 'inner.size'?"),
        ("inner.zzz", "unknown key 'inner.zzz': 'inner' has the keys from, size, kind"),
        ("hidden", "unknown key 'hidden': the keys at the top are inner, share, words, extra"),
        ("zz.size", "unknown key 'zz.size': did you mean 'inner.size'?"),
        ("share.x", "unknown key 'share.x': there are no keys"),
        ("", "unknown key '\"\"': the keys at the top are inner, share, words, extra"),
    ],
)
def test_unknown_key_is_explained(key: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        keys.explain(Root, key)
    assert str(caught.value) == sentence


def test_values_are_shown_as_toml() -> None:
    assert keys.show({"a": [1, 2.5, True], "b": "x"}) == '{ a = [1, 2.5, true], b = "x" }'
    assert keys.show(float("nan")) == "nan"
    assert keys.join_words(["a"]) == "a"
    assert keys.join_words(["a", "b", "c"], "and") == "a, b and c"
    assert keys.dotted_key(["a", 0, "b c", 1, 2]) == 'a[0]."b c"[1][2]'

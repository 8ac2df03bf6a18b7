"""Control: attributes of a text, named by a prompt before it, and where training finds them."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from moesaic.base import keys
from moesaic.base.config import Section

SOFT_PROMPTS = 64
"""Learnable tokens of a genre."""
ATTRIBUTES = ("genre", "topic", "keywords", "sentiment", "length")
"""Attributes of a text, in the order of a prompt."""
BUILT_IN = {"genre": "directory", "keywords": "tf-idf", "length": "tokens"}
"""Labeller of an attribute that needs neither a column nor a function."""


class ControlConfig(Section):
    """Attributes that prompts name; each is set to its labeller.

    A labeller is a column of the records, a built-in one, or `module:function`.
    """

    genres: list[str] = Field(default_factory=list)
    """Genres. Each adds 64 tokens to the vocabulary, its soft prompts."""
    genre: str | None = None
    """Labeller of the genre, one of `genres`: a column, `directory` (the directory of a file below
    `data.path`), or `module:function`."""
    topic: str | None = None
    """Labeller of the topic, any text: a column, or `module:function`."""
    keywords: str | None = None
    """Labeller of the keywords: a column (a list of texts, or one with commas), `tf-idf` (three
    words that are frequent in the text and rare in `data.path`), or `module:function`."""
    sentiment: str | None = None
    """Labeller of the sentiment, any text: a column, or `module:function`."""
    length: str | None = None
    """Labeller of the length: a column of integers, `tokens` (the text's number of tokens), or
    `module:function`."""

    @property
    def labellers(self) -> dict[str, str]:
        """Labeller of each attribute in use, in the order of a prompt."""
        found = ((name, getattr(self, name)) for name in ATTRIBUTES)
        return {name: value for name, value in found if value is not None}

    def conflicts(self) -> Iterator[str]:
        """Yield attributes that nothing labels, and wrong genres."""
        if not self.labellers:
            yield (
                f"[control] names no attribute: set {keys.join_words(list(ATTRIBUTES))} to a "
                "column, or remove the table"
            )
        shown = f"control.genres = {keys.show(self.genres)}"
        if (self.genre is None) != (not self.genres):
            remedy = (
                "set control.genre to the column that names them"
                if self.genres
                else "list the genres"
            )
            yield f"{shown} and control.genre = {keys.show(self.genre or '')}: {remedy}"
        for name in dict.fromkeys(self.genres):
            if name != name.strip() or set("[]") & set(name):
                yield (
                    f"{shown} holds {keys.show(name)}, and a genre has neither brackets nor blanks "
                    "at its ends: rename it"
                )
        if len(set(self.genres)) < len(self.genres):
            yield f"{shown} names a genre twice: remove one"
        for name, labeller in self.labellers.items():
            if ":" in labeller and not all(
                part.isidentifier() for part in labeller.replace(":", ".", 1).split(".")
            ):
                yield (
                    f"control.{name} = {keys.show(labeller)} is no module:function: give a column "
                    "without a colon, or a function such as labels.topic:label"
                )


class ControlValues(Section):
    """Attributes of one text; unset ones are left out of its prompt."""

    genre: str | None = None
    """Genre, one of those that the model was trained on."""
    soft_prompts: int = Field(default=SOFT_PROMPTS, ge=0, le=SOFT_PROMPTS)
    """Soft prompts of the genre."""
    topic: str | None = None
    """Topic."""
    keywords: list[str] = Field(default_factory=list)
    """Words that the text is about."""
    sentiment: str | None = None
    """Sentiment."""
    length: int | None = Field(default=None, ge=1)
    """Tokens of the text."""

    @property
    def given(self) -> dict[str, str | int | list[str]]:
        """Attributes with a value, in the order of a prompt."""
        values = ((name, getattr(self, name)) for name in ATTRIBUTES)
        return {name: value for name, value in values if value not in (None, [])}

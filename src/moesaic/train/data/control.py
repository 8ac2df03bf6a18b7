"""Texts with their attributes: from files and labellers to tokens behind prompts.

A document of the corpus begins with the segments of its prompt for topic, keywords, sentiment and
length; each may be empty. The text and the end token follow. If the first tokens of the text differ
behind a prompt, both forms of them stand before the rest. Beside the document are its genre (-1 for
none) and the lengths of the four segments and of both forms.
"""

from __future__ import annotations

import hashlib
import importlib
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from moesaic.base import keys
from moesaic.base.errors import DataError
from moesaic.facts.job import ControlConfig, DataConfig
from moesaic.facts.job.control import ATTRIBUTES, BUILT_IN
from moesaic.models.control import ControlPrompts, ControlTokenizer
from moesaic.models.tokenizer import Tokenizer, open_tokenizer
from moesaic.train.data.corpus import (
    BATCH_CHARACTERS,
    Corpus,
    EncodedDocuments,
    Extra,
    split_batches,
)
from moesaic.train.data.sources import TextSource, fingerprint
from moesaic.train.data.text import read_records, read_texts_with_records

ENCODING_VERSION = 3
"""Version of the encoding, to raise whenever the same text gives other tokens or an error."""

_WORD = re.compile(r"[^\W\d_]{3,}")
_NUM_KEYWORDS = 3
_SEGMENTS = ATTRIBUTES[1:]

Label = str | int | list[str] | None


class LabelledText(NamedTuple):
    """A text, its tokens, and the record that it comes from."""

    where: str
    """Location, for messages."""
    file: Path
    text: str
    record: dict[str, Any]
    ids: list[int]
    """Tokens behind a prompt."""
    start_ids: list[int]
    """Tokens without a prompt."""


Labeller = Callable[[Sequence[LabelledText]], Sequence[Any]]
"""Function from texts to a label or None for each."""


class ControlEncoder:
    """Encoder of texts and their attributes; see `DocumentEncoder`."""

    extra: ClassVar[Extra] = "segments"

    def __init__(
        self, control: ControlConfig, prompts: ControlPrompts, end_id: int, train: TextSource
    ) -> None:
        """Create the encoder; keywords are words that are rare in the training text `train`."""
        self._control, self.prompts, self._end_id = control, prompts, end_id
        self._train = train
        self._functions = {
            name: _import_function(name, labeller)
            for name, labeller in control.labellers.items()
            if ":" in labeller
        }
        sources = [_read_module(function) for function in self._functions.values()]
        if control.keywords == BUILT_IN["keywords"]:
            sources += fingerprint(train)
        identity = f"{ENCODING_VERSION} {prompts.genres} {control.labellers} {sources}"
        self.digest = hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()
        """Hash of everything besides files and tokenizer that determines the documents."""

    def encode(self, source: TextSource) -> Iterator[EncodedDocuments]:
        """Yield the texts of `source` with the segments of their prompts, some at a time."""
        if source.key == "data.path":  # Validation text may lack attributes.
            self._find_columns(source)
        labellers = {
            name: self._make_labeller(name, labeller, source)
            for name, labeller in self._control.labellers.items()
        }
        found = read_texts_with_records(source, list(_columns(self._control).values()))
        for batch in split_batches(found, lambda one: len(one[2]), BATCH_CHARACTERS):
            plain = [one[2] for one in batch]
            both = (self.prompts.encode_texts(plain, has_prompt=one) for one in (True, False))
            texts = [
                LabelledText(*one, *ids) for one, *ids in zip(batch, *both, strict=True) if ids[0]
            ]
            if texts:
                yield self._join(texts, labellers)

    def check_source(self, source: TextSource) -> None:
        """Raise if a labeller names a column, and the files of `source` are plain text."""
        columns = _columns(self._control)
        if columns and source.kind == "text":
            attribute, column = next(iter(columns.items()))
            built_in = BUILT_IN.get(attribute)
            other = f" = {keys.show(built_in)}" if built_in else " to a function (module:function)"
            raise DataError(
                f"control.{attribute} = {keys.show(column)} is a column, and {source.key} = "
                f"{keys.show(source.path)} is plain text, which has none: set "
                f"control.{attribute}{other}, or give JSON lines or Parquet"
            )

    def _find_columns(self, source: TextSource) -> None:
        """Raise if no record of `source` has a column that a labeller names.

        This reads up to the first record of each column, and encodes nothing."""
        missing, seen = _columns(self._control), set[str]()
        for file in source.files if missing else ():
            for _, record in read_records(file, list(missing.values())):
                seen |= record.keys()
                missing = {key: one for key, one in missing.items() if one not in record}
                if not missing:
                    return
        for attribute, column in missing.items():
            words = sorted(seen - {source.text_key})[:12]
            expected = keys.join_words([keys.show(one) for one in words] or ["another labeller"])
            raise DataError(
                f"control.{attribute} = {keys.show(column)} is a column of no record: "
                + keys.suggest_choice(column, words, expected)
            )

    def check(self, corpus: Corpus) -> None:
        """Raise if a genre or another attribute labels no text of `corpus`."""
        assert corpus.segments is not None, "a corpus of texts behind prompts"
        found = {
            self.prompts.genres[i] for i in np.unique(corpus.segments[:, 0]).tolist() if i >= 0
        }
        for name, labeller in self._control.labellers.items():
            missing = [genre for genre in self._control.genres if genre not in found]
            if name == "genre" and missing:
                raise DataError(
                    f"control.genres: no text is of genre {keys.show(missing[0])}: add texts of "
                    "it, or remove it"
                )
            if name != "genre" and not corpus.segments[:, 1 + _SEGMENTS.index(name)].any():
                raise DataError(
                    f"control.{name} = {keys.show(labeller)} labels no text: name a column that "
                    "the records have, or remove the key"
                )

    def _make_labeller(self, attribute: str, labeller: str, source: TextSource) -> Labeller:
        """Return the function of a labeller for `source`."""
        if function := self._functions.get(attribute):
            return lambda texts: _call(function, attribute, labeller, texts)
        if labeller != BUILT_IN.get(attribute):
            return lambda texts: [one.record.get(labeller) for one in texts]
        if attribute == "length":
            return lambda texts: [len(one.ids) for one in texts]
        if attribute == "keywords":
            return self._keyword_finder
        root = Path(source.path).expanduser()
        return lambda texts: [_directory_below(root, one) for one in texts]

    @cached_property
    def _keyword_finder(self) -> KeywordFinder:
        """Labeller of keywords, fitted on the training text; validation text has the same one."""
        return KeywordFinder(text for _, _, text, _ in read_texts_with_records(self._train, ()))

    def _join(
        self, texts: Sequence[LabelledText], labellers: dict[str, Labeller]
    ) -> EncodedDocuments:
        """Return texts behind the segments of their prompts."""
        table = np.zeros((len(texts), len(ATTRIBUTES) + 2), "<i4")
        table[:, 0] = -1
        segments: list[list[list[int]]] = []
        for index, attribute in enumerate(ATTRIBUTES):
            labels: list[Label] = [None] * len(texts)
            if attribute in labellers:
                found = zip(labellers[attribute](texts), texts, strict=True)
                labels = [
                    _check_label(attribute, label, self._control, one.where) for label, one in found
                ]
            if attribute == "genre":
                genres = list(self.prompts.genres)
                table[:, 0] = [-1 if one is None else genres.index(str(one)) for one in labels]
            else:
                segments.append(self.prompts.encode_values(attribute, labels))
                table[:, index] = [len(ids) for ids in segments[-1]]
        starts = [_split_starts(one.ids, one.start_ids) for one in texts]
        table[:, len(ATTRIBUTES) :] = [[len(ids) for ids in both] for *both, _ in starts]
        rows = [
            [*chain.from_iterable(before), *chain.from_iterable(one), self._end_id]
            for *before, one in zip(*segments, starts, strict=True)
        ]
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        tokens = np.fromiter(chain.from_iterable(rows), np.uint32, int(lengths.sum()))
        return EncodedDocuments(tokens, lengths, table)


def _split_starts(one: list[int], other: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Return the unlike starts of two lists, and their common rest."""
    if one == other:
        return [], [], one
    pairs = zip(reversed(one), reversed(other), strict=False)
    rest = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return one[: len(one) - rest], other[: len(other) - rest], one[len(one) - rest :]


class KeywordFinder:
    """Labeller of keywords by TF-IDF: words of a text that few other texts have."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Count the texts that each word is in."""
        self._num_texts, self._texts_with = 0, Counter[str]()
        for text in texts:
            self._num_texts += 1
            self._texts_with.update(set(_WORD.findall(text)))

    def __call__(self, texts: Sequence[LabelledText]) -> list[list[str]]:
        """Return the keywords of each text, best first; among equals, the first in the text."""
        return [self.find(one.text) for one in texts]

    def find(self, text: str) -> list[str]:
        """Return the keywords of one text; a word of no counted text is as rare as one of one."""
        scores = {
            word: count * math.log(self._num_texts / max(self._texts_with[word], 1))
            for word, count in Counter(_WORD.findall(text)).items()
        }
        best = sorted((word for word in scores if scores[word] > 0), key=lambda word: -scores[word])
        return best[:_NUM_KEYWORDS]


def open_control(
    data: DataConfig, control: ControlConfig, train: TextSource
) -> tuple[Tokenizer, ControlEncoder]:
    """Return the tokenizer of a job with prompts, and its encoder; `train` is the training text."""
    base = open_tokenizer(data.tokenizer, data.end_token)
    tokenizer = ControlTokenizer(base, control)
    return tokenizer, ControlEncoder(control, ControlPrompts(tokenizer), tokenizer.end_id, train)


def _columns(control: ControlConfig) -> dict[str, str]:
    """Return the columns that labellers name, by attribute."""
    return {
        name: labeller
        for name, labeller in control.labellers.items()
        if ":" not in labeller and labeller != BUILT_IN.get(name)
    }


def _check_label(attribute: str, label: object, control: ControlConfig, where: str) -> Label:
    """Return a label that prompts can name; None for none."""
    labeller = getattr(control, attribute)
    shown = f"{where}: control.{attribute} = {keys.show(labeller)} gives {label!r:.80}"
    if label is None:
        return None
    if attribute == "length":
        if isinstance(label, int) and not isinstance(label, bool) and label > 0:
            return label
        raise DataError(f"{shown}, which is no number of tokens: give a whole number from 1")
    if attribute == "keywords":
        words = label.split(",") if isinstance(label, str) else label
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise DataError(f"{shown}, which is no list of words: give a list of texts")
        return [word.strip() for word in words if word.strip()]
    if not isinstance(label, str):
        raise DataError(f"{shown}, which is no text: give one, or null for none")
    if attribute == "genre" and label not in control.genres:
        raise DataError(
            f"{shown}, which is not in control.genres = {keys.show(control.genres)}: add it there, "
            "or mend the text's label"
        )
    return label


def _directory_below(root: Path, one: LabelledText) -> str:
    """Return the first directory of a text's file below `root`."""
    if not root.is_dir():
        raise DataError(
            'control.genre = "directory" needs a directory of directories as the path of the text: '
            "give one, or set control.genre to a column"
        )
    parts = one.file.relative_to(root).parts
    if len(parts) == 1:
        raise DataError(
            f'{one.where}: control.genre = "directory", and the file is in no directory below '
            f"'{root}': move it into the directory of a genre"
        )
    return parts[0]


def _import_function(attribute: str, labeller: str) -> Callable[..., Any]:
    """Return the function `module:function`; modules may be in the current directory."""
    module, _, name = labeller.partition(":")
    shown = f"control.{attribute} = {keys.show(labeller)}"
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - a module may fail in any way
        raise DataError(
            f"{shown} cannot be imported ({type(error).__name__}: {error}): name a function of an "
            "installed module, or of a file in the current directory"
        ) from None
    finally:
        sys.path.remove("")
    if not callable(function):
        raise DataError(f"{shown} is no function: name one that takes a list of texts")
    return cast("Callable[..., Any]", function)


def _read_module(function: Callable[..., Any]) -> str:
    """Return the source of a function's module; empty if it has none."""
    path = getattr(sys.modules.get(function.__module__), "__file__", None)
    return Path(path).read_text(encoding="utf-8", errors="replace") if path else ""


def _call(
    function: Callable[..., Any], attribute: str, labeller: str, texts: Sequence[LabelledText]
) -> list[Any]:
    """Return the labels that a user's function gives."""
    shown = f"control.{attribute} = {keys.show(labeller)}"
    try:
        labels = list(function([one.text for one in texts]))
    except Exception as error:  # noqa: BLE001 - a function may fail in any way
        raise DataError(
            f"{shown} fails on the texts from {texts[0].where} on ({type(error).__name__}: "
            f"{error}): mend the function"
        ) from None
    if len(labels) != len(texts):
        raise DataError(
            f"{shown} gives {len(labels)} labels for {len(texts)} texts: return one for each, or "
            "None"
        )
    return labels

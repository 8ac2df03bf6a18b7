"""Files of original and generated texts with labels, from a text and a model that continues it.

Each paragraph of two sentences or more gives two lines: itself with label 1, and its first
sentences continued by the model with label 0. A dropped paragraph leaves a line without text, so
that it is not continued again. Lines are in the order of the text, so a file that was cut off is
continued where it ends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from moesaic.api.batch import locked_output
from moesaic.api.engine import Engine
from moesaic.api.generation import TextRequest
from moesaic.base.config import parse
from moesaic.base.errors import ConfigError, write_error
from moesaic.serve.adversarial import (
    PARAGRAPH_BREAK,
    draw_prefix,
    drop_cut_sentence,
    limit_text,
    split_paragraphs,
)
from moesaic.serve.config import AdversarialConfig, SamplingConfig
from moesaic.train.data.sources import TextSource, file_kind, find_text
from moesaic.train.data.text import read_text


class PairCounts(NamedTuple):
    """Paragraphs of a text, as pairs are made of them."""

    pairs: int = 0
    """Pairs written by this call."""
    present: int = 0
    """Pairs that the file had before."""
    dropped: int = 0
    """Paragraphs without a pair, also of earlier calls: nothing complete was left after the prefix
    within the limit."""
    tokens: int = 0
    """Generated tokens."""
    total: int = 0
    """Paragraphs of two sentences or more in the text."""


class Paragraph(NamedTuple):
    """Original paragraph of a text, and the prefix to continue."""

    source: str
    """Name of its file, and its number there."""
    text: str
    prefix: str
    position: int
    """Number in the whole text, which the random draws depend on."""


class PairBuilder:
    """Builder of pairs in the order of the text."""

    def __init__(
        self, engine: Engine, config: AdversarialConfig, output: BinaryIO, counts: PairCounts
    ) -> None:
        self._engine, self._config, self._output = engine, config, output
        self.counts, self._digest = counts, _settings_digest(engine, config)
        shared = SamplingConfig.model_fields.keys()
        values = {name: getattr(config, name) for name in shared}
        stop = [config.stop] if isinstance(config.stop, str) else config.stop
        self._sampling = SamplingConfig.model_construct(
            **{**values, "n": 1, "stop": [*stop, PARAGRAPH_BREAK]}
        )
        self._pending: dict[TextRequest, Paragraph] = {}
        """Requests that are not written yet, in the order of the text."""

    def run(
        self, paragraphs: Iterator[Paragraph], on_progress: Callable[[PairCounts], None]
    ) -> None:
        """Write a pair for each of `paragraphs`."""
        for one, _ in self._engine.run(self._requests(paragraphs)):
            if one.error is not None:
                raise one.error
            while self._pending and (first := next(iter(self._pending))).is_finished:
                self._write(first, self._pending.pop(first))
                on_progress(self.counts)

    def _requests(self, paragraphs: Iterator[Paragraph]) -> Iterator[TextRequest]:
        limit = self._config.max_tokens
        for paragraph in paragraphs:
            length = len(self._engine.prompts.tokenizer.encode(paragraph.prefix))
            if length >= limit:
                self._count(dropped=1)
                continue
            config = self._sampling.model_copy(
                update={
                    "max_tokens": limit - length,
                    "seed": (self._config.seed + paragraph.position) % 2**63,
                }
            )
            (request,) = self._engine.requests(paragraph.prefix, config)
            self._pending[request] = paragraph
            yield request

    def _write(self, request: TextRequest, paragraph: Paragraph) -> None:
        """Write both texts of a paragraph, unless one has nothing beyond the prefix."""
        result, prefix = request.result(), paragraph.prefix
        generated, *others = split_paragraphs(f"{prefix}{result.text}")
        if result.finish_reason == "length" and not others:
            generated = drop_cut_sentence(generated)
        # Encoded anew, a generated text may have more tokens.
        tokenizer, limit = self._engine.prompts.tokenizer, self._config.max_tokens
        original, generated = (
            limit_text(text, tokenizer, limit) for text in (paragraph.text, generated)
        )
        is_dropped = min(len(original), len(generated)) <= len(prefix)
        origin = {"source": paragraph.source, "settings": self._digest}
        texts = [(None, None)] if is_dropped else [(original, 1), (generated, 0)]
        lines = [json.dumps({"text": text, "label": label, **origin}) for text, label in texts]
        try:
            self._output.write("".join(f"{line}\n" for line in lines).encode())
            self._output.flush()
        except OSError as error:
            raise write_error(f"output '{self._output.name}'", error) from None
        self._count(**{"dropped" if is_dropped else "pairs": 1}, tokens=len(result.tokens))

    def _count(self, **more: int) -> None:
        counts = self.counts._asdict()
        self.counts = PairCounts(**{name: counts[name] + more.get(name, 0) for name in counts})


def build_pairs(
    engine: Engine,
    source: str | Path,
    target: str | Path,
    *,
    on_progress: Callable[[PairCounts], None] = lambda counts: None,
    **settings: Any,
) -> PairCounts:
    """Write original and generated texts with labels to `target`, and return their counts.

    Args:
        engine: the model that continues the prefixes.
        source: text: a file, a directory or a glob, as `data.path` of a job.
        target: file of JSON lines; if it exists, it is continued.
        on_progress: function of the counts so far, called after each pair.
        settings: settings of `moesaic generate --adversarial`.
    """
    config = parse(AdversarialConfig, settings, "adversarial")
    limit = engine.max_positions
    if config.max_tokens > limit:
        raise ConfigError(
            f"max_tokens = {config.max_tokens} is more than the model's {limit} positions: set "
            f"max_tokens = {limit} or less"
        )
    is_plain = Path(source).is_file() and file_kind(Path(source)) is None
    text = find_text("input", str(source), "text" if is_plain else "auto", config.text_key, "train")
    if text.kind == "dataset":
        raise ConfigError(
            f"input '{source}' is a dataset directory: give a glob of its files (.txt, .jsonl or "
            ".parquet)"
        )
    total = sum(1 for _ in read_paragraphs(text, config.seed))
    if not total:
        raise ConfigError(
            f"input '{source}' has no paragraph of two sentences or more: give other text"
        )
    with _open_pairs(Path(target), _settings_digest(engine, config)) as (output, has_pair):
        files = {str(file) for file in text.files}
        for one in sorted(has_pair):
            if one.rpartition(":")[0] not in files:
                raise ConfigError(
                    f"output '{target}' has a pair of '{one}', which is not in input '{source}': "
                    "name another file, or give the input as before"
                )
        rest = (one for one in read_paragraphs(text, config.seed) if one.source not in has_pair)
        present = sum(has_pair.values())
        counts = PairCounts(present=present, dropped=len(has_pair) - present, total=total)
        builder = PairBuilder(engine, config, output, counts)
        builder.run(rest, on_progress)
    return builder.counts


def read_paragraphs(text: TextSource, seed: int) -> Iterator[Paragraph]:
    """Yield the paragraphs of a text with two sentences or more, and their prefixes."""
    index = 0
    for file in text.files:
        documents = read_text(replace(text, files=(file,)), Path())
        paragraphs = (one for document in documents for one in split_paragraphs(document))
        for number, paragraph in enumerate(paragraphs, start=1):
            prefix = draw_prefix(paragraph, seed, index)
            if prefix is not None:
                yield Paragraph(f"{file}:{number}", paragraph, prefix, index)
            index += 1


def _settings_digest(engine: Engine, config: AdversarialConfig) -> str:
    """Return a short hash of the model's name and all settings."""
    content = json.dumps([engine.name, config.model_dump(mode="json")], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


@contextmanager
def _open_pairs(path: Path, digest: str) -> Iterator[tuple[BinaryIO, dict[str, bool]]]:
    """Yield the file of pairs, without a torn last pair, and whether each source in it has a pair
    or was dropped.

    All must have the `digest` of the present settings."""
    with locked_output(path) as file:
        has_pair, end, position = dict[str, bool](), 0, 0
        for number, line in enumerate(file, start=1):
            position += len(line)
            if not line.endswith(b"\n"):
                break
            source, label = _read_line(path, number, line, digest)
            if label != 1:  # The second line of a pair, or a dropped paragraph.
                has_pair[source] = label == 0
                end = position
        file.truncate(end)
        yield file, has_pair


def _read_line(path: Path, number: int, line: bytes, digest: str) -> tuple[str, int | None]:
    try:
        record = json.loads(line)
        source, label = record["source"], record["label"]
    except (ValueError, TypeError, KeyError, RecursionError):
        source, label = None, None
    if not isinstance(source, str) or label not in (0, 1, None):
        raise ConfigError(
            f"line {number} of output '{path}' is no text with a label: name another file"
        )
    if record.get("settings") != digest:
        raise ConfigError(
            f"line {number} of output '{path}' was made by another model or with other settings: "
            "give the same ones, or name another file"
        )
    return source, label

"""Pairs of original and generated text, for a classifier that tells them apart (ERNIE 3.0 Titan).

A paragraph is an original. Its first one to three sentences are the prefix that a frozen generator
continues. Both texts have the same limit of tokens; a last sentence that the limit cut is dropped,
so that neither length nor a torn end tells the two apart. Imports torch on use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from moesaic.models.tokenizer import Tokenizer

MAX_PREFIX_SENTENCES = 3
"""Sentences of the longest prefix."""
PARAGRAPH_BREAK = "\n\n"
"""String that ends a generated paragraph, as it ends an original one."""

_BREAK = re.compile(r"\n[^\S\n]*(?:\n[^\S\n]*)+")
_END = r"[.!?\u2026\u3002\uff01\uff1f]+[\"')\]\u00bb\u201d\u2019\u300d\u300f]*"
_SENTENCE_END = re.compile(rf"{_END}(?=\s+(?![a-z])|$)|[\u3002\uff01\uff1f]+[\u300d\u300f\u201d]*")
"""End of a sentence: before white space and no lower-case letter, or after a full-width stop."""
_INITIAL = re.compile(r"(?:^|[\s(.])[A-Z]\.$")
"""Initial of a name, whose full stop ends no sentence."""


def split_paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text, which blank lines separate."""
    for part in _BREAK.split(text):
        if paragraph := part.strip():
            yield paragraph


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, each with the white space after it; joined they are `text`.

    The last one may lack its end."""
    starts = [0]
    for match in _SENTENCE_END.finditer(text):
        if not _INITIAL.search(text, starts[-1], match.end()):
            rest = len(text) - len(text[match.end() :].lstrip())
            if rest < len(text):
                starts.append(rest)
    stops = [*starts[1:], len(text)]
    return [text[start:stop] for start, stop in zip(starts, stops, strict=True) if stop > start]


def drop_cut_sentence(text: str) -> str:
    """Return a text that a limit has cut without its last sentence, unless that is complete."""
    sentences = split_sentences(text.rstrip())
    if sentences and _is_complete(sentences[-1]):
        return text.rstrip()
    return "".join(sentences[:-1]).rstrip()


def _is_complete(sentence: str) -> bool:
    found = list(_SENTENCE_END.finditer(sentence))
    is_end = bool(found) and found[-1].end() == len(sentence)
    return is_end and not _INITIAL.search(sentence)


def draw_prefix(paragraph: str, seed: int, index: int) -> str | None:
    """Return the first one to three sentences of the paragraph with number `index`.

    The number of sentences is drawn by seed and index. At least one sentence is left for the rest;
    None for a paragraph of one sentence."""
    sentences = split_sentences(paragraph)
    limit = min(MAX_PREFIX_SENTENCES, len(sentences) - 1)
    if limit < 1:
        return None
    import torch

    from moesaic.kernels.randomness import uniform

    zero = torch.zeros(1, dtype=torch.int64)
    draw = float(uniform(seed, "adversarial prefix", 0, zero + index, zero))
    return "".join(sentences[: 1 + int(draw * limit)]).rstrip()


def limit_text(paragraph: str, tokenizer: Tokenizer, max_tokens: int) -> str:
    """Return a text within `max_tokens`, without a sentence that this cut."""
    ids = tokenizer.encode(paragraph)
    if len(ids) <= max_tokens:
        return paragraph
    return drop_cut_sentence(tokenizer.decode(ids[:max_tokens]))

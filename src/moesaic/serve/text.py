"""Text of a sequence while its tokens arrive: whole characters, up to a stop string.

A token costs the decoding of a short tail, whatever the length of the text so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.models.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Last character of a decoded text whose last bytes are no whole character."""
_CHARACTER_BYTES = 4
"""Bytes of a UTF-8 character at most, and so tokens of an incomplete one, plus 1."""
_TAIL = 16
"""Tokens that are decoded together at most, if none of them ends a character."""


class TextDecoder:
    """Decoder of tokens to pieces of text.

    The pieces together are the text of all tokens. Tokenizers with byte fallback are an exception
    if the bytes are not UTF-8, or U+FFFD: the text of earlier bytes would change.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The first tokens of the tail may be given out already: decoders look back at them, for
        # example to decide about a space.
        self._tail: list[int] = []
        self._num_given = 0
        """Characters of the tail's text that are given out."""
        self._num_pending = 0
        """Tokens since the text last ended in a whole character."""

    def push(self, token: int) -> str:
        """Return the new text of a token, without an incomplete character at the end."""
        decode = self._tokenizer.decode
        if not decode([token, token]):  # A special token.
            return ""
        self._tail.append(token)
        self._num_pending += 1
        text = decode(self._tail)
        if not text.endswith(_REPLACEMENT):
            piece = text[self._num_given :]
            del self._tail[: -self._num_pending]
            self._num_given, self._num_pending = len(decode(self._tail)), 0
            return piece
        if self._num_pending < _CHARACTER_BYTES:
            return ""
        # There are invalid bytes, and only the last characters may still be completed.
        end = len(text) - min(len(text) - len(text.rstrip(_REPLACEMENT)), _CHARACTER_BYTES - 1)
        piece = text[self._num_given : end]
        self._num_given = max(self._num_given, end)
        self._shorten(len(text) - self._num_given)
        return piece

    def finish(self) -> str:
        """Return the rest of the text."""
        text = self._tokenizer.decode(self._tail)[self._num_given :]
        self._num_given += len(text)
        return text

    def _shorten(self, num_held: int) -> None:
        """Drop the front of a long tail; the last `num_held` characters are not given out yet."""
        if len(self._tail) > _TAIL:
            # UTF-8 finds the borders of characters again within a character.
            del self._tail[: -_TAIL // 2 - 2]
            self._num_pending = len(self._tail)
            self._num_given = max(len(self._tokenizer.decode(self._tail)) - num_held, 0)


class TextStream:
    """Text of a sequence, up to the first of some stop strings.

    The first one is the one that ends first; of several that end there, the longest.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, includes_stop: bool = False
    ) -> None:
        """Create an empty text; with `includes_stop` the stop string is part of it."""
        self._decoder = TextDecoder(tokenizer)
        self._stop, self._includes_stop = tuple(stop), includes_stop
        self._held = ""
        """Text that may be the start of a stop string."""
        self.is_stopped = False
        """True after a stop string; no text follows."""

    def push(self, token: int) -> str:
        """Return the text that is certain since the last call."""
        return self._filter(self._decoder.push(token))

    def finish(self) -> str:
        """Return the rest of the text."""
        rest = self._filter(self._decoder.finish()) + self._held
        self._held = ""
        return rest

    def _filter(self, piece: str) -> str:
        """Return the text before a stop string, and hold back what may be the start of one."""
        if self.is_stopped or not piece:
            return ""
        text = self._held + piece
        matches = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            end, start = min(matches)
            self._held, self.is_stopped = "", True
            return text[: end if self._includes_stop else start]
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that starts `stop`."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)

"""Pieces of text against decoding the whole, and stop strings against a search in the whole."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models

from moesaic.models.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from moesaic.serve.text import TextDecoder, TextStream
from moesaic.testing.chat_templates import write_tokenizer

TEXT = "Grüße, 世界! 👩‍👩‍👧 \N{REPLACEMENT CHARACTER} e\u0301 \U0001d11e  end\n"


def write(directory: Path, tokenizer: tokenizers.Tokenizer) -> FileTokenizer:
    directory.mkdir()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return FileTokenizer(str(directory))


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Return tokenizers of the kinds that models have."""
    root = tmp_path_factory.mktemp("tokenizers")
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁end", "e", "n", "▁▁", "Gr", "!"]
    fallback = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True)
    )
    fallback.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    words = ["[UNK]", "do", "##ing", "n", "'", "t", ".", "end"]
    word_piece = tokenizers.Tokenizer(
        models.WordPiece(vocab={w: i for i, w in enumerate(words)}, unk_token="[UNK]")
    )
    word_piece.decoder = decoders.WordPiece()
    write_tokenizer(root / "byte level")
    return {
        "bytes": ByteTokenizer(), "byte level": FileTokenizer(str(root / "byte level")),
        "byte fallback": write(root / "fallback", fallback),
        "word pieces": write(root / "words", word_piece),
    }  # fmt: skip


def sequences(tokenizer: Tokenizer, name: str) -> Iterator[list[int]]:
    draw = random.Random(3)
    if name == "byte fallback":
        offset = 256
        for _ in range(100):
            ids: list[int] = []
            for character in draw.choices(TEXT.replace("\ufffd", ""), k=40):
                others = draw.choices(range(offset, tokenizer.size), k=draw.randrange(2))
                ids += [*others, *character.encode()]
            yield ids
        return
    for _ in range(100):
        yield draw.choices(range(tokenizer.size), k=60)
        yield draw.choices([0x41, 0x82, 0xAC, 0xE2, 0xF0, 0xFF, tokenizer.size - 1], k=60)
        yield tokenizer.encode("".join(draw.choices(TEXT, k=40)))


@pytest.mark.parametrize("name", ["bytes", "byte level", "byte fallback", "word pieces"])
def test_pieces_are_the_text_in_whole_characters(name: str, by_name: dict[str, Tokenizer]) -> None:
    tokenizer = by_name[name]
    for ids in sequences(tokenizer, name):
        decoder = TextDecoder(tokenizer)
        pieces = [decoder.push(token) for token in ids]
        whole = tokenizer.decode(ids)
        assert "".join([*pieces, decoder.finish()]) == whole
        for end in range(len(ids)):
            so_far = "".join(pieces[: end + 1])
            assert whole.startswith(so_far)
            # Whole characters are there at once.
            assert len(so_far) >= len(tokenizer.decode(ids[: end + 1]).rstrip("\ufffd"))


@pytest.mark.parametrize("name", ["bytes", "byte level", "byte fallback"])
def test_invalid_bytes_are_not_held_for_long(name: str, by_name: dict[str, Tokenizer]) -> None:
    decoder = TextDecoder(by_name[name])
    pieces = [decoder.push(0xFF if name != "byte level" else 0xBB) for _ in range(50)]
    assert "".join(pieces) == "\ufffd" * 47
    assert decoder.finish() == "\ufffd" * 3


class CountingTokenizer(ByteTokenizer):
    """Tokenizer that counts the ids that it decodes."""

    num_decoded = 0

    def decode(self, ids: Sequence[int], with_special_tokens: bool = False) -> str:
        self.num_decoded += len(ids)
        return super().decode(ids, with_special_tokens)


@pytest.mark.parametrize("ids", [[0x41], [0xE2, 0x82, 0xAC], [0xFF], [0xE2], [256], [0x82, 256]])
def test_a_token_costs_the_same_in_a_long_text(ids: list[int]) -> None:
    tokenizer = CountingTokenizer()
    decoder = TextDecoder(tokenizer)
    for _ in range(1000):
        for token in ids:
            decoder.push(token)
    assert tokenizer.num_decoded <= 40 * 1000 * len(ids)


def find_stop(text: str, stop: Sequence[str]) -> tuple[int, int] | None:
    """Return the span of the stop string that a reader of single characters finds first."""
    for end in range(1, len(text) + 1):
        found = [one for one in stop if text[:end].endswith(one)]
        if found:
            return end - max(map(len, found)), end
    return None


@pytest.mark.parametrize("includes_stop", [False, True])
def test_stop_strings_end_the_text_at_any_token_border(includes_stop: bool) -> None:
    tokenizer, draw = ByteTokenizer(), random.Random(5)
    for _ in range(500):
        text = "".join(draw.choices("abü", k=30))
        stop = [
            "".join(draw.choices("abü", k=draw.randint(3, 7))) for _ in range(draw.randrange(4))
        ]
        stream = TextStream(tokenizer, stop, includes_stop=includes_stop)
        pieces = [stream.push(token) for token in tokenizer.encode(text)]
        got = "".join([*pieces, stream.finish()])
        span = find_stop(text, stop)
        if span is None:
            assert (got, stream.is_stopped) == (text, False)
        else:
            assert got == text[: span[1] if includes_stop else span[0]]
            assert stream.is_stopped
        assert stream.finish() == ""


def test_stop_strings_inside_one_token() -> None:
    class Words(ByteTokenizer):
        """Tokenizer of words with numbers."""

        words = ("one. ", "two", " END three", "EN")

        def decode(self, ids: Sequence[int], with_special_tokens: bool = False) -> str:
            return "".join(self.words[i] for i in ids)

    stream = TextStream(Words(), ["END", "."])
    assert [stream.push(0), stream.push(1), stream.is_stopped] == ["one", "", True]
    stream = TextStream(Words(), ["END"])
    assert [stream.push(token) for token in (0, 1, 3, 1)] == ["one. ", "two", "", "ENtwo"]
    assert [stream.push(2), stream.push(1), stream.is_stopped] == [" ", "", True]
    stream = TextStream(Words(), ["END"])
    assert [stream.push(3), stream.finish(), stream.is_stopped] == ["", "EN", False]


def test_text_is_not_held_for_long() -> None:
    """Text leaves with the token after which no stop string can contain it."""
    stream = TextStream(ByteTokenizer(), ["\n\n"])
    assert [stream.push(token) for token in b"a\nb\n\nc"] == ["a", "", "\nb", "", "", ""]
    assert stream.is_stopped

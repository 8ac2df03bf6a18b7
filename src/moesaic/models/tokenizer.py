"""Text to token ids and back: plain bytes, or a tokenizer of Hugging Face `tokenizers`.

A document becomes what the tokenizer's own template makes of it (some begin every text with a
token) and ends with the end token, once. Ids lie in [0, size).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from moesaic.base import keys
from moesaic.base.errors import ConfigError, DataError

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import AddedToken

TOKENIZER_FILE = "tokenizer.json"
OTHER_FORMS = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Files of tokenizers without one of the above, which are not read here."""
SETTINGS_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
TOOL_USE_FILE = "additional_chat_templates/tool_use.jinja"
COMPANION_FILES = (
    SETTINGS_FILE, "special_tokens_map.json", "added_tokens.json",
    TEMPLATE_FILE, TOOL_USE_FILE, "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
"""Files that other libraries keep beside tokenizer.json; they travel with it."""

USUAL_END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
_SMALL = 50_000
"""Bytes of a file that may be that of `ByteTokenizer`."""
_SETTINGS = b'{"tokenizer_class": "PreTrainedTokenizerFast"}'


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    name: str
    """As the user named it in data.tokenizer."""
    size: int
    """One more than the largest id."""
    end_id: int
    """Token that ends a document."""
    digest: str
    """Hash of all that decides the ids of a text."""

    def encode(self, text: str, whole: bool = False) -> list[int]:
        """The ids of a prompt: the tokenizer's opening, no end token.

        A `whole` text, as a chat template makes one, says its special tokens itself: none is added
        or taken away.
        """

    def decode(self, ids: Sequence[int], whole: bool = False) -> str:
        """The text of `ids`; end and other special tokens are left out, unless it is `whole`."""

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """All ids of `texts`, one after another, and how many each has, its end token counted."""

    def files(self) -> dict[str, bytes]:
        """Contents, by name, of the files from which `open_tokenizer` makes this tokenizer."""


def open_tokenizer(
    name: str, end_token: str | None = None, key: str = "data.tokenizer"
) -> Tokenizer:
    """The tokenizer that `name`, the value of the setting `key`, asks for."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name, end_token, key)


def check_vocabulary(vocab: int, tokenizer: Tokenizer, *, fixed: bool = False) -> None:
    """Raise unless a model with `vocab` embeddings can take every id of `tokenizer`; the number of
    a model with weights is `fixed`."""
    if vocab < tokenizer.size:
        more = f"set model.vocab = {-(-tokenizer.size // 64) * 64} (any number from "
        remedy = "choose the tokenizer that the model has learnt with"
        if not fixed:
            remedy = f"{more}{tokenizer.size}), or choose another tokenizer"
        raise ConfigError(
            f"model.vocab = {vocab} is less than the {tokenizer.size} ids of data.tokenizer = "
            f"{keys.show(tokenizer.name)}: {remedy}"
        )


def tokenizer_in(directory: Path) -> str | None:
    """The data.tokenizer that takes what lies in `directory`: `bytes`, if that is what an export
    has in their place; None: there is none that is read here."""
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        return None
    with suppress(OSError, ValueError, LookupError, TypeError):  # Whoever opens it will complain.
        if path.stat().st_size < _SMALL:
            content = json.loads(path.read_text(encoding="utf-8"))
            model, added = content["model"], content["added_tokens"]
            of_bytes = {character: byte for byte, character in enumerate(_byte_characters())}
            ends = [(one["id"], one["content"]) for one in added]
            plain = (content["normalizer"], content["post_processor"], model["merges"])
            if (model["vocab"], ends, plain) == (
                of_bytes, [(ByteTokenizer.end_id, USUAL_END_TOKENS[0])], (None, None, []),
            ):  # fmt: skip
                return ByteTokenizer.name
    return str(directory)


class ByteTokenizer:
    """The 256 bytes of UTF-8 and, as id 256, the end of a document."""

    name = "bytes"
    size = 257
    end_id = 256
    digest = "bytes-1"

    def encode(self, text: str, whole: bool = False) -> list[int]:
        """The bytes of `text`; what UTF-8 cannot hold (lone surrogates) becomes a question mark."""
        del whole  # nothing is ever added
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int], whole: bool = False) -> str:
        """The text of `ids`; broken UTF-8 and ids beyond 256 become U+FFFD."""
        if whole:
            end = USUAL_END_TOKENS[0].encode()
            ids = [byte for i in ids for byte in (end if i == self.end_id else (i,))]
        # 0xFF occurs nowhere in UTF-8, so it decodes as broken whatever stands beside it.
        data = bytes(i if i < self.end_id else 0xFF for i in ids if i != self.end_id)
        return data.decode("utf-8", errors="replace")

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `Tokenizer`."""
        encoded = [text.encode("utf-8", errors="replace") for text in texts]
        lengths = np.fromiter((len(data) + 1 for data in encoded), np.int64, len(encoded))
        joined = b"".join(data + b"\0" for data in encoded)
        tokens = np.frombuffer(joined, np.uint8).astype(np.uint16)
        tokens[np.cumsum(lengths) - 1] = self.end_id
        return tokens, lengths

    def files(self) -> dict[str, bytes]:
        """The same ids as a tokenizer.json, so that other libraries read an exported model."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        end = USUAL_END_TOKENS[0]
        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        whole = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        whole.decoder = decoders.ByteLevel()
        whole.add_special_tokens([tokenizers.AddedToken(end, special=True)])
        settings = {**json.loads(_SETTINGS), "eos_token": end}
        return {
            TOKENIZER_FILE: whole.to_str(pretty=True).encode(),
            SETTINGS_FILE: _to_json(settings),
        }


class FileTokenizer:
    """A tokenizer.json, with the settings that lie beside it."""

    def __init__(
        self, name: str, end_token: str | None = None, key: str = "data.tokenizer"
    ) -> None:
        self.name, self._key = name, key
        self._path = _tokenizer_file(name, key)
        content = self._path.read_bytes()
        self._tokenizer = _parse(self._path, content, key)
        # A file may carry the cutting and padding of its last use; documents are neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._end = self._find_end(end_token)
        end_id = self._tokenizer.token_to_id(self._end)
        assert end_id is not None, "_find_end looks it up"
        self.end_id = end_id
        self.digest = hashlib.sha256(content + b"\0" + self._end.encode()).hexdigest()

    def encode(self, text: str, whole: bool = False) -> list[int]:
        """See `Tokenizer`."""
        ids: list[int] = self._tokenizer.encode(_storable(text), add_special_tokens=not whole).ids
        return ids[:-1] if ids and ids[-1] == self.end_id and not whole else ids

    def decode(self, ids: Sequence[int], whole: bool = False) -> str:
        """See `Tokenizer`; ids that the vocabulary does not have are left out too."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not whole)
        return text

    def encode_places(self, texts: Sequence[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """For each whole text its ids, and where in it each of them stands: from, up to."""
        encode = self._tokenizer.encode_batch
        found = encode([_storable(text) for text in texts], add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in found]

    def added(self) -> list[str]:
        """Texts that are one token each by decree, such as the end of a turn."""
        return [token.content for token in self._added()]

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `Tokenizer`."""
        parts = []
        for encoding in self._tokenizer.encode_batch_fast([_storable(text) for text in texts]):
            ids = encoding.ids
            parts.append(ids if ids and ids[-1] == self.end_id else [*ids, self.end_id])
        lengths = np.fromiter((len(part) for part in parts), np.int64, len(parts))
        every = (token for part in parts for token in part)
        return np.fromiter(every, np.uint32, int(lengths.sum())), lengths

    def files(self) -> dict[str, bytes]:
        """See `Tokenizer`: the file itself and those of the same model beside it."""
        found = {TOKENIZER_FILE: self._path.read_bytes()}
        found |= {name: path.read_bytes() for name, path in self._companions()}
        if self._stated_end() != self._end:
            settings = json.loads(found.get(SETTINGS_FILE, _SETTINGS))
            found[SETTINGS_FILE] = _to_json({**settings, "eos_token": self._end})
        return found

    def _companions(self) -> list[tuple[str, Path]]:
        """Only a file of the standard name shares its directory with one model's other files."""
        if self._path.name != TOKENIZER_FILE:
            return []
        beside = [(name, self._path.parent / name) for name in COMPANION_FILES]
        return [(name, path) for name, path in beside if path.is_file()]

    def _find_end(self, asked: str | None) -> str:
        if asked is not None:
            if self._tokenizer.token_to_id(asked) is None:
                raise DataError(
                    f"data.end_token = {keys.show(asked)} is no token of '{self._path}': name one "
                    f"of its special tokens ({self._special_tokens()})"
                )
            return asked
        stated = self._stated_end()
        if stated is not None:
            return stated
        special = {token.content for token in self._added() if token.special}
        for token in USUAL_END_TOKENS:
            if token in special:
                return token
        raise DataError(
            f"'{self._path}' does not say which token ends a document: set data.end_token to one "
            f"of its special tokens ({self._special_tokens()})"
        )

    def _stated_end(self) -> str | None:
        """The end token that the files beside the tokenizer name, if it has that token."""
        for name, path in self._companions():
            if name in (SETTINGS_FILE, "special_tokens_map.json"):
                token = _end_token_of(path, self._key)
                if token is not None and self._tokenizer.token_to_id(token) is not None:
                    return token
        return None

    def _added(self) -> list[AddedToken]:
        return list(self._tokenizer.get_added_tokens_decoder().values())

    def _special_tokens(self) -> str:
        special = [token.content for token in self._added() if token.special]
        shown = ", ".join(special[:8]) + (", ..." if len(special) > 8 else "")
        return shown or "it has none; any token of its vocabulary will do"


def _tokenizer_file(name: str, key: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(
            f"{key} = {keys.show(name)} does not exist: give {keys.show('bytes')}, a "
            f"{TOKENIZER_FILE}, or the directory that holds one"
        )
    if not (path / TOKENIZER_FILE).is_file():
        raise DataError(
            f"{key} = {keys.show(name)} holds no {TOKENIZER_FILE}: save the tokenizer there in "
            "that format (transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR))"
        )
    return path / TOKENIZER_FILE


def _parse(path: Path, content: bytes, key: str) -> tokenizers.Tokenizer:
    import tokenizers

    try:
        return tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise DataError(
            f"{key}: '{path}' is not a tokenizer of Hugging Face tokenizers ({error}): save it anew"
        ) from None


def _end_token_of(path: Path, key: str) -> str | None:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{key}: '{path}' is not JSON ({error}): mend or remove it") from None
    token = settings.get("eos_token") if isinstance(settings, dict) else None
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _to_json(settings: dict[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()


def _storable(text: str) -> str:
    """`text` without lone surrogates, which no UTF-8 holds and the library refuses."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _byte_characters() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {byte: chr(byte) for byte in printable}
    spelled |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [spelled[byte] for byte in range(256)]

"""Tokenizers: plain bytes, or a tokenizer.json of Hugging Face `tokenizers`.

A document is encoded with the tokenizer's own template (some start every text with a token) and
ends with one end token. Ids lie in [0, size).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
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
UNSUPPORTED_FILES = ("tokenizer.model", "vocab.json", "vocab.txt")
"""Files of other tokenizer formats, which are not supported without a tokenizer.json."""
SETTINGS_FILE = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.jinja"
TOOL_USE_FILE = "additional_chat_templates/tool_use.jinja"
COMPANION_FILES = (
    SETTINGS_FILE, TOKENS_FILE, "added_tokens.json",
    TEMPLATE_FILE, TOOL_USE_FILE, "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip
"""Files that other libraries keep beside tokenizer.json, copied with it."""

COMMON_END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
DEFAULT_SETTINGS = b'{"tokenizer_class": "PreTrainedTokenizerFast"}'
"""Settings of a tokenizer without a settings file."""


class Tokenizer(Protocol):
    """Interface of tokenizers."""

    name: str
    """Value of data.tokenizer."""
    size: int
    """Largest id plus 1."""
    end_id: int
    """Id of the token that ends a document."""
    digest: str
    """Hash of everything that determines the ids of a text."""

    def encode(self, text: str, has_special_tokens: bool = False) -> list[int]:
        """Return the ids of a prompt: with the template's start tokens, without an end token.

        With `has_special_tokens` the text already contains them, as a rendered chat does: no token
        is added or removed.
        """

    def decode(self, ids: Sequence[int], with_special_tokens: bool = False) -> str:
        """Return the text of `ids`, without special tokens unless `with_special_tokens`."""

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the concatenated ids of `texts`, and the length of each with its end token."""

    def files(self) -> dict[str, bytes]:
        """Return file contents by name, from which `open_tokenizer` recreates this tokenizer."""


def open_tokenizer(
    name: str, end_token: str | None = None, key: str = "data.tokenizer"
) -> Tokenizer:
    """Return the tokenizer `name`, which is the value of the setting `key`."""
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name, end_token, key)


def check_vocabulary(
    vocab: int, tokenizer: Tokenizer, *, is_fixed: bool = False, has_control: bool = False
) -> None:
    """Raise unless a model with `vocab` embeddings covers all ids.

    Args:
        vocab: number of embeddings.
        tokenizer: the tokenizer.
        is_fixed: whether the model has weights already.
        has_control: whether some of the ids are those of [control].
    """
    if vocab < tokenizer.size:
        more = f"set model.vocab = {-(-tokenizer.size // 64) * 64} (any number from "
        remedy = "use the tokenizer that the model was trained with"
        if has_control:
            remedy = f"{more}{tokenizer.size})"
        elif not is_fixed:
            remedy = f"{more}{tokenizer.size}), or choose another tokenizer"
        added = " with the tokens of [control]" if has_control else ""
        raise ConfigError(
            f"model.vocab = {vocab} is less than the {tokenizer.size} ids of data.tokenizer = "
            f"{keys.show(tokenizer.name)}{added}: {remedy}"
        )


def find_tokenizer(directory: Path) -> str | None:
    """Return the data.tokenizer value for `directory`; None if it has no supported tokenizer.

    An exported `ByteTokenizer` gives `bytes`."""
    path = directory / TOKENIZER_FILE
    if not path.is_file():
        return None
    is_bytes = path.read_bytes() == ByteTokenizer().files()[TOKENIZER_FILE]
    return ByteTokenizer.name if is_bytes else str(directory)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and id 256 as the end of a document."""

    name = "bytes"
    size = 257
    end_id = 256
    digest = "bytes-1"

    def encode(self, text: str, has_special_tokens: bool = False) -> list[int]:
        """Return the UTF-8 bytes of `text`; lone surrogates become question marks."""
        del has_special_tokens  # There are none to add.
        return list(text.encode("utf-8", errors="replace"))

    def decode(self, ids: Sequence[int], with_special_tokens: bool = False) -> str:
        """Return the text of `ids`; invalid UTF-8 and ids beyond 256 become U+FFFD."""
        if with_special_tokens:
            end = COMMON_END_TOKENS[0].encode()
            ids = [byte for i in ids for byte in (end if i == self.end_id else (i,))]
        # 0xFF never occurs in UTF-8, so it always decodes as invalid.
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
        """Return a tokenizer.json with the same ids, so that other libraries can read an exported
        model."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        end = COMMON_END_TOKENS[0]
        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([tokenizers.AddedToken(end, special=True)])
        settings = {**json.loads(DEFAULT_SETTINGS), "eos_token": end}
        return {
            TOKENIZER_FILE: tokenizer.to_str(pretty=True).encode(),
            SETTINGS_FILE: to_json(settings),
        }


class FileTokenizer:
    """A tokenizer.json with the settings files beside it."""

    def __init__(
        self, name: str, end_token: str | None = None, key: str = "data.tokenizer"
    ) -> None:
        self.name = name
        self._path = _tokenizer_file(name, key)
        content = self._path.read_bytes()
        self._tokenizer = parse_tokenizer(content, f"{key}: '{self._path}'")
        self._end_token = self._find_end_token(end_token)
        self._measure(content)

    def _measure(self, content: bytes) -> None:
        """Set size, end id and digest of the tokenizer, whose file has `content`."""
        self.size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        end_id = self._tokenizer.token_to_id(self._end_token)
        assert end_id is not None, "the end token was looked up"
        self.end_id = end_id
        self.digest = hashlib.sha256(content + b"\0" + self._end_token.encode()).hexdigest()

    def encode(self, text: str, has_special_tokens: bool = False) -> list[int]:
        """See `Tokenizer`."""
        ids: list[int] = self._tokenizer.encode(
            replace_surrogates(text), add_special_tokens=not has_special_tokens
        ).ids
        return ids[:-1] if ids and ids[-1] == self.end_id and not has_special_tokens else ids

    def decode(self, ids: Sequence[int], with_special_tokens: bool = False) -> str:
        """See `Tokenizer`; ids outside the vocabulary are dropped."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not with_special_tokens)
        return text

    def encode_with_offsets(
        self, texts: Sequence[str]
    ) -> list[tuple[list[int], list[tuple[int, int]]]]:
        """Return for each text its ids, and the character span [start, stop) of each id."""
        encode = self._tokenizer.encode_batch
        encodings = encode([replace_surrogates(text) for text in texts], add_special_tokens=False)
        return [(encoding.ids, encoding.offsets) for encoding in encodings]

    def added_token_texts(self) -> list[str]:
        """Return the texts of the added tokens, such as the end of a turn."""
        return [token.content for token in self._added_tokens()]

    def encode_documents(self, texts: Sequence[str]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """See `Tokenizer`."""
        documents = []
        for encoding in self._tokenizer.encode_batch_fast(
            [replace_surrogates(text) for text in texts]
        ):
            ids = encoding.ids
            documents.append(ids if ids and ids[-1] == self.end_id else [*ids, self.end_id])
        lengths = np.fromiter((len(document) for document in documents), np.int64, len(documents))
        tokens = (token for document in documents for token in document)
        return np.fromiter(tokens, np.uint32, int(lengths.sum())), lengths

    def files(self) -> dict[str, bytes]:
        """See `Tokenizer`; includes the companion files."""
        contents = {TOKENIZER_FILE: self._path.read_bytes()}
        contents |= {name: path.read_bytes() for name, path in self._companion_files()}
        if self._declared_end_token() != self._end_token:
            contents = {SETTINGS_FILE: DEFAULT_SETTINGS, **contents}
            for name in contents.keys() & {SETTINGS_FILE, TOKENS_FILE}:
                settings = json.loads(contents[name])
                contents[name] = to_json({**settings, "eos_token": self._end_token})
        return contents

    def _companion_files(self) -> list[tuple[str, Path]]:
        """Return companion files; only a tokenizer.json has its directory to itself."""
        if self._path.name != TOKENIZER_FILE:
            return []
        companions = [(name, self._path.parent / name) for name in COMPANION_FILES]
        return [(name, path) for name, path in companions if path.is_file()]

    def _find_end_token(self, requested: str | None) -> str:
        if requested is not None:
            if self._tokenizer.token_to_id(requested) is None:
                raise DataError(
                    f"data.end_token = {keys.show(requested)} is no token of '{self._path}': "
                    f"use one of its special tokens ({self._list_special_tokens()})"
                )
            return requested
        declared = self._declared_end_token()
        if declared is not None:
            return declared
        special = {token.content for token in self._added_tokens() if token.special}
        for token in COMMON_END_TOKENS:
            if token in special:
                return token
        raise DataError(
            f"'{self._path}' does not say which token ends a document: set data.end_token to one "
            f"of its special tokens ({self._list_special_tokens()})"
        )

    def _declared_end_token(self) -> str | None:
        """Return the end token named by the companion files, if the tokenizer has it."""
        if self._path.name != TOKENIZER_FILE:
            return None
        token = special_tokens(self._path.parent).get("eos_token")
        return token if token and self._tokenizer.token_to_id(token) is not None else None

    def _added_tokens(self) -> list[AddedToken]:
        return list(self._tokenizer.get_added_tokens_decoder().values())

    def _list_special_tokens(self) -> str:
        special = [token.content for token in self._added_tokens() if token.special]
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


def parse_tokenizer(content: bytes, label: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json, without truncation and padding; errors start with
    `label`."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise DataError(
            f"{label} is not a tokenizer of Hugging Face tokenizers ({error}): save it again"
        ) from None
    # The file may carry the truncation and padding of its last use.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the texts of bos_token, eos_token and the other special tokens, as transformers."""
    settings = read_json_object(directory / SETTINGS_FILE)
    # The older file only applies to settings of its age, which list no added tokens.
    if "added_tokens_decoder" not in settings:
        settings |= read_json_object(directory / TOKENS_FILE)
    tokens = {key: value for key, value in settings.items() if key.endswith("_token")}
    texts = {k: v.get("content") if isinstance(v, dict) else v for k, v in tokens.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object at `path`; empty if the file is missing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise DataError(f"'{path}' cannot be read ({error}): restore it") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{path}' is not JSON ({error}): fix or remove it") from None
    return content if isinstance(content, dict) else {}


def to_json(settings: dict[str, Any]) -> bytes:
    """Return settings as the content of a file."""
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()


def replace_surrogates(text: str) -> str:
    """Return `text` without lone surrogates, which UTF-8 cannot encode and the library rejects."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _byte_characters() -> list[str]:
    """Return the printable character of each byte in byte-level tokenizers, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    remaining = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(remaining)}
    return [characters[byte] for byte in range(256)]

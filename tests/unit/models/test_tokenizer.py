from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from moesaic.base.errors import ConfigError, DataError
from moesaic.models.tokenizer import check_vocabulary, open_tokenizer

TEXTS = ["the cat sat on the mat", "the dog sat", "Ünïcödé, 日本 🐈", "  spaces\n\ttabs "]


def train_bpe(special: list[str], template: bool = False) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if template:
        ends = [(token, tokenizer.token_to_id(token)) for token in special]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A {special[1]}", special_tokens=ends
        )
    return tokenizer


def save(directory: Path, tokenizer: tokenizers.Tokenizer, **settings: object) -> Path:
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    if settings:
        (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


@given(st.text())
def test_bytes_round_trip(text: str) -> None:
    tokenizer = open_tokenizer("bytes")
    storable = text.encode("utf-8", "replace").decode()
    ids = tokenizer.encode(text)
    assert ids == list(storable.encode())
    assert tokenizer.decode([*ids, tokenizer.end_id]) == storable
    assert (
        tokenizer.decode([*ids, tokenizer.end_id], with_special_tokens=True)
        == storable + "<|endoftext|>"
    )


def test_bytes_of_documents_and_of_any_ids() -> None:
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.decode([104, 319, 105, 0xC3]) == "h\ufffdi\ufffd"
    tokens, lengths = tokenizer.encode_documents(["ab", "", "é\x00"])
    assert tokens.tolist() == [97, 98, 256, 256, 0xC3, 0xA9, 0, 256]
    assert lengths.tolist() == [3, 1, 4]


def test_bytes_as_tokenizer_file(tmp_path: Path) -> None:
    """The exported tokenizer.json of a byte tokenizer gives the same ids."""
    for name, content in open_tokenizer("bytes").files().items():
        (tmp_path / name).write_bytes(content)
    exported = open_tokenizer(str(tmp_path))
    assert (exported.size, exported.end_id) == (257, 256)
    for text in [*TEXTS, "".join(map(chr, range(1, 400))), "it's  3.14\r\n"]:
        assert exported.encode(text) == list(text.encode())
        assert exported.decode(list(text.encode())) == text


@pytest.mark.parametrize("as_file", [False, True])
def test_file_tokenizer(tmp_path: Path, as_file: bool) -> None:
    whole = train_bpe(["<|endoftext|>"])
    save(tmp_path, whole)
    tokenizer = open_tokenizer(str(tmp_path / "tokenizer.json" if as_file else tmp_path))
    assert tokenizer.size == whole.get_vocab_size()
    assert tokenizer.end_id == whole.token_to_id("<|endoftext|>")
    tokens, lengths = tokenizer.encode_documents(TEXTS)
    expected = [[*whole.encode(text).ids, tokenizer.end_id] for text in TEXTS]
    assert tokens.tolist() == [token for ids in expected for token in ids]
    assert lengths.tolist() == [len(ids) for ids in expected]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode([*tokenizer.encode(text), tokenizer.end_id]) == text
        assert tokenizer.decode([tokenizer.end_id], with_special_tokens=True) != ""
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a?b")


def test_template_applies_and_end_token_is_single(tmp_path: Path) -> None:
    whole = train_bpe(["<s>", "</s>"], template=True)
    tokenizer = open_tokenizer(str(save(tmp_path, whole)))
    start, end = whole.token_to_id("<s>"), whole.token_to_id("</s>")
    assert tokenizer.end_id == end
    plain = whole.encode("the cat", add_special_tokens=False).ids
    tokens, lengths = tokenizer.encode_documents(["the cat", ""])
    assert tokens.tolist() == [start, *plain, end, start, end]
    assert lengths.tolist() == [len(plain) + 2, 2]
    assert tokenizer.encode("the cat") == [start, *plain]


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    whole = train_bpe(["<|endoftext|>"])
    long = open_tokenizer(str(save(tmp_path / "a", whole))).encode("the cat " * 50)
    whole.enable_truncation(4)
    whole.enable_padding(length=8)
    tokenizer = open_tokenizer(str(save(tmp_path / "b", whole)))
    assert tokenizer.encode("the cat " * 50) == long
    assert tokenizer.encode_documents(["the cat " * 50, "a"])[1].tolist() == [len(long) + 1, 2]


def test_end_token_precedence(tmp_path: Path) -> None:
    whole = train_bpe(["<pad>", "<stop>", "</s>"])
    ids = {token: whole.token_to_id(token) for token in ("<pad>", "<stop>", "</s>")}
    assert open_tokenizer(str(save(tmp_path / "guess", whole))).end_id == ids["</s>"]
    said = save(tmp_path / "said", whole, eos_token={"content": "<stop>", "lstrip": False})
    assert open_tokenizer(str(said)).end_id == ids["<stop>"]
    assert open_tokenizer(str(said), "<pad>").end_id == ids["<pad>"]
    mapped = save(tmp_path / "mapped", whole)
    (mapped / "special_tokens_map.json").write_text('{"eos_token": "<stop>"}')
    assert open_tokenizer(str(mapped)).end_id == ids["<stop>"]


def test_files_recreate_the_tokenizer(tmp_path: Path) -> None:
    directory = save(
        tmp_path / "from", train_bpe(["<pad>", "<stop>"]), eos_token="<pad>", note="kept"
    )
    (directory / "special_tokens_map.json").write_text('{"eos_token": "<pad>"}')
    for end, unchanged in (("<pad>", True), ("<stop>", False)):
        tokenizer = open_tokenizer(str(directory), end)
        copy = tmp_path / end.strip("<>")
        copy.mkdir()
        for name, content in tokenizer.files().items():
            (copy / name).write_bytes(content)
            original = (directory / name).read_bytes()
            assert (content == original) == (unchanged or name == "tokenizer.json")
        again = open_tokenizer(str(copy))
        assert (again.end_id, again.digest) == (tokenizer.end_id, tokenizer.digest)
        assert json.loads((copy / "tokenizer_config.json").read_text())["note"] == "kept"


def test_file_with_another_name_has_no_companions(tmp_path: Path) -> None:
    directory = save(tmp_path, train_bpe(["</s>", "<stop>"]), eos_token="<stop>")
    (directory / "tokenizer.json").rename(directory / "mine.json")
    tokenizer = open_tokenizer(str(directory / "mine.json"))
    assert tokenizer.end_id == 0
    assert sorted(tokenizer.files()) == ["tokenizer.json", "tokenizer_config.json"]


def test_digest_covers_what_determines_ids(tmp_path: Path) -> None:
    directory = save(tmp_path / "a", train_bpe(["</s>", "<stop>"]))
    other = save(tmp_path / "b", train_bpe(["</s>", "<stop>", "<more>"]))
    digests = {
        open_tokenizer(str(directory)).digest,
        open_tokenizer(str(directory), "<stop>").digest,
        open_tokenizer(str(other)).digest,
        open_tokenizer("bytes").digest,
    }
    assert len(digests) == 4
    assert open_tokenizer(str(directory / "tokenizer.json")).digest in digests


def test_vocabulary_check(tmp_path: Path) -> None:
    tokenizer = open_tokenizer("bytes")
    check_vocabulary(257, tokenizer)
    with pytest.raises(ConfigError, match=r'model\.vocab = 256 .* 257 .*"bytes".* = 320'):
        check_vocabulary(256, tokenizer)
    with pytest.raises(ConfigError, match=r"use the tokenizer that the model was trained with$"):
        check_vocabulary(256, tokenizer, is_fixed=True)


def test_errors_name_key_and_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'data\.tokenizer = "/nowhere" does not exist: give'):
        open_tokenizer("/nowhere")
    with pytest.raises(DataError, match=r"holds no tokenizer\.json: save"):
        open_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DataError, match=r"data\.tokenizer: '.*tokenizer\.json' is not"):
        open_tokenizer(str(tmp_path))
    save(tmp_path, train_bpe(["<pad>"]))
    with pytest.raises(DataError, match=r"set data\.end_token .*\(<pad>\)"):
        open_tokenizer(str(tmp_path))
    with pytest.raises(DataError, match=r'data\.end_token = "<eos>" is no token .*\(<pad>\)'):
        open_tokenizer(str(tmp_path), "<eos>")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json' is not JSON"):
        open_tokenizer(str(tmp_path))

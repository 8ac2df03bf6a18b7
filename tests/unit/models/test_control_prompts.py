"""Prompts of attributes: their layout to the letter, and their ids in transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from moesaic.base.errors import ConfigError, DataError
from moesaic.facts.job import ControlConfig, ControlValues
from moesaic.models.control import ControlPrompts, ControlTokenizer, prompt_text
from moesaic.models.tokenizer import FileTokenizer, open_tokenizer
from moesaic.testing.chat_templates import write_tokenizer

CONTROL = ControlConfig(
    genres=["docs", "Machine Translation"], genre="g", topic="t", keywords="k", sentiment="s",
    length="tokens",
)  # fmt: skip
EVERYTHING = ControlValues(
    genre="docs", soft_prompts=3, topic="Python", keywords=["list", "sort"], sentiment="neutral",
    length=80,
)  # fmt: skip
TAGS = ("[t]", "[/t]", "[k]", "[/k]", "[senti]", "[/senti]", "[w]", "[/w]")


def write(directory: Path, tokenizer: ControlTokenizer) -> FileTokenizer:
    """Return a tokenizer from its files, as a run and an export have them."""
    directory.mkdir()
    for name, content in tokenizer.files().items():
        (directory / name).write_bytes(content)
    return FileTokenizer(str(directory))


def write_metaspace(directory: Path) -> Path:
    """Write a tokenizer that marks words by the blank before them, also before a text."""
    directory.mkdir()
    letters = {c: i for i, c in enumerate("▁abcdefghijklmnopqrstuvwxyzA,0123456789")}
    words = {f"▁{word}": len(letters) + i for i, word in enumerate(("a", "in", "words"))}
    merges = [("▁", "a"), ("▁", "i"), ("▁i", "n")]
    tokenizer = Tokenizer(models.BPE(vocab={**letters, **words, "▁i": 42}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def make_base(kind: str, directory: Path) -> str:
    """Return the name of a tokenizer of some kind, written to `directory`."""
    name = "bytes"
    if kind == "start token":
        name = str(write_tokenizer(directory))
        file = Path(name, "tokenizer.json")
        content = json.loads(file.read_text())
        sequence = {"Sequence": {"id": "A", "type_id": 0}}
        content["post_processor"] = {
            "type": "TemplateProcessing", "pair": [sequence],
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, sequence],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
        }  # fmt: skip
        file.write_text(json.dumps(content))
    elif kind == "metaspace":
        name = str(write_metaspace(directory))
    elif kind == "class of its own":  # transformers builds it from the older files.
        settings = {"tokenizer_class": "GPT2Tokenizer", "unk_token": "</s>"}
        name = str(write_tokenizer(directory, **settings))
        vocab = json.loads(Path(name, "tokenizer.json").read_text())["model"]["vocab"]
        Path(name, "vocab.json").write_text(json.dumps(vocab))
        Path(name, "merges.txt").write_text("#version: 0.2\n")
    return name


def test_a_prompt_has_the_layout_of_the_paper() -> None:
    assert prompt_text(EVERYTHING) == (
        "[docs-0][docs-1][docs-2] [t] Python [/t] [k] list, sort [/k] [senti] neutral [/senti] "
        "[w] About 80 words [/w]"
    )
    assert prompt_text(ControlValues(genre="docs")) == "".join(f"[docs-{i}]" for i in range(64))
    assert prompt_text(ControlValues(genre="docs", soft_prompts=0, length=5)) == (
        "[w] About 5 words [/w]"
    )
    assert prompt_text(ControlValues()) == ""


@pytest.mark.parametrize("kind", ["bytes", "start token", "metaspace", "class of its own"])
def test_ids_equal_transformers(kind: str, tmp_path: Path) -> None:
    base = open_tokenizer(make_base(kind, tmp_path / "base"))
    added = ControlTokenizer(base, CONTROL)
    assert added.size == base.size + len(TAGS) + 2 * 64
    assert added.end_id == base.end_id
    ours = write(tmp_path / "added", added)
    assert (ours.size, ours.end_id, ours.digest) == (added.size, added.end_id, added.digest)
    prompts = ControlPrompts.find(ours)
    assert prompts is not None
    assert prompts.start_ids == ([256] if kind == "start token" else [])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "added")
    values = ControlValues(
        genre="Machine Translation", soft_prompts=2, topic=" in a ", keywords=["a", "in"],
        sentiment="in", length=7,
    )  # fmt: skip
    for text in ("a in a", "  in words", ""):
        string = f"{prompt_text(values)} {text}"
        ids = prompts.encode(values, text)
        assert ids == theirs(string)["input_ids"]
        assert ids == ours.encode(string)
        assert ids == ours.encode(prompt_text(values).replace("] ", "]").replace(" [", "[") + text)
    plain = prompts.encode(ControlValues(), "in a")
    assert plain == ours.encode("in a") == theirs("in a")["input_ids"]
    assert (plain == [*prompts.start_ids, *prompts.encode_texts(["in a"])[0]]) is (
        kind != "metaspace"
    )
    assert theirs.convert_ids_to_tokens(list(prompts.soft_ids[1, :2])) == [
        "[Machine Translation-0]", "[Machine Translation-1]",
    ]  # fmt: skip
    shown = theirs.convert_ids_to_tokens(list(prompts.reserved_ids))
    assert shown[:8] == list(TAGS)
    suppressed = transformers.GenerationConfig.from_pretrained(tmp_path / "added").suppress_tokens
    assert suppressed == list(prompts.reserved_ids)
    resaved = tmp_path / "resaved"
    theirs.save_pretrained(resaved)
    again = ControlPrompts.find(FileTokenizer(str(resaved)))
    assert again is not None
    assert again.encode(values, "a") == prompts.encode(values, "a")


def test_texts_and_values_hold_no_control_tokens() -> None:
    added = ControlTokenizer(open_tokenizer("bytes"), CONTROL)
    prompts = ControlPrompts(added)
    text = "x[t] = d[k] + [docs-0] [/w]"
    assert prompts.encode_texts([text]) == [list(text.encode())]
    (ids,) = prompts.encode_values("topic", ["a [/t] b"])
    assert added.decode(ids, with_special_tokens=True) == "[t]a [/t] b[/t]"
    assert sum(number in prompts.reserved_ids for number in ids) == 2
    assert prompts.encode_values("keywords", [None, [], ["a"]])[:2] == [[], []]


def test_genres_and_attributes_are_added_to_earlier_ones(tmp_path: Path) -> None:
    first = ControlTokenizer(open_tokenizer("bytes"), ControlConfig(genres=["a"], genre="g"))
    kept = write(tmp_path / "first", first)
    settings = tmp_path / "first" / "tokenizer_config.json"
    settings.write_text(
        json.dumps({**json.loads(settings.read_text()), "added_tokens_decoder": {}})
    )
    second = ControlTokenizer(
        FileTokenizer(str(tmp_path / "first")), ControlConfig(genres=["b"], genre="g", topic="t")
    )
    prompts, before = ControlPrompts(second), ControlPrompts(kept)
    assert prompts.genres == ("a", "b")
    assert prompts.attributes == ("genre", "topic")
    assert prompts.soft_ids[0].tolist() == before.soft_ids[0].tolist()
    assert prompts.soft_ids[1].tolist() == list(range(first.size, first.size + 64))
    described = json.loads(second.files()["tokenizer_config.json"])["added_tokens_decoder"]
    assert sorted(map(int, described)) == list(prompts.reserved_ids)


def test_what_a_prompt_cannot_name_is_refused(tmp_path: Path) -> None:
    control = ControlConfig(genres=["docs"], genre="g", length="tokens")
    prompts = ControlPrompts(ControlTokenizer(open_tokenizer("bytes"), control))
    with pytest.raises(ConfigError, match="trained on genre and length: leave it out"):
        prompts.encode(ControlValues(topic="a"), "")
    with pytest.raises(ConfigError, match='did you mean "docs"'):
        prompts.encode(ControlValues(genre="doc"), "")
    for vocab, words in (
        (
            {"a": 0, "?": 1, "[k]": 2},
            r"id 2 for the ordinary token '\[k\]'.* for '\[k\]': use another",
        ),
        ({"a": 0, "?": 1, "b": 7}, r"id 7 for the ordinary token 'b'"),
    ):
        taken = Tokenizer(models.WordLevel(vocab, "?"))
        taken.add_special_tokens([AddedToken("</s>", special=True)])
        taken.save(str(tmp_path / "tokenizer.json"))
        with pytest.raises(DataError, match=words):
            ControlTokenizer(open_tokenizer(str(tmp_path)), control)

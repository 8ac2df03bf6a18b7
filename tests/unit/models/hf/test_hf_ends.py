"""Text ends where transformers ends it, and exports name the end tokens of their tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from directories import tune

from moesaic.cli.main import main
from moesaic.models.chat import ChatTemplate
from moesaic.models.hf.origin import open_origin
from moesaic.models.hf.special_tokens import special_token_ids
from moesaic.models.tokenizer import FileTokenizer
from moesaic.testing.chat_templates import TEMPLATES, without_generation_marks, write_tokenizer

FIRST, END, START, TURN = range(256, 260)
"""Special token ids of `testing.chat_templates`."""
PROMPT = "Why is it so?"


def write(path: Path, **changes: Any) -> None:
    raw = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**raw, **changes}))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, their_model: Callable[..., Any]) -> Path:
    directory = tmp_path_factory.mktemp("ends") / "base"
    their_model("llama", vocab_size=260, eos_token_id=END).save_pretrained(directory)
    return write_tokenizer(directory, TEMPLATES["chatml"])


@pytest.fixture
def base(written: Path, tmp_path: Path) -> Path:
    """Create a model with a tokenizer that names END and a template that ends turns with TURN."""
    return Path(shutil.copytree(written, tmp_path / "base"))


def word(directory: Path, token: int) -> str:
    found = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).id_to_token(token)
    assert found is not None
    return str(found)


def ours(line: str, capfd: pytest.CaptureFixture[str], prompt: str = PROMPT) -> list[int]:
    capfd.readouterr()
    sets = ["--set", "temperature=0", "--set", "max_tokens=20", "--json", "--prompt", prompt]
    assert main(["generate", *line.split(), *sets]) == 0, capfd.readouterr().err
    (row,) = json.loads(capfd.readouterr().out)
    tokens: list[int] = row["tokens"]
    return tokens


def theirs(directory: Path, **settings: Any) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    ids = torch.tensor([FileTokenizer(str(directory)).encode(PROMPT)])
    seen = torch.ones_like(ids)
    found = model.generate(ids, attention_mask=seen, do_sample=False, max_new_tokens=20, **settings)
    tokens: list[int] = found[0, ids.shape[1] :].tolist()
    return tokens


@pytest.mark.parametrize(
    ("config", "generation"),
    [(0, None), (0, 1), (1, 0), (0, [2, 1]), ([3, 1], 2), ([2, 1], None), (END, [END, 1])],
)
def test_greedy_text_ends_as_in_transformers(
    config: Any, generation: Any, base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`config` and `generation` are positions of tokens in the text generated without an end."""
    free = list(dict.fromkeys(theirs(base, eos_token_id=-1)[3:]))
    assert len(free) > 3

    def token(position: Any) -> Any:
        if isinstance(position, list):
            return [token(one) for one in position]
        return position if position is END else free[position]

    file = base / "generation_config.json"
    file.unlink(missing_ok=True)
    write(base / "config.json", eos_token_id=token(config))
    if generation is not None:
        write(file, eos_token_id=token(generation))
    expected = theirs(base)
    assert len(expected) < 20
    assert ours(str(base), capfd) == expected


def test_end_token_of_the_tokenizer_alone_is_ignored(
    base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    free = list(dict.fromkeys(theirs(base, eos_token_id=-1)[3:]))
    write(base / "tokenizer_config.json", eos_token=word(base, free[0]))
    for name in ("config", "generation_config"):
        write(base / f"{name}.json", eos_token_id=free[2])
    expected = theirs(base)
    assert free[0] in expected[:-1]
    assert ours(str(base), capfd) == expected


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": None}])
def test_end_token_without_generation_settings(
    generation: dict[str, Any], base: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The end is that of config.json, else of the tokenizer; transformers would go on."""
    free = theirs(base, eos_token_id=-1)
    (base / "generation_config.json").write_text(json.dumps(generation))
    write(base / "config.json", eos_token_id=free[4])
    assert ours(str(base), capfd) == free[: free.index(free[4]) + 1]
    write(base / "config.json", eos_token_id=None)
    write(base / "tokenizer_config.json", eos_token=word(base, free[4]))
    assert ours(str(base), capfd) == free[: free.index(free[4]) + 1]


def test_invalid_end_token_is_rejected(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for text, words in (('{"eos_token_id": "</s>"}', "is no token id"), ("{", "is not JSON")):
        (base / "generation_config.json").write_text(text)
        assert main(["generate", str(base), "--prompt", "x", "--set", "max_tokens=1"]) == 2
        said = " ".join(capfd.readouterr().err.split())
        assert words in said
        assert "generation_config.json" in said


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        *((text, TURN if name == "chatml" else END) for name, text in TEMPLATES.items()),
        (without_generation_marks(TEMPLATES["chatml"]), TURN),
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}", None),
        ("{{ messages[0].content }}<|end|>", None),
        ("{{ raise_exception('none') }}", None),
    ],
)
def test_end_of_turn_token(template: str, expected: int | None, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, template)
    assert ChatTemplate(tmp_path).end_of_turn_id(FileTokenizer(str(tmp_path))) == expected


CHAT = ('data.format="chat"', 'data.path="talks.jsonl"', "data.sequence=64")
TALK = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]


def test_chat_stops_at_the_end_of_turn(
    base: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """After fine-tuning too, although only the template named that token."""
    monkeypatch.chdir(base.parent)
    write(base / "generation_config.json", top_k=5)
    Path("talks.jsonl").write_text(f"{json.dumps({'messages': TALK})}\n" * 4)
    assert tune(*CHAT, "train.steps=60", "schedule.warmup=1", "optimizer.lr=0.01") == 0
    for line in (
        "convert run --out hf", "convert hf --out again",
        "convert run --out bare --set to=checkpoint", "convert bare --out back",
    ):  # fmt: skip
        assert main(line.split()) == 0, capfd.readouterr().err
    answer = [*FileTokenizer("base").encode("Yes."), TURN]
    for model in ("run", "hf", "again", "bare", "back"):
        assert open_origin(Path(model)).end_ids() == [END, TURN]
        assert ours(f"{model} --chat", capfd, "Hi?") == answer
    for model in ("hf", "again", "back"):
        config, generation = (
            json.loads(Path(model, f"{name}.json").read_text())
            for name in ("config", "generation_config")
        )
        assert config["eos_token_id"] == generation["eos_token_id"] == [END, TURN]
        assert generation["top_k"] == 5
    write(Path("hf/config.json"), eos_token_id=END)
    Path("hf/generation_config.json").unlink()
    assert ours("hf --chat", capfd, "Hi?") == answer
    shutil.rmtree("base")
    assert tune(*CHAT, "train.steps=61", flags=["--resume", "--change"]) == 0, (
        capfd.readouterr().err
    )
    assert json.loads(Path("run/job.json").read_text())["data"]["tokenizer"] == "run/tokenizer"


def test_tokenizer_of_a_run_takes_precedence_over_its_base(
    base: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer replaces other ids; files that already name its tokens stay unchanged."""
    monkeypatch.chdir(base.parent)
    other = write_tokenizer(Path("other"), bos_token="<|start|>", eos_token="<|end|>")
    kept = {"bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    file = base / "generation_config.json"
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("", [5, END], kept | {"bos_token_id": FIRST, "eos_token_id": [5, END]}),
        ("data.end_token=<|start|>", END, kept | {"bos_token_id": FIRST, "eos_token_id": START}),
        (f"data.tokenizer={other}", [5, END], kept | {"bos_token_id": START, "eos_token_id": TURN}),
    ]
    for number, (item, ends, expected) in enumerate(cases):
        write(base / "config.json", eos_token_id=ends)
        file.write_text(json.dumps({"top_k": 5, "bos_token_id": 1, "eos_token_id": ends}))
        run, out, same = f"run-{number}", f"out-{number}", f"same-{number}"
        sets = [item] if item else []
        assert tune(*sets, "train.steps=1", out=run) == 0, capfd.readouterr().err
        for line in (f"convert {run} --out {out}", f"convert {base} --out {same}"):
            assert main(line.split()) == 0, capfd.readouterr().err
        config = json.loads(Path(out, "config.json").read_text())
        assert {key: config[key] for key in kept} == expected, item
        expected = {key: value for key, value in expected.items() if key != "pad_token_id"}
        generation = json.loads(Path(out, file.name).read_text())
        assert generation == {"top_k": 5, **expected}, item
        assert open_origin(Path(run)).end_ids() == open_origin(Path(out)).end_ids()
        assert Path(same, file.name).read_bytes() == file.read_bytes()
    file.write_text('{"bos_token_id":256,\n"eos_token_id":257}')
    assert main(["convert", "run-0", "--out", "exact"]) == 0
    assert Path("exact", file.name).read_bytes() == file.read_bytes()


def test_end_token_of_special_tokens_map(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    write(tmp_path / "tokenizer_config.json", eos_token=None)
    write(tmp_path / "special_tokens_map.json", eos_token="<|end|>", bos_token="<|start|>")
    assert special_token_ids(tmp_path) == {"bos_token_id": START, "eos_token_id": TURN}
    assert FileTokenizer(str(tmp_path)).end_id == TURN

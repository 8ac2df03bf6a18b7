from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.job import CtrJob, Job, LayoutConfig, ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import plan_from_layout
from moesaic.models.hf.config import config_text
from moesaic.models.tokenizer import open_tokenizer
from moesaic.testing.chat_templates import write_tokenizer
from moesaic.train.input_checks import check_inputs
from moesaic.train.job_file import load_job

JOB = """# what a person wrote
[model]
{model}

[data]
path = "text.txt"
sequence = 16

[train]
steps = 2
batch = 2
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text " * 2)
    return tmp_path


def write(model: str = 'preset = "tiny-olmoe"') -> Path:
    Path("job.toml").write_text(JOB.format(model=model))
    return Path("job.toml")


def write_model(directory: str = "hf", **changes: object) -> ModelConfig:
    model = parse(ModelConfig, {**PRESETS["tiny-mixtral"], **changes}, "preset")
    Path(directory).mkdir()
    Path(directory, "config.json").write_text(config_text(model, "float32"))
    return model


def refusal(*sets: str, model: str = 'preset = "tiny-olmoe"') -> str:
    with pytest.raises(ConfigError) as caught:
        check_inputs(load_job(write(model), sets))
    return str(caught.value)


def test_a_job_keeps_its_text_and_sets() -> None:
    text = write().read_text()
    loaded = load_job(Path("job.toml"))
    assert (loaded.text, loaded.warnings) == (text, [])
    loaded = load_job(Path("job.toml"), ["train.steps=3", "data.path=a\nb"])
    assert loaded.job.train.steps == 3
    assert loaded.text == f"{text.rstrip()}\n\n# --set train.steps=3\n# --set data.path=a\n# b\n"


def test_from_takes_the_model_and_names_the_source(place: Path) -> None:
    model = write_model(rope_theta=12345.0)
    loaded = load_job(write('from = "hf"\nmax_positions = 64\ninit_std = 0.5'))
    assert loaded.job.source == str(place / "hf")
    assert loaded.job.model == model.model_copy(update={"max_positions": 64, "init_std": 0.5})
    again = parse(Job, json.loads(loaded.job.to_json()), "job.json")
    assert again == loaded.job


def test_unknown_keys_of_config_json_warn() -> None:
    write_model()
    raw = json.loads(Path("hf/config.json").read_text())
    Path("hf/config.json").write_text(json.dumps({**raw, "mystery": 1}))
    (warning,) = load_job(write('from = "hf"')).warnings
    assert "mystery" in warning


def test_settings_without_effect_warn() -> None:
    loaded = load_job(write('preset = "tiny-dense"'), ["routing.z_loss=0.1"])
    assert loaded.warnings == ["routing.z_loss has no effect: the model is dense"]


@pytest.mark.parametrize("preset", ["tiny-olmoe", "tiny-dense", "tiny-deepseek"])
def test_explicit_defaults_do_not_warn(preset: str) -> None:
    """Load the output of a dry run as a job file."""
    first = load_job(write(f'preset = "{preset}"'))
    Path("whole.toml").write_text(first.job.to_toml())
    again = load_job(Path("whole.toml"))
    assert again.job == first.job
    assert again.warnings == first.warnings == []


@pytest.mark.parametrize(("ep", "keys"), [(2, []), (1, ["chunks", "overlap_local"])])
def test_settings_without_effect_under_a_plan_warn(ep: int, keys: list[str]) -> None:
    """Warn only about settings of the job, not about those the plan adds."""
    write()
    text = "\n[layout]\noverlap_local = false\nchunks = 1\n"
    Path("job.toml").write_text(Path("job.toml").read_text() + text)
    alone = load_job(Path("job.toml"))
    sentence = "layout.{} has no effect: layout.ep = 1 dispatches no tokens"
    assert alone.warnings == [sentence.format(key) for key in ("chunks", "overlap_local")]
    dispatch = "dedup" if ep > 1 else "all_to_all"
    layout = LayoutConfig(ep=ep, dispatch=dispatch)
    plan = plan_from_layout(layout, alone.job.model, 2)
    Path("plan.json").write_text(plan.to_json())
    loaded = load_job(Path("job.toml"), plan=Path("plan.json"))
    assert sorted(loaded.warnings) == [sentence.format(key) for key in keys]


def test_settings_that_a_plan_overrides_warn() -> None:
    path = write()
    Path("job.toml").write_text(path.read_text() + "\n[layout]\nep = 2\noverlap_local = true\n")
    alone = load_job(path)
    plan = plan_from_layout(LayoutConfig(ep=2, chunks=4), alone.job.model, 2)
    Path("plan.json").write_text(plan.to_json())
    (warning,) = load_job(path, plan=Path("plan.json")).warnings
    assert warning == ("plan 'plan.json' overrides the job: layout.overlap_local = false, not true")
    with pytest.raises(ConfigError, match=r"^layout.overlap_local=true beside plan 'plan.json'"):
        load_job(path, ["layout.overlap_local=true"], plan=Path("plan.json"))


@pytest.mark.parametrize("pinned", ["auto", "torch", "triton"])
@pytest.mark.parametrize("planned", ["auto", "torch", "triton"])
def test_a_plan_with_auto_kernels_leaves_them_to_the_job(pinned: str, planned: str) -> None:
    """Obey a plan that names kernels; the job may name the same ones."""
    path, sets = write(), [f'kernels.grouped_mm="{pinned}"'] * (pinned != "auto")
    plan = plan_from_layout(LayoutConfig(), load_job(path).job.model, 1)
    plan = plan.model_copy(update={"grouped_mm": planned})
    Path("plan.json").write_text(plan.to_json())
    if pinned == "auto" or planned in ("auto", pinned):
        loaded = load_job(path, sets, plan=Path("plan.json"))
        assert loaded.plan is not None
        expected = pinned if planned == "auto" else planned
        assert loaded.plan.grouped_mm == loaded.job.kernels.grouped_mm == expected
    else:
        with pytest.raises(ConfigError, match="grouped_mm = "):
            load_job(path, sets, plan=Path("plan.json"))


def test_a_model_that_cannot_be_exported_warns() -> None:
    (warning,) = load_job(write('preset = "tiny-mixtral"\nrenormalise = false')).warnings
    assert warning.startswith("this model cannot be exported to a Hugging Face directory: ")


def test_invalid_values_of_from() -> None:
    write_model()
    Path("empty").mkdir()
    give = "give a Hugging Face model directory"
    assert refusal(model='from = "no"') == f'job.toml: model.from = "no" is no directory: {give}'
    assert refusal(model='from = "empty"') == (
        f'job.toml: model.from = "empty" holds no config.json: {give}'
    )
    assert refusal(model="from = 3") == f"job.toml: model.from = 3 is not a string: {give}"
    remedy = (
        "the directory defines the model, remove one of the two "
        "(only init_std, max_positions and vocab may stand beside it)"
    )
    assert refusal(model='from = "hf"\nhidden = 64') == (
        f'job.toml: model.from = "hf" and model.hidden = 64: {remedy}'
    )
    assert refusal(model='preset = "tiny-olmoe"\nfrom = "hf"') == (
        f'job.toml: model.from = "hf" and model.preset = "tiny-olmoe": {remedy}'
    )


def test_a_resumed_run_supplies_the_model_of_a_missing_directory(place: Path) -> None:
    """Only the run that began with the directory supplies the model, and only to resume."""
    model = write_model()
    path, run = write('from = "hf"\nmax_positions = 64'), place / "run"
    run.mkdir()
    (run / "job.json").write_text(load_job(path).job.to_json())
    Path("hf").rename("elsewhere")
    loaded = load_job(path, run=run)
    assert loaded.job.model == model.model_copy(update={"max_positions": 64})
    assert loaded.job.source == str(place / "hf")
    (warning,) = loaded.warnings
    assert warning == (
        f"job.toml: model.from = \"hf\" is no directory any more: taking the model from '{run}'"
    )
    for sets, given in (([], None), ([], place), (['model.from="other"'], run)):
        with pytest.raises(ConfigError, match="is no directory: give"):
            load_job(path, sets, given)


def test_from_a_run_checkpoint_or_adapter() -> None:
    for name, mark in (("run", "job.json"), ("step", "COMMIT"), ("lora", "adapter_config.json")):
        Path(name).mkdir()
        Path(name, mark).write_text("{}")
    for name in ("run", "step"):
        assert refusal(model=f'from = "{name}"') == (
            f'job.toml: model.from = "{name}" holds no config.json, as it is a run or a '
            f"checkpoint: write its model out (moesaic convert {name} --out DIR), and give DIR"
        )
    assert refusal(model='from = "lora"') == (
        'job.toml: model.from = "lora" holds no config.json, as it is an adapter, which holds no '
        "model of its own: give the merged model (for a run of moesaic: moesaic convert RUN "
        "--out DIR)"
    )


def test_from_takes_the_tokenizer() -> None:
    write_model(vocab=320)
    write_tokenizer(Path("hf"))
    write_tokenizer(Path("other"))
    loaded = load_job(write('from = "hf"'), ["data.end_token=<|end|>"])
    assert (loaded.job.data.tokenizer, loaded.warnings) == ("hf", [])
    assert json.loads(loaded.job.to_json())["data"]["tokenizer"] == "hf"
    check_inputs(loaded)
    loaded = load_job(write('from = "hf"'), ["data.tokenizer=other"])
    assert (loaded.job.data.tokenizer, loaded.warnings) == ("other", [])
    loaded = load_job(write('from = "hf"'), ["data.tokenizer=bytes"])
    assert loaded.job.data.tokenizer == "bytes"
    assert loaded.warnings == [
        'job.toml: model.from = "hf" has a tokenizer, and data.tokenizer = "bytes" is another: its '
        "ids mean other text than those the model was trained on, and an export would replace the "
        "model's own tokenizer by it; remove data.tokenizer to train with the model's"
    ]


def test_from_without_a_supported_tokenizer() -> None:
    write_model(vocab=320)
    loaded = load_job(write('from = "hf"'))
    assert (loaded.job.data.tokenizer, loaded.warnings) == ("bytes", [])
    for name, data in open_tokenizer("bytes").files().items():  # As exported by a run on bytes.
        Path("hf", name).write_bytes(data)
    for sets in ((), ("data.tokenizer=bytes",)):
        loaded = load_job(write('from = "hf"'), sets)
        assert (loaded.job.data.tokenizer, loaded.warnings) == ("bytes", [])
    for text in ("{}", "[]", "nonsense"):
        Path("hf/tokenizer.json").write_text(text)
        assert "tokenizer.json' is not a tokenizer" in refusal(model='from = "hf"')
    Path("hf/tokenizer.json").unlink()
    Path("hf/tokenizer.model").write_text("pieces")
    (warning,) = load_job(write('from = "hf"')).warnings
    assert 'has a tokenizer, and data.tokenizer = "bytes" is another' in warning
    assert "save that (tokenizer.model) as tokenizer.json" in warning


def test_a_resumed_run_keeps_its_tokenizer() -> None:
    """Its source directory may be gone."""
    write_model(vocab=320)
    write_tokenizer(Path("hf"))
    runs = {name: Path(name) for name in ("of-bytes", "of-file")}
    for run in runs.values():
        sets = ["data.tokenizer=bytes"] if run.name == "of-bytes" else []
        run.mkdir()
        (run / "job.json").write_text(load_job(write('from = "hf"'), sets).job.to_json())
    write_tokenizer(Path("of-file/tokenizer"))
    found = {
        name: load_job(write('from = "hf"'), (), run).job.data.tokenizer
        for name, run in runs.items()
    }
    assert found == {"of-bytes": "bytes", "of-file": "hf"}
    shutil.rmtree("hf")
    loaded = load_job(write('from = "hf"'), (), runs["of-file"])
    assert loaded.job.data.tokenizer == "of-file/tokenizer"
    assert load_job(write('from = "hf"'), (), runs["of-bytes"]).job.data.tokenizer == "bytes"


def test_source_is_not_for_files() -> None:
    assert refusal("source=hf") == (
        "source=hf: 'source' is not a key of a job: write from = DIR in [model]"
    )


def test_a_wrong_source_comes_with_the_other_mistakes() -> None:
    student = '[[student]]\nname = "small"\nlr = -1\nmodel.from = "none"'
    text = write(f'from = "nowhere"\n{student}').read_text()
    Path("job.toml").write_text(text.replace("batch = 2", "bacth = 2"))
    with pytest.raises(ConfigError) as caught:
        load_job(Path("job.toml"), ["layout.ep=x", "student.small.model.from=no"])
    assert [line.split(": ")[:2] for line in str(caught.value).split("\n  ")] == [
        ["job.toml", "5 mistakes"],
        ['model.from = "nowhere" is no directory', "give a Hugging Face model directory"],
        ["student.small.model.from=no", "student[0]"],
        ["unknown key 'train.bacth'", "did you mean 'train.batch'?"],
        ["layout.ep=x", 'layout.ep = "x"'],
        ["student[0].lr = -1", "give a number above 0"],
    ]


@pytest.mark.parametrize("text", ["", '[model]\npreset = "tiny-olmoe"'])
def test_all_missing_tables_are_named_at_once(text: str) -> None:
    Path("job.toml").write_text(text)
    tables = ["model", "data", "train"][bool(text) :]
    for needs_data in (True, False):
        with pytest.raises(ConfigError) as caught:
            load_job(Path("job.toml"), needs_data=needs_data)
        missing = [one for one in tables if f"{one} is missing: add [{one}]" in str(caught.value)]
        assert missing == [one for one in tables if needs_data or one != "data"]


def test_a_job_of_a_plan_is_refused_for_training() -> None:
    Path("job.toml").write_text(JOB.format(model='preset = "tiny-olmoe"').replace("path =", "#"))
    with pytest.raises(
        ConfigError,
        match=r"job.toml: training needs data.path .*, and only plans do without: add it",
    ):
        check_inputs(load_job(Path("job.toml")))


def test_all_missing_inputs_are_named_at_once() -> None:
    sets = ("data.path=no.txt", "data.tokenizer=no", "routing.replay=no", "log.mlflow=mine")
    heading, *lines = refusal(*sets).split("\n  ")
    assert heading == "job.toml: 4 mistakes"
    assert [line.partition(": ")[0] for line in lines] == list(sets)


def test_missing_inputs_come_with_the_mistakes_of_the_job() -> None:
    sets = ("data.path=no.txt", "data.tokenizer=no", "layout.epp=2", "train.batch=x")
    for needs_data in (True, False):
        with pytest.raises(ConfigError) as caught:
            load_job(write(), sets, needs_data=needs_data)
        heading, *lines = str(caught.value).split("\n  ")
        told = sets if needs_data else sets[2:]
        assert heading == f"job.toml: {len(told)} mistakes"
        assert [line.partition(": ")[0].split("=")[0] for line in lines] == [
            one.split("=")[0] for one in told
        ]
    with pytest.raises(ConfigError, match=r"job\.toml: 2 mistakes\n.*sequence = -1.*\n.*batch"):
        load_job(
            write(), ("data.path=no.txt", "data.sequence=-1", "train.batch=x"), needs_data=True
        )
    with pytest.raises(ConfigError) as caught:
        load_job(write_ctr('path = "none.tsv"'), ["train.batch=x"], needs_data=True)
    assert [line.partition(" = ")[0] for line in str(caught.value).split("\n  ")] == [
        "ctr.toml: 2 mistakes", "data.path", "train.batch=x: train.batch",
    ]  # fmt: skip


def test_missing_inputs(place: Path) -> None:
    Path("tok").mkdir()
    for key in ("data.path", "data.validation_path"):
        for value, problem in (("no.txt", "does not exist"), ("*.md", "matches no file")):
            item = f"{key}={value}"
            assert refusal(item).startswith(f"{item}: {key} = '{value}' {problem}: ")
    assert refusal("data.tokenizer=no") == (
        'data.tokenizer=no: data.tokenizer = "no" does not exist: '
        'give "bytes", a tokenizer.json, or the directory that holds one'
    )
    Path("tokenizer.json").write_text("{}")
    assert "tokenizer.json' is not a tokenizer" in refusal("data.tokenizer=tokenizer.json")
    assert "holds no tokenizer.json" in refusal("data.tokenizer=tok")
    assert refusal("model.vocab=256") == (
        "model.vocab=256: model.vocab = 256 is less than the 257 ids of "
        'data.tokenizer = "bytes": set model.vocab = 320 (any number from 257), or choose another '
        "tokenizer"
    )
    assert refusal("routing.replay=no") == (
        'routing.replay=no: routing.replay = "no" does not exist: '
        "give a file written by routing.record"
    )
    assert refusal("log.wandb=mine") == (
        'log.wandb=mine: log.wandb = "mine" needs the package wandb: '
        "pip install 'moesaic[wandb]', or remove the key"
    )


def test_errors_about_the_same_file_are_all_listed() -> None:
    Path("bad.jsonl").write_text("none")
    text = refusal("data.path=bad.jsonl", "data.validation_path=bad.jsonl", "log.wandb=mine")
    heading, *mistakes = text.splitlines()
    assert heading == "job.toml: 3 mistakes"
    starts = ("data.path=bad.jsonl: ", "data.validation_path=bad.jsonl: ", "log.wandb=mine: ")
    assert all(one.strip().startswith(start) for one, start in zip(mistakes, starts, strict=True))


def test_existing_inputs(place: Path) -> None:
    for name, content in open_tokenizer("bytes").files().items():
        Path(name).write_bytes(content)
    sets = ["data.tokenizer=tokenizer.json", "data.path=*.txt", f"data.validation_path={place}"]
    check_inputs(load_job(write(), sets))


CTR = """
kind = "ctr"
[model]
family = "ctr-dnn"
[data]
{data}
[train]
steps = 2
batch = 2
"""


def write_ctr(data: str = "stream = {}") -> Path:
    Path("ctr.toml").write_text(CTR.format(data=data))
    return Path("ctr.toml")


def ctr_refusal(*sets: str, data: str = "stream = {}") -> str:
    with pytest.raises(ConfigError) as caught:
        check_inputs(load_job(write_ctr(data), sets))
    return str(caught.value)


def test_the_kind_chooses_the_class_of_the_job() -> None:
    loaded = load_job(write_ctr(), ["table.lr=0.5"])
    assert isinstance(loaded.job, CtrJob)
    assert loaded.job.table.lr == 0.5
    check_inputs(loaded)
    assert isinstance(load_job(write()).job, Job)
    assert ctr_refusal("kind=ctx") == 'kind=ctx: kind = "ctx" is not known: did you mean "ctr" ' + (
        '(it takes "lm" or "ctr")?'
    )
    assert "'layout.ep': remove it, a recommender has no layout" in ctr_refusal("layout.ep=2")


def test_a_plan_is_for_language_models() -> None:
    plan = plan_from_layout(LayoutConfig(), load_job(write()).job.model, 1)
    Path("plan.json").write_text(plan.to_json())
    with pytest.raises(ConfigError, match=r'ctr\.toml: kind = "ctr" takes no plan: .* remove the'):
        load_job(write_ctr(), plan=Path("plan.json"))


def test_inputs_of_a_ctr_job_are_checked() -> None:
    assert "data.path = 'none.tsv'" in ctr_refusal(data='path = "none.tsv"')
    text = ctr_refusal(data='path = "clicks"\ndense = ["price"]')
    assert 'data.path = "clicks" is no Parquet: remove it, or set data.format = "parquet"' in text
    Path("clicks.tsv").write_text("1\t" + "\t".join(["1"] * 39) + "\n")
    assert "data.validation_path = 'none.tsv'" in ctr_refusal(
        data='path = "clicks.tsv"\nvalidation_path = "none.tsv"'
    )
    check_inputs(load_job(write_ctr('path = "clicks.tsv"')))


def test_settings_of_a_ctr_job_without_effect_are_named() -> None:
    Path("clicks.tsv").write_text("1\t" + "\t".join(["1"] * 39) + "\n")
    sets = [
        "train.validate_every=2", "schedule.kind=constant", "schedule.final=0.5",
        "table.betas=[0.5, 0.5]", "checkpoint.every=5",
    ]  # fmt: skip
    warnings = load_job(write_ctr('path = "clicks.tsv"'), sets).warnings
    assert [text.split(" ")[0] for text in warnings] == [
        "train.validate_every", "schedule.final", "table.betas", "checkpoint.every",
    ]  # fmt: skip
    assert not load_job(write_ctr()).warnings


STUDENT = """preset = "tiny-mixtral"
[[student]]
name = "small"
[student.model]
{model}"""


def test_a_student_starts_from_a_directory_or_a_preset(place: Path) -> None:
    model = write_model(layers=2)
    loaded = load_job(write(STUDENT.format(model='from = "hf"\ninit_std = 0.5')))
    (student,) = loaded.job.student
    assert student.model == model.model_copy(update={"init_std": 0.5})
    assert student.source == str(place / "hf")
    assert loaded.job.source is None
    assert loaded.warnings == []
    run = place / "run"
    run.mkdir()
    (run / "job.json").write_text(loaded.job.to_json())
    Path("hf").rename("elsewhere")
    again = load_job(Path("job.toml"), run=run)
    assert again.job.student == loaded.job.student
    (student,) = load_job(write(STUDENT.format(model='preset = "tiny-dense"'))).job.student
    assert student.source is None


def test_mistakes_in_the_model_of_a_student() -> None:
    write_model()
    where = "job.toml: student[0]"
    for model, sentence in (
        ('from = "there"', ': model.from = "there" is no directory: give a Hugging Face'),
        ('from = "hf"\nhidden = 64', ': model.from = "hf" and model.hidden = 64: the directory'),
        ('preset = "tiny"', '.model.preset = "tiny" is not known'),
        ('preset = "tiny-dense"\nheads = 3', ".model: model.kv_heads = 2 does not divide"),
    ):
        assert refusal(model=STUDENT.format(model=model)).startswith(f"{where}{sentence}")
    source = STUDENT.format(model='preset = "tiny-dense"').replace("small", 'small"\nsource = "hf')
    assert refusal(model=source) == f"{where}.source is not a key of a job: write model.from = DIR"


def test_a_student_larger_than_its_teacher_warns() -> None:
    (warning,) = load_job(write(STUDENT.format(model='preset = "tiny-dense"\nffn = 9999'))).warnings
    assert warning.startswith('student "small" has 15,')
    assert 'parameters, more than its teacher "model" with 3,' in warning


def test_a_student_of_logits_that_no_loss_trains_warns() -> None:
    other = (
        '\nlayers = 1\n[[student]]\nname = "tiny"\nteacher = "small"\nlosses = { logits = 1.0 }\n'
        'model = { preset = "tiny-dense", layers = 1 }'
    )
    path = write(STUDENT.format(model=f'preset = "tiny-dense"{other}'))
    assert load_job(path).warnings == []
    path.write_text(path.read_text().replace('"small"', '"small"\nlosses = { attention = 1.0 }', 1))
    assert load_job(path).warnings == [
        'student "tiny" learns the logits of "small", which no loss trains: give "small" '
        "losses.text or losses.logits"
    ]

"""A recommender after training: predictions, exports, what inspect and the report say of it."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as parquet
import pytest
import torch

import moesaic
from moesaic.api.inspection import inspect_path
from moesaic.api.model import convert
from moesaic.api.recommender import predict
from moesaic.base.errors import ConfigError, DataError, StoreError
from moesaic.cli.main import main
from moesaic.dist.world import World
from moesaic.facts.job.ctr import CtrJob
from moesaic.models.recommender_files import open_recommender
from moesaic.train.click_metrics import click_metrics
from moesaic.train.data.clicks import ClickBatch, ClickData

JOB: dict[str, Any] = {
    "kind": "ctr",
    "model": {"family": "dlrm", "dim": 4, "hidden": [8], "dense_hidden": [8]},
    "table": {"decay": 0.5, "init_std": 0.3},
    "data": {
        "stream": {
            "days": 2, "samples_per_day": 200, "slots": 3, "keys": 40, "multi_hot": 2, "users": 9
        }
    },
    "train": {"steps": 4, "batch": 100, "validation_samples": 200, "device": "cpu"},
    "optimizer": {"lr": 0.01},
    "checkpoint": {"every": 2},
    "log": {"tensorboard": False},
}  # fmt: skip

CONSTANT = {"kind": "constant"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> moesaic.Run:
    """A run on the built-in stream."""
    out = tmp_path_factory.mktemp("ctr") / "run"
    return moesaic.Job.load(JOB).train(out=out, output=None)


@pytest.fixture(scope="module")
def exported(run: moesaic.Run) -> Path:
    """The export of the run."""
    directory = run.directory.with_name("exported")
    convert(run.directory, directory)
    return directory


def samples_of(run: moesaic.Run, *, training: bool = False) -> ClickBatch:
    """Return all validation samples of a run, or all that it trained on."""
    job = CtrJob.model_validate_json(json.dumps(run.job))
    data = ClickData.open(job.data, job.seed, World.solo())
    samples = data.train if training else data.validation
    assert samples is not None
    return samples.read(range(len(samples)), shuffled=False)


def plain_logits(directory: Path, batch: ClickBatch) -> list[float]:
    """Return logits one sample at a time, with rows added up one by one."""
    network = open_recommender(directory).load_network()
    with moesaic.Table.open(directory, read_only=True) as table:
        rows = [
            sum((table.pull([key])[0] for key in batch.keys[start:end]), np.zeros(4, np.float32))
            for start, end in zip(batch.offsets, batch.offsets[1:], strict=False)
        ]
    pooled = torch.from_numpy(np.stack(rows)).view(3, len(batch), 4)
    with torch.no_grad():
        return [
            network(pooled[:, [one]].transpose(0, 1), torch.from_numpy(batch.dense[[one]])).item()
            for one in range(len(batch))
        ]


def test_predictions_equal_a_plain_loop_over_pulled_rows(
    run: moesaic.Run, exported: Path, tmp_path: Path
) -> None:
    batch = samples_of(run)
    logits = np.array(plain_logits(exported, batch))
    for source, name in ((run.directory, "p.parquet"), (exported, "p.csv")):
        facts = predict(source, out=tmp_path / name)
        read = parquet.read_table if name.endswith("parquet") else csv.read_csv
        found = read(tmp_path / name)["probability"].to_numpy()
        np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), rtol=1e-5)
        expected = click_metrics(batch.labels, logits, batch.weights, batch.users)
        assert facts["metrics"] == pytest.approx(expected.figures(), abs=1e-6)
        assert (facts["samples"], facts["step"]) == (200, 4)
        assert facts["metrics"]["auc"] < facts["best_auc"] < 1
    last = run.summary()["clicks"]["validation"]
    assert facts["metrics"] == pytest.approx({name: last[name] for name in facts["metrics"]})


@pytest.fixture(scope="module")
def criteo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with Criteo TSV, with labels and without, and a run on the first."""
    directory, random = tmp_path_factory.mktemp("criteo"), np.random.default_rng(0)
    lines = [
        "\t".join(
            [str(int(random.random() < 0.3)), *map(str, random.integers(0, 99, 13)),
             *(f"{number:08x}" for number in random.integers(0, 9, 26))]
        )
        for _ in range(60)
    ]  # fmt: skip
    (directory / "day.tsv").write_text("\n".join(lines))
    (directory / "unlabelled.tsv").write_text("\n".join(line[2:] for line in lines))
    (directory / "damaged.tsv").write_text("\n".join([*lines[:5], "1\tx", *lines[5:]]))
    data = {"path": str(directory / "day.tsv"), "cache": str(directory / "cache")}
    job = {**JOB, "data": data, "train": {"steps": 2, "batch": 30, "device": "cpu"}}
    moesaic.Job.load(job).train(out=directory / "run", output=None)
    return directory


def test_files_without_labels_have_the_same_probabilities(criteo: Path, tmp_path: Path) -> None:
    run = criteo / "run"
    labelled = predict(run, str(criteo / "day.tsv"), tmp_path / "labelled.csv")
    unlabelled = predict(run, str(criteo / "unlabelled.tsv"), tmp_path / "unlabelled.csv")
    assert (tmp_path / "labelled.csv").read_bytes() == (tmp_path / "unlabelled.csv").read_bytes()
    assert labelled["metrics"].keys() == {"auc", "calibration", "log_loss", "normalized_entropy"}
    assert unlabelled["metrics"] is None
    with pytest.raises(ConfigError, match="has no labels, so there are no metrics"):
        predict(run, str(criteo / "unlabelled.tsv"))


def test_a_new_day_joins_a_run(criteo: Path, tmp_path: Path) -> None:
    """A run that is resumed with one more file equals a run over all files."""
    lines = (criteo / "day.tsv").read_text().splitlines()
    data = {"path": str(tmp_path / "day-*.tsv"), "cache": str(tmp_path / "cache")}

    def job(steps: int) -> moesaic.Job:
        train = {"steps": steps, "batch": 20, "device": "cpu"}
        return moesaic.Job.load({**JOB, "data": data, "train": train, "schedule": CONSTANT})

    (tmp_path / "day-1.tsv").write_text("\n".join(lines[:40]))
    job(2).train(out=tmp_path / "run", output=None)
    (tmp_path / "day-2.tsv").write_text("\n".join(lines[40:]))
    resumed = job(3).train(out=tmp_path / "run", resume="auto", output=None)
    whole = job(3).train(out=tmp_path / "whole", output=None)
    assert resumed.steps()["loss"].to_pylist() == whole.steps()["loss"].to_pylist()
    job(4).train(out=tmp_path / "run", resume="auto", output=None)
    (tmp_path / "day-3.tsv").write_text(lines[0])
    with pytest.raises(ConfigError, match="has done the 2 days that it had"):
        job(5).train(out=tmp_path / "run", resume="auto", output=None)
    (tmp_path / "day-1.tsv").write_text(lines[0])
    with pytest.raises(ConfigError, match=r"other samples \(the files of its samples have changed"):
        job(5).train(out=tmp_path / "run", resume="auto", output=None)


def test_a_predictor_takes_columns(criteo: Path, tmp_path: Path) -> None:
    """Columns in memory have the probabilities of the same lines in a file."""
    predict(criteo / "run", str(criteo / "unlabelled.tsv"), tmp_path / "p.parquet")
    expected = parquet.read_table(tmp_path / "p.parquet")["probability"].to_numpy()
    lines = (criteo / "unlabelled.tsv").read_text().splitlines()
    fields = list(zip(*(line.split("\t") for line in lines), strict=True))
    with moesaic.Predictor.open(criteo / "run") as predictor:
        names = predictor.columns
        assert (names[0], names[-1], len(names)) == ("I1", "C26", 39)
        dense = {name: [int(one) for one in fields[at]] for at, name in enumerate(names[:13])}
        slots = {name: list(fields[13 + at]) for at, name in enumerate(names[13:])}
        assert np.array_equal(predictor.predict(dense | slots), expected)
        assert len(predictor.predict(pa.table(dense | slots).slice(0, 0))) == 0
        missing = {name: [None] for name in names} | {"C1": [""]}
        assert 0 < predictor.predict(missing)[0] < 1
        with pytest.raises(DataError, match=r"'samples' has no column, or several, of that name"):
            predictor.predict(dense | {name: slots[name] for name in names[13:-1]})
        with pytest.raises(ConfigError, match="give lists of equal length by column"):
            predictor.predict(dense | slots | {"I1": [1]})


def test_a_predictor_needs_columns(run: moesaic.Run) -> None:
    with (
        moesaic.Predictor.open(run.directory) as predictor,
        pytest.raises(ConfigError, match="trained on the built-in stream"),
    ):
        predictor.predict({})


def test_a_malformed_line_leaves_no_probabilities(criteo: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 6: 2 fields instead of 40\): correct or remove"):
        predict(criteo / "run", str(criteo / "damaged.tsv"), tmp_path / "p.csv")
    assert not list(tmp_path.iterdir())


def test_mistakes_name_the_key(run: moesaic.Run, criteo: Path, exported: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --data"):
        predict(run.directory, "clicks.tsv")
    with pytest.raises(ConfigError, match="--data is missing"):
        predict(criteo / "run")
    with pytest.raises(DataError, match=r"--data = 'none\.tsv' does not exist"):
        predict(criteo / "run", "none.tsv")
    with pytest.raises(ConfigError, match="to is for language models"):
        convert(run.directory, exported.with_name("other"), to="packed")
    with pytest.raises(ConfigError, match="is exported already"):
        convert(exported, exported.with_name("other"))
    with pytest.raises(ConfigError, match="is a recommender, not a language model"):
        moesaic.load(run.directory)
    with pytest.raises(ConfigError, match="is an exported recommender, not a language model"):
        moesaic.load(exported)
    for replay in (run.replay, lambda: run.replay_memory("1GB")):
        with pytest.raises(ConfigError, match='kind = "ctr" has no experts'):
            replay()
    with pytest.raises(ConfigError, match='give a run of kind "ctr", a checkpoint of it, or its'):
        predict(exported.with_name("none"))
    with pytest.raises(ConfigError, match="is a run: write its table out"):
        moesaic.Table.open(run.directory, read_only=True)
    with pytest.raises(ConfigError, match="open it with read_only=True"):
        moesaic.Table.open(exported)


def test_an_export_is_whole_or_not_there(
    run: moesaic.Run, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("moesaic.models.recommender_files.export_rows", fail)
        with pytest.raises(StoreError, match="no output was kept"):
            convert(run.directory, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    for name in ("model.safetensors", "segment-0"):
        copy = tmp_path / name
        shutil.copytree(exported, copy)
        content = bytearray((copy / name).read_bytes())
        content[-3000 if name == "segment-0" else -3] ^= 1
        (copy / name).write_bytes(content)
        with pytest.raises(StoreError, match=name):
            predict(copy)


def test_inspect_shows_the_hottest_keys(run: moesaic.Run, exported: Path) -> None:
    batch = samples_of(run, training=True)
    shows, clicks = defaultdict[int, float](float), defaultdict[int, float](float)
    assert len(batch) == 400
    for bag, (start, end) in enumerate(zip(batch.offsets, batch.offsets[1:], strict=False)):
        sample = bag % len(batch)
        share = 0.25 if sample < 200 else 0.5  # Two days end, and each halves the counts.
        for key in {*batch.keys[start:end].tolist()}:
            shows[key] += share
            clicks[key] += share * batch.labels[sample]
    scores = {key: 0.1 * (shows[key] - clicks[key]) + clicks[key] for key in shows}
    order = sorted(scores, key=lambda key: (-round(scores[key], 4), key))
    for path in (run.directory, exported):
        table = inspect_path(path)["table"]
        assert (table["rows"], table["day"]) == (len(shows), 2)
        assert [one["key"] for one in table["hottest"]] == order[:10]
        for one in table["hottest"]:
            assert one["show"] == pytest.approx(shows[one["key"]])
            assert one["click"] == pytest.approx(clicks[one["key"]])
    assert inspect_path(exported, verify=True)["verified"]


def test_the_report_has_clicks_and_no_experts(run: moesaic.Run) -> None:
    summary, steps = run.summary(), run.steps()
    assert (summary["unit"], summary["experts"]) == ("samples", None)
    assert [one["day"] for one in summary["clicks"]["days"]] == [0, 1]
    assert summary["clicks"]["days"][1]["samples"] == 200
    assert summary["table"]["rows"] == steps["rows"][-1].as_py() > 0
    assert {"auc", "samples", "samples_per_s", "data_s"} <= {*steps.column_names}
    assert not {"tokens", "dropped", "replicas"} & {*steps.column_names}
    text = run.report().read_text()
    found = re.search(r'id="page-data">(.*?)</script>', text, re.S)
    assert found is not None
    assert [one["name"] for one in json.loads(found[1])["figures"]] == [
        "loss", "learning-rate", "gradient-norm", "auc", "normalized-entropy", "calibration",
        "gauc", "units-per-second", "phases", "phases-by-rank", "rows",
    ]  # fmt: skip
    page = re.sub(r"<script.*?</script>|<style.*?</style>", "", text, flags=re.S)
    assert "<dt>AUC</dt>" in page
    assert not re.search("token|expert", re.sub("<pre>.*?</pre>", "", page, flags=re.S))


def test_the_examples_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    examples = Path(__file__).parents[3] / "examples" / "ctr"
    assert not moesaic.Job.load(examples / "ctr.toml").warnings
    program = runpy.run_path(str(examples / "own_loop.py"))
    program["train"](str(tmp_path / "rows"))
    losses = re.findall(r"loss (\S+),", capsys.readouterr().out)
    assert float(losses[-1]) < float(losses[0])
    program["serve"](str(tmp_path / "rows"))
    assert "rows; norms" in capsys.readouterr().out


def test_the_command_line(
    run: moesaic.Run, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(run.directory), "--json", "--out", str(tmp_path / "p.csv")]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 200
    assert main(["predict", str(exported)]) == 0
    assert "(best possible" in capsys.readouterr().out
    assert main(["convert", str(run.directory), "--out", str(tmp_path / "out")]) == 0
    assert main(["inspect", str(tmp_path / "out")]) == 0
    assert "hottest keys" in capsys.readouterr().out
    assert main(["predict", str(exported), "--out", "p.txt"]) == 2
    assert "name a file .parquet or .csv" in capsys.readouterr().err

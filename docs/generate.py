"""Write docs/config.md, the page of every key, and the tables of keys in other pages.

`make docs` runs it. With --check it writes nothing and fails if a page is out of date.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel

from moesaic.base import keys
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.facts.cluster.file import ClusterFile
from moesaic.facts.cluster.presets import SOURCES
from moesaic.facts.job import FinetuneConfig, Job
from moesaic.facts.job.bench import BenchConfig
from moesaic.facts.job.ctr import CtrJob
from moesaic.facts.plan import Plan
from moesaic.models.hf.settings import ConvertConfig
from moesaic.serve.config import AdversarialConfig, EvalConfig, GenerateConfig, ServeConfig

DOCS = Path(__file__).parent

OPENING = """# Configuration

Every key of moesaic, generated from the code by `make docs`. The command line explains them too:
`moesaic train --explain train.batch`, `moesaic generate --explain all`. [plan.md](plan.md#keys) has
the keys of plans (`moesaic plan --explain plan.expert_placement`), [facts.md](facts.md#keys) those
of clusters (`moesaic plan --explain cluster.hosts`).

A job file sets the keys of `moesaic train`; `--set train.steps=100` changes one of them. Other
verbs have no file: `--set` alone sets their keys. Values are TOML; any other value is a string.
Paths are relative to the current directory.
"""

_HEADERS = {"table": "[{}]", "list of tables": "[[{}]]"}
"""Headings of subsections, by the kind of their keys."""
VERBS: dict[str, tuple[type[BaseModel], str]] = {
    "The job": (Job, "`moesaic train JOB.toml`"),
    "The ctr job": (
        CtrJob,
        '`moesaic train JOB.toml` with `kind = "ctr"`, see [recommender.md](recommender.md). Its '
        "other tables and keys, such as those of [optimizer], are as in a job above.",
    ),
    "generate": (GenerateConfig, "`moesaic generate MODEL --set KEY=VALUE`"),
    "generate --adversarial": (
        AdversarialConfig,
        "`moesaic generate MODEL --adversarial --set KEY=VALUE`, see "
        "[credibility.md](credibility.md). Its other keys are those of generate, but for n and "
        "logprobs.",
    ),
    "serve": (ServeConfig, "`moesaic serve MODEL --set KEY=VALUE`"),
    "eval": (
        EvalConfig,
        "`moesaic eval MODEL --tasks PATH --set KEY=VALUE`, see [eval.md](eval.md).",
    ),
    "convert": (ConvertConfig, "`moesaic convert SOURCE --out DIR --set KEY=VALUE`"),
    "probe": (ProbeConfig, "`moesaic probe --set KEY=VALUE`"),
    "bench": (BenchConfig, "`moesaic bench layer --set KEY=VALUE`"),
}


def render() -> str:
    """Return the page of every key."""
    parts = [OPENING]
    for title, (kind, usage) in VERBS.items():
        parts += [f"## {title}\n\n{usage}\n", *_sections(kind)]
    return "\n".join(parts)


def with_tables(page: str) -> str:
    """Return `page` with current tables between its markers."""
    sources = [f"| `{name}` | {source} |" for name, source in SOURCES.items()]
    parts = {
        "cluster": "\n".join(_table(_grouped(ClusterFile))),
        "presets": "\n".join(["| preset | source of its figures |", "| --- | --- |", *sources, ""]),
        "plan": "\n".join(_table(_grouped(Plan))),
        "finetune": "\n".join(_table(list(keys.walk(FinetuneConfig, "finetune.")))),
    }
    for name, body in parts.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, found, rest = page.partition(begin)
        if not found:
            continue
        page = f"{before}{begin}\n{body}\n{end}{rest.partition(end)[2]}"
    return page


def _sections(kind: type[BaseModel]) -> list[str]:
    """Return a table of the section's own keys, then a heading and a table for each subsection."""
    parts: list[str] = []
    rows: list[keys.Key] = []
    repeated = _repeated_keys(kind) if kind is CtrJob else _model_keys(kind)
    for entry in _grouped(kind):
        if entry.path in repeated:
            continue
        if entry.kind in _HEADERS:
            header = _HEADERS[entry.kind].format(entry.path)
            parts += [*_table(rows), f"### {header}\n\n{entry.meaning}\n"]
            rows = []
        else:
            rows.append(entry)
    return [*parts, *_table(rows)]


def _model_keys(kind: type[BaseModel]) -> set[str]:
    """Return the keys of a student's model, which are those of [model], and the keys that pairs of
    text have in common with generated text."""
    if kind is AdversarialConfig:
        return {one.path for one in keys.walk(kind)} & {
            one.path for one in keys.walk(GenerateConfig) if one in list(keys.walk(kind))
        }
    return {one.path for one in keys.walk(kind) if one.path.startswith("student.model.")}


def _repeated_keys(kind: type[BaseModel]) -> set[str]:
    """Return the keys that equal those of a job, of tables with the same keys as there."""
    of_job, repeated = _tables_of(Job), set[str]()
    for name, own in _tables_of(kind).items():
        others = of_job.get(name, [])
        if [one.path for one in own] == [one.path for one in others]:
            equal = {one.path for one, other in zip(own, others, strict=True) if one == other}
            repeated |= equal | ({name} if len(equal) == len(own) else set())
    return repeated


def _tables_of(kind: type[BaseModel]) -> dict[str, list[keys.Key]]:
    """Return the keys of each top-level table, without the table itself."""
    tables: dict[str, list[keys.Key]] = {}
    for entry in keys.walk(kind):
        table, _, name = entry.path.partition(".")
        if name:
            tables.setdefault(table, []).append(entry)
    return tables


def _grouped(kind: type[BaseModel]) -> list[keys.Key]:
    """Return the keys of a section: its own values, then each subsection followed by its values."""
    entries = list(keys.walk(kind))
    values: dict[str, list[keys.Key]] = {"": []}
    for entry in entries:
        if entry.kind not in _HEADERS:
            values.setdefault(entry.path.rpartition(".")[0], []).append(entry)
    grouped = values[""]
    for entry in entries:
        if entry.kind in _HEADERS:
            grouped += [entry, *values.get(entry.path, [])]
    return grouped


def _table(rows: list[keys.Key]) -> list[str]:
    """Return a Markdown table of keys."""
    if not rows:
        return []
    lines = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        default = f"`{row.default}`" if row.default else ""
        cells = (f"`{row.path}`", row.kind, default, row.meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return ["\n".join(lines) + "\n"]


def main(arguments: list[str]) -> int:
    """Write the pages, or with --check report those out of date; return the exit status."""
    pages = {DOCS / "config.md": render()}
    for path in (DOCS / "facts.md", DOCS / "finetune.md", DOCS / "plan.md"):
        pages[path] = with_tables(path.read_text(encoding="utf-8"))
    if arguments == ["--check"]:
        stale = [path for path, page in pages.items() if path.read_text(encoding="utf-8") != page]
        for path in stale:
            print(f"docs/{path.name} is out of date: run make docs", file=sys.stderr)
        return 1 if stale else 0
    for path, page in pages.items():
        path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

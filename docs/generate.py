"""Writes docs/config.md, the page of every key, and tables of other pages.

`make docs` does.

With --check nothing is written, and a page that is not current is an error.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel

from moesaic.base import keys
from moesaic.cli.inspect import InspectConfig
from moesaic.dist.probe.settings import ProbeConfig
from moesaic.facts.cluster.file import ClusterFile
from moesaic.facts.cluster.presets import SOURCES
from moesaic.facts.job import FinetuneConfig, Job
from moesaic.facts.job.bench import BenchConfig
from moesaic.facts.plan import Plan
from moesaic.models.hf.settings import ConvertConfig
from moesaic.serve.config import GenerateConfig

DOCS = Path(__file__).parent

OPENING = """# Configuration

Every key that moesaic knows, generated from the code by `make docs`. The command line says the
same: `moesaic train --explain train.batch`, `moesaic generate --explain all`. It knows the keys of
a plan and of a cluster too, whose pages are [plan.md](plan.md) and [facts.md](facts.md):
`moesaic plan --explain plan.homes`, `moesaic plan --explain cluster.hosts`.

What `moesaic train` is told stands in a job file; `--set train.steps=100` changes one key of it.
The other verbs have no file: their keys are set by `--set` alone. Values are TOML; what is no TOML
is a string. Paths are relative to the directory that the command runs in.
"""

VERBS: dict[str, tuple[type[BaseModel], str]] = {
    "The job": (Job, "`moesaic train JOB.toml`"),
    "generate": (GenerateConfig, "`moesaic generate MODEL --set KEY=VALUE`"),
    "convert": (ConvertConfig, "`moesaic convert SOURCE --out DIR --set KEY=VALUE`"),
    "probe": (ProbeConfig, "`moesaic probe --set KEY=VALUE`"),
    "bench": (BenchConfig, "`moesaic bench layer --model NAME --set KEY=VALUE`"),
    "inspect": (InspectConfig, "`moesaic inspect PATH --set KEY=VALUE`"),
}


def render() -> str:
    """The page."""
    parts = [OPENING]
    for title, (kind, usage) in VERBS.items():
        parts += [f"## {title}\n\n{usage}\n", *_keys(kind)]
    return "\n".join(parts)


def with_tables(page: str) -> str:
    """A page with what is generated in it: keys of sections, sources of presets."""
    sources = [f"| `{name}` | {source} |" for name, source in SOURCES.items()]
    parts = {
        "cluster": "\n".join(_keys(ClusterFile)),
        "presets": "\n".join(["| preset | figures from |", "| --- | --- |", *sources, ""]),
        "plan": "\n".join(_keys(Plan)),
        "finetune": "\n".join(_table(list(keys.walk(FinetuneConfig, "finetune.")))),
    }
    for name, body in parts.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        before, found, rest = page.partition(begin)
        if not found:
            continue
        page = f"{before}{begin}\n{body}\n{end}{rest.partition(end)[2]}"
    return page


def _keys(kind: type[BaseModel]) -> list[str]:
    """Every key of a section: its own, then a heading for each table in it, with its keys."""
    entries, headers = list(keys.walk(kind)), {"table": "[{}]", "list of tables": "[[{}]]"}
    values: dict[str, list[keys.Key]] = {}
    for entry in entries:
        if entry.kind not in headers:
            values.setdefault(entry.path.rpartition(".")[0], []).append(entry)
    parts = _table(values.get("", []))
    for entry in entries:
        if entry.kind in headers:
            header = headers[entry.kind].format(entry.path)
            parts.append(f"### {header}\n\n{entry.meaning}\n")
            parts += _table(values.get(entry.path, []))
    return parts


def _table(rows: list[keys.Key]) -> list[str]:
    if not rows:
        return []
    lines = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = (f"`{row.path}`", row.kind, f"`{row.default}`", row.meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return ["\n".join(lines) + "\n"]


def main(arguments: list[str]) -> int:
    """Write the pages, or say whether they are current."""
    pages = {DOCS / "config.md": render()}
    for path in (DOCS / "facts.md", DOCS / "finetune.md", DOCS / "plan.md"):
        pages[path] = with_tables(path.read_text(encoding="utf-8"))
    if arguments == ["--check"]:
        stale = [path for path, page in pages.items() if path.read_text(encoding="utf-8") != page]
        for path in stale:
            print(f"docs/{path.name} is not current: make docs", file=sys.stderr)
        return 1 if stale else 0
    for path, page in pages.items():
        path.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

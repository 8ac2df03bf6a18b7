"""Writes docs/config.md, the page of every key: `make docs`.

With --check nothing is written, and a page that is not current is an error.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel

from moesaic.base import keys
from moesaic.cli.inspect import InspectConfig
from moesaic.facts.job import Job
from moesaic.models.hf.settings import ConvertConfig
from moesaic.serve.config import GenerateConfig

PAGE = Path(__file__).with_name("config.md")

OPENING = """# Configuration

Every key that moesaic knows, generated from the code by `make docs`. The command line says the
same: `moesaic train --explain train.batch`, `moesaic generate --explain all`.

What `moesaic train` is told stands in a job file; `--set train.steps=100` changes one key of it.
The other verbs have no file: their keys are set by `--set` alone. Values are TOML; what is no TOML
is a string. Paths are relative to the directory that the command runs in.
"""

VERBS: dict[str, tuple[type[BaseModel], str]] = {
    "The job": (Job, "`moesaic train JOB.toml`"),
    "generate": (GenerateConfig, "`moesaic generate MODEL --set KEY=VALUE`"),
    "convert": (ConvertConfig, "`moesaic convert SOURCE --out DIR --set KEY=VALUE`"),
    "inspect": (InspectConfig, "`moesaic inspect PATH --set KEY=VALUE`"),
}


def render() -> str:
    """The page."""
    parts = [OPENING]
    for title, (kind, usage) in VERBS.items():
        parts.append(f"## {title}\n\n{usage}\n")
        rows: list[keys.Key] = []
        for entry in keys.walk(kind):
            if entry.kind == "table" and not entry.default:
                parts += _table(rows)
                rows = []
                parts.append(f"### [{entry.path}]\n\n{entry.meaning}\n")
            else:
                rows.append(entry)
        parts += _table(rows)
    return "\n".join(parts)


def _table(rows: list[keys.Key]) -> list[str]:
    if not rows:
        return []
    lines = ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
    for row in rows:
        cells = (f"`{row.path}`", row.kind, f"`{row.default}`", row.meaning)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return ["\n".join(lines) + "\n"]


def main(arguments: list[str]) -> int:
    """Write the page, or say whether it is current."""
    page = render()
    if arguments == ["--check"]:
        if PAGE.read_text(encoding="utf-8") == page:
            return 0
        print("docs/config.md is not current: make docs", file=sys.stderr)
        return 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

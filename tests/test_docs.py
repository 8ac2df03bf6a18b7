"""What documents say of the project is so: links lead somewhere, commands and jobs are taken."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from moesaic.base import keys, unknown_keys
from moesaic.base.config import parse
from moesaic.cli.main import expand_resume, make_app
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.job.ctr import CtrJob
from moesaic.facts.job.job import fill_preset
from moesaic.facts.plan import Plan

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)|<img[^>]*src=\"([^\"]+)\"")
AREAS = "|".join(p.name for p in (ROOT / "src/moesaic").iterdir() if (p / "__init__.py").exists())

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def prose(text: str) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", text)


def blocks(page: Path, *kinds: str) -> Iterator[str]:
    """The code blocks of a page whose info string is one of `kinds`."""
    for kind, body in FENCE.findall(page.read_text()):
        if kind.strip() in kinds:
            yield body


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(page.read_text()), flags=re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", h.lower()).replace(" ", "-") for h in headings}


def commands(text: str) -> Iterator[list[str]]:
    """Every call of moesaic in a shell block, as arguments."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        for place, word in enumerate(words):
            called = word in ("moesaic", ".venv/bin/moesaic")
            if called and (place in (0, 1) or words[place - 1] == "-m"):
                yield words[place + 1 :]


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for groups in LINK.findall(prose(page.read_text())):
        target = next(filter(None, groups))
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), target


@every_page
def test_commands_are_taken(page: Path) -> None:
    group = typer.main.get_command(make_app())
    for block in blocks(page, "", "sh", "bash", "console"):
        for arguments in commands(block):
            verb, *rest = expand_resume(arguments)
            verbs: dict[str, typer.core.TyperCommand] = getattr(group, "commands")  # noqa: B009
            assert verb in verbs, f"moesaic {verb}"
            context = verbs[verb].make_context(verb, list(rest))
            if verb == "train":
                for item in context.params["sets"] or ():
                    key = item.partition("=")[0]
                    unknown_keys.locate(CtrJob if key.startswith("table.") else Job, key)
    inline = re.findall(r"`moesaic ([a-z-]+)", prose(page.read_text()))
    assert set(inline) <= set(getattr(group, "commands"))  # noqa: B009


@every_page
def test_targets_of_make_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    text = page.read_text()
    called = re.findall(r"(?:^|`)make(?: [A-Z]+=\S+)* ([a-z][a-z-]+)", text, flags=re.MULTILINE)
    for target in called:
        assert target in targets or target.startswith("bench-"), f"make {target}"


@every_page
def test_jobs_plans_and_clusters_parse(page: Path) -> None:
    for body in blocks(page, "toml"):
        tomllib.loads(body)
    for body in blocks(page, "toml job"):
        raw = tomllib.loads(body)
        if raw.get("kind") == "ctr":
            parse(CtrJob, raw, str(page))
            continue
        if "from" in raw["model"]:
            raw["model"] = {"preset": "tiny-olmoe"}  # what the directory would say
        job = parse(Job, fill_preset(raw), str(page))
        assert not job.ineffective_settings()
    for body in blocks(page, "json plan"):
        parse(Plan, json.loads(body), str(page))
    for body in blocks(page, "toml cluster"):
        resolve_cluster(tomllib.loads(body), str(page))


@every_page
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    for place in re.findall(
        r"`((?:tests|src|docs|examples|benchmarks)/[^`\s*]+)`", page.read_text()
    ):
        path, _, name = place.partition("::")
        assert (ROOT / path).exists(), place
        if name:
            tree = ast.parse((ROOT / path).read_text())
            assert name in {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}, place


@every_page
def test_names_with_dots_are_modules_or_keys(page: Path) -> None:
    known = {entry.path for kind in (Job, CtrJob) for entry in keys.walk(kind)}
    for name in re.findall(rf"`((?:{AREAS})(?:\.[a-zA-Z_]+)+)`", page.read_text()):
        parts = name.split(".")
        if parts[-1] == "html":
            continue  # report.html is a file
        module = ROOT / "src/moesaic" / "/".join(parts)
        above = module.parent.with_suffix(".py")
        package = module.parent / "__init__.py"
        holder = above if above.exists() else package
        inside = holder.exists() and re.search(rf"\b{parts[-1]}\b", holder.read_text())
        assert name in known or module.with_suffix(".py").exists() or module.is_dir() or inside, (
            name
        )


def test_the_pages_of_keys_are_current() -> None:
    subprocess.run([sys.executable, ROOT / "docs/generate.py", "--check"], check=True)


def test_a_wrong_document_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for text, check in (
        ("[here](nowhere.md)", test_links_lead_somewhere),
        ("[here](#nothing)", test_links_lead_somewhere),
        ("```\nmoesaic train job.toml --flags 2\n```", test_commands_are_taken),
        ("```\nmoesaic fly\n```", test_commands_are_taken),
        ("```\nmoesaic train a.toml --set train.step=3\n```", test_commands_are_taken),
        ("`make everything`", test_targets_of_make_exist),
        ("```toml job\n[model]\npreset = 'tiny'\n```", test_jobs_plans_and_clusters_parse),
        ("```toml cluster\nname = 'c'\nhosts = []\n```", test_jobs_plans_and_clusters_parse),
        ("`tests/world/test_layouts.py::test_nothing`", test_files_and_tests_that_are_named_exist),
        ("`nn.gate`", test_names_with_dots_are_modules_or_keys),
    ):
        page.write_text(text + "\n")
        with pytest.raises(Exception):  # noqa: B017, PT011 - of many kinds
            check(page)

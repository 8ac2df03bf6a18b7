"""Wording: old identifiers stay away, and docstrings use plain sentences.

Rules and reasons: CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CODE = sorted(p for d in ("src", "tests", "benchmarks") for p in (ROOT / d).rglob("*.py"))
PAGES = sorted(
    page
    for pattern in ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/*.md")
    for page in ROOT.glob(pattern)
)

OLD = {
    "visits": "dedup (deduplicated tokens)",
    "by_visits": "dedup",
    "guests": "replicas",
    "guest": "replica",
    "gifts": "quota_search",
    "journey": "Exchange",
    "Journey": "Exchange",
    "Carrier": "Transport",
    "Flight": "AsyncAllToAll",
    "Held": "LocalParam, RankMemory or LockHeld",
    "Piece": "TensorShard",
    "Stretch": "FlatParams",
    "ByRows": "AllToAll",
    "ByVisits": "DedupAllToAll",
    "RowsByHosts": "HierarchicalAllToAll",
    "ByHosts": "HierarchicalDedup",
    "rehome": "migrate",
    "rehome_every": "migrate_every",
    "rehoming": "expert_migration",
    "rehomed": "migrated",
    "homes_of_layers": "expert_placement_by_layer",
    "copies_sent": "max_replicas_sent",
    "least_rows": "min_replica_tokens",
    "handling_s": "cpu_s_per_byte",
    "matrices_s": "weight_read_s",
    "rows_per_s": "expert_tokens_per_s",
    "deadline_s": "collective_timeout_s",
    "foretold": "predicted",
    "outlook": "prediction",
    "binds": "bottleneck",
    "jobfile": "job_file",
}
"""Identifiers of this project's former private language, and their replacements."""

OPENERS = re.compile(r"(Of|What|That|Whether|Who|Whose|Whom|Nobody)\b")
MAX_WORDS = 25


def old_words(text: str) -> list[str]:
    """Return the old identifiers of a Python file, with their lines."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    names = (t for t in tokens if t.type == tokenize.NAME and t.string in OLD)
    return [f"{t.start[0]}: `{t.string}` is now {OLD[t.string]}" for t in names]


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring and field doc."""
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def faults(doc: str) -> list[str]:
    """Return what is wrong with a docstring: an opener of the old voice, an endless sentence."""
    found = []
    for paragraph in re.split(r"\n\s*\n|\n\s*(?=- )|\n\s*\w+: ", doc):
        for sentence in re.split(r"(?<=[.:;?!])\s+", " ".join(paragraph.split())):
            if OPENERS.match(sentence):
                found.append(f"begins with '{sentence.split()[0]}': {sentence[:60]}")
            if len(sentence.split()) > MAX_WORDS:
                found.append(f"has {len(sentence.split())} words: {sentence[:60]}...")
    return found


@pytest.mark.parametrize("area", ["src", "tests", "benchmarks"])
def test_old_identifiers_stay_away(area: str) -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{line}"
        for path in CODE
        if path.is_relative_to(ROOT / area) and path != Path(__file__)
        for line in old_words(path.read_text(encoding="utf-8"))
    ]


def test_old_identifiers_stay_out_of_pages() -> None:
    assert not [
        f"{page.relative_to(ROOT)}: `{word}` is now {OLD[word]}"
        for page in PAGES
        for word in re.findall(r"`(\w+)`", page.read_text(encoding="utf-8"))
        if word in OLD
    ]


def test_docstrings_are_plain() -> None:
    assert not [
        f"{path.relative_to(ROOT)}:{line}: {fault}"
        for path in CODE
        if path.is_relative_to(ROOT / "src")
        for line, doc in docstrings(path.read_text(encoding="utf-8"))
        for fault in faults(doc)
    ]


def test_the_rules_can_fail() -> None:
    assert old_words("x = a.visits\n") == ["1: `visits` is now dedup (deduplicated tokens)"]
    assert faults("What computes so many times.") != []
    assert faults("word " * 40) != []
    assert faults("Return the number of tokens.") == []

"""Text of the theme `titan-quality`: what Python and Debian install, by genre and source.

A source is a help topic, a module, a licence or a manual page. Sources are split by a hash of their
names, so text that was held out shares no file with text that was learned.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import re
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import tokenizers

LICENCES = ("/usr/share/common-licenses", "*"), ("/usr/share/doc", "*/copyright")
MANUALS = Path("/usr/share/man")
END = "<|end|>"
_FONTS = {"B", "I", "SM", "SB", "BR", "RB", "BI", "IB", "IR", "RI"}
_FONT = re.compile(r"\\f(?:\(..|\[[^]]*\]|.)|\\s[+-]?\d|\\[&|/,^:]")
_SYMBOLS = (
    (re.compile(r"\\\*?\((?:aq|Aq|cq|oq)"), "'"), (re.compile(r"\\\*?\((?:lq|rq|dq)"), '"'),
    (re.compile(r"\\\*?\(..|\\\*?\[[^]]*\]"), ""), (re.compile(r"\\-"), "-"),
    (re.compile(r"\\e"), r"\\"), (re.compile(r"\\(.)"), r"\1"),
)  # fmt: skip


class Passage(NamedTuple):
    """A text and where it is from."""

    genre: str
    source: str
    text: str


def help_topics() -> Iterator[Passage]:
    """Yield the paragraphs of Python's help topics."""
    for name, text in sorted(topics.items()):
        for part in paragraphs(text):
            if not part.startswith((" ", "*", ">")) and "::=" not in part:
                yield Passage("help", f"topic {name}", flat(part))


def modules() -> Iterator[tuple[str, str]]:
    """Yield names and text of the standard library's modules."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield f"module {path.stem}", path.read_text(encoding="utf-8", errors="replace")


def code() -> Iterator[Passage]:
    """Yield statements of the standard library of at most six lines, without comments."""
    for name, text in modules():
        for node in ast.walk(ast.parse(text)):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if isinstance(node, ast.stmt) and not is_text and _lines(node) <= 6:
                yield Passage("source", name, ast.unparse(node))


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def docstrings() -> Iterator[Passage]:
    """Yield paragraphs of the standard library's docstrings."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for name, text in modules():
        for node in ast.walk(ast.parse(text)):
            for part in paragraphs((isinstance(node, kinds) and ast.get_docstring(node)) or ""):
                if not part.startswith((" ", ">")):
                    yield Passage("docstring", name, flat(part))


def licences() -> Iterator[Passage]:
    """Yield paragraphs of licences and of packages' notices."""
    for directory, pattern in LICENCES:
        for path in sorted(Path(directory).glob(pattern)):
            if not path.is_symlink():
                notice = path.read_text(encoding="utf-8", errors="replace")
                for part in paragraphs(re.sub(r"(?m)^ \.$", "", notice)):
                    if not re.search(r"(?m)^(Files|Copyright|Source|Format):|\(c\)|@", part):
                        yield Passage("licence", str(path), flat(part))


def manuals(sections: str) -> Iterator[Passage]:
    """Yield paragraphs of the manual pages of `sections`; of a group such as `git-`, four pages."""
    seen: dict[str, int] = {}
    for section in sections:
        for path in sorted(MANUALS.glob(f"man{section}/*.gz")):
            group = re.split(r"[-_.]", path.name)[0]
            seen[group] = seen.get(group, 0) + 1
            if seen[group] <= 4 and not path.is_symlink():
                page = gzip.decompress(path.read_bytes()).decode(errors="replace")
                for part in roff_paragraphs(page):
                    yield Passage("manual", f"manual {path.stem}", part)


def roff_paragraphs(page: str) -> Iterator[str]:
    """Yield the paragraphs of a manual page as plain text, roughly."""
    lines: list[str] = []
    for line in [*page.splitlines(), "."]:
        if line.startswith(('."', '.\\"', "'\\")):
            continue
        macro, _, words = line[1:].partition(" ")
        if line.startswith((".", "'")) or not line.strip():
            if macro in _FONTS:
                glue = "" if len(macro) == 2 and macro not in ("SM", "SB") else " "
                lines.append(glue.join(re.findall(r'"[^"]*"|\S+', words)).replace('"', ""))
                continue
            if lines:
                yield flat(plain(" ".join(lines)))
            lines = []
        else:
            lines.append(line)


def plain(text: str) -> str:
    """Return text without roff's escapes."""
    text = _FONT.sub("", text)
    for pattern, replacement in _SYMBOLS:
        text = pattern.sub(replacement, text)
    return text


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text without their common indentation."""
    for part in re.split(r"\n\s*\n", text.expandtabs(4)):
        lines = [line.rstrip() for line in part.strip("\n").splitlines() if line.strip()]
        indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
        if lines:
            yield "\n".join(line[indent:] for line in lines)


def flat(text: str) -> str:
    """Return text on one line."""
    return re.sub(r"\s+", " ", text).strip()


def is_ascii(one: Passage) -> bool:
    return one.text.isascii()


def share(name: str, seed: int = 0) -> float:
    """Return a number in [0, 1) that depends on a name alone."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:6]) / 2**48


def thin(found: Iterable[Passage], limit: int, key: Callable[[Passage], str]) -> list[Passage]:
    """Return at most `limit` distinct passages, chosen by a hash of `key`."""
    distinct = {one.text: one for one in found}.values()
    return sorted(distinct, key=lambda one: share(key(one)))[:limit]


def write_lines(path: Path, records: Iterable[dict[str, object]]) -> Path:
    """Write records as JSON lines."""
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    return path


def make_tokenizer(texts: Iterable[str], vocab: int, directory: Path) -> tokenizers.Tokenizer:
    """Write a byte-level BPE of `vocab` words to `directory`; digits stand alone."""
    directory.mkdir(parents=True, exist_ok=True)
    pre = tokenizers.pre_tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[tokenizers.AddedToken(END, special=True)],
        initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer

"""Write short texts of two genres as JSON lines: Python's help topics and its library's source.

    python examples/control/make_texts.py DIRECTORY

writes DIRECTORY/texts.jsonl, a paragraph a line: {"text": ..., "genre": ..., "topic": ...}.
"""

from __future__ import annotations

import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

SHORTEST, LONGEST = 40, 240
"""Characters of a text."""
MODULES = ("argparse", "ast", "calendar", "copy", "csv", "enum", "heapq", "inspect", "shutil")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text that are neither too short nor too long."""
    for paragraph in text.split("\n\n"):
        lines = [line.rstrip() for line in paragraph.strip("\n").splitlines()]
        indent = min((len(line) - len(line.lstrip()) for line in lines if line), default=0)
        found = "\n".join(line[indent:] for line in lines)
        if SHORTEST <= len(found) <= LONGEST:
            yield found


def texts() -> Iterator[dict[str, str]]:
    """Yield the records of both genres."""
    for topic, text in sorted(topics.items()):
        for one in paragraphs(text):
            yield {"text": one, "genre": "help", "topic": topic}
    library = Path(sysconfig.get_path("stdlib"))
    for module in MODULES:
        for one in paragraphs((library / f"{module}.py").read_text(encoding="utf-8")):
            yield {"text": one, "genre": "source", "topic": module}


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / "texts.jsonl"
    lines = [json.dumps(one) + "\n" for one in texts()]
    target.write_text("".join(lines), encoding="utf-8")
    print(f"{target}: {len(lines)} texts, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

"""Write the text of the demo: the help topics of Python's own `pydoc`, as JSON lines.

    python examples/demo/make_text.py DIRECTORY

writes DIRECTORY/topics.jsonl, one topic a line: {"topic": ..., "text": ...}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / "topics.jsonl"
    with target.open("w", encoding="utf-8") as file:
        for topic, text in sorted(topics.items()):
            file.write(json.dumps({"topic": topic, "text": text}) + "\n")
    print(f"{target}: {len(topics)} topics, {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))

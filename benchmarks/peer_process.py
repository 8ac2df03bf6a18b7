"""A peer in an environment of its own: a process that takes turns with this one."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import measure
from moesaic.api.start import SPIN_COUNT

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moesaic" / "peers"
SPINS = "GOMP_SPINCOUNT"
"""Variable that moesaic sets for OpenMP in its own processes."""
Arm = Callable[[dict[str, Any]], dict[str, Any]]
"""An arm handles a request, such as the arguments of `batches`, and returns seconds."""


def interpreter(name: str) -> Path:
    """Return the interpreter of the environment of the peers of theme `name`."""
    return CACHE / name / "bin" / "python"


@contextmanager
def peer(python: Path, module: str, *arguments: object) -> Iterator[Arm]:
    """Start a module in an environment, and end its process at the end.

    The module prints a line of JSON when it is ready, and one for each line that it reads.
    """
    command = [str(python), "-m", module, *map(str, arguments)]
    environment = dict(os.environ)
    if environment.get(SPINS) == SPIN_COUNT:
        del environment[SPINS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, cwd=measure.ROOT, env=environment,
    ) as process:  # fmt: skip
        requests, answers = process.stdin, process.stdout
        assert requests is not None
        assert answers is not None

        def answer() -> dict[str, Any]:
            for line in answers:
                if line.startswith("{"):  # Libraries print other lines.
                    found: dict[str, Any] = json.loads(line)
                    return found
            raise RuntimeError(f"a peer ended: run `{' '.join(command)}` to see why")

        def ask(request: dict[str, Any]) -> dict[str, Any]:
            requests.write(json.dumps(request) + "\n")
            requests.flush()
            return answer()

        answer()
        yield ask
        requests.close()

"""A save that is under way when its program ends is finished all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moesaic.dist.checkpoint import Checkpoint, committed

SCRIPT = """
import sys
from pathlib import Path
import torch
from moesaic.dist.checkpoint import Saver
from moesaic.dist.state import PARAMETER, Piece, State
from moesaic.dist.world import World

values = torch.arange(24_000_000.0)
saver = Saver(Path(sys.argv[1]), World.solo(), keep=2, file_bytes=32 << 20)
pieces = [
    Piece(PARAMETER, f"p{i}", (8_000_000,), (0,), part, (0,))
    for i, part in enumerate(values.split(8_000_000))
]
saver.save(State(pieces, {"step": 1}), 1, {})
"""


def test_whoever_does_not_wait_has_a_checkpoint(tmp_path: Path) -> None:
    """The interpreter waits for its threads, but lets them begin no others."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = committed(tmp_path)
    checkpoint = Checkpoint.open(path)
    checkpoint.verify()
    assert len(checkpoint.tensors) == 3

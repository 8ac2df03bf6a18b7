"""A save in progress when its program ends is still completed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moesaic.dist.checkpoint import Checkpoint, list_committed

SCRIPT = """
import sys
from pathlib import Path
import torch
from moesaic.dist.checkpoint import Saver
from moesaic.dist.state import PARAMETER, State, TensorShard
from moesaic.dist.world import World

values = torch.arange(24_000_000.0)
saver = Saver(Path(sys.argv[1]), World.solo(), keep=2, file_bytes=32 << 20)
shards = [
    TensorShard.of_tensor(PARAMETER, f"p{i}", (8_000_000,), (0,), part, (0,))
    for i, part in enumerate(values.split(8_000_000))
]
saver.save(State(shards, {"step": 1}), 1, {})
"""


def test_exit_without_wait_completes_the_save(tmp_path: Path) -> None:
    """At exit, the interpreter waits for threads but starts no new ones."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = list_committed(tmp_path)
    checkpoint = Checkpoint.open(path)
    checkpoint.verify()
    assert len(checkpoint.tensors) == 3

"""Layout-independent checkpoints: saved in the background, committed atomically, loaded into any
layout.

`Saver` reads the shards of a running job and `Checkpoint` fills those of another; they share only
the files that `manifest` describes. Neither knows models or optimizers.
"""

from moesaic.dist.checkpoint.directory import list_committed, resume_candidates, set_head
from moesaic.dist.checkpoint.reader import Checkpoint, list_snapshots, newest_intact
from moesaic.dist.checkpoint.writer import PHASES, Saver

__all__ = [
    "PHASES",
    "Checkpoint",
    "Saver",
    "list_committed",
    "list_snapshots",
    "newest_intact",
    "resume_candidates",
    "set_head",
]

"""Checkpoints that know no layout: saved in the background, committed last, loaded into any other.

`Saver` takes pieces out of a running job, `Checkpoint` fills pieces of another one; the two share
only the files on disk, which `manifest` describes. Nothing here knows models or optimizers.
"""

from moesaic.dist.checkpoint.directory import candidates, committed, go_back_to
from moesaic.dist.checkpoint.reader import Checkpoint, newest_intact
from moesaic.dist.checkpoint.writer import PHASES, Saver

__all__ = [
    "PHASES",
    "Checkpoint",
    "Saver",
    "candidates",
    "committed",
    "go_back_to",
    "newest_intact",
]

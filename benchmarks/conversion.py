"""Conversion of a directory of ten gigabytes against a copy of the same bytes, for `families`.

Weights are random, in bf16, on file as transformers has them. Before every contender the page cache
drops what it reads, and every contender ends when the disk has what it wrote. A conversion is
`moesaic convert` with its start. families.md says what bounds the figures.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks import measure
from moesaic.base.safetensors_file import sync_directory
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.facts.workload import parameters
from moesaic.models.hf.config import CONFIG_NAME, config_text
from moesaic.models.hf.names import written_name
from moesaic.models.hf.reader import INDEX_NAME

OLMOE = {**PRESETS["olmoe-1b-7b"], "layers": 12}
"""OLMoE-1B-7B with 12 of its 16 layers, 10.5 GB."""
NOTHING = {
    **PRESETS["tiny-olmoe"], "layers": 1, "hidden": 32, "head_dim": 8, "ffn": 8, "experts": 2,
    "top_k": 1,
}  # fmt: skip
"""A model of almost no bytes: it shows the memory of the process itself."""
SHARD_BYTES = 1_000_000_000
ROUNDS = 5
ROOM = 2.5
"""Free space that the disk needs, in sizes of the directory."""
CHUNK_BYTES = 4 << 20
QUICK, SMALL = "<= 1.1", "<= 1.1"
CHILD = """
import sys
from moesaic.cli.main import main
status = main(sys.argv[1:])
import torch
from moesaic.kernels.device import peak_bytes
print(peak_bytes(torch.device("cpu")))  # wait() would count the parent process.
sys.exit(status)
"""


def rows(
    rounds: int, model: Mapping[str, Any] = OLMOE, shard_bytes: int = SHARD_BYTES
) -> Iterator[measure.Row]:
    """Measure conversions: time over that of a copy, memory over one shard."""
    with emptied(measure.ROOT / "build" / "conversion") as place:
        source = place / "source"
        make(source, ModelConfig(**model), shard_bytes)
        check_room(place, source)
        yield from Conversions(place, source, shard_bytes).rows(min(rounds, ROUNDS))


@contextmanager
def emptied(place: Path) -> Iterator[Path]:
    """Yield a new directory; remove it at the end, after SIGTERM too."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield place
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(place)


def make(directory: Path, model: ModelConfig, shard_bytes: int) -> None:
    """Write `model` with random bf16 weights, in shards of at most `shard_bytes`."""
    directory.mkdir()
    (directory / CONFIG_NAME).write_text(config_text(model, "bfloat16"))
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for one in parameters(model):
        if shards[-1] and filled + 2 * one.size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][written_name(model, one)] = one.shape
        filled += 2 * one.size
    files = {}
    for number, shapes in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        values = {name: torch.randn(size, dtype=torch.bfloat16) for name, size in shapes.items()}
        save_file(values, directory / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shapes, file)
    total = sum(2 * one.size for one in parameters(model))
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (directory / INDEX_NAME).write_text(json.dumps(index))


def size_of(directory: Path) -> int:
    """Return bytes of all files."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def check_room(place: Path, source: Path) -> None:
    """Raise if the disk has too little free space."""
    free, needed = shutil.disk_usage(place).free, ROOM * size_of(source)
    if free < needed:
        raise OSError(
            f"'{place}' has {free / 1e9:.0f} GB left of {needed / 1e9:.0f} GB that conversions "
            "are measured with: make room"
        )


class Conversions:
    """A directory, its checkpoint, and their conversions."""

    def __init__(self, place: Path, source: Path, shard_bytes: int) -> None:
        self.source, self.checkpoint, self.out = source, place / "checkpoint", place / "out"
        self.shard_bytes = shard_bytes
        self.peaks: dict[str, list[int]] = {}
        """Peak bytes of each conversion, by round."""
        nothing = place / "nothing"
        make(nothing, ModelConfig(**NOTHING), shard_bytes)
        self.own_bytes = self.convert("nothing", nothing, "huggingface")
        """Peak bytes of a conversion of almost nothing."""
        shutil.rmtree(self.out)

    def rows(self, rounds: int) -> Iterator[measure.Row]:
        """Measure time and memory of every conversion."""
        contenders = self._contenders()
        self._check()
        times = measure.interleave(
            contenders, rounds, warmup=0, patience_s=0.0, before=self._forget
        )
        shutil.rmtree(self.out)
        size, shard = size_of(self.source), largest(self.source)
        rate = size / times.median("copy") / 1e6
        against = f"a copy of the same bytes on the same disk, at {rate:.0f} MB/s"
        what = f"conversion of {size / 1e9:.1f} GB"
        found, above = list[measure.Row](), list[measure.Row]()
        for name in list(contenders)[1:]:
            title = f"{what}, {name}, time"
            found.append(measure.compare(title, times, name, "copy", against=against))
            over = [(peak - self.own_bytes) / shard for peak in self.peaks[name]]
            above.append(
                measure.row(
                    f"{what}, {name}, memory", statistics.median(over), "ratio", bar="",
                    interval=measure.bootstrap(over), repeats=rounds,
                    against=f"one shard of {shard / 1e9:.2f} GB, beside the "
                    f"{self.own_bytes / 1e9:.2f} GB of a process with nothing to convert",
                )
            )  # fmt: skip
        yield measure.worst(f"{what}, time over a copy's, worst of 3 ways", found, QUICK)
        yield measure.worst(f"{what}, memory over a shard, worst of 3 ways", above, SMALL)
        yield from found

    def _forget(self) -> None:
        """Remove the last result, and drop what is read from the page cache."""
        shutil.rmtree(self.out, ignore_errors=True)
        forget(self.source, self.checkpoint)

    def _contenders(self) -> dict[str, Callable[[], object]]:
        return {
            "copy": partial(copy, self.source, self.out),
            "directory to directory": partial(
                self.convert, "directory to directory", self.source, "huggingface"
            ),
            "directory to checkpoint": partial(
                self.convert, "directory to checkpoint", self.source, "checkpoint"
            ),
            "checkpoint to directory": partial(
                self.convert, "checkpoint to directory", self.checkpoint, "huggingface"
            ),
        }

    def _check(self) -> None:
        """Make the checkpoint, and check that conversions keep all tensors."""
        self.convert("checkpoint", self.source, "checkpoint")
        self.out.rename(self.checkpoint)
        for origin in (self.source, self.checkpoint):
            self.convert("check", origin, "huggingface")
            check_same(self.source, self.out)
            shutil.rmtree(self.out)

    def convert(self, name: str, origin: Path, to: str) -> int:
        """Convert in a process of its own; return its peak bytes."""
        command = [
            sys.executable, "-c", CHILD, "convert", str(origin), "--out", str(self.out),
            "--set", f"to={to}", "--set", f"max_shard_bytes={self.shard_bytes}",
        ]  # fmt: skip
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        peak = int(done.stdout.split()[-1])
        self.peaks.setdefault(name, []).append(peak)
        return peak


def largest(directory: Path) -> int:
    """Return bytes of the largest file."""
    return max(path.stat().st_size for path in directory.iterdir())


def copy(source: Path, target: Path) -> None:
    """Copy every file, and wait until the disk has it."""
    target.mkdir()
    chunk = memoryview(bytearray(CHUNK_BYTES))
    for path in sorted(source.iterdir()):
        with path.open("rb", 0) as file, (target / path.name).open("wb", 0) as out:
            while count := file.readinto(chunk):
                out.write(chunk[:count])
            os.fsync(out.fileno())
    sync_directory(target)


def forget(*directories: Path) -> None:
    """Drop all files from the page cache, so that the next read goes to the disk."""
    os.sync()
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def check_same(left: Path, right: Path) -> None:
    """Raise unless both directories hold the same tensors, bit for bit."""
    files = [_files(directory) for directory in (left, right)]
    if files[0].keys() != files[1].keys():
        raise ValueError(f"'{left}' and '{right}' hold other tensors")
    for name in files[0]:
        if not torch.equal(*(_read(one[name], name) for one in files)):
            raise ValueError(f"'{name}' of '{left}' is another one in '{right}'")


def _files(directory: Path) -> dict[str, Path]:
    """Return the file of every tensor."""
    files: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    return files


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor.view(torch.int16)

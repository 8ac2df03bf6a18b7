"""Weights out of a Hugging Face directory, tensor by tensor.

The headers of all files are read first: every parameter must be there with the shape that
config.json means, and every tensor must belong to a parameter. Then values are taken row by row
from memory-mapped files, one file at a time, so that a reader never holds more than one shard; or
tensor by tensor past the page cache, if each is read but once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moesaic.base import direct, tensorfile
from moesaic.base.errors import WeightsError
from moesaic.base.tensorfile import Entry
from moesaic.dist.state import PARAMETER, Piece
from moesaic.facts.job import ModelConfig
from moesaic.models.hf import fp8, names

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
_ROWS_COMPARED = 4096


@dataclass(frozen=True)
class Stored:
    """One tensor on file, from its header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


class HFSource:
    """The weights of `directory` as those of `model`: fills pieces, or gives whole parameters."""

    def __init__(self, directory: Path, model: ModelConfig, once: bool = False) -> None:
        """`once`: nothing will be read again, so that the system need not keep it in memory."""
        self._once = once
        self._stored = scan(directory)
        self._open: tuple[Path, Any] | None = None
        self._starts: dict[Path, dict[str, tuple[Entry, int]]] = {}
        chosen = names.choose(model, self._stored)
        _check(directory, model, self._stored, chosen)
        self._places = {name: place for name, place in chosen.items() if place is not None}
        self.notes: list[str] = []
        """Tensors on file that are passed over, and why, for a person to read."""
        used = {place.tensor for place in self._places.values()}
        spare: dict[str | None, list[str]] = {}
        for tensor in sorted(self._stored.keys() - used - _scales(used, self._stored)):
            spare.setdefault(_spare(model, self._stored, tensor), []).append(tensor)
        for reason, tensors in spare.items():
            self.notes.append(
                f"'{directory}': {_listed(tensors)} left out, and no export will have "
                f"{'it' if len(tensors) == 1 else 'them'}: {reason}"
            )
        if model.tied and names.HEAD in self._stored:
            self._check_tied(directory)

    def __enter__(self) -> HFSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def close(self) -> None:
        """Let go of the file that was read last; the source may be used again."""
        self._open = None

    def dtype(self, name: str) -> torch.dtype:
        """The dtype that `read` gives one parameter in: that on file, fp32 for scaled blocks."""
        dtype = self._stored[self._places[name].tensor].dtype
        return torch.float32 if dtype == fp8.DTYPE else DTYPES[dtype]

    def read(self, name: str) -> Tensor:
        """One whole parameter; a view of the mapped file, if that is what it is read from."""
        place = self._places[name]
        box = [slice(o, o + n) for o, n in zip(place.offset, place.size, strict=True)]
        return self._slice(place.tensor, box).reshape(_parameter_size(place))

    def fill(self, pieces: Sequence[Piece]) -> None:
        """Write values into every piece's tensor, file by file."""

        def position(piece: Piece) -> tuple[Path, str]:
            tensor = self._places[piece.name].tensor
            return self._stored[tensor].file, tensor

        for piece in sorted(pieces, key=position):
            if piece.kind != PARAMETER:
                raise ValueError(f"{piece.key}: a model directory holds parameters only")
            if piece.tensor.numel():
                self._fill(piece)
        self.close()

    def _fill(self, piece: Piece) -> None:
        place = self._places[piece.name]
        lead = len(place.shape) - len(piece.shape)
        offset = (*place.offset[:lead], *_added(place.offset[lead:], piece.offset))
        size = (*place.size[:lead], *piece.tensor.shape)
        box = [slice(o, o + n) for o, n in zip(offset, size, strict=True)]
        piece.tensor.copy_(self._slice(place.tensor, box).reshape(piece.tensor.shape))

    def _slice(self, tensor: str, box: Sequence[slice]) -> Tensor:
        if self._stored[tensor].dtype != fp8.DTYPE:
            return self._raw(tensor, box)
        scales = self._raw(fp8.scale_name(tensor), fp8.scale_box(box))
        return fp8.dequantise(self._raw(tensor, box), scales, box)

    def _raw(self, tensor: str, box: Sequence[slice]) -> Tensor:
        stored = self._stored[tensor]
        whole = all(s.stop - s.start == n for s, n in zip(box, stored.shape, strict=True))
        if self._once and whole and stored.dtype in DTYPES:
            return self._whole(tensor, stored)
        part: Tensor = self._opened(stored.file).get_slice(tensor)[tuple(box)]
        return part

    def _whole(self, tensor: str, stored: Stored) -> Tensor:
        if stored.file not in self._starts:
            self._starts[stored.file] = tensorfile.read_entries(stored.file)
        _, start = self._starts[stored.file][tensor]
        dtype = DTYPES[stored.dtype]
        if 0 in stored.shape:
            return torch.empty(stored.shape, dtype=dtype)
        data = direct.read(stored.file, start, math.prod(stored.shape) * dtype.itemsize)
        raw = torch.frombuffer(data, dtype=torch.uint8)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()  # The file's header has an odd length.
        return raw.view(dtype).view(stored.shape)

    def _opened(self, path: Path) -> Any:
        if self._open is None or self._open[0] != path:
            self._open = None  # lets go of the old mapping before the new one grows
            self._open = (path, _opened(path))
        return self._open[1]

    def _check_tied(self, directory: Path) -> None:
        rows = self._stored[names.EMBEDDING].shape[0]
        for first in range(0, rows, _ROWS_COMPARED):
            count = min(_ROWS_COMPARED, rows - first)
            left, right = (
                self._slice(
                    name, [slice(first, first + count), slice(0, self._stored[name].shape[1])]
                )
                for name in (names.EMBEDDING, names.HEAD)
            )
            if not torch.equal(left, right.to(left.dtype)):
                raise WeightsError(
                    f"'{directory}': config.json ties the head, but tensor '{names.HEAD}' differs "
                    f"from '{names.EMBEDDING}': set tie_word_embeddings to false, or remove it"
                )
        self.close()


def _parameter_size(place: names.Place) -> tuple[int, ...]:
    return place.size[1:] if len(place.size) == 3 else place.size


def _added(left: Iterable[int], right: Iterable[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def scan(directory: Path) -> dict[str, Stored]:
    """Every tensor of the weight files of `directory`."""
    files, index = _weight_files(directory)
    stored: dict[str, Stored] = {}
    for file in files:
        opened = _opened(file)
        for name in opened.keys():  # noqa: SIM118 - a file is no mapping
            if name in stored:
                raise WeightsError(
                    f"tensor '{name}' is both in '{stored[name].file}' and in '{file}': remove one"
                )
            header = opened.get_slice(name)
            stored[name] = Stored(file, tuple(header.get_shape()), str(header.get_dtype()))
    for name, file_name in index.items():
        if name not in stored or stored[name].file.name != file_name:
            raise WeightsError(
                f"'{directory / INDEX_NAME}' says that tensor '{name}' is in '{file_name}', "
                "but it is not: restore the files"
            )
    return stored


def refuse_loose(path: Path) -> None:
    """Raise for a link to what is not there, as a cache has it of a file that it has not got."""
    if path.is_symlink() and not path.exists():
        raise WeightsError(
            f"'{path}' is a link to '{os.readlink(path)}', which is not there: fetch that file, or "
            "remove the link"
        )


def _weight_files(directory: Path) -> tuple[list[Path], Mapping[str, str]]:
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    refuse_loose(single)
    refuse_loose(index)
    if single.exists() and index.exists():
        raise WeightsError(f"'{directory}' has both {SINGLE_NAME} and {INDEX_NAME}: remove one")
    if single.exists():
        return [single], {}
    if not index.exists():
        others = sorted(p.name for p in directory.glob("*.bin")) or ["no weights at all"]
        raise WeightsError(
            f"'{directory}' has neither {SINGLE_NAME} nor {INDEX_NAME} (it has {others[0]}): "
            "save the model as safetensors"
        )
    weight_map = _weight_map(index)
    files = [directory / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if not file.is_file():
            count = sum(name == file.name for name in weight_map.values())
            raise WeightsError(
                f"'{index}' names the file '{file.name}' for {count} tensors, but it is not there: "
                "fetch the missing file"
            )
    return files, weight_map


def _weight_map(index: Path) -> dict[str, str]:
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"'{index}' cannot be read as JSON ({error}): restore it") from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict):
        raise WeightsError(f"'{index}' has no table 'weight_map', as an index has: restore it")
    plain = all(isinstance(n, str) and Path(n).name == n for n in weight_map.values())
    if not plain or not weight_map:
        raise WeightsError(f"'{index}' must map tensors to files beside it: restore it")
    result: dict[str, str] = weight_map
    return result


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"'{path}' is no whole safetensors file ({error}): fetch it again"
        ) from None


def _spare(model: ModelConfig, stored: Mapping[str, Stored], tensor: str) -> str | None:
    """Why a tensor that no parameter is read from may be there, if it may."""
    if 0 in stored[tensor].shape:  # As of no shared experts.
        return "without a number in it"
    return names.spare(model, tensor)


def _check(
    directory: Path,
    model: ModelConfig,
    stored: Mapping[str, Stored],
    chosen: Mapping[str, names.Place | None],
) -> None:
    written = {logical: tensor for tensor, logical in names.logical_names(model).items()}
    missing = [written[name] for name, place in chosen.items() if place is None]
    placed = {place.tensor: place for place in chosen.values() if place is not None}
    used = placed.keys() | _scales(placed, stored)
    unused = [t for t in stored if t not in used and _spare(model, stored, t) is None]
    problems = []
    if missing:
        problems.append(f"{_listed(missing)} missing")
    if unused:
        problems.append(f"{_listed(sorted(unused))} not part of the model")
    if problems:
        raise WeightsError(
            f"'{directory}': {'; '.join(problems)}: "
            "the weights and config.json must be of one model"
        )
    for tensor, place in placed.items():
        found = stored[tensor]
        if found.shape != place.shape:
            count = sum(stored[t].shape != p.shape for t, p in placed.items())
            raise WeightsError(
                f"'{found.file}': tensor '{tensor}' has shape {list(found.shape)}, but config.json "
                f"means {list(place.shape)} ({count} of {len(placed)} tensors differ): "
                "the weights and config.json must be of one model"
            )
        if found.dtype == fp8.DTYPE:
            _check_scales(tensor, stored)
        elif found.dtype not in DTYPES:
            raise WeightsError(
                f"'{found.file}': tensor '{tensor}' is of dtype {found.dtype}, which is not "
                f"supported: convert the model to one of {', '.join(DTYPES)}"
            )


def _scales(tensors: Iterable[str], stored: Mapping[str, Stored]) -> set[str]:
    """The scales on file of those of `tensors` that are quantised."""
    found = (fp8.scale_name(t) for t in tensors if stored[t].dtype not in DTYPES)
    return {name for name in found if name in stored}


def _check_scales(tensor: str, stored: Mapping[str, Stored]) -> None:
    weight, name = stored[tensor], fp8.scale_name(tensor)
    opening = f"'{weight.file}': tensor '{tensor}' of shape {list(weight.shape)} is of eight bits"
    if name not in stored:
        raise WeightsError(f"{opening}, and its scales '{name}' are missing: fetch them")
    scales, shape = stored[name], fp8.scale_shape(weight.shape)
    if len(shape) < 2 or scales.shape != shape or scales.dtype not in ("F32", "BF16"):
        raise WeightsError(
            f"{opening}, but its scales '{name}' are {scales.dtype} {list(scales.shape)}: only "
            f"F32 or BF16 {list(shape)} is supported, one for each {fp8.BLOCK} by {fp8.BLOCK} of a "
            "matrix; fetch the model in bf16"
        )


def _listed(tensors: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in tensors[:3])
    if len(tensors) == 1:
        return f"tensor {shown} is"
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return f"{len(tensors)} tensors ({shown}{more}) are"

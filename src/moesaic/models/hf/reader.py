"""Reader of the weights in a Hugging Face directory, tensor by tensor.

All headers are read first. Every parameter must exist with the shape that config.json implies, and
every tensor must belong to a parameter. Values then come from memory-mapped files, one file at a
time, so at most one shard is mapped. If each tensor is read only once, whole tensors bypass the
page cache instead.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moesaic.base import direct_io, safetensors_file
from moesaic.base.errors import WeightsError
from moesaic.base.safetensors_file import ITEM_BYTES
from moesaic.dist.state import PARAMETER, TensorShard
from moesaic.facts.job import ModelConfig
from moesaic.models.hf import fp8, names
from moesaic.models.hf.config import read_config
from moesaic.store.expert_files import StoredBytes, StoredMatrix

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


@dataclass(frozen=True)
class TensorHeader:
    """Header of one tensor on file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    """Offset of its data in the file."""

    def rows(self, name: str, first: int, count: int) -> StoredBytes:
        """Return where some rows of the tensor `name` are, counted over all leading dimensions."""
        columns = self.shape[-1]
        offset = self.start + first * columns * ITEM_BYTES[self.dtype]
        return StoredBytes(name, self.file, offset, self.dtype, (count, columns))


class HFSource:
    """Weights of a directory as parameters of a model; a state source."""

    def __init__(self, directory: Path, model: ModelConfig, reads_once: bool = False) -> None:
        """Check the weights of `directory` against `model`.

        Args:
            directory: the Hugging Face directory.
            model: config of the model that it holds.
            reads_once: bypass the page cache, because nothing is read a second time."""
        self._reads_once = reads_once
        self._headers = scan_weights(directory)
        self._open_file: tuple[Path, Any] | None = None
        chosen = names.choose_slices(model, self._headers)
        self._slices = {name: source for name, source in chosen.items() if source is not None}
        used = {source.tensor for source in self._slices.values()}
        used |= _scale_names(used, self._headers)
        unused: dict[str | None, list[str]] = {}
        for tensor in sorted(self._headers.keys() - used):
            is_empty = 0 in self._headers[tensor].shape  # Such as shared experts of width 0.
            reason = "empty tensors" if is_empty else names.reason_to_skip(model, tensor)
            unused.setdefault(reason, []).append(tensor)
        written = {logical: tensor for tensor, logical in names.logical_names(model).items()}
        missing = [written[name] for name, source in chosen.items() if source is None]
        _check_complete(directory, missing, unused.pop(None, []))
        for source in self._slices.values():
            _check_header(source, self._headers)
        self.notes = [
            f"'{directory}': {_describe_tensors(tensors)} left out, and no export will have "
            f"{'it' if len(tensors) == 1 else 'them'}: {reason}"
            for reason, tensors in unused.items()
        ]
        """Messages about skipped tensors on file, with the reason."""
        if model.tied and names.HEAD in self._headers:
            self._check_tied(directory)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype in which `read` returns a parameter: as on file, fp32 for fp8 blocks."""
        dtype = self._headers[self._slices[name].tensor].dtype
        return torch.float32 if dtype == fp8.DTYPE else DTYPES[dtype]

    def read(self, name: str) -> Tensor:
        """Return one whole parameter; it may be a view of the mapped file."""
        source = self._slices[name]
        size = source.size[1:] if len(source.size) == 3 else source.size
        return self._read_box(name, (0,) * len(size), size)

    def locate(self, name: str) -> list[StoredMatrix]:
        """Return where one expert's matrix is stored, in one box."""
        source = self._slices[name]
        header = self._headers[source.tensor]
        rows, columns = source.size[-2:]
        # A tensor of several experts is [experts, rows, columns], of one it is [rows, columns].
        expert = source.offset[0] if len(source.offset) == 3 else 0
        first, num_rows = source.offset[-2], source.shape[-2]
        values = header.rows(source.tensor, expert * num_rows + first, rows)
        scales = None
        if header.dtype == fp8.DTYPE:
            scale_tensor = fp8.scale_name(source.tensor)
            scale_rows = fp8.scale_shape((num_rows, columns))[0]
            box, _ = fp8.scale_box((slice(first, first + rows), slice(0, columns)))
            scales = self._headers[scale_tensor].rows(
                scale_tensor, expert * scale_rows + box.start, box.stop - box.start
            )
        return [StoredMatrix(values, 0, columns, scales, first % fp8.BLOCK_SIZE)]

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Write values into `shards`, file by file."""

        def position(shard: TensorShard) -> tuple[Path, str]:
            tensor = self._slices[shard.name].tensor
            return self._headers[tensor].file, tensor

        for shard in sorted(shards, key=position):
            if shard.kind != PARAMETER:
                raise ValueError(f"{shard.key}: a model directory holds parameters only")
            if shard.num_elements:
                with shard.borrow(writes=True) as tensor:
                    tensor.copy_(self._read_box(shard.name, shard.offset, shard.size))
        self._open_file = None

    def _read_box(self, name: str, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return a box of a parameter."""
        source = self._slices[name]
        lead = len(source.shape) - len(size)
        starts = (a + b for a, b in zip(source.offset, (*(0,) * lead, *offset), strict=True))
        extents = (*source.size[:lead], *size)
        box = [slice(start, start + n) for start, n in zip(starts, extents, strict=True)]
        return self._read_slice(source.tensor, box).reshape(*size)

    def _read_slice(self, tensor: str, box: Sequence[slice]) -> Tensor:
        if self._headers[tensor].dtype != fp8.DTYPE:
            return self._read_raw(tensor, box)
        scales = self._read_raw(fp8.scale_name(tensor), fp8.scale_box(box))
        return fp8.dequantise(self._read_raw(tensor, box), scales, box)

    def _read_raw(self, tensor: str, box: Sequence[slice]) -> Tensor:
        stored = self._headers[tensor]
        whole = all(s.stop - s.start == n for s, n in zip(box, stored.shape, strict=True))
        if self._reads_once and whole and stored.dtype in DTYPES:
            return _read_whole(stored)
        part: Tensor = self._mapped_file(stored.file).get_slice(tensor)[tuple(box)]
        return part

    def _mapped_file(self, path: Path) -> Any:
        if self._open_file is None or self._open_file[0] != path:
            self._open_file = None  # Unmap the old file before mapping the new one.
            self._open_file = (path, _open_safetensors(path))
        return self._open_file[1]

    def _check_tied(self, directory: Path) -> None:
        box = [slice(0, extent) for extent in self._headers[names.EMBEDDING].shape]
        left, right = (self._read_slice(name, box) for name in (names.EMBEDDING, names.HEAD))
        if not torch.equal(left, right.to(left.dtype)):
            raise WeightsError(
                f"'{directory}': config.json ties the head, but tensor '{names.HEAD}' differs "
                f"from '{names.EMBEDDING}': set tie_word_embeddings to false, or remove it"
            )
        self._open_file = None


class PretrainedSource:
    """Weights of a directory for a model that may have more embeddings than the directory, and a
    classifier that the directory lacks."""

    def __init__(self, directory: Path, model: ModelConfig) -> None:
        stored, _ = read_config(directory)
        self._vocab = min(stored.vocab, model.vocab)
        """Embeddings of the directory."""
        self.has_classifier = stored.labels > 0
        """True if the directory has a classifier."""
        changes = {"vocab": self._vocab, "labels": model.labels if stored.labels else 0}
        self._source = HFSource(directory, model.model_copy(update=changes))
        self.notes = self._source.notes
        """See `HFSource`."""

    def is_partial(self, shard: TensorShard) -> bool:
        """Return whether the directory lacks rows of `shard`, an embedding or a head."""
        by_word = shard.name in names.BY_WORD
        return by_word and shard.offset[0] + shard.size[0] > self._vocab

    def fill(self, shards: Sequence[TensorShard]) -> None:
        """Write values into `shards`; rows that the directory lacks keep theirs."""
        self._source.fill([shard for shard in shards if not self.is_partial(shard)])
        for shard in filter(self.is_partial, shards):
            with shard.borrow(writes=True) as tensor:
                rows = tensor[: max(self._vocab - shard.offset[0], 0)]
                self._source.fill([shard.with_tensor(rows)])


def _read_whole(header: TensorHeader) -> Tensor:
    dtype = DTYPES[header.dtype]
    if 0 in header.shape:
        return torch.empty(header.shape, dtype=dtype)
    data = direct_io.read(header.file, header.start, math.prod(header.shape) * dtype.itemsize)
    raw = torch.frombuffer(data, dtype=torch.uint8)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()  # The header of the file has an odd length.
    return raw.view(dtype).view(header.shape)


def scan_weights(directory: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors in the weight files of `directory`."""
    files, index = _weight_files(directory)
    stored: dict[str, TensorHeader] = {}
    for file in files:
        _open_safetensors(file)  # It is complete.
        for name, (entry, start) in safetensors_file.read_entries(file).items():
            if name in stored:
                raise WeightsError(
                    f"tensor '{name}' is both in '{stored[name].file}' and in '{file}': remove one"
                )
            stored[name] = TensorHeader(file, entry.shape, entry.dtype, start)
    for name, file_name in index.items():
        if name not in stored or stored[name].file.name != file_name:
            raise WeightsError(
                f"'{directory / INDEX_NAME}' says that tensor '{name}' is in '{file_name}', "
                "but it is not: restore the files"
            )
    return stored


def check_not_dangling(path: Path) -> None:
    """Raise if `path` is a dangling link, as a download cache leaves for a file that it lacks."""
    if path.is_symlink() and not path.exists():
        raise WeightsError(
            f"'{path}' is a link to '{os.readlink(path)}', which is not there: fetch that file, or "
            "remove the link"
        )


def _weight_files(directory: Path) -> tuple[list[Path], Mapping[str, str]]:
    single, index = directory / SINGLE_NAME, directory / INDEX_NAME
    check_not_dangling(single)
    check_not_dangling(index)
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
            raise WeightsError(
                f"'{index}' names the file '{file.name}', but it is not there: fetch the missing "
                "file"
            )
    return files, weight_map


def _weight_map(index: Path) -> dict[str, str]:
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"'{index}' cannot be read as JSON ({error}): restore it") from None
    weight_map: Any = raw.get("weight_map") if isinstance(raw, dict) else None
    names_of_files = weight_map.values() if isinstance(weight_map, dict) else ()
    if not names_of_files or not all(
        isinstance(name, str) and Path(name).name == name for name in names_of_files
    ):
        raise WeightsError(f"'{index}' must map tensors to files beside it: restore it")
    return dict(weight_map)


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"'{path}' is not a complete safetensors file ({error}): fetch it again"
        ) from None


def _check_complete(directory: Path, missing: Sequence[str], unknown: Sequence[str]) -> None:
    problems = []
    if missing:
        problems.append(f"{_describe_tensors(missing)} missing")
    if unknown:
        problems.append(f"{_describe_tensors(unknown)} not part of the model")
    if problems:
        raise WeightsError(
            f"'{directory}': {'; '.join(problems)}: "
            "the weights and config.json must belong to one model"
        )


def _check_header(source: names.StoredSlice, headers: Mapping[str, TensorHeader]) -> None:
    """Raise if the tensor of `source` has another shape, or a dtype that is not supported."""
    tensor, header = source.tensor, headers[source.tensor]
    if header.shape != source.shape:
        raise WeightsError(
            f"'{header.file}': tensor '{tensor}' has shape {list(header.shape)}, but "
            f"config.json implies {list(source.shape)}: the weights and config.json must belong "
            "to one model"
        )
    if header.dtype == fp8.DTYPE:
        _check_scales(tensor, headers)
    elif header.dtype not in DTYPES:
        raise WeightsError(
            f"'{header.file}': tensor '{tensor}' is of dtype {header.dtype}, which is not "
            f"supported: convert the model to one of {', '.join(DTYPES)}"
        )


def _scale_names(tensors: Iterable[str], headers: Mapping[str, TensorHeader]) -> set[str]:
    """Return the scales on file of the quantised tensors among `tensors`."""
    found = (fp8.scale_name(t) for t in tensors if headers[t].dtype not in DTYPES)
    return {name for name in found if name in headers}


def _check_scales(tensor: str, headers: Mapping[str, TensorHeader]) -> None:
    weight, name = headers[tensor], fp8.scale_name(tensor)
    prefix = f"'{weight.file}': tensor '{tensor}' of shape {list(weight.shape)} is fp8"
    if name not in headers:
        raise WeightsError(f"{prefix}, and its scales '{name}' are missing: fetch them")
    scales, shape = headers[name], fp8.scale_shape(weight.shape)
    if len(shape) < 2 or scales.shape != shape or scales.dtype not in ("F32", "BF16"):
        raise WeightsError(
            f"{prefix}, but its scales '{name}' are {scales.dtype} {list(scales.shape)}: only "
            f"F32 or BF16 {list(shape)} is supported, one for each {fp8.BLOCK_SIZE} by "
            f"{fp8.BLOCK_SIZE} block of a matrix; fetch the model in bf16"
        )


def _describe_tensors(tensors: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in tensors[:3])
    if len(tensors) == 1:
        return f"tensor {shown} is"
    more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
    return f"{len(tensors)} tensors ({shown}{more}) are"

"""Segment files of a table: what was written is read, and damage is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moesaic.base.errors import StoreError
from moesaic.ps.segments import PREFIX_BYTES, SegmentLayout, SegmentReader, SegmentWriter

LAYOUTS = [SegmentLayout(record_bytes=size, dim=size // 4) for size in (12, 80, 2060, 4088, 9000)]
LAYOUTS.append(SegmentLayout(record_bytes=2060, dim=515, min_block_bytes=16_000))


def random_rows(
    layout: SegmentLayout, count: int, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return distinct keys, negative ones too, and records."""
    random = np.random.default_rng(seed)
    keys = np.unique(random.integers(-(1 << 63), 1 << 63, count + 8, np.int64))[:count]
    random.shuffle(keys)
    return keys, random.integers(0, 256, (len(keys), layout.record_bytes), np.uint8)


@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout.record_bytes}-{layout.block_bytes}"
)
def test_rows_are_read_as_they_were_appended(tmp_path: Path, layout: SegmentLayout) -> None:
    """Appends of all sizes, with a flush and removed keys between them."""
    path, random = tmp_path / "segment", np.random.default_rng(1)
    keys, records = random_rows(layout, 1500 if layout.record_bytes < 5000 else 300)
    removed = np.arange(1200)
    cuts = np.sort(random.integers(0, len(keys), 7))
    positions = []
    with SegmentWriter(path, layout) as writer:
        for number, chosen in enumerate(np.split(np.arange(len(keys)), cuts)):
            positions.append(writer.append(keys[chosen], records[chosen]))
            if number == 2:
                writer.flush()
            if number == 4:
                writer.remove(removed)
        writer.sync()
        assert path.stat().st_size == writer.num_blocks * layout.block_bytes
        digest = writer.digest
    place = np.concatenate(positions)
    with SegmentReader(path, layout) as reader:
        runs = list(reader.scan(digest))
        with pytest.raises(StoreError, match="is another file"):
            list(reader.scan("0" * 64))
    np.testing.assert_array_equal(np.concatenate([run.keys for run in runs]), keys)
    np.testing.assert_array_equal(np.concatenate([run.records for run in runs]), records)
    per_block = layout.records_per_block
    with path.open("rb") as file:
        for position, key, record in list(zip(place, keys, records, strict=True))[::7]:
            block, slot = divmod(int(position), per_block)
            file.seek(block * layout.block_bytes + PREFIX_BYTES + slot * layout.row_bytes)
            assert file.read(layout.row_bytes) == key.tobytes() + record.tobytes()
    np.testing.assert_array_equal(np.concatenate([run.removed for run in runs]), removed)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    layout, random = SegmentLayout(record_bytes=80, dim=16), np.random.default_rng(2)
    path = tmp_path / "segment"
    keys, records = random_rows(layout, 500)
    with SegmentWriter(path, layout) as writer:
        writer.append(keys, records)
        writer.remove(keys[:10])
        writer.sync()
    whole = path.read_bytes()
    headers = random.integers(0, 8 * layout.block_bytes, 50)
    for bit in (*headers, *random.integers(0, 8 * len(whole), 250)):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with pytest.raises(StoreError, match="restore the file"), SegmentReader(path) as reader:
            list(reader.scan())
    for size in (0, 5, len(whole) - 1, layout.block_bytes - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(StoreError, match="restore the file"):
            SegmentReader(path)


def test_another_table_is_refused(tmp_path: Path) -> None:
    layout = SegmentLayout(record_bytes=80, dim=16, optimizer="rowwise-adagrad")
    path = tmp_path / "segment"
    with SegmentWriter(path, layout) as writer:
        writer.sync()
    for change in ({"dim": 8}, {"optimizer": "adam"}, {"dtype": "float64"}, {"seed": 1}):
        ((name, value),) = change.items()
        with pytest.raises(StoreError, match=rf"{name} = {getattr(layout, name)}, not {value}"):
            SegmentReader(path, layout.model_copy(update=change))
    later = tmp_path / "later"
    with SegmentWriter(later, layout.model_copy(update={"version": 2})) as writer:
        writer.sync()
    with pytest.raises(StoreError, match=r"in version 2, and this moesaic reads .* version 1"):
        SegmentReader(later)
    with pytest.raises(StoreError, match="cannot be written"):
        SegmentWriter(path, layout)
    with pytest.raises(StoreError, match=r"'.*absent' cannot be read .*restore it"):
        SegmentReader(tmp_path / "absent")
    with SegmentReader(path, layout.model_copy(update={"min_block_bytes": 1 << 16})) as reader:
        assert reader.layout == layout
        assert [len(run.keys) for run in reader.scan()] == [0]

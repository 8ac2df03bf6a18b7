"""Parts of bulk records: round trips, and reports of damage."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moesaic.base.errors import StoreError
from moesaic.base.records import RecordWriter, read_records
from moesaic.report.loads import read_loads

SCHEMA = pa.schema([("step", pa.int32()), ("counts", pa.list_(pa.int64()))])
WANTED = {"step": pa.int64(), "counts": pa.list_(pa.int64())}


def test_records_round_trip_in_order(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, SCHEMA, rows_per_part=2)
    rows = [{"step": step, "counts": [step, 2 * step]} for step in range(5)]
    for row in rows:
        writer.add([row])
    writer.flush()
    parts = list(read_records(tmp_path))
    assert [part.num_rows for part in parts] == [2, 2, 1]
    assert [row for part in parts for row in part.to_pylist()] == rows
    (step,) = {part.schema.field("step").type for part in read_records(tmp_path, WANTED)}
    assert step == pa.int64()


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"step": [1]}, "has no column 'counts'"),
        ({"step": [1, None], "counts": [[1], [2]]}, "has nulls in column 'step'"),
        ({"step": [1, 2], "counts": [[1], None]}, "has nulls in column 'counts'"),
        ({"step": [1, 2], "counts": [[1, 1], [None, 3]]}, "has nulls in column 'counts'"),
        ({"step": ["a"], "counts": [[1]]}, "has string in column 'step', not int64"),
        ({"step": [1], "counts": [1]}, "has int64 in column 'counts', not list"),
        ({"step": [1], "counts": [[0.5]]}, "in column 'counts', not list"),
    ],
)
def test_damaged_part_is_reported(
    columns: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table(columns), tmp_path / "part-000000.parquet")
    with pytest.raises(StoreError, match=sentence) as caught:
        list(read_records(tmp_path, WANTED))
    assert "part-000000.parquet" in str(caught.value)
    assert "remove it" in str(caught.value)


@pytest.mark.parametrize("counts", [[[1, 2], [3]], [[1, 2, 3], [4]], [[1, 2], [3, -1]], [[], []]])
def test_impossible_loads_are_rejected(counts: list[list[int]], tmp_path: Path) -> None:
    kinds = pa.array(counts, pa.list_(pa.int64()))
    table = pa.table({"step": [1, 2], "layer": [0, 0], "counts": kinds})
    pq.write_table(table, tmp_path / "part-000000.parquet")
    with pytest.raises(StoreError, match="damaged loads"):
        read_loads(tmp_path, 2)

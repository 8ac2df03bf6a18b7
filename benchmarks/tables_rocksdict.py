"""Rows in rocksdict, in a process of the peers' environment, which has no moesaic.

Requests and answers are lines of JSON, as `benchmarks.memory_group.Arm` sends them.
"""

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from rocksdict import AccessType, Options, Rdict, WriteBatch

_READ_KEYS = 4096
_LOOK_S = 1.0
_THREADS = 8


def fill(path: str, rows: int, record_bytes: int) -> None:
    """Write all rows in the order of their keys, which is RocksDB's fastest."""
    options = Options(raw_mode=True)
    options.prepare_for_bulk_load()
    table = Rdict(path, options)
    rng = np.random.default_rng(0)
    for start in range(0, rows, 1 << 16):
        batch = WriteBatch(raw_mode=True)
        records = rng.integers(0, 256, (min(1 << 16, rows - start), record_bytes), np.uint8)
        for key, record in enumerate(records, start):
            batch.put(key.to_bytes(8), record.tobytes())
        table.write(batch)
    table.flush()
    table.compact_range(None, None)
    table.close()


def main() -> None:
    """Fill a table, then answer each request with distinct rows per second."""
    path, rows, record_bytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    fill(path, rows, record_bytes)
    options = Options(raw_mode=True)
    options.set_use_direct_reads(True)
    table = Rdict(path, options, access_type=AccessType.read_only())
    rng = np.random.default_rng(1)
    print(json.dumps({"rows": rows}), flush=True)
    with ThreadPoolExecutor(_THREADS) as pool:
        for line in sys.stdin:
            threads = json.loads(line)["threads"]
            done, began = 0, time.perf_counter()
            while time.perf_counter() < began + _LOOK_S:
                drawn = np.unique(rng.integers(0, rows, _READ_KEYS))
                keys = [key.to_bytes(8) for key in drawn.tolist()]
                if threads == 1:
                    found = table.get(keys)
                else:
                    parts = [keys[part::threads] for part in range(threads)]
                    found = [one for some in pool.map(table.get, parts) for one in some]
                if any(len(one) != record_bytes for one in found):
                    raise RuntimeError("a row is missing")
                done += len(keys)
            seconds = time.perf_counter() - began
            print(json.dumps({"rows_per_s": done / seconds}), flush=True)


if __name__ == "__main__":
    main()

"""Memory as torch counts it: the most bytes that tensors on the CPU held at one time."""

from __future__ import annotations

import ctypes
import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def most_allocated(work: Callable[[], object]) -> int:
    """Most bytes that were there while `work()` ran, beyond what was there before.

    The profiler alone counts what its own thread frees. Threads of gloo let go of what they have
    sent, which would then count for ever: it is told to count everywhere, from the first call on.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    gc.collect()  # Or what goes meanwhile would make room.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        work()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "trace.json"
        watched.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    seen = [event["args"] for event in events if event.get("name") == "[memory]"]
    before = seen[0]["Total Allocated"] - seen[0]["Bytes"]
    return int(max(one["Total Allocated"] for one in seen) - before)

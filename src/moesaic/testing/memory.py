"""Peak memory of tensors on the CPU, as torch counts it."""

from __future__ import annotations

import ctypes
import gc
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function


def peak_allocated(*works: Callable[[], object]) -> list[int]:
    """Return the peak bytes allocated during each of `works`, beyond those before the first.

    The profiler counts only memory freed by its own thread, but gloo threads free what they have
    sent. From the first call on, torch therefore counts in all threads. Those may free late, so of
    equal works the smallest peak is the accurate one.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True
    gc.collect()  # Garbage freed meanwhile would hide allocations.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        for index, work in enumerate(works):
            with record_function(f"work {index}"):
                work()
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "trace.json"
        watched.export_chrome_trace(str(path))
        events = _events(path.read_text())
    seen = sorted((e for e in events if e["name"] == "[memory]"), key=lambda e: e["ts"])
    first = seen[0]["args"]
    before = first["Total Allocated"] - first["Bytes"]
    spans = {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("ph") == "X"}
    result = []
    for index in range(len(works)):
        began, end = spans[f"work {index}"]
        totals = [e["args"]["Total Allocated"] for e in seen if began <= e["ts"] <= end]
        result.append(max(totals) - before)
    return result


def _events(trace: str) -> list[dict[str, Any]]:
    """Return the allocations and works in a trace; parsing all of its events takes seconds."""
    wanted = ('"name": "[memory]"', '"name": "work ')
    found = (
        event for event in trace.split("\n  },\n  {\n") if any(name in event for name in wanted)
    )
    events: list[dict[str, Any]] = json.loads(f"[{{{'},{'.join(found)}}}]")
    return events

"""Devices: the one file that knows their names.

Everything else asks here for a device, its communication backend, its memory and its clock.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from functools import cache
from pathlib import Path
from typing import Literal

import torch

from moesaic.base.errors import ConfigError

OF_KERNELS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the Triton kernels."""
MEASURED = ((9, 0),)
"""Compute capabilities of the GPUs on which the Triton kernels and their tile sizes were timed."""

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""glibc's names for how much is kept at most (-1: all), and how often memory comes by itself."""

_WHOLE_VECTORS = 26
"""The family of AMD's processors since which 512 bits are computed with at a time."""


def resolve(name: str, local_rank: int = 0, key: str = "train.device") -> torch.device:
    """The device that `name`, the value of the setting `key`, means on this rank."""
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{key} = '{name}' is no device: use auto, cpu or cuda") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise ConfigError(f"{key} = '{name}' is not supported: use auto, cpu or cuda")
    if device.index is not None and local_rank > 0:
        raise ConfigError(
            f"{key} = '{name}' names one GPU for {local_rank + 1} or more ranks: set it to 'cuda', "
            "and every rank takes its own"
        )
    if not has_gpu:
        raise ConfigError(
            f"{key} = '{name}' is not there: this machine has no CUDA GPU that torch "
            f"{torch.__version__} can use; set {key} = 'auto' or 'cpu'"
        )
    index = device.index if device.index is not None else local_rank
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"{key} = '{name}' with local rank {local_rank} needs GPU {index}, but there "
            f"are {torch.cuda.device_count()}: start fewer ranks or name another device"
        )
    return torch.device("cuda", index)


def activate(device: torch.device) -> None:
    """Make `device` this process's current one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _keep_memory()


def _keep_memory() -> None:
    """Have the C library keep what is freed for the next tensor, as allocators of GPUs do.

    Large tensors would come from fresh pages and go back at once, and the kernel's clearing of
    pages costs more than what is computed in them. It holds for a process's first thread until the
    C library is refused memory: it then serves that thread from a place that keeps less.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # glibc; others have ways of their own.
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, -1)


def backend(device: torch.device) -> str:
    """The collective backend of `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def describe(device: torch.device) -> str:
    """The device as a person would name it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"cpu ({os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''} a rank)"


def kind(device: torch.device) -> str:
    """What a cluster's file calls such devices."""
    return "gpu" if device.type == "cuda" else "cpu"


def model(device: torch.device) -> str:
    """What the maker calls it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    lines = _cpu().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.machine()


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN multiplies wide numbers faster here than MKL, torch's own choice.

    It does on AMD's cores with wide vectors, twice as fast where MKL's kernels for them take a
    vector in halves, by a little on cores that do so themselves (`prefers_copies`). The answer is
    the same in every process of a machine, whoever else is busy.
    """
    if (
        not torch.backends.mkldnn.is_available()
        or torch.backends.cpu.get_cpu_capability() != "AVX512"
    ):
        return False
    return "AuthenticAMD" in _cpu()


@cache
def prefers_copies() -> bool:
    """Whether oneDNN is faster even where its result, which it cannot write to a place, is copied
    there: on cores that take a wide vector in one go, and not in halves, as MKL's are."""
    found = re.search(r"^cpu family\s*: (\d+)$", _cpu(), re.MULTILINE)
    return prefers_onednn() and found is not None and int(found[1]) >= _WHOLE_VECTORS


def _cpu() -> str:
    return Path("/proc/cpuinfo").read_text()


@cache
def multiplies_bf16() -> bool:
    """Whether oneDNN multiplies bf16 on this CPU."""
    there = torch.backends.mkldnn.is_available()
    return there and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def multiplies_in_tiles() -> bool:
    """Whether this CPU has units for products of bf16 (AMX), so quick that how a matrix comes to
    them is what takes time."""
    return multiplies_bf16() and re.search(r"^flags\s*:.*\bamx_bf16\b", _cpu(), re.M) is not None


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_bytes() -> int:
    """Main memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def num_devices(device: torch.device) -> int:
    """How many ranks this machine has a device for: GPUs, or cores."""
    return torch.cuda.device_count() if device.type == "cuda" else num_cores()


def memory_bytes(device: torch.device) -> int:
    """All memory of `device`; of a CPU, the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_bytes()


def number_types(device: torch.device) -> list[str]:
    """Types of numbers that `device` is meant to multiply, as a cluster's file calls them."""
    if device.type == "cuda":
        return ["fp64", "fp32", "tf32", "bf16", "fp16"]
    return ["fp64", "fp32", "bf16"]


def largest_product(device: torch.device) -> int:
    """Side of square matrices by which `device` has reached the speed it keeps."""
    return 8192 if device.type == "cuda" else 1024


def largest_copy(device: torch.device) -> int:
    """Bytes that no cache of `device` holds."""
    return 1 << 30 if device.type == "cuda" else 1 << 27


def peak_bytes(device: torch.device) -> int:
    """Most memory this process has held: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def begin_anew(device: torch.device) -> None:
    """Give back memory that nobody holds, and look for the most anew, where that can be done."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def held_bytes(device: torch.device) -> int:
    """Memory this process holds now: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS")


def memory_kind(device: torch.device) -> Literal["allocated", "resident"]:
    """What `peak_bytes` and `held_bytes` are of: tensors, or all of the process."""
    return "allocated" if device.type == "cuda" else "resident"


def is_prompt(device: torch.device) -> bool:
    """Whether what is asked of `device` is done when the call returns, so that a clock of the host
    tells what it took, without anybody waiting."""
    return device.type == "cpu"


def now(device: torch.device) -> float:
    """Seconds on a clock that has waited for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def generation(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability; of anything else, and of GPUs of other makers, none."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


@cache
def processors(device: torch.device) -> int:
    """Of a GPU; a few, where its programs are only interpreted."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 3

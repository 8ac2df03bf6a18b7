"""Devices: selection, collective backend, memory, clock and CPU features.

No other module names a device type, except `facts.job.device_name`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from functools import cache
from pathlib import Path

import torch

from moesaic.base.errors import ConfigError
from moesaic.base.host_memory import free_memory_bytes
from moesaic.facts.job.device_name import check_device_name

KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of the Triton kernels."""
TUNED_CAPABILITY = ((9, 0),)
"""Compute capabilities of the GPUs on which the Triton kernels and their tile sizes were timed."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -3, -4, -8
"""glibc's option numbers: free memory kept at most (-1: all), number of allocations by mmap, and
number of heaps from which no thread gets a heap of its own."""

_NUM_COMPILED_KERNELS = 128
"""Compiled kernels that oneDNN keeps where memory has a budget."""

_FULL_WIDTH_AVX512_FAMILY = 26
"""First AMD CPU family that computes 512 bits at a time."""


def resolve(name: str, local_rank: int = 0, key: str = "train.device") -> torch.device:
    """Return the device of this rank for `name`, the value of the setting `key`."""
    has_gpu = torch.cuda.is_available()
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    device = torch.device(check_device_name(key, name))
    if device.type == "cpu":
        return device
    if device.index is not None and local_rank > 0:
        raise ConfigError(
            f"{key} = '{name}' names one GPU for {local_rank + 1} or more ranks; set it to 'cuda' "
            "to give every rank its own"
        )
    if not has_gpu:
        raise ConfigError(
            f"{key} = '{name}' is not available: this machine has no CUDA GPU that torch "
            f"{torch.__version__} can use; set {key} = 'auto' or 'cpu'"
        )
    index = device.index if device.index is not None else local_rank
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"{key} = '{name}' with local rank {local_rank} needs GPU {index}, but this "
            f"machine has {torch.cuda.device_count()}; start fewer ranks or name another device"
        )
    return torch.device("cuda", index)


def activate(device: torch.device) -> None:
    """Make `device` the current one of this process."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        _keep_freed_memory()


def _keep_freed_memory() -> None:
    """Make the C library keep freed memory for the next tensor, as GPU allocators do.

    Otherwise large tensors get fresh pages each time, and clearing pages in the kernel costs more
    than the computation. Later threads share the heaps that exist, often one, so that each reuses
    what another has freed. This holds until the C library fails to get memory; then it serves
    threads from a heap that keeps less.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # Only glibc has it.
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, -1)
        library.mallopt(_ARENA_MAX, 1)


def return_large_tensors() -> None:
    """Let tensors of a megabyte or more return their memory to the system when they are freed.

    They take longer to allocate, and leave no gaps in the heap of a process with little memory.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # Only glibc has it.
        library.mallopt(_MMAP_MAX, 1 << 16)
        library.mallopt(_MMAP_THRESHOLD, 1 << 20)


def release_freed_memory() -> None:
    """Return the memory that this process has freed, and keeps, to the system."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):  # Only glibc has it.
        library.malloc_trim(0)


def limit_compiled_kernels() -> None:
    """Let oneDNN keep few compiled kernels, if it has none yet.

    It compiles 0.6 MB for each matrix and number of rows, and keeps up to 1,024 by default.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_NUM_COMPILED_KERNELS))


def collective_backend(device: torch.device) -> str:
    """Return the collective backend of `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def describe(device: torch.device) -> str:
    """Return the name of the device for log lines."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"cpu ({os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''} per rank)"


def kind(device: torch.device) -> str:
    """Return the device kind as cluster.toml names it."""
    return "gpu" if device.type == "cuda" else "cpu"


def model(device: torch.device) -> str:
    """Return the manufacturer's name of the device."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    lines = _cpuinfo().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.machine()


@cache
def prefers_onednn() -> bool:
    """Return whether oneDNN multiplies fp32 faster than MKL, torch's default.

    It does on AMD CPUs with full-width AVX-512 units, which MKL uses in halves. All processes of a
    machine get the same answer, however busy it is.
    """
    if (
        not torch.backends.mkldnn.is_available()
        or torch.backends.cpu.get_cpu_capability() != "AVX512"
        or "AuthenticAMD" not in _cpuinfo()
    ):
        return False
    family = re.search(r"^cpu family\s*: (\d+)$", _cpuinfo(), re.MULTILINE)
    return family is not None and int(family[1]) >= _FULL_WIDTH_AVX512_FAMILY


def _cpuinfo() -> str:
    return Path("/proc/cpuinfo").read_text()


@cache
def supports_bf16_matmul() -> bool:
    """Return whether oneDNN multiplies bf16 on this CPU."""
    available = torch.backends.mkldnn.is_available()
    return available and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def has_amx() -> bool:
    """Return whether this CPU has AMX units for bf16, which are so fast that loading matrices is
    the bottleneck."""
    return (
        supports_bf16_matmul()
        and re.search(r"^flags\s*:.*\bamx_bf16\b", _cpuinfo(), re.M) is not None
    )


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_memory_bytes() -> int:
    """Return the main memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def num_devices(device: torch.device) -> int:
    """Return the number of ranks that this machine has a device for: GPUs, or cores."""
    return torch.cuda.device_count() if device.type == "cuda" else num_cores()


def memory_bytes(device: torch.device) -> int:
    """Return the memory of `device`; for a CPU, that of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes()


def free_bytes(device: torch.device) -> int:
    """Return the memory of `device` that this process may still take."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory_bytes()


def matmul_dtypes(device: torch.device) -> list[str]:
    """Return the dtypes that `device` multiplies well, as cluster.toml names them."""
    if device.type == "cuda":
        return ["fp64", "fp32", "tf32", "bf16", "fp16"]
    return ["fp64", "fp32", "bf16"]


def max_matmul_size(device: torch.device) -> int:
    """Return the side of the square matrices at which `device` reaches its sustained speed."""
    return 8192 if device.type == "cuda" else 1024


def uncached_copy_bytes(device: torch.device) -> int:
    """Return a number of bytes that exceeds every cache of `device`."""
    return 1 << 30 if device.type == "cuda" else 1 << 27


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def reset_peak_memory(device: torch.device) -> None:
    """Release unused cached memory and restart the peak count, on a GPU; a CPU can do neither."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def used_bytes(device: torch.device) -> int:
    """Return the memory of this process now: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS")


def is_synchronous(device: torch.device) -> bool:
    """Return whether work on `device` is done when its call returns, so that a host clock times it
    without synchronization."""
    return device.type == "cpu"


def synchronized_time_s(device: torch.device) -> float:
    """Return the host clock after synchronizing with the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of an NVIDIA GPU; (0, 0) for any other device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0, 0
    return torch.cuda.get_device_capability(device)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; 3 on a CPU, for Triton's interpreter."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return 3

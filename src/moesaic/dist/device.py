"""Devices: the one file that knows their names.

Everything else asks here for a device, its communication backend, its memory and its clock.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from moesaic.base.errors import ConfigError


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


def backend(device: torch.device) -> str:
    """The collective backend of `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def describe(device: torch.device) -> str:
    """The device as a person would name it."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    threads = torch.get_num_threads()
    return f"cpu ({os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''} a rank)"


def peak_bytes(device: torch.device) -> int:
    """Most memory this process has held: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status_bytes("VmHWM")


def held_bytes(device: torch.device) -> int:
    """Memory this process holds now: allocated by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status_bytes("VmRSS")


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

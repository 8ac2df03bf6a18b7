"""Two hosts on one machine: network namespaces joined by a link of given rate (Linux, root).

Ranks of a pool of their own `enter` a host and form a new world there; their traffic uses the link
or stays on their host.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

from moesaic.dist.world import World

_LINK = "link0"
_NEW_NETWORK = 0x40000000
_ADDRESSES = ("10.213.77.1", "10.213.77.2")
_PORT = 29517
_BURST_S, _BURST_BYTES = 1e-3, 1 << 17
"""Burst that an idle link lets through at once: seconds at its rate, or two packets."""
_QUEUE_MS = 200
_HEADER_BYTES = 14 + 20 + 32
"""Header bytes of a packet: Ethernet, IP, and TCP with timestamps."""


def unsupported_reason() -> str:
    """Return why this machine cannot simulate two hosts; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces are for root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"there is no `{missing[0]}`"
    name = _namespace_name("try")
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made.stderr.strip()


@contextmanager
def two_hosts(megabits: float | None = None) -> Iterator[tuple[str, str]]:
    """Yield the names of two hosts joined by a link of `megabits` per second each way; None is
    unlimited."""
    names = _namespace_name("a"), _namespace_name("b")
    burst = max(_BURST_BYTES, int((megabits or 0.0) * 1e6 / 8 * _BURST_S))
    try:
        for name in names:
            _run_command("ip", "netns", "add", name)
        _run_command(
            "ip", "link", "add", _LINK, "netns", names[0], "type", "veth",
            "peer", "name", _LINK, "netns", names[1],
        )  # fmt: skip
        for name, address in zip(names, _ADDRESSES, strict=True):
            _run_command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", _LINK)
            _run_command("ip", "-n", name, "link", "set", _LINK, "up")
            _run_command("ip", "-n", name, "link", "set", "lo", "up")
            if megabits is not None:
                _run_command(
                    "tc", "-n", name, "qdisc", "add", "dev", _LINK, "root", "tbf",
                    "rate", f"{megabits:g}mbit", "burst", str(burst),
                    "latency", f"{_QUEUE_MS}ms",
                )  # fmt: skip
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@contextmanager
def join_across_hosts(world: World, hosts: tuple[str, str]) -> Iterator[World]:
    """Yield `world` joined again, its first half on the first host and the rest on the second. The
    process stays on its host and cannot join another world afterwards."""
    rank, size = world.rank, world.size
    world.barrier()  # No rank leaves while another still connects.
    world.leave()
    _enter_namespace(hosts[rank * 2 // size])
    os.environ["GLOO_SOCKET_IFNAME"] = _LINK
    patience = timedelta(seconds=60)
    store = TCPStore(_ADDRESSES[0], _PORT, is_master=rank == 0, timeout=patience)
    again = World.join(rank, size, store, timeout=timedelta(minutes=10))
    try:
        yield again
        again.barrier()
    finally:
        with suppress(RuntimeError):
            again.leave()


def sent_bytes() -> int:
    """Return the bytes that this process's host has sent over the link, without packet headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == _LINK:
            num_bytes, packets = map(int, figures.split()[8:10])
            return num_bytes - packets * _HEADER_BYTES
    raise LookupError(f"this host has no {_LINK}")


def _enter_namespace(host: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    with Path(f"/run/netns/{host}").open() as file:
        if library.setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _namespace_name(which: str) -> str:
    return f"moesaic-{os.getpid()}-{which}"


def _run_command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

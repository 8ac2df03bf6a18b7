"""Theme `layer`: the expert layer against peers and limits; layer.md says what bounds it."""

from __future__ import annotations

from benchmarks import exchange, experts, hosts, on_gpu, overlap, peers

PARTS = {
    "experts": experts.rows, "hosts": hosts.rows, "exchange": exchange.rows,
    "overlap": overlap.rows, "gradients": overlap.gradient_rows, "peers": peers.rows,
    "gpu": on_gpu.rows,
}  # fmt: skip
APART = ("gpu",)
"""Parts that run only where `--parts` names them."""

"""Part `published` of the theme `planner`: predictions beside published runs of other trainers.

All runs are in bf16, on A100 and H100, with a known layout. Nothing is fitted to them. The presets
of these devices carry the least and the largest ratio (`facts.cluster.presets`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from benchmarks import measure
from moesaic.base.config import parse
from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.cluster.presets import NETWORKS
from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.policy.plan.predict import choose_plan, predict_plan

LATENCY_S = 5e-6
"""Latency of a message between hosts, as `--cluster 2xh100-8` assumes."""
VIRTUAL_STAGES = 2
"""Stages per pipeline rank of our schedule `interleaved`."""
RECOMPUTE = {"none": (False,), "full": (True,), "selective": (False, True)}
"""Values of `train.recompute` by how the run recomputes; the mean of both stands for a share.
Recomputing norms and activations alone is next to none."""
TITAN = "https://github.com/pytorch/torchtitan/blob/main/"
TITAN_H100 = f"{TITAN}benchmarks/llama3_h100_202412_torchtitan.md"
TITAN_TP = f"{TITAN}benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md"
TITAN_A100 = (
    "https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/"
    "performance.md"
)
AUTOMODEL = "https://github.com/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.mdx"
MEGATRON = (
    "https://github.com/NVIDIA/Megatron-LM/blob/022bcb5afe888664d3fb61adacea6e6c887a97f8/megatron/"
    "core/transformer/moe/README.md"
)
MODEL_ZOO = (
    "https://github.com/yanring/Megatron-MoE-ModelZoo/blob/c1ad0b5c89f425d60febddc38e7f741a16f08bd1/"
    "best_practice/Qwen3/readme.md"
)
H100_500W = {
    "memory_bandwidth": 2.4e12, "matmul": [{"dtype": "bf16", "flops": 912e12}],
}  # fmt: skip
"""H100 of torchtitan's runs: HBM2e, and 500 W. The peak is "between SXM and NVL": their mean."""


@dataclass(frozen=True)
class PublishedRun:
    """A run of another trainer, with what it reports."""

    name: str
    model: dict[str, Any]
    host: str
    """Preset of its hosts, eight devices each."""
    gpus: int
    sequence: int
    batch: int
    tokens_per_s: float
    """Reported tokens per second and device."""
    source: str
    layout: dict[str, Any]
    recompute: str
    micro_batches: int = 1
    virtual_stages: int = VIRTUAL_STAGES
    """Stages per pipeline rank."""
    flush: int = 0
    """Micro-batches between two flushes of the pipeline; 0: all of a step."""
    devices: dict[str, Any] = field(default_factory=dict)
    """Figures of the devices that differ from the preset's."""

    @property
    def step_s(self) -> float:
        """Reported seconds of a step."""
        return self.batch * self.sequence / (self.tokens_per_s * self.gpus)

    def job(self, *, recompute: bool) -> Job:
        """Return the job of the run."""
        raw = {
            "model": {**self.model, "max_positions": self.sequence},
            "data": {"path": "unused", "sequence": self.sequence},
            "train": {
                "steps": 1, "batch": self.batch, "micro_batches": self.micro_batches,
                "precision": "bf16", "recompute": recompute,
            },
            "layout": {"embedding": "whole", "chunks": 1, "overlap_local": False, **self.layout},
        }  # fmt: skip
        return parse(Job, raw, "benchmark")

    def cluster(self) -> Cluster:
        """Return its hosts by their data sheets, not calibrated."""
        hosts = {"name": "a", "preset": self.host, "replicas": self.gpus // 8}
        net = {
            "ends": ["*", "*"], "kind": "infiniband", "latency_s": LATENCY_S,
            "bandwidth": NETWORKS[self.host],
        }  # fmt: skip
        changed = {"devices": self.devices} if self.devices else {}
        raw = {"name": self.name, "hosts": [{**hosts, **changed}], "links": [net]}
        return resolve_cluster(raw, "benchmark").model_copy(update={"calibration": None})

    @cached_property
    def predicted_s(self) -> float:
        """Predicted seconds of a step, without calibration."""
        cluster = self.cluster()
        steps = [
            predict_plan(*choose_plan(self.job(recompute=one), cluster)).figures["step_s"]
            for one in RECOMPUTE[self.recompute]
        ]
        return float(np.mean(steps)) * self._bubble_ratio()

    def _bubble_ratio(self) -> float:
        """Return the ideal step with the run's virtual stages and flushes over that with ours."""
        others = self.layout.get("pp", 1) - 1
        own = 1 + others / (self.virtual_stages * (self.flush or self.micro_batches))
        return own / (1 + others / (VIRTUAL_STAGES * self.micro_batches))


def _llama(layers: int, hidden: int, kv_heads: int, ffn: int, vocab: int) -> dict[str, Any]:
    return {
        "family": "llama", "layers": layers, "hidden": hidden, "heads": hidden // 128,
        "kv_heads": kv_heads, "head_dim": 128, "ffn": ffn, "vocab": vocab,
    }  # fmt: skip


LLAMA3_8B = _llama(32, 4096, 8, 14336, 128256)
LLAMA3_70B = _llama(80, 8192, 8, 28672, 128256)
LLAMA2_13B = _llama(40, 5120, 40, 13824, 32000)
LLAMA2_70B = _llama(80, 8192, 8, 28672, 32000)
KIMI_K2 = {
    **PRESETS["deepseek-v3"], "vocab": 163840, "heads": 64, "kv_heads": 64, "experts": 384,
    "dense_layers": 1, "expert_groups": 1, "top_expert_groups": 1, "routed_scaling_factor": 2.827,
}  # fmt: skip
QWEN3_235B = {
    "family": "qwen3_moe", "layers": 94, "hidden": 4096, "heads": 64, "kv_heads": 4,
    "head_dim": 128, "ffn": 1536, "vocab": 151936, "experts": 128, "top_k": 8,
}  # fmt: skip
MIXTRAL_TOKENS = 5643
"""Tokens a second of 468 TFLOPS: a token takes 6 flops per active weight and 12 layers x hidden x
sequence, as Megatron-LM counts. Its page reports the TFLOPS and, elsewhere, this layout as the
best."""
FSDP = {"dp_shard": "all"}
PIPELINE = {"schedule": "interleaved", "dispatch": "dedup"}

RUNS = (
    PublishedRun("Llama 3.1 8B, 8 H100 of 500 W", LLAMA3_8B, "h100-8", 8, 8192, 16, 5762,
                 TITAN_H100, FSDP, "selective", devices=H100_500W),
    PublishedRun("Llama 3.1 8B, 128 H100 of 500 W", LLAMA3_8B, "h100-8", 128, 8192, 256, 5605,
                 TITAN_H100, FSDP, "selective", devices=H100_500W),
    PublishedRun("Llama 3.1 8B, 64 H100 of 500 W", LLAMA3_8B, "h100-8", 64, 8192, 96, 4378,
                 TITAN_TP, {"tp": 8, **FSDP}, "selective", devices=H100_500W),
    PublishedRun("Llama 3.1 70B, 256 H100 of 500 W", LLAMA3_70B, "h100-8", 256, 8192, 512, 597.3,
                 TITAN_TP, {"tp": 8, **FSDP}, "full", devices=H100_500W),
    PublishedRun("Mixtral 8x7B, 64 H100", PRESETS["mixtral-8x7b"], "h100-8", 64, 4096, 256,
                 MIXTRAL_TOKENS, MEGATRON,
                 {"pp": 4, "ep": 8, "schedule": "interleaved", "dispatch": "all_to_all"}, "none",
                 micro_batches=16, virtual_stages=8),
    PublishedRun("Qwen3 30B-A3B, 8 H100", PRESETS["qwen3-30b-a3b"], "h100-8", 8, 4096, 512, 12040,
                 AUTOMODEL, {"ep": 8, "dispatch": "dedup", **FSDP}, "full", micro_batches=16),
    PublishedRun("DeepSeek-V3, 256 H100", PRESETS["deepseek-v3"], "h100-8", 256, 4096, 512, 1002,
                 AUTOMODEL, {"pp": 4, "ep": 64, "dp_shard": 64, "dispatch_hosts": 8, **PIPELINE},
                 "full", micro_batches=8, virtual_stages=8),
    PublishedRun("DeepSeek-V3, 1,024 H100", PRESETS["deepseek-v3"], "h100-8", 1024, 4096, 8192, 865,
                 AUTOMODEL, {"pp": 4, "ep": 64, "dp_shard": 256, "dispatch_hosts": 8, **PIPELINE},
                 "full", micro_batches=32, virtual_stages=8, flush=8),
    PublishedRun("Kimi K2, 256 H100", KIMI_K2, "h100-8", 256, 4096, 512, 924,
                 AUTOMODEL, {"pp": 8, "ep": 32, "dp_shard": 32, "dispatch_hosts": 4, **PIPELINE},
                 "full", micro_batches=16, virtual_stages=4, flush=8),
    PublishedRun("Qwen3 235B-A22B, 256 H100, EP 32", QWEN3_235B, "h100-8", 256, 4096, 2048, 1663,
                 MODEL_ZOO, {"pp": 8, "tp": 2, "ep": 32, "dispatch_hosts": 8, **PIPELINE},
                 "none", micro_batches=128, virtual_stages=4),
    PublishedRun("Qwen3 235B-A22B, 256 H100, TP 4", QWEN3_235B, "h100-8", 256, 4096, 2048, 1130,
                 MODEL_ZOO, {"pp": 8, "tp": 4, "ep": 8, **PIPELINE}, "none", micro_batches=256,
                 virtual_stages=4),
    PublishedRun("Llama 2 13B, 64 A100", LLAMA2_13B, "a100-8", 64, 4096, 128, 2162,
                 TITAN_A100, FSDP, "none"),
    PublishedRun("Llama 2 70B, 64 A100", LLAMA2_70B, "a100-8", 64, 4096, 128, 353,
                 TITAN_A100, FSDP, "full"),
    PublishedRun("Llama 3 8B, 64 A100", LLAMA3_8B, "a100-8", 64, 8192, 64, 2973,
                 TITAN_A100, FSDP, "selective"),
    PublishedRun("Llama 3 70B, 64 A100", LLAMA3_70B, "a100-8", 64, 8192, 64, 331,
                 TITAN_A100, FSDP, "full"),
)  # fmt: skip
"""Published runs in bf16 whose layout a job can describe.

NeMo AutoModel's recompute is that of its recipes of the time; the one for 1,024 devices was not
found, and is taken to recompute like the one for 256.
"""


def ratios(runs: Sequence[PublishedRun]) -> list[float]:
    """Return the published over the predicted step of each run."""
    return [run.step_s / run.predicted_s for run in runs]


def published(rounds: int) -> Iterator[measure.Row]:
    """Yield the published over the predicted step of each run; nothing is timed or fitted."""
    del rounds
    found = ratios(RUNS)
    farthest = [max(one, 1 / one) for one in found]
    at = int(np.argmax(farthest))
    yield _row(
        f"published and predicted step, larger over smaller, worst of {len(RUNS)} runs",
        farthest[at], f"{RUNS[at].name}; median {np.median(farthest):.2f}; nothing is fitted",
        bar="<= 1.5",
    )  # fmt: skip
    for run, ratio in zip(RUNS, found, strict=True):
        keys = ", ".join(f"{key} {value}" for key, value in run.layout.items())
        yield _row(
            f"published over predicted step, {run.name}", ratio,
            f"{run.tokens_per_s:,g} tokens/s per device; {keys}, {run.recompute} recompute; "
            f"{run.source}",
        )  # fmt: skip


def _row(name: str, value: float, against: str, bar: str = "") -> measure.Row:
    return measure.row(name, value, "ratio", bar=bar, against=against, repeats=1, simulated=True)


PARTS = {"published": published}

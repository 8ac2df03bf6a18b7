"""DeepSpeed ZeRO-3 with parameters and optimizer on NVMe, in an environment of its own.

`python memory_deepspeed.py SETTINGS-AS-JSON` trains a model of Mixtral's shape in plain PyTorch. It
prints a line when it is ready, and takes a step for each line that it reads.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

os.environ.update(
    DS_ACCELERATOR="cpu", GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1", MASTER_PORT="29671",
    RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1",
)  # fmt: skip

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Expert(nn.Module):
    """One expert."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(one, other, bias=False)
            for one, other in ((hidden, ffn), (hidden, ffn), (ffn, hidden))
        )

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x))."""
        result: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result


class Layer(nn.Module):
    """Attention with fewer keys than queries, then experts."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        hidden, self.heads, self.kv_heads = sizes["hidden"], sizes["heads"], sizes["kv_heads"]
        self.top_k, self.head_dim = sizes["top_k"], hidden // sizes["heads"]
        self.norm, self.expert_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(2))
        self.k, self.v = (
            nn.Linear(hidden, self.kv_heads * self.head_dim, bias=False) for _ in range(2)
        )
        self.router = nn.Linear(hidden, sizes["experts"], bias=False)
        self.experts = nn.ModuleList(Expert(hidden, sizes["ffn"]) for _ in range(sizes["experts"]))

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then send each token through its experts."""
        batch, sequence, hidden = x.shape
        y = self.norm(x)
        q, k, v = (
            matrix(y).view(batch, sequence, heads, self.head_dim).transpose(1, 2)
            for matrix, heads in (
                (self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads),
            )
        )  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, sequence, hidden))
        tokens = self.expert_norm(x).view(-1, hidden)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            out = expert(tokens[token]) * weights[token, place, None]
            result = result.index_add(0, token, out)
        return x + result.view_as(x)


class Model(nn.Module):
    """The network, which returns its loss."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes["vocab"], sizes["hidden"])
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes["layers"]))
        self.norm = nn.RMSNorm(sizes["hidden"])
        self.head = nn.Linear(sizes["hidden"], sizes["vocab"], bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of the next tokens."""
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def engine(sizes: dict[str, int], directory: str, clip: float) -> Any:
    """Return DeepSpeed's engine."""
    largest = sizes["hidden"] * sizes["ffn"]
    offload = {"device": "nvme", "nvme_path": directory, "pin_memory": False}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": sizes["micro_batches"], "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "aio": {
            "block_size": 1 << 20, "queue_depth": 16, "single_submit": False,
            "overlap_events": True, "thread_count": 2,
        },
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 1e4,
            "stage3_prefetch_bucket_size": 2 * largest,
            "stage3_max_live_parameters": 6 * largest,
            "stage3_max_reuse_distance": 6 * largest,
            "reduce_bucket_size": largest, "sub_group_size": 3 * largest,
            "offload_param": {**offload, "buffer_count": 8, "buffer_size": largest},
            "offload_optimizer": {**offload, "buffer_count": 4},
        },
    }  # fmt: skip
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = Model(sizes)
    return deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())[0]


def main() -> None:
    """Take a step for each line of input."""
    settings = json.loads(sys.argv[1])
    sizes = settings["shape"]
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed("gloo", verbose=False)
    torch.manual_seed(0)
    model = engine(sizes, settings["directory"], settings["clip"])
    print(json.dumps({"assembled": 1}), flush=True)
    for _ in sys.stdin:
        began = time.perf_counter()
        for _ in range(sizes["micro_batches"]):
            loss = model(torch.randint(sizes["vocab"], (1, sizes["sequence"] + 1)))
            model.backward(loss)
            model.step()
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "loss": float(loss.detach())}), flush=True)


if __name__ == "__main__":
    main()

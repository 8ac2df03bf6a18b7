"""TorchRec's DLRM with fused row-wise AdaGrad, one process, in an environment of its own.

`python -m benchmarks.tables_torchrec ROWS THREADS` prints a line when it is ready. For each line of
JSON that it reads, it trains on batches and prints seconds, or prints the AUC of a batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import distributed, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.models.dlrm import DLRM

from benchmarks.tables_clicks import (
    BOTTOM,
    DENSE,
    DENSE_LR,
    DIM,
    EPSILON,
    LR,
    SLOTS,
    STD,
    TOP,
    Clicks,
    Stream,
    auc,
)

NAMES = [f"slot{slot}" for slot in range(SLOTS)]


def make_model(rows: int) -> nn.Module:
    """Return the model, whose rows update themselves in backward."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    tables = [
        EmbeddingBagConfig(
            name=f"table of {name}", embedding_dim=DIM, num_embeddings=rows, feature_names=[name],
            init_fn=lambda weight: nn.init.normal_(weight, std=STD),
        )
        for name in NAMES
    ]  # fmt: skip
    bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    model = DLRM(bags, DENSE, list(BOTTOM), [*TOP, 1], dense_device=torch.device("cpu"))
    sharder = EmbeddingBagCollectionSharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": LR, "eps": EPSILON,
        }
    )  # fmt: skip
    topology = Topology(world_size=1, compute_device="cpu", local_world_size=1)
    planner = EmbeddingShardingPlanner(topology=topology)
    plan = planner.collective_plan(model, [sharder], distributed.group.WORLD)
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )


def inputs(batch: Clicks) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """Return dense features, keys and labels."""
    values = torch.from_numpy(batch.numbers.reshape(-1))
    keys = KeyedJaggedTensor(NAMES, values, lengths=torch.ones(len(values), dtype=torch.int32))
    return torch.from_numpy(batch.dense), keys, torch.from_numpy(batch.labels)


def main() -> None:
    """Serve requests from standard input."""
    rows, threads = map(int, sys.argv[1:])
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    os.environ.update(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29673", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    distributed.init_process_group("gloo")
    model, stream = make_model(rows), Stream(rows)
    network = [one for name, one in model.named_parameters() if "embedding" not in name]
    optimizer = torch.optim.Adam(network, lr=DENSE_LR)
    loss_of = nn.BCEWithLogitsLoss()

    def answer(request: dict[str, Any]) -> dict[str, float]:
        if "evaluate" in request:
            batch = stream.batch(request["evaluate"], 100_000)
            with torch.no_grad():
                dense, keys, _ = inputs(batch)
                scores = model(dense, keys).view(-1).numpy()
            return {"auc": auc(batch.labels, scores)}
        work = [inputs(stream.batch(seed)) for seed in range(*request["seeds"])]
        began = time.perf_counter()
        for dense, keys, labels in work:
            optimizer.zero_grad()
            loss_of(model(dense, keys).view(-1), labels).backward()
            optimizer.step()
        return {"seconds": time.perf_counter() - began}

    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()

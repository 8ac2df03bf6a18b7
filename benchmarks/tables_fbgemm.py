"""fbgemm's table on the CPU, static ids and row-wise AdaGrad, in an environment of its own.

`python -m benchmarks.tables_fbgemm DIM ROWS THREADS` prints a line when it is ready. For each line
of JSON that it reads, it takes training steps, and prints their seconds and the first batch's rows.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.tables_batches import EPSILON, LR, Shape, batches


def main() -> None:
    """Serve requests from standard input."""
    dim, rows, threads = map(int, sys.argv[1:])
    shape = Shape(dim, rows)
    torch.set_num_threads(threads)
    table = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=LR, eps=EPSILON,
        device=torch.device("cpu"),
    )  # fmt: skip
    (weight,) = table.split_embedding_weights()
    for numbers, values in shape.chunks():
        weight[numbers[0] : numbers[-1] + 1] = torch.from_numpy(values)
    weight.sum()
    for states in table.split_optimizer_states():
        for state in states:
            state.add_(0).sum()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        work = [
            (torch.from_numpy(numbers), torch.from_numpy(grads))
            for numbers, grads in batches(shape, **request)
        ]
        offsets = torch.arange(request["size"] + 1)
        began = time.perf_counter()
        for numbers, grads in work:
            table(numbers, offsets).backward(grads)
        seconds = time.perf_counter() - began
        found = weight[work[0][0][:8]].tolist()
        print(json.dumps({"seconds": seconds, "rows": found}), flush=True)


if __name__ == "__main__":
    main()

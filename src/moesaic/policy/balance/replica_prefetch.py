"""Timing of early replicas, which are planned before tokens are counted.

Replicas that fit are sent during the dense layers between two expert layers. The rest is sent
earlier, during the experts of the previous layer.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from moesaic.facts.balance import BalanceProblem, BoolArray, IntArray


def prefetch_mask(replicas: IntArray, problem: BalanceProblem) -> BoolArray:
    """Return the mask of `replicas` (expert, rank) to send during experts of the previous layer.

    In their order, replicas that a rank can send or receive during the dense layers stay out of it.
    """
    mask = np.zeros(len(replicas), bool)
    each_s = problem.expert_bytes / problem.bytes_per_s + problem.latency_s
    if not problem.overlaps or not each_s:
        return mask
    num_fitting = min(problem.dense_compute_s / each_s, len(replicas))
    sent, received = Counter[int](), Counter[int]()
    for place, (expert, rank) in enumerate(replicas.tolist()):
        owner = int(problem.owners[expert])
        mask[place] = max(sent[owner], received[rank]) + 1 > num_fitting
        sent[owner] += not mask[place]
        received[rank] += not mask[place]
    return mask

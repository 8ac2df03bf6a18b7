"""When copies that are decided on before rows are known leave: under what is between two expert
layers as many as that has time for, and the rest before that, under experts of the layer before."""

from __future__ import annotations

from collections import Counter

import numpy as np

from moesaic.facts.balance import Bools, Ints, Setting


def leave_ahead(copies: Ints, setting: Setting) -> Bools:
    """Which of `copies` (expert, rank) leave under experts; in their order, as many as a rank can
    send, or get, in the time between layers do not."""
    found = np.zeros(len(copies), bool)
    each_s = setting.expert_bytes / setting.bytes_per_s + setting.latency_s
    if not setting.hides or not each_s:
        return found
    fits = min(setting.beside_s / each_s, len(copies))
    sent, received = Counter[int](), Counter[int]()
    for place, (expert, rank) in enumerate(copies.tolist()):
        home = int(setting.homes[expert])
        found[place] = max(sent[home], received[rank]) + 1 > fits
        sent[home] += not found[place]
        received[rank] += not found[place]
    return found

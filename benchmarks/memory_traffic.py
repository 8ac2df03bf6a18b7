"""Bytes that a step must move between memory and drive, for a model of Mixtral's shape."""

from __future__ import annotations

import random
from dataclasses import dataclass

ALIGNMENT = 4096


@dataclass(frozen=True)
class Shape:
    """Sizes of a model and of its steps."""

    layers: int = 6
    hidden: int = 768
    ffn: int = 2688
    heads: int = 12
    kv_heads: int = 2
    vocab: int = 1024
    experts: int = 8
    top_k: int = 2
    sequence: int = 512
    micro_batches: int = 4

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert."""
        return 3 * self.hidden * self.ffn

    @property
    def block_bytes(self) -> int:
        """Bytes of a block: the parameters of one expert in fp32, or a moment, or the gradient."""
        return -(-4 * self.expert_parameters // ALIGNMENT) * ALIGNMENT

    @property
    def num_experts(self) -> int:
        """Experts of all layers."""
        return self.layers * self.experts

    @property
    def state_bytes(self) -> int:
        """Bytes of parameters and both moments of all experts."""
        return 3 * self.num_experts * self.block_bytes

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.micro_batches * self.sequence


def touched_experts(shape: Shape, step: int) -> list[list[int]]:
    """Return the experts that a step uses, by layer: a third of all, popular ones more often.

    Of eight experts a layer uses three or two, so that three layers use eight of 24."""
    result = []
    for layer in range(shape.layers):
        number = (shape.experts * (layer + 1)) // 3 - shape.experts * layer // 3
        order = random.Random(f"popularity {layer}").sample(range(shape.experts), shape.experts)
        draw = random.Random(f"step {step} layer {layer}")
        keys = {
            expert: draw.random() ** float(rank + 1) for rank, expert in enumerate(order)
        }  # Sampling without replacement, with weights 1, 1/2, 1/3, ...
        result.append(sorted(sorted(keys, key=lambda one: -keys[one])[:number]))
    return result


@dataclass(frozen=True)
class Uses:
    """Experts of all layers that a step uses."""

    touched: int
    behind: int
    """Of these, the experts that did not take part in the step before."""


def must_move(uses: Uses, num_blocks: int, *, clips: bool) -> tuple[int, int]:
    """Return the blocks that a step must read and write, if memory has room for `num_blocks`.

    Forward needs the parameters of the touched experts, and the moments of those that have skipped
    updates, to catch up. Backward and update need the whole state, which is written. With clipping,
    backward needs parameters and makes gradients; the update needs them with the whole state. At
    most `num_blocks` of the blocks that a pass needs are in memory when it begins, and as many of
    the changed blocks stay there when it ends.
    """

    def beyond(blocks: int) -> int:
        return max(blocks - num_blocks, 0)

    reads = beyond(uses.touched + 2 * uses.behind)
    writes = beyond(3 * uses.touched)
    if not clips:
        return reads + beyond(3 * uses.touched), writes
    reads += beyond(uses.touched) + beyond(4 * uses.touched)
    return reads, writes + beyond(uses.touched)

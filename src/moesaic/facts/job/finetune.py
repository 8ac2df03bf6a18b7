"""What a run changes of the weights that it starts from."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from moesaic.base.config import Section

Target = Literal["attention", "experts", "ffn", "shared"]


class FinetuneConfig(Section):
    """What a run changes of the weights that it starts from; without this table all of them."""

    method: Literal["full", "lora"] = "full"
    """full: the weights themselves. lora: nothing but two thin matrices A and B beside each matrix
    W of the targets, which then counts as W + alpha / rank * B A."""
    router: Literal["train", "frozen"] = "frozen"
    """train: routers learn, and so do their biases, whatever the method; frozen: neither does."""
    targets: list[Target] = Field(default=["attention", "experts"], min_length=1)
    """lora: attention's projections, experts, dense feed-forward networks, shared experts."""
    rank: int = Field(default=8, ge=1)
    """lora: rows of A and columns of B."""
    alpha: float = Field(default=16.0, gt=0)
    """lora: strength of B A, before it is divided by the rank."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank

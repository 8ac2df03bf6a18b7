"""Settings of a recommender's network."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from moesaic.base.config import Section

RecommenderFamily = Literal["ctr-dnn", "dlrm", "dcn-v2"]
"""Networks over embedding rows and dense features."""

Width = Annotated[int, Field(ge=1)]


class RecommenderConfig(Section):
    """Network over the summed embedding rows of each slot, and the dense features."""

    family: RecommenderFamily
    """Network. ctr-dnn: a deep stack over all features. dlrm: dot products of all pairs of slots
    and of the dense features' own stack. dcn-v2: cross layers beside a deep stack."""
    dim: int = Field(default=16, ge=1, le=1024)
    """Numbers per embedding row."""
    hidden: list[Width] = Field(default=[256, 128, 64], min_length=1)
    """Widths of the deep stack, before its single output."""
    dense_hidden: list[Width] = Field(default=[64])
    """Widths of the stack over dense features, before its output of width `dim` (dlrm)."""
    cross_layers: int = Field(default=3, ge=1)
    """Cross layers (dcn-v2)."""

    def conflicts(self) -> Iterator[str]:
        """Yield settings of another family."""
        given = self.non_default_fields
        for name, family in (("dense_hidden", "dlrm"), ("cross_layers", "dcn-v2")):
            if name in given and self.family != family:
                yield (
                    f'model.{name} is for model.family = "{family}", not "{self.family}": remove it'
                )

    def stack_widths(self, num_slots: int, num_dense: int) -> dict[str, list[int]]:
        """Return the widths of each stack of linear layers by name, from its inputs on."""
        inputs, output = num_slots * self.dim + num_dense, {"output": [self.hidden[-1], 1]}
        if self.family == "ctr-dnn":
            return {"deep": [inputs, *self.hidden], **output}
        if self.family == "dlrm":
            pairs = num_slots * (num_slots + 1) // 2
            return {
                "dense": [num_dense, *self.dense_hidden, self.dim],
                "deep": [self.dim + pairs, *self.hidden],
                **output,
            }
        return {
            "cross": [inputs] * (self.cross_layers + 1),
            "deep": [inputs, *self.hidden],
            "output": [inputs + self.hidden[-1], 1],
        }

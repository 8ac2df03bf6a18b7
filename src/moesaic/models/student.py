"""Auxiliary weights of a student in distillation, beside its language model; exports omit them.

Their logical names start with `auxiliary.`, behind the student's own prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from moesaic.facts.job import ModelConfig
from moesaic.facts.job.distill import AUXILIARY, StudentConfig
from moesaic.models.lm import auxiliary_layer
from moesaic.models.state import LocalParam
from moesaic.nn.attention import Linear
from moesaic.nn.inputs import Inputs
from moesaic.nn.reports import AttentionReport, BlockReport


class Auxiliary(nn.Module):
    """Weights on top of a student's last layer: an attention layer and a projection, or neither."""

    def __init__(self, student: StudentConfig, teacher: ModelConfig) -> None:
        """Create the weights that the losses of `student` need beside `teacher`."""
        super().__init__()
        own = student.model
        self.layer = auxiliary_layer(own, teacher) if student.auxiliary_layer else None
        is_projected = student.losses.hidden > 0 and own.hidden != teacher.hidden
        self.projection = Linear(own.hidden, teacher.hidden) if is_projected else None

    def attend(self, last: BlockReport, inputs: Inputs) -> AttentionReport:
        """Return queries and keys to compare with the teacher's, from the student's last layer."""
        if self.layer is None:
            assert last.attention is not None
            return last.attention
        report: AttentionReport = self.layer(last.hidden_states, inputs)
        return report

    def project(self, hidden_states: Tensor) -> Tensor:
        """Return a student's hidden states in the teacher's width."""
        if self.projection is None:
            return hidden_states
        projected: Tensor = self.projection(hidden_states)
        return projected


def build_auxiliary(
    student: StudentConfig, teacher: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Auxiliary:
    """Return the auxiliary weights of a student, uninitialised, on `device`."""
    with device:
        return Auxiliary(student, teacher).to(dtype)


def auxiliary_params(auxiliary: Auxiliary, ranks: Sequence[int]) -> Iterator[LocalParam]:
    """Yield the weights as parameters that all `ranks` hold whole."""
    for name, parameter in auxiliary.named_parameters():
        shape, owners = tuple(parameter.shape), tuple(ranks)
        yield LocalParam(AUXILIARY, f"{AUXILIARY}.{name}", parameter, None, shape, owners)

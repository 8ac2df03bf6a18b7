"""Dispatch without communication: every expert is on this rank."""

from __future__ import annotations

from torch import Tensor

from moesaic.nn.dispatch.all_to_all import ExpertInputs


class LocalDispatch:
    """Token dispatch on a single rank. Experts read the tokens in place and sum their results."""

    def __init__(self, inputs: ExpertInputs) -> None:
        self._inputs = inputs

    def finish_dispatch(self) -> ExpertInputs:
        """Return the tokens, uncopied."""
        return self._inputs

    def start_combine(self, results: Tensor) -> None:
        """Keep the results, which the experts have summed by token."""
        self._results = results

    def finish_combine(self) -> Tensor:
        """Return the results, [tokens, hidden]."""
        return self._results

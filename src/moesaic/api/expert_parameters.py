"""Parameters of experts, one by one, over the arena in which a layer computes with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from moesaic.base.errors import ConfigError
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.mlp import MLPBank


class ExpertParameters(nn.ModuleDict):
    """Parameters of the experts that this rank owns, such as `3.up_proj.weight`.

    Each is a view of one row of an arena, so that a forward pass copies nothing. A move to another
    device or dtype separates them; the next pass makes a new arena.
    """

    def __init__(
        self,
        bank: ExpertBank | MLPBank,
        average_gradient: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Take over the parameters of `bank`. If the experts are split over ranks,
        `average_gradient` replaces the arena's gradient in each backward pass."""
        super().__init__()
        self._average_gradient = average_gradient
        self._bank = (bank,)  # A tuple, so that it is not registered.
        self._arena = bank.arena.detach()
        del bank.arena  # `computing` sets it, to a tensor of the graph.
        self._views = [view for _, _, view in bank.matrices(self._arena)]
        for expert, name, view in bank.matrices(self._arena):
            matrix, _, kind = name.partition(".")
            if str(expert) not in self:
                self[str(expert)] = nn.ModuleDict()
            matrices = cast("nn.ModuleDict", self[str(expert)])
            if f"{matrix}_proj" not in matrices:
                matrices[f"{matrix}_proj"] = nn.Module()
            matrices[f"{matrix}_proj"].register_parameter(kind or "weight", nn.Parameter(view))
        self.register_load_state_dict_post_hook(_remember_loaded)
        self.remember()

    def in_order(self) -> Iterator[nn.Parameter]:
        """Yield the parameters in the order of the arena."""
        (bank,) = self._bank
        for expert in bank.experts:
            for name in bank.names:
                matrix, _, kind = name.partition(".")
                layer = cast("nn.ModuleDict", self[str(expert)])[f"{matrix}_proj"]
                yield cast("nn.Parameter", getattr(layer, kind or "weight"))

    def remember(self) -> None:
        """Take the present parameters as the layer's own."""
        self._known = tuple(self.in_order())

    def _apply(self, fn: Any, recurse: bool = True) -> ExpertParameters:
        """Move or cast the parameters, which may replace them."""
        super()._apply(fn, recurse)
        self.remember()
        return self

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Give the bank its arena for one forward pass."""
        (bank,) = self._bank
        bank.arena = cast("nn.Parameter", self._join(list(self.in_order())))
        try:
            yield
        finally:
            bank.arena = cast("nn.Parameter", self._arena)

    def _join(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the arena, whose gradient goes to the parameters."""
        own = zip(parameters, self._known, strict=True)
        if any(parameter is not known for parameter, known in own):
            if self._average_gradient is not None:
                raise ConfigError(
                    "FSDP shards the experts of a moesaic.MoE, which its group splits already: "
                    "call fully_shard(module, "
                    "ignored_params=moesaic.expert_parameters(model))"
                )
            rows = torch.cat([parameter.flatten() for parameter in parameters])
            return rows.view(self._arena.shape)  # FSDP gathers them for this pass.
        self._tie(parameters)
        if not torch.is_grad_enabled():
            return self._arena
        joined: Tensor = _Join.apply(self, *parameters)
        return joined

    @torch.no_grad()
    def _tie(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the parameters views of one arena, if they are not."""
        pairs = zip(parameters, self._views, strict=True)
        if all(_shares_memory(parameter, view) for parameter, view in pairs):
            return
        first = parameters[0]
        self._arena = torch.empty_like(self._arena, dtype=first.dtype, device=first.device)
        (bank,) = self._bank
        self._views = [view for _, _, view in bank.matrices(self._arena)]
        for parameter, view in zip(parameters, self._views, strict=True):
            parameter.data = view.copy_(parameter)

    def split(self, arena_gradient: Tensor) -> Iterable[Tensor]:
        """Return the gradient of each parameter, averaged over ranks if the experts are split."""
        if self._average_gradient is not None:
            arena_gradient = self._average_gradient(arena_gradient)
        (bank,) = self._bank
        return (view for _, _, view in bank.matrices(arena_gradient))


def _remember_loaded(parameters: ExpertParameters, _: object) -> None:
    parameters.remember()


def _shares_memory(parameter: Tensor, view: Tensor) -> bool:
    return (
        parameter.data_ptr() == view.data_ptr()
        and parameter.dtype == view.dtype
        and parameter.device == view.device
    )


class _Join(torch.autograd.Function):
    """Arena of parameters that are views of it."""

    @staticmethod
    def forward(ctx: Any, owner: ExpertParameters, *parameters: Tensor) -> Tensor:
        """Return the arena."""
        del parameters
        ctx.owner = owner
        return owner._arena.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return views of the arena's gradient."""
        return None, *ctx.owner.split(grads[0])

"""Recommenders: networks over the summed embedding rows of each slot, and the dense features.

`ctr-dnn` is a deep stack over all features. `dlrm` (Naumov et al., 2019) takes dot products of all
pairs of slots and of the dense features' own stack. `dcn-v2` (Wang et al., 2020) has cross layers
beside a deep stack. Embedding rows are inputs: the network owns none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moesaic.facts.job import RecommenderConfig
from moesaic.models.state import LocalParam


class Recommender(nn.Module):
    """Network of a recommender; its stacks of linear layers are lists of modules by name."""

    def __init__(
        self,
        config: RecommenderConfig,
        num_slots: int,
        num_dense: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        """Allocate the network on `device`; parameters have no values yet."""
        super().__init__()
        self.config, self.num_slots, self.num_dense = config, num_slots, num_dense
        self._pairs: Tensor
        for name, widths in config.stack_widths(num_slots, num_dense).items():
            layers = [nn.Linear(*sizes, device="meta", dtype=dtype) for sizes in pairwise(widths)]
            self.add_module(name, nn.ModuleList(layers))
        self.to_empty(device=device or torch.device("cpu"))
        features = num_slots + 1
        first, second = torch.tril_indices(features, features, offset=-1, device=device)
        self.register_buffer("_pairs", first * features + second, persistent=False)

    def forward(self, pooled: Tensor, dense: Tensor) -> Tensor:
        """Return the logits, [samples].

        Args:
            pooled: sums of embedding rows, [samples, slots, dim].
            dense: dense features, [samples, features].
        """
        if self.config.family == "dlrm":
            hidden = self._run("deep", self._interact(pooled, dense))
        else:
            inputs = torch.cat((pooled.flatten(1), dense), 1)
            hidden = self._run("deep", inputs)
            if self.config.family == "dcn-v2":
                hidden = torch.cat((self._cross(inputs), hidden), 1)
        (output,) = self._layers("output")
        logits: Tensor = output(hidden)
        return logits.squeeze(1)

    def _interact(self, pooled: Tensor, dense: Tensor) -> Tensor:
        """Return the output of the dense features' stack, and the dot products of all pairs of it
        and the slots."""
        own = self._run("dense", dense)
        features = torch.cat((own[:, None], pooled), 1)
        dots = torch.bmm(features, features.transpose(1, 2)).flatten(1)
        return torch.cat((own, dots.index_select(1, self._pairs)), 1)

    def _cross(self, inputs: Tensor) -> Tensor:
        """Return the output of the cross layers, x -> inputs * (W x + b) + x."""
        x = inputs
        for layer in self._layers("cross"):
            x = torch.addcmul(x, inputs, layer(x))
        return x

    def _run(self, name: str, x: Tensor) -> Tensor:
        """Run a stack, with a ReLU after each layer."""
        for layer in self._layers(name):
            x = F.relu(layer(x))
        return x

    def _layers(self, name: str) -> nn.ModuleList:
        layers = self.get_submodule(name)
        assert isinstance(layers, nn.ModuleList)
        return layers


def network_params(network: Recommender, ranks: Sequence[int]) -> list[LocalParam]:
    """Return the parameters of a network that `ranks` replicate; each stack is a block."""
    owners = tuple(ranks)
    return [
        LocalParam(name.partition(".")[0], name, one, None, tuple(one.shape), owners)
        for name, one in network.named_parameters()
    ]

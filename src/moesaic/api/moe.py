"""`moesaic.MoE`: the expert layer as a module of a user's own model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moesaic.api.arguments import explains_arguments
from moesaic.api.ddp import is_averaged_by_ddp
from moesaic.api.expert_group import PRECISIONS, ExpertGroup
from moesaic.api.expert_parameters import ExpertParameters
from moesaic.base.errors import ConfigError
from moesaic.kernels.randomness import normal
from moesaic.nn.aux_loss import AuxLoss
from moesaic.nn.dispatch.all_to_all import DispatchGroups
from moesaic.nn.dispatch.dispatcher import Dispatcher
from moesaic.nn.experts.bank import ExpertBank
from moesaic.nn.experts.mlp import ActivationName, MLPBank
from moesaic.nn.inputs import Inputs, Rotary
from moesaic.nn.moe import MoE as ExpertLayer
from moesaic.nn.reports import MoEReport
from moesaic.nn.router import Router
from moesaic.policy.balance import LayerBalancer

_INIT_STD = 0.02


class MoE(nn.Module):
    """Mixture-of-experts feed-forward layer: `[..., hidden]` to `[..., hidden]`.

    In training, add `aux_loss` to the loss after each forward pass. With a group, each rank holds
    some of the experts, and tokens travel to them. Loss and gradients are then as with data
    parallelism: means over ranks. Keep the experts out of DDP and FSDP: see `exclude_experts` and
    `expert_parameters`.
    """

    @explains_arguments
    def __init__(  # noqa: PLR0913 -- the options of a public layer, by keyword
        self,
        hidden: int,
        ffn: int,
        experts: int,
        top_k: int,
        *,
        group: dist.ProcessGroup | DeviceMesh | ExpertGroup | None = None,
        activation: Literal["swiglu"] | ActivationName = "swiglu",
        bias: bool = False,
        renormalise: bool = True,
        capacity_factor: float | None = None,
        balance: Literal["none", "quota"] = "none",
        balance_loss: float = 0.01,
        z_loss: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Create and initialise the layer; every rank of a group must.

        Args:
            hidden: width of tokens.
            ffn: channels of an expert.
            experts: experts of the layer.
            top_k: experts that compute each token.
            group: ranks that split the experts. Give all layers of a model one `ExpertGroup`, so
                that they share connections. None: this rank has all experts.
            activation: swiglu: an expert is down(silu(gate(x)) * up(x)). Others: an expert is
                down(activation(up(x))).
            bias: add biases to up and down; not with swiglu.
            renormalise: make the weights of a token's experts sum to 1.
            capacity_factor: most assignments of an expert in training, as a multiple of the mean;
                further ones are dropped. None: no limit.
            balance: quota: busy experts get replicas on other ranks for one step, in training (see
                docs/balance.md). It needs a group and activation "swiglu".
            balance_loss: weight of the load-balance loss in `aux_loss`.
            z_loss: weight of the router's z-loss in `aux_loss`.
            device: device of the parameters.
            dtype: dtype of the parameters.
        """
        super().__init__()
        _check_sizes(hidden=hidden, ffn=ffn, experts=experts, top_k=top_k)
        _check_options(dtype, capacity_factor, balance_loss=balance_loss, z_loss=z_loss)
        if group is not None and not isinstance(group, ExpertGroup):
            group = ExpertGroup(group)
        self.group = group
        self.hidden, self.ffn, self.num_experts, self.top_k = hidden, ffn, experts, top_k
        self.activation, self.balance_loss, self.z_loss = activation, balance_loss, z_loss
        self.num_replicas = 0
        """Replicas of experts in the last forward pass in training."""
        self._aux: AuxLoss | None = None
        device = _device(device)
        groups = DispatchGroups() if group is None else group.dispatch_groups(device)
        with device:
            self.router = Router(0, hidden, experts, top_k, renormalise=renormalise).to(dtype)
            bank = _make_bank(_owned_experts(experts, groups), hidden, ffn, activation, bias=bias)
        dedup = group is not None and groups.ep_size > 1 and group.deduplicates(top_k)
        self._build(bank.to(dtype), Dispatcher(experts, groups, capacity_factor, dedup=dedup))
        if balance != "none":
            self._layer[0].balancer = self._make_balancer(balance)

    def _build(self, bank: ExpertBank | MLPBank, dispatcher: Dispatcher) -> None:
        """Make the parameters of `bank` those of the module, and initialise them."""
        average = None if self.group is None else self.group.average_gradient
        self.experts = ExpertParameters(bank, average)
        # An MLPBank does what the layer asks of a bank.
        layer = ExpertLayer(self.router, cast("ExpertBank", bank), dispatcher)
        self._layer = (layer,)  # A tuple, so that its modules are registered once.
        self.register_load_state_dict_pre_hook(_check_state)
        if not self.router.weight.is_meta:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise router and experts from torch's generator, equally for any number of ranks."""
        if isinstance(self.router.weight, DTensor):
            raise ConfigError("FSDP shards the layer: call reset_parameters() before fully_shard")
        if self.group is None:
            seed = int(torch.randint(2**62, ()))
        else:
            seed = self.group.broadcast_seed()
        _fill_normal(self.router.weight, seed, "router")
        for name, parameter in self.experts.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                _fill_normal(parameter, seed, f"experts.{name}")

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer, in the shape of `x`."""
        self._check_input(x)
        if self.group is not None and is_averaged_by_ddp(next(self.experts.parameters())):
            raise ConfigError(
                "DDP averages the experts of a moesaic.MoE, which differ from rank to rank: call "
                "moesaic.exclude_experts(model) before DistributedDataParallel(model), with the "
                "same model"
            )
        (layer,) = self._layer
        with self.experts.computing():
            result: tuple[Tensor, MoEReport] = layer(x, Inputs(_NO_ROTARY, training=self.training))
        out, report = result
        if self._aux is not None:
            self._aux.wait()
        if isinstance(layer.balancer, LayerBalancer) and self.training:
            decisions = layer.balancer.take_decisions()
            self.num_replicas = sum(len(one.outcome.replicas) for one in decisions)
        all_group = None if self.group is None else self.group.all_group
        self._aux = AuxLoss([report], all_group) if self.training else None
        return out

    def _check_input(self, x: Tensor) -> None:
        """Raise if the layer cannot compute with `x`."""
        weight, expert = self.router.weight, next(self.experts.parameters())
        if weight.is_meta or expert.is_meta:
            raise ConfigError(
                "the layer is on the meta device and has no values: call layer.to_empty(device=...)"
                " and layer.reset_parameters(), or layer.load_state_dict(state, assign=True), first"
            )
        if not x.is_floating_point():
            raise ConfigError(f"x has dtype {x.dtype}: give tokens as floating-point vectors")
        if x.ndim == 0 or x.shape[-1] != self.hidden:
            raise ConfigError(
                f"x has {x.shape[-1] if x.ndim else 'no'} channels, but the layer has "
                f"hidden = {self.hidden}"
            )
        for parameter in (weight, expert):
            if x.device != parameter.device:
                raise ConfigError(
                    f"x is on {x.device}, but the layer is on {parameter.device}: move one of them "
                    "with .to(device)"
                )
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise ConfigError(
                f"x has dtype {x.dtype}, but the layer has {weight.dtype}: cast one of them with "
                ".to(dtype), or compute under torch.autocast"
            )

    @property
    def aux_loss(self) -> Tensor:
        """Weighted balance loss and z-loss of the last forward pass in training.

        It has a gradient. Its mean over ranks is the loss of all ranks' tokens.
        """
        if self._aux is None:
            first = "the layer" if self.training else "train() and then the layer"
            raise ConfigError(f"aux_loss follows a forward pass in training: call {first} first")
        if torch.is_grad_enabled() and self.router.weight.requires_grad > self._aux.has_gradient:
            raise ConfigError(
                "aux_loss has no gradient: the forward pass ran under no_grad(). Checkpoint layers "
                "with use_reentrant=False, or read aux_loss under no_grad() too"
            )
        balance, z = self._aux.losses()
        num_ranks = 1 if self.group is None else self.group.num_ranks
        return num_ranks * (self.balance_loss * balance + self.z_loss * z)

    def _make_balancer(self, policy: str) -> LayerBalancer:
        """Return the balancer of this layer; every rank must call this."""
        if policy != "quota":
            raise ConfigError(f'balance = "{policy}" is not known: give "none" or "quota"')
        if self.group is None or self.activation != "swiglu":
            raise ConfigError(
                f'balance = "{policy}" needs a group and activation = "swiglu": give both, or '
                'balance = "none"'
            )
        sizes = {
            "hidden": self.hidden, "ffn": self.ffn, "experts": self.num_experts,
            "top_k": self.top_k,
        }  # fmt: skip
        weight = self.router.weight
        return self.group.make_balancer(sizes, policy, weight.device, weight.dtype)

    def extra_repr(self) -> str:
        """Return sizes for `print(model)`."""
        groups = self._layer[0].dispatcher.groups
        return (
            f"{self.hidden}, {self.ffn}, experts={self.num_experts}, "
            f"top_k={self.top_k}, ranks={groups.ep_size}"
        )

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load parameters of this layer alone; experts of other ranks are ignored."""
        if strict and not _matrices(state_dict, "experts."):
            raise ConfigError(
                "the state dict has no experts.*, such as experts.0.up_proj.weight: give the "
                "state_dict() of a moesaic.MoE, or strict=False"
            )
        return super().load_state_dict(state_dict, strict, assign)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without losses of the last forward pass."""
        return {**self.__dict__, "_aux": None}


_NO_ROTARY = Rotary(torch.empty(0), torch.empty(0))


def _device(device: torch.device | str | None) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        words = str(error).splitlines()[0]
        raise ConfigError(
            f"device = {str(device)!r} cannot be used ({words}): give one such as cpu"
        ) from None


def _owned_experts(experts: int, groups: DispatchGroups) -> range:
    """Return the experts of this rank."""
    each, rest = divmod(experts, groups.ep_size)
    if rest:
        raise ConfigError(
            f"experts = {experts} do not split evenly over {groups.ep_size} ranks: give a "
            "multiple, or a group of another size"
        )
    return range(groups.ep_rank * each, (groups.ep_rank + 1) * each)


def _make_bank(
    experts: Sequence[int],
    hidden: int,
    ffn: int,
    activation: Literal["swiglu"] | ActivationName,
    *,
    bias: bool,
) -> ExpertBank | MLPBank:
    """Return the parameters of `experts`."""
    names = ("swiglu", *get_args(ActivationName))
    if activation not in names:
        raise ConfigError(f"activation = {activation!r} is not one of {', '.join(names)}")
    if activation != "swiglu":
        return MLPBank(experts, hidden, ffn, activation, bias=bias)
    if bias:
        raise ConfigError('bias = True needs another activation than "swiglu"')
    return ExpertBank(experts, hidden, ffn)


def _check_sizes(**sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"{name} = {size!r} must be an integer of at least 1")
    if sizes["top_k"] > sizes["experts"]:
        raise ConfigError("top_k = {top_k} exceeds experts = {experts}".format(**sizes))


def _check_options(dtype: object, capacity_factor: float | None, **loss_weights: float) -> None:
    if dtype is not None and dtype not in PRECISIONS:
        names = ", ".join(str(one) for one in PRECISIONS)
        raise ConfigError(f"dtype = {dtype!r} is not known: give one of {names}, or None")
    if capacity_factor is not None and not (_is_number(capacity_factor) and capacity_factor > 0):
        raise ConfigError(f"capacity_factor = {capacity_factor!r} must be above 0, or None")
    for name, weight in loss_weights.items():
        if not (_is_number(weight) and weight >= 0):
            raise ConfigError(f"{name} = {weight!r} must be a number from 0; 0 leaves the loss out")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _fill_normal(out: Tensor, seed: int, name: str) -> None:
    values = normal(seed, f"initial {name}", 0, out.numel()).view(out.shape)
    out.copy_(values.mul_(_INIT_STD))


def _check_state(layer: MoE, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Raise if a state dict has other sizes or matrices; drop experts of other ranks from it."""
    saved = _matrices(state, f"{prefix}experts.")
    needed = _matrices(layer.state_dict(), "experts.")
    if saved and saved != needed:
        raise ConfigError(
            f"the experts in the state dict have {', '.join(sorted(saved))}, but those of the "
            f"layer have {', '.join(sorted(needed))}: create the layer with the activation and "
            "bias of the saved one"
        )
    own = {f"{prefix}{name}": value for name, value in layer.state_dict().items()}
    for key, value in own.items():
        if key in state and state[key].shape != value.shape:
            raise ConfigError(
                f"{key} has shape {list(state[key].shape)} in the state dict, but the layer needs "
                f"{list(value.shape)}: create the layer with the sizes of the saved one"
            )
    foreign = [
        key
        for expert in range(layer.num_experts)
        if str(expert) not in layer.experts
        for key in state
        if key.startswith(f"{prefix}experts.{expert}.")
    ]
    for key in foreign:
        del state[key]


def _matrices(state: Mapping[str, Any], prefix: str) -> set[str]:
    """Return the names of an expert's parameters in `state`, such as `up_proj.weight`."""
    return {key.removeprefix(prefix).partition(".")[2] for key in state if key.startswith(prefix)}

"""Private API of torch's DDP for parameters that it does not average.

Tested with torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


def exclude_from_ddp(model: nn.Module, names: Sequence[str]) -> None:
    """Exclude the parameters called `names` from DDP, besides those excluded before."""
    known = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [*known, *names])


def is_averaged_by_ddp(parameter: Tensor) -> bool:
    """Return whether the forward pass of DDP that runs now averages `parameter`."""
    active = DistributedDataParallel._get_active_ddp_module()
    return active is not None and any(one is parameter for one in active._module_parameters)

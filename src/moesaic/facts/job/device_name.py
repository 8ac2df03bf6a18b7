"""Names of devices in a job; `kernels.device` finds the device."""

from __future__ import annotations

import re

from moesaic.base.errors import ConfigError


def is_gpu(name: str) -> bool:
    """Return whether `name` asks for a GPU."""
    return name.startswith("cuda")


def check_device_name(key: str, name: str) -> str:
    """Return `name`, the value of the setting `key`, if it can name a device; raise if not."""
    if re.fullmatch(r"auto|(cpu|cuda)(:\d+)?", name) is None:
        raise ConfigError(f"{key} = '{name}' is not a device; use auto, cpu or cuda")
    return name

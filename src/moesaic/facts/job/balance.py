"""What is done about experts that get more tokens than others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moesaic.base.config import Section

Policy = Literal[
    "none", "auto", "quota", "pro-prophet", "faster-moe", "top-k-broadcast", "eplb", "llep"
]  # fmt: skip
"""Who decides which experts have copies for a step."""


class Prices(Section):
    """What a policy counts on; the same on every rank."""

    rows_per_s: float = Field(gt=0)
    """Rows that the experts of a rank take in a second, forward."""
    bytes_per_s: float = Field(gt=0)
    """Bytes that a rank sends to others in a second, while it gets as many."""
    latency_s: float = Field(ge=0)
    """Seconds that an exchange takes, however little travels."""
    hides: bool = True
    """Whether copies travel while ranks compute, as over a network or between GPUs; ranks that
    share a host's memory move bytes themselves, and do nothing else then."""


class BalanceConfig(Section):
    """What is done about experts that get more tokens than others, where ranks share them out.

    Routing stays as it is: for one step, experts have copies on ranks that have less to do, and
    gradients of copies go home.
    """

    policy: Policy = "auto"
    """none: nothing. quota: few copies, where tokens are, each with an exact number of rows, and
    none where they would not pay. pro-prophet, faster-moe, llep: as published. top-k-broadcast: the
    `hottest` to everyone, whatever it costs. eplb: as many on every rank as `copies` says, by the
    rows of the time before. auto: whichever of these is modelled best by the rows at hand, and none
    where a rank has few rows."""
    copies: int | None = Field(default=None, ge=0)
    """Experts of other ranks that a rank has memory for, in each layer; unset: for auto a quarter
    of its own, for eplb one, and any number else. pro-prophet, faster-moe and top-k-broadcast know
    no such limit."""
    hottest: int = Field(default=1, ge=1)
    """top-k-broadcast: how many."""
    least_rows: int = Field(default=64, ge=1)
    """quota and llep: rows that a copy gets at least."""
    early: bool = False
    """Copies leave before a layer's attention, under which they travel, and their gradients under
    its backward: which ones is decided by the rows of the time before, and how many rows each takes
    by those at hand. Of pro-prophet and eplb they always do."""
    prices: Prices | None = None
    """What copies cost and save; unset: what the plan says (`moesaic plan` works it out from the
    cluster's figures), and without one what is usual of such devices, between hosts 1 Gbit/s."""
    measure: bool = False
    """Where neither job nor plan say prices, measure them when a run starts: two runs may then
    decide differently. What was measured is kept by the run's plan and its checkpoints."""

    rehome: int = Field(default=0, ge=0)
    """Steps after which experts may change their ranks for good, moments along, each time: as few
    as make up for moving in as many steps more, by the rows since the last time, whatever `policy`
    does within a step. 0: never."""

    @model_validator(mode="after")
    def _keeps_to_memory(self) -> BalanceConfig:
        if self.copies is not None and self.policy not in (
            "none", "auto", "quota", "eplb", "llep",
        ):  # fmt: skip
            raise ValueError(
                f'balance.copies = {self.copies} with balance.policy = "{self.policy}", which '
                "knows no limit: remove it, or take a policy that does (quota, eplb, llep)"
            )
        return self

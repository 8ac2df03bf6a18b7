"""What is done about experts that get more tokens than others."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from moesaic.base.config import Section

Policy = Literal[
    "none", "auto", "quota", "pro-prophet", "faster-moe", "top-k-broadcast", "eplb", "llep", "lp"
]  # fmt: skip
"""Who decides which experts have copies for a step."""

LATE: tuple[Policy, ...] = ("pro-prophet", "eplb", "lp")
"""Those that always decide on copies by rows of the time before."""

WITH_LEAST_ROWS: tuple[Policy, ...] = ("auto", "quota", "llep")
"""Those whose copies get a least number of rows."""

_CAREFUL = ("none", "auto", "quota")
"""Those that by themselves make no copies that are modelled to cost more than they save."""

_OF_COPIES = {
    "copies", "copies_sent", "hottest", "least_rows", "early", "as_published", "replan_every",
    "replan_drift",
}  # fmt: skip

_LIMITED = ("none", "auto", "quota", "eplb", "lp", "llep")
"""Those that know of limits to copies."""


class Prices(Section):
    """What a policy counts on; the same on every rank."""

    rows_per_s: float = Field(gt=0)
    """Rows that the experts of a rank take in a second, forward."""
    bytes_per_s: float = Field(gt=0)
    """Bytes that a rank sends to others in a second, while it gets as many."""
    latency_s: float = Field(ge=0)
    """Seconds that an exchange takes, however little travels."""
    matrices_s: float = Field(default=0.0, ge=0)
    """Seconds that a rank's experts take forward beside that, however few rows there are: reading
    their matrices."""
    hides: bool
    """Whether copies travel while ranks compute, as over a network or between GPUs; false: ranks
    move bytes themselves, as within a host's memory, and do nothing else then, so that what travels
    takes half of its time from who sends it and half from who gets it."""
    handling_s: float = Field(default=0.0, ge=0)
    """Seconds of computing that a byte of a copy costs who sends it and who gets it, if it travels
    while they compute: cores that compute work the sockets, too."""

    def words(self) -> str:
        """For a person."""
        matrices = f" and {1e3 * self.matrices_s:.3g} ms for their matrices"
        handled = f", handling a byte of a copy {1e9 * self.handling_s:.3g} ns"
        hides = "copies travel while ranks compute" if self.hides else "ranks move copies by hand"
        return (
            f"experts take {self.rows_per_s:,.0f} rows/s{matrices if self.matrices_s else ''}, "
            f"{self.bytes_per_s / 1e9:.3g} GB/s travel, an exchange takes "
            f"{1e3 * self.latency_s:.3g} ms{handled if self.handling_s else ''}, {hides}"
        )


class BalanceConfig(Section):
    """What is done about experts that get more tokens than others, where ranks share them out.

    Routing stays as it is: for one step, experts have copies on ranks that have less to do, and
    gradients of copies go home.
    """

    policy: Policy = "auto"
    """none: nothing. quota: few copies, where tokens are, each with an exact number of rows, and
    none where they would not pay. pro-prophet, faster-moe, llep: those of published systems.
    top-k-broadcast: the `hottest` to everyone. eplb: as many on every rank as `copies` says, by the
    rows of the time before. lp: likewise, with the rows at hand split so that the busiest rank has
    the least. auto: whichever of these is modelled best by the rows at hand, quota's where the
    model could not tell them apart, and none where a rank has few rows. Whoever decides, a layer
    has no copies that are modelled to cost more than they save by the rows they are decided by,
    unless `as_published`."""
    as_published: bool = False
    """A layer has whatever copies the policy asks for, also those that are modelled to cost more
    than they save. auto and quota never ask for such."""
    copies: int | None = Field(default=None, ge=0)
    """Experts of other ranks that a rank has memory for, in each layer; unset: for auto a quarter
    of its own, for eplb and lp one, and any number else. pro-prophet, faster-moe and
    top-k-broadcast know no such limit."""
    copies_sent: int | None = Field(default=None, ge=1)
    """Copies of its own experts that a rank has memory to send, in each layer: as many parameters
    leave at a time, and as many gradients come back; unset: any number. The same policies know
    it that know `copies`."""
    hottest: int = Field(default=1, ge=1)
    """top-k-broadcast: experts of a layer, those with the most rows, that every rank has copies
    of."""
    least_rows: int = Field(default=64, ge=1)
    """quota and llep: rows that a copy gets at least. auto asks nobody where a rank has fewer than
    four times as many of a layer."""
    early: bool = False
    """Copies leave before a layer's attention, under which they travel, and their gradients under
    its backward: which ones is decided by the rows of the time before, and how many rows each takes
    by those at hand. Of pro-prophet, eplb and lp they always do."""
    replan_every: int = Field(default=1, ge=1)
    """Where copies go by the rows of the time before: micro-batches for which a layer keeps to
    copies that were decided on."""
    replan_drift: float | None = Field(default=None, ge=0, lt=1)
    """Copies that are kept for `replan_every` micro-batches are decided on anew before that if so
    large a part of the rows has gone over to other experts since; unset: they are not."""
    prices: Prices | None = None
    """What copies cost and save; unset: what the plan says (`moesaic plan` works it out from the
    cluster's figures), and without one what is usual of such devices, between hosts 1 Gbit/s."""
    measure: bool = False
    """Where neither job nor plan say prices, measure them when a run starts: two runs may then
    decide differently. What was measured is kept by the run's plan and its checkpoints."""

    rehome_every: int = Field(default=0, ge=0)
    """Steps after which experts may change their ranks for good, moments along, each time: as few
    as make up for moving in as many steps more, by the rows since the last time, whatever `policy`
    does within a step. 0: never."""

    @model_validator(mode="after")
    def _keeps_to_memory(self) -> BalanceConfig:
        for name in ("copies", "copies_sent"):
            limit = getattr(self, name)
            if limit is not None and self.policy not in _LIMITED:
                raise ValueError(
                    f'balance.{name} = {limit} with balance.policy = "{self.policy}", which knows '
                    "no limit: remove it, or take a policy that does (auto, quota, eplb, lp, llep)"
                )
        return self

    @model_validator(mode="after")
    def _keeps_what_can_be_kept(self) -> BalanceConfig:
        if self.replan_drift is not None and self.replan_every == 1:
            raise ValueError(
                f"balance.replan_drift = {self.replan_drift} with balance.replan_every = 1, which "
                "decides anew each time: remove it, or raise balance.replan_every"
            )
        if self.replan_every > 1 and self.policy != "none" and not self.goes_by_the_past:
            raise ValueError(
                f"balance.replan_every = {self.replan_every} with balance.policy = "
                f'"{self.policy}", which decides by the rows at hand: remove it, take one that '
                f"does not ({', '.join(LATE)}), or say balance.early = true"
            )
        return self

    def idle(self) -> list[str]:
        """A sentence for each setting that was given and has no effect."""
        given, found = self.model_fields_set, list[str]()
        policy = f'balance.policy = "{self.policy}"'
        if not self.copies_are_made:
            why = policy if self.policy == "none" else "balance.copies = 0"
            idle = given & _OF_COPIES - ({"copies"} if self.policy != "none" else set())
            idle |= set() if self.rehome_every else given & {"prices", "measure"}
            return [f"balance.{key} has no effect: {why}" for key in sorted(idle)]
        if self.policy != "top-k-broadcast" and "hottest" in given:
            found.append(f"balance.hottest has no effect: {policy}")
        if self.policy not in WITH_LEAST_ROWS and "least_rows" in given:
            found.append(f"balance.least_rows has no effect: {policy}")
        if self.policy in LATE and self.early:
            found.append(f"balance.early has no effect: {policy} has early copies in any case")
        if self.as_published and self.is_careful:
            found.append(f"balance.as_published has no effect: {policy}")
        if self.prices is not None:
            if self.measure:
                found.append("balance.measure has no effect: balance.prices says what copies cost")
            if self.prices.handling_s and not self.prices.hides:
                found.append(
                    "balance.prices.handling_s has no effect: balance.prices.hides = false"
                )
        return found

    def idle_alone(self, why: str) -> list[str]:
        """The same where nothing is balanced, for `why`: of all but the policies that then do
        nothing by themselves."""
        return [
            f"balance.{key} has no effect: {why}"
            for key in type(self).model_fields
            if key in self.model_fields_set
            and getattr(self, key) != type(self).model_fields[key].default
            and not (key == "policy" and self.policy == "none")
        ]

    @property
    def copies_are_made(self) -> bool:
        """Whether there may be any."""
        return self.policy != "none" and self.copies != 0

    @property
    def is_careful(self) -> bool:
        """Whether the policy by itself makes no copies that are modelled not to pay."""
        return self.policy in _CAREFUL

    @property
    def name(self) -> str:
        """The policy, for a person."""
        published = self.as_published and not self.is_careful
        return f"{self.policy}, as published" if published else self.policy

    @property
    def goes_by_the_past(self) -> bool:
        """Whether copies are decided on by the rows of the time before."""
        return self.early or self.policy in LATE

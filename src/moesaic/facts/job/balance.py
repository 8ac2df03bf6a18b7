"""What is done about experts that get more tokens than others."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from moesaic.base.config import Section
from moesaic.base.keys import listed, show

Policy = Literal["none", "quota", "pro-prophet", "eplb", "faster-moe"]
"""Policies of a training job, which decide which experts have copies for a step."""

Yardstick = Literal["best", "llep", "lp", "top-k-broadcast"]
"""Policies to compare with, which no training job takes."""

LATE: tuple[Policy, ...] = ("pro-prophet", "eplb")
"""Policies that always decide on copies by rows of the time before."""

_OURS = ("none", "quota")
"""Policies that by themselves make no copies that are modelled to cost more than they save."""

_OF_COPIES = {
    "copies", "copies_sent", "least_rows", "early", "as_published", "replan_every", "replan_drift",
}  # fmt: skip


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

    policy: Policy = "quota"
    """quota, the default: few copies, where tokens are, each with an exact number of rows. none:
    no memory is left for copies. pro-prophet, eplb, faster-moe: to train as these systems do;
    pro-prophet and faster-moe copy the hottest experts to every rank, eplb puts as many on each
    rank as `copies` says. A layer has no copies that are modelled to cost more than they save,
    unless `as_published`."""
    as_published: bool = False
    """pro-prophet, eplb and faster-moe: also make copies that are modelled to cost more than they
    save; set it to reproduce a paper."""
    copies: int | None = Field(default=None, ge=0)
    """Experts of other ranks that a rank has memory for, in each layer; set it where memory is
    tight, 0 for no copies. Unset: for quota a quarter of the rank's own experts, at least one; for
    eplb one. pro-prophet and faster-moe have no such limit."""
    copies_sent: int | None = Field(default=None, ge=1)
    """Copies of its own experts that a rank has memory to send, in each layer; set it where the
    rank of a hot expert runs out of memory. Unset: any number. pro-prophet and faster-moe have no
    such limit."""
    least_rows: int = Field(default=64, ge=1)
    """quota: rows that a copy gets at least; raise it for fewer and larger copies. quota makes no
    copies where a rank has fewer than four times as many rows of a layer; lower it for small
    batches."""
    early: bool = False
    """Copies leave before a layer's attention, under which they travel, and their gradients under
    its backward; set it on a slow network with loads that stay. Rows of the time before decide
    which experts have copies, rows at hand how many each copy takes. pro-prophet and eplb always
    do so."""
    replan_every: int = Field(default=1, ge=1)
    """Where rows of the time before decide: micro-batches for which a layer keeps its copies; raise
    it where hot experts stay hot."""
    replan_drift: float | None = Field(default=None, ge=0, lt=1)
    """Share of the rows that must go over to other experts for copies to be decided on anew before
    `replan_every`; set it where hot experts change at times. Unset: copies are kept."""
    prices: Prices | None = None
    """What copies cost and save; unset: what the plan says (`moesaic plan` works it out from the
    cluster's figures), and without one what is usual of such devices, between hosts 1 Gbit/s. Set
    them where `moesaic probe` has measured the machine and there is no plan."""
    measure: bool = False
    """Where neither job nor plan say prices, measure them when a run starts; set it on unusual
    machines where two runs may decide differently. The run's plan and its checkpoints keep what
    was measured."""

    rehome_every: int = Field(default=0, ge=0)
    """Steps after which experts may change their ranks for good, with their moments, each time; set
    it, 100 say, where the same experts are hot for hundreds of steps. An expert moves only if that
    saves more than it costs in as many steps more, whatever `policy` is. 0: never."""

    @model_validator(mode="before")
    @classmethod
    def _trains(cls, raw: Any) -> Any:
        policy = raw.get("policy") if isinstance(raw, dict) else None
        if policy in get_args(Yardstick):
            raise ValueError(
                f"balance.policy = {show(policy)} is a yardstick for replay; training takes "
                f"{listed(get_args(Policy))}"
            )
        return raw

    @model_validator(mode="after")
    def _keeps_to_memory(self) -> BalanceConfig:
        for name in ("copies", "copies_sent"):
            limit = getattr(self, name)
            if limit is not None and not self._knows_limits:
                raise ValueError(
                    f'balance.{name} = {limit} with balance.policy = "{self.policy}", which has '
                    "no such limit: remove it, or take a policy that has one (quota, eplb)"
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
        if not self._has_least_rows and "least_rows" in given:
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
        return self.policy in _OURS

    @property
    def name(self) -> str:
        """The policy, for a person."""
        published = self.as_published and not self.is_careful
        return f"{self.policy}, as published" if published else self.policy

    @property
    def goes_by_the_past(self) -> bool:
        """Whether copies are decided on by the rows of the time before."""
        return self.early or self.policy in LATE

    @property
    def _knows_limits(self) -> bool:
        """Whether the policy keeps to `copies` and `copies_sent`."""
        return self.policy in (*_OURS, "eplb")

    @property
    def _has_least_rows(self) -> bool:
        """Whether the policy keeps to `least_rows`."""
        return self.policy == "quota"


class YardstickConfig(BalanceConfig):
    """Settings of a comparison: as in a job, and the policy may be a yardstick, too."""

    policy: Policy | Yardstick = "quota"  # type: ignore[assignment]
    """As in a job, or a yardstick. best: whichever policy is modelled fastest by the rows at hand.
    llep: what is above a rank's share goes to the ranks with the least. lp: copies as eplb's, with
    rows split so that the busiest rank has the least. top-k-broadcast: the hottest expert to every
    rank."""

    @model_validator(mode="before")
    @classmethod
    def _trains(cls, raw: Any) -> Any:
        return raw  # Yardsticks are welcome here.

    @property
    def is_careful(self) -> bool:
        """As of a job; best compares with no copies as well."""
        return super().is_careful or self.policy == "best"

    @property
    def goes_by_the_past(self) -> bool:
        """As of a job; lp decides on copies by rows of the time before."""
        return super().goes_by_the_past or self.policy == "lp"

    @property
    def _knows_limits(self) -> bool:
        return super()._knows_limits or self.policy in ("best", "llep", "lp")

    @property
    def _has_least_rows(self) -> bool:
        return super()._has_least_rows or self.policy in ("best", "llep")

"""Settings of expert load balancing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field

from moesaic.base.config import Section

Policy = Literal["none", "quota", "pro-prophet", "eplb", "faster-moe"]
"""Policies of a training job. A policy decides which experts have replicas in a step."""

Yardstick = Literal["best", "llep", "lp", "top-k-broadcast"]
"""Policies for comparison in `moesaic replay`; training does not accept them."""


class _Traits(NamedTuple):
    """Traits of a policy."""

    has_cost_check: bool = False
    """The policy itself skips replicas predicted to cost more than they save."""
    uses_past_loads: bool = False
    """Loads of earlier micro-batches always place the replicas."""
    limits_replicas: bool = False
    """The policy obeys `max_replicas` and `max_replicas_sent`."""
    limits_replica_tokens: bool = False
    """The policy obeys `min_replica_tokens`."""


_TRAITS: dict[Policy | Yardstick, _Traits] = {
    "none": _Traits(has_cost_check=True, limits_replicas=True),
    "quota": _Traits(has_cost_check=True, limits_replicas=True, limits_replica_tokens=True),
    "pro-prophet": _Traits(uses_past_loads=True),
    "eplb": _Traits(uses_past_loads=True, limits_replicas=True),
    "faster-moe": _Traits(),
    "best": _Traits(has_cost_check=True, limits_replicas=True, limits_replica_tokens=True),
    "llep": _Traits(limits_replicas=True, limits_replica_tokens=True),
    "lp": _Traits(uses_past_loads=True, limits_replicas=True),
    "top-k-broadcast": _Traits(),
}

_REPLICA_KEYS = {
    "max_replicas", "max_replicas_sent", "min_replica_tokens", "prefetch", "as_published",
    "replan_every", "replan_drift",
}  # fmt: skip


def no_effect(table: str, names: Iterable[str], reason: str) -> list[str]:
    """Return one sentence for each setting of `table` that has no effect for `reason`."""
    return [f"{table}.{name} has no effect: {reason}" for name in sorted(names)]


class BalanceCosts(Section):
    """Costs that balance policies assume, the same on every rank."""

    expert_tokens_per_s: float = Field(gt=0)
    """Tokens a second that the experts of one rank process in forward."""
    bytes_per_s: float = Field(gt=0)
    """Bytes a second that one rank sends while it receives as many."""
    latency_s: float = Field(ge=0)
    """Seconds of the smallest exchange between ranks."""
    weight_read_s: float = Field(default=0.0, ge=0)
    """Seconds that one rank's experts need in forward to read their weights, in addition to the
    time for tokens."""
    overlaps: bool
    """true: replicas are sent while ranks compute, as over a network or between GPUs. false: ranks
    copy the bytes themselves, as in the shared memory of a host, and cannot compute meanwhile.
    Sender and receiver each spend half of the time."""
    cpu_s_per_byte: float = Field(default=0.0, ge=0)
    """CPU seconds per byte of overlapped replica traffic, for both sender and receiver: the cores
    that compute also serve the sockets."""

    def describe(self) -> str:
        """Return the costs as one line of text."""
        weights = f" plus {1e3 * self.weight_read_s:.3g} ms to read weights"
        cpu = f", {1e9 * self.cpu_s_per_byte:.3g} ns of CPU per replica byte"
        replicas = "overlapped with compute" if self.overlaps else "copied by the ranks"
        return (
            f"experts {self.expert_tokens_per_s:,.0f} tokens/s"
            f"{weights if self.weight_read_s else ''}, exchanges {self.bytes_per_s / 1e9:.3g} GB/s "
            f"with {1e3 * self.latency_s:.3g} ms latency{cpu if self.cpu_s_per_byte else ''}, "
            f"replicas {replicas}"
        )


class BalanceConfig(Section):
    """Balancing of expert loads over the `ep` ranks.

    The router's choices do not change. For one step, busy experts get replicas on less loaded
    ranks, and replica gradients are added on the owner rank.
    """

    key_prefix: ClassVar[str] = "balance."
    """Prefix of these settings in error messages."""

    policy: Policy = "quota"
    """Policy that places expert replicas. quota (default): few replicas, near the tokens, each for
    an exact number of tokens. none: no replicas, and no memory for them. pro-prophet, eplb,
    faster-moe: to train as these systems do. pro-prophet and faster-moe copy the busiest experts to
    every rank; eplb puts `max_replicas` on each rank. A layer gets no replicas if they are
    predicted to cost more than they save, unless `as_published` is set."""
    as_published: bool = False
    """Keep replicas that are predicted to cost more than they save (pro-prophet, eplb, faster-moe).
    Set it to reproduce a paper."""
    max_replicas: int | None = Field(default=None, ge=0)
    """Experts of other ranks that a rank has memory for, per layer; 0 for no replicas. Set it where
    memory is tight. Unset: quota takes a quarter of the rank's own experts, at least one; eplb
    takes one. pro-prophet and faster-moe have no such limit."""
    max_replicas_sent: int | None = Field(default=None, ge=1)
    """Replicas of its own experts that a rank has memory to send, per layer. Set it where the owner
    rank of a busy expert runs out of memory. Unset: no limit. pro-prophet and faster-moe have no
    such limit."""
    min_replica_tokens: int = Field(default=64, ge=1)
    """Fewest tokens that a replica is made for (quota only). Raise it for fewer and larger
    replicas; lower it for small batches. quota makes no replicas where a rank has fewer than four
    times as many routed tokens of a layer."""
    prefetch: bool = False
    """Send replicas before a layer's attention, so that they overlap it; their gradients overlap
    its backward. Set it on a slow network with slowly changing loads. Loads of earlier
    micro-batches place the replicas; current loads decide how many tokens each one gets.
    pro-prophet and eplb always do this."""
    replan_every: int = Field(default=1, ge=1)
    """Micro-batches for which a layer keeps its replicas, if loads of earlier micro-batches place
    them (`prefetch`, pro-prophet, eplb). Raise it where the same experts stay busy."""
    replan_drift: float | None = Field(default=None, ge=0, lt=1)
    """Fraction of tokens that must have moved to other experts before replicas are placed anew
    ahead of `replan_every`. Set it where the busy experts change now and then. Unset: replicas stay
    for `replan_every` micro-batches."""
    costs: BalanceCosts | None = None
    """Costs that policies assume. Unset: those of the plan, which `moesaic plan` derives from the
    cluster's file. Without a plan: typical values of such devices, with 1 Gbit/s between hosts. Set
    them where `moesaic probe` has measured the machine and there is no plan."""
    migrate_every: int = Field(default=0, ge=0)
    """Steps between permanent migrations of experts to other ranks, with their optimizer moments;
    0: never. Set it (to 100, for example) where the same experts stay busy for hundreds of steps.
    An expert moves only if that saves more than it costs until the next migration. It works with
    every `policy`."""

    def conflicts(self) -> Iterator[str]:
        """Yield limits that the policy lacks, and plans that it cannot keep."""
        at = self.key_prefix
        for name in ("max_replicas", "max_replicas_sent"):
            limit = getattr(self, name)
            if limit is not None and not _TRAITS[self.policy].limits_replicas:
                yield (
                    f'{at}{name} = {limit} with {at}policy = "{self.policy}", which has '
                    "no such limit: remove it, or use a policy that has one (quota, eplb)"
                )
        if self.replan_drift is not None and self.replan_every == 1:
            yield (
                f"{at}replan_drift = {self.replan_drift} with {at}replan_every = 1, which always "
                f"plans anew: remove it, or raise {at}replan_every"
            )
        if self.replan_every > 1 and self.policy != "none" and not self.uses_past_loads:
            yield (
                f'{at}replan_every = {self.replan_every} with {at}policy = "{self.policy}", which '
                "plans by current loads: remove it, use a policy that plans by earlier loads "
                f"(pro-prophet, eplb), or set {at}prefetch = true"
            )

    def ineffective_settings(self) -> list[str]:
        """Return one sentence for each setting that is not a default and has no effect."""
        given, policy = self.non_default_fields, f'balance.policy = "{self.policy}"'
        if self.policy == "none":
            unused = _REPLICA_KEYS if self.migrate_every else {*_REPLICA_KEYS, "costs"}
            return no_effect("balance", given & unused, policy)
        if self.max_replicas == 0:
            unused = _REPLICA_KEYS - {"max_replicas"}
            unused |= set() if self.migrate_every else {"costs"}
            return no_effect("balance", given & unused, "balance.max_replicas = 0")
        unused = {"as_published"} if self.has_cost_check else set()
        unused |= set() if _TRAITS[self.policy].limits_replica_tokens else {"min_replica_tokens"}
        unused |= {"prefetch"} if _TRAITS[self.policy].uses_past_loads else set()
        return no_effect("balance", given & unused, policy)

    @property
    def uses_replicas(self) -> bool:
        """True if replicas are possible."""
        return self.policy != "none" and self.max_replicas != 0

    @property
    def has_cost_check(self) -> bool:
        """True if the policy itself skips replicas predicted to cost more than they save."""
        return _TRAITS[self.policy].has_cost_check

    @property
    def display_name(self) -> str:
        """Name of the policy for output."""
        published = self.as_published and not self.has_cost_check
        return f"{self.policy}, as published" if published else self.policy

    @property
    def uses_past_loads(self) -> bool:
        """True if loads of earlier micro-batches place the replicas."""
        return self.prefetch or _TRAITS[self.policy].uses_past_loads


class YardstickConfig(BalanceConfig):
    """Balance settings of a replay, whose policy may also be a yardstick."""

    policy: Policy | Yardstick = "quota"  # type: ignore[assignment]
    """Policy as in a job, or a yardstick. best: the policy with the lowest predicted time for the
    current loads. llep: tokens above a rank's even share go to the least loaded ranks. lp: replicas
    as with eplb, with tokens split so that the busiest rank has the fewest. top-k-broadcast: the
    busiest expert to every rank."""

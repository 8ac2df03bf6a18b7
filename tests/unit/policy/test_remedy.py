"""Remedies for jobs that do not fit, compared with plans of the changed job."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from moesaic.base.config import parse
from moesaic.base.errors import ConfigError
from moesaic.facts.cluster import Cluster
from moesaic.facts.cluster.file import resolve_cluster
from moesaic.facts.job import Job
from moesaic.facts.job.model import PRESETS
from moesaic.facts.plan import idle_ranks_warning
from moesaic.facts.plan.search import Remedy
from moesaic.policy.plan.predict import choose_plan
from moesaic.policy.plan.remedy import describe_remedy, find_remedy, remedy_text
from moesaic.policy.plan.search import search_facts


def cluster(nodes: int, **device: float) -> Cluster:
    device = {"reserved_bytes": 0.0, **device}
    host = {"name": "n", "preset": "h100-8", "replicas": nodes, "devices": device}
    link = {"ends": ["*", "*"], "kind": "ethernet", "latency_s": 1e-5, "bandwidth": 1e10}
    links = [link] if nodes > 1 else []
    return resolve_cluster({"name": "some", "hosts": [host], "links": links}, "here")


def job(model: str, train: dict[str, Any], changes: dict[str, Any]) -> Job:
    tables: dict[str, Any] = {
        "model": PRESETS[model], "layout": {}, "data": {"path": "x", "sequence": 1024},
        "train": {"steps": 1, "precision": "bf16", **train},
    }  # fmt: skip
    for key, value in changes.items():
        table, _, name = key.partition(".")
        tables[table] = {**tables.get(table, {}), name: value}
    return parse(Job, tables, "job")


def used(one: Job, where: Cluster, ranks: int) -> float:
    """Return the memory that the plan of a job says, as a fraction of the device's."""
    choices, facts = choose_plan(one, where, ranks)
    return facts.tightest_rank(choices.plan).used_fraction


def remedy_for(one: Job, where: Cluster, ranks: int) -> Remedy | None:
    return find_remedy(search_facts(one, where, ranks))


@pytest.mark.parametrize(("memory", "keys"), [(7e10, 1), (2e10, 2)])
def test_the_smallest_change_fits(memory: float, keys: int) -> None:
    train, where, changes = (
        {"batch": 32},
        cluster(2, count=4, memory_bytes=memory),
        dict[str, Any](),
    )
    found = remedy_for(job("olmoe-1b-7b", train, changes), where, 8)
    assert found is not None
    assert found.fits
    assert len(found.changes) == keys
    assert used(job("olmoe-1b-7b", train, changes), where, 8) > 1
    wanted = {**changes, **found.changes}
    fraction = used(job("olmoe-1b-7b", train, wanted), where, 8)
    assert found.memory.peak_bytes == pytest.approx(fraction * memory)
    assert fraction <= 1
    for key in found.changes:
        fewer = {name: value for name, value in wanted.items() if name != key}
        assert used(job("olmoe-1b-7b", train, fewer), where, 8) > 1


def test_micro_batches_help_where_no_layout_fits() -> None:
    """Their number changes what a run learns, so it comes last."""
    train, where = {"batch": 8, "recompute": True}, cluster(1, count=1, memory_bytes=8e7)
    alone = job("tiny-mixtral", train, {})
    found = remedy_for(alone, where, 1)
    assert found is not None
    assert found.fits
    assert set(found.changes) == {"train.micro_batches"}
    assert used(job("tiny-mixtral", train, found.changes), where, 1) <= 1


def test_what_comes_nearest_is_named_if_nothing_fits() -> None:
    where = cluster(1, count=1, memory_bytes=1e5)
    found = remedy_for(job("tiny-dense", {"batch": 2}, {}), where, 1)
    assert found is not None
    assert not found.fits


SMALL: dict[str, list[Any]] = {
    "layout.pp": [1, 2], "layout.tp": [1, 2], "layout.ep": [1, 2, 4],
    "layout.dp_shard": [1, 2, "all"], "train.recompute": [False, True],
}  # fmt: skip
"""Keys and values that a job on four ranks may change."""


@pytest.mark.parametrize("memory", [2.4e8, 1.6e8, 1.2e8, 1e8, 8e7])
def test_no_set_of_fewer_changes_fits(memory: float) -> None:
    """The oracle tries every set of fewer values, or every set if no remedy fits."""
    train = {"batch": 16, "micro_batches": 2}
    where = cluster(1, count=4, memory_bytes=memory)
    found = remedy_for(job("tiny-mixtral", train, {}), where, 4)
    assert found is not None
    most = len(found.changes) - 1 if found.fits else len(SMALL)
    for values in itertools.product(*SMALL.values()):
        wanted = dict(zip(SMALL, values, strict=True))
        if sum(one != SMALL[key][0] for key, one in wanted.items()) > most:
            continue
        try:
            assert used(job("tiny-mixtral", train, wanted), where, 4) > 1
        except ConfigError:
            continue
    if not found.fits:
        return
    assert found.is_least
    own = job("tiny-mixtral", train, found.changes)
    assert used(own, where, 4) == found.memory.used_fraction


def test_a_remedy_for_thousands_of_devices() -> None:
    """The limit of work leaves most shapes unseen; those with the fewest changes come first."""
    alone = job("deepseek-v3", {"batch": 4096}, {"data.sequence": 4096})
    found = remedy_for(alone, cluster(256), 2048)
    assert found is not None
    assert found.fits
    assert found.memory.used_fraction <= 1


def test_a_remedy_leaves_no_rank_idle_if_as_few_changes_use_all() -> None:
    """Sharding parameters fits too, and splits nothing, but two of four ranks get no sample."""
    own, where = job("tiny-mixtral", {"batch": 2}, {}), cluster(1, count=4, memory_bytes=8e7)
    found = remedy_for(own, where, 4)
    assert found is not None
    assert found.fits
    (change,) = found.changes.items()
    sharded = job("tiny-mixtral", {"batch": 2}, {"layout.dp_shard": "all"})
    assert used(own, where, 4) > 1 >= used(sharded, where, 4)
    chosen = job("tiny-mixtral", {"batch": 2}, dict([change]))
    assert idle_ranks_warning(choose_plan(sharded, where, 4)[0].plan, sharded) is not None
    assert idle_ranks_warning(choose_plan(chosen, where, 4)[0].plan, chosen) is None


def test_qwen3_on_two_hosts() -> None:
    """Its default layout needs 656 GiB a rank; a known layout fits, and so must a remedy."""
    train, where = {"batch": 256}, cluster(2)
    known = {
        "layout.ep": 8, "layout.dp_shard": "all", "train.recompute": True,
        "train.micro_batches": 4, "data.sequence": 4096,
    }  # fmt: skip
    assert used(job("qwen3-30b-a3b", train, known), where, 16) <= 1
    alone = job("qwen3-30b-a3b", train, {"data.sequence": 4096})
    found = remedy_for(alone, where, 16)
    assert found is not None
    assert found.fits
    assert found.changes.keys() <= known.keys()
    changed = job("qwen3-30b-a3b", train, {"data.sequence": 4096, **found.changes})
    assert used(changed, where, 16) == found.memory.used_fraction


def test_the_memory_of_what_comes_nearest_is_that_of_its_changes() -> None:
    train, where = {"batch": 2}, cluster(1, count=2, memory_bytes=1e5)
    own = {"optimizer.moments": "full"}
    found = remedy_for(job("tiny-mixtral", train, own), where, 2)
    assert found is not None
    assert not found.fits
    assert found.changes
    changed = job("tiny-mixtral", train, {**own, **found.changes})
    assert used(changed, where, 2) == found.memory.used_fraction


@pytest.mark.soak
def test_a_change_of_the_layout_is_found_beyond_the_limit_of_work() -> None:
    """Few changes of 512 ranks are tried; more micro-batches would fit with fewer keys."""
    train = {"batch": 256, "micro_batches": 8}
    where = Cluster.model_validate(cluster(64, reserved_bytes=6.15e9))
    found = remedy_for(job("deepseek-v3", train, {"data.sequence": 4096}), where, 512)
    assert found is not None
    assert found.fits
    assert all(key.startswith("layout.") or key == "train.recompute" for key in found.changes)
    changed = job("deepseek-v3", train, {"data.sequence": 4096, **found.changes})
    assert used(changed, where, 512) == found.memory.used_fraction


MIXTRAL = {"batch": 256, "micro_batches": 8}, {"data.sequence": 4096}


def test_8_bit_moments_come_before_a_smaller_batch() -> None:
    train, own = MIXTRAL
    where = cluster(1, reserved_bytes=6.15e9)
    found = remedy_for(job("mixtral-8x7b", train, own), where, 8)
    assert found is not None
    assert found.fits
    assert found.changes["optimizer.moments"] == "8bit"
    assert "train.batch" not in found.changes
    changed = job("mixtral-8x7b", train, {**own, **found.changes})
    assert used(changed, where, 8) == found.memory.used_fraction
    assert "rounded to 8 bits" in remedy_text(describe_remedy(found))


def test_written_moments_stay_and_a_second_host_helps() -> None:
    train, own = MIXTRAL
    written = job("mixtral-8x7b", train, {**own, "optimizer.moments": "full"})
    found = remedy_for(written, cluster(1, reserved_bytes=6.15e9), 8)
    assert found is not None
    assert found.fits
    assert found.changes["nproc"] == 16
    assert "optimizer.moments" not in found.changes


def test_a_change_that_is_no_nearer_is_not_named() -> None:
    train = {"batch": 1, "recompute": True}
    own = {"optimizer.moments": "8bit", "layout.dp_shard": 1}
    where = cluster(1, count=1, memory_bytes=1e5)
    one = job("tiny-dense", train, own)
    found = remedy_for(one, where, 1)
    assert found is not None
    assert not found.fits
    assert found.changes == {}
    assert found.memory.used_fraction == used(one, where, 1)
    assert "nearest" not in remedy_text(describe_remedy(found))


@pytest.mark.parametrize(
    ("batch", "sequence", "number"),
    [(300, 4096, 10), (225, 4096, 9)],
)
def test_micro_batches_of_any_divisor_come_before_moments_and_sequence(
    batch: int, sequence: int, number: int
) -> None:
    where, own = cluster(1, reserved_bytes=6.15e9), {"data.sequence": sequence}
    found = remedy_for(job("qwen3-30b-a3b", {"batch": batch}, own), where, 8)
    assert found is not None
    assert found.fits
    assert found.changes == {
        "layout.ep": 8, "layout.dp_shard": "all", "train.recompute": True,
        "train.micro_batches": number,
    }  # fmt: skip
    fewer = max(one for one in range(1, number) if batch % one == 0)
    changes = {**own, **found.changes}
    for train, fits in ((number, True), (fewer, False)):
        changed = job("qwen3-30b-a3b", {"batch": batch}, {**changes, "train.micro_batches": train})
        assert (used(changed, where, 8) <= 1) is fits


def test_a_remedy_for_256_devices_has_few_micro_batches() -> None:
    """Changes of the layout alone do not fit, and most layouts stay untried."""
    train, own = {"batch": 1024}, {"data.sequence": 4096}
    where = cluster(32, reserved_bytes=6.15e9)
    found = remedy_for(job("deepseek-v3", train, own), where, 256)
    assert found is not None
    assert found.fits
    assert found.changes["train.micro_batches"] <= 4
    assert not found.changes.keys() & {"optimizer.moments", "train.batch", "data.sequence"}
    changed = job("deepseek-v3", train, {**own, **found.changes})
    assert used(changed, where, 256) == found.memory.used_fraction


@pytest.mark.parametrize("batch", [1125, 1_000_000])
def test_a_device_without_others_gets_fewer_samples_at_a_time(batch: int) -> None:
    """No key of a layout helps on one rank."""
    own, where = {"data.sequence": 4096}, cluster(1, count=1, memory_bytes=2e10)
    found = remedy_for(job("tiny-mixtral", {"batch": batch}, own), where, 1)
    assert found is not None
    assert found.fits
    assert found.changes.keys() <= {"train.micro_batches", "train.recompute"}
    assert batch % found.changes["train.micro_batches"] == 0
    changed = job("tiny-mixtral", {"batch": batch}, {**own, **found.changes})
    assert used(changed, where, 1) == found.memory.used_fraction


def test_the_most_micro_batches_come_nearest() -> None:
    own, where = {"optimizer.moments": "full"}, cluster(1, count=1, memory_bytes=1e9)
    alone = job("olmoe-1b-7b", {"batch": 225}, own)
    found = remedy_for(alone, where, 1)
    assert found is not None
    assert not found.fits
    assert found.changes["train.micro_batches"] == 225
    assert found.memory.used_fraction == used(
        job("olmoe-1b-7b", {"batch": 225}, {**own, **found.changes}), where, 1
    )
    fewer = {**own, "train.recompute": True, "train.micro_batches": 75}
    assert found.memory.used_fraction < used(job("olmoe-1b-7b", {"batch": 225}, fewer), where, 1)


@pytest.mark.parametrize(
    ("pp", "numbers"),
    [(1, (2, 3, 5, 8, 12, 15, 30, 60, 120)), (4, (5, 10, 12, 15, 20, 30, 60))],
)
def test_memory_falls_with_more_micro_batches(pp: int, numbers: tuple[int, ...]) -> None:
    """Remedies bisect by it, whether samples split evenly or not; a pipeline needs whole ones."""
    needs = [
        used(
            job(
                "olmoe-1b-7b", {"batch": 120, "micro_batches": number},
                {"layout.pp": pp, "data.sequence": 1024},
            ),
            cluster(1, count=8, memory_bytes=7e10), 8,
        )
        for number in numbers
    ]  # fmt: skip
    assert needs == sorted(needs, reverse=True)


@pytest.mark.parametrize(
    ("ranks", "memory", "fewest"), [(2, 6e7, 8), (2, 8e7, 12), (4, 8e7, 4), (4, 6e7, 6)]
)
def test_micro_batches_are_the_fewest_with_which_the_plan_of_the_layout_fits(
    ranks: int, memory: float, fewest: int
) -> None:
    """The plan has another dispatch method than the one that needs least memory."""
    train, where = {"batch": 24}, cluster(1, count=ranks, memory_bytes=memory)
    found = remedy_for(job("tiny-mixtral", train, {}), where, ranks)
    assert found is not None
    assert found.fits
    assert found.changes["train.micro_batches"] == fewest
    assert "optimizer.moments" not in found.changes
    fractions = {
        number: used(
            job("tiny-mixtral", train, {**found.changes, "train.micro_batches": number}),
            where, ranks,
        )
        for number in (1, 2, 3, 4, 6, 8, 12) if number <= fewest
    }  # fmt: skip
    assert fractions.pop(fewest) == found.memory.used_fraction <= 1
    assert min(fractions.values()) > 1

"""The predicted peak of memory against what torch allocates, on one rank and on several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts import sparing

from moesaic.dist import device as devices
from moesaic.dist.checkpoint.staging import Staging
from moesaic.dist.world import World
from moesaic.facts.job import Job, RoutingConfig
from moesaic.facts.plan import lay_out
from moesaic.facts.workload import memory
from moesaic.facts.workload.kept import activations
from moesaic.models.initial import InitialSource
from moesaic.testing.blocks import Watched, watch
from moesaic.testing.jobs import RandomSamples, tiny_job
from moesaic.testing.memory import most_allocated
from moesaic.testing.ranks import Ranks
from moesaic.train.assemble import assemble
from moesaic.train.data import Batch

# Large enough for what is not counted (indices, scalars, gradients of routers) to be little.
SIZES = {"hidden": 128, "head_dim": 32, "layers": 3, "vocab": 640, "init_std": 0.02}
FAMILIES: dict[str, dict[str, Any]] = {
    "olmoe": {**SIZES, "ffn": 64, "experts": 8, "top_k": 4},
    "mixtral": {**SIZES, "family": "mixtral", "ffn": 256, "experts": 8},
    "qwen3": {
        **SIZES, "family": "qwen3_moe", "ffn": 64, "experts": 8, "top_k": 4, "renormalise": True,
        "window": 100,
    },
    "dense": {**SIZES, "family": "llama", "ffn": 384, "experts": 0, "top_k": 0},
}  # fmt: skip
FAMILIES["deepseek"] = {
    **FAMILIES["olmoe"], "family": "deepseek_v3", "kv_heads": 4, "dense_layers": 1,
    "dense_ffn": 384, "shared": 2, "groups": 4, "top_groups": 2,
    "latent": {"width": 36, "queries": 72, "rotary": 16, "value": 32},
}  # fmt: skip
FAMILIES["latent"] = {  # In DeepSeek-V3's proportions, in which heads are wider than the stream.
    **FAMILIES["olmoe"], "family": "deepseek_v3", "heads": 8, "kv_heads": 8, "head_dim": 48,
    "ffn": 36, "top_k": 8, "latent": {"width": 9, "queries": 27, "rotary": 16, "value": 32},
}  # fmt: skip
FAMILIES["deep"] = {**FAMILIES["olmoe"], "layers": 4}
FAMILIES["wide vocabulary"] = {**FAMILIES["dense"], "vocab": 6000}
FAMILIES["wide vocabulary, tied"] = {**FAMILIES["wide vocabulary"], "tied": True}
FAMILIES["wide"] = {
    **FAMILIES["mixtral"], "layers": 1, "hidden": 512, "head_dim": 64, "ffn": 1024, "experts": 2,
    "top_k": 2,
}  # fmt: skip
FAMILIES["words"] = {**FAMILIES["dense"], "layers": 2, "hidden": 384, "ffn": 96, "vocab": 3000}
FAMILIES["words, tied"] = {**FAMILIES["words"], "tied": True}
EVEN = {"router": "balanced", "balance_loss": 0.0}
AGAIN, PARTS = {"recompute": True}, {"micro_batches": 2}
CASES: list[tuple[int, int, int, str, dict[str, Any]]] = [
    # ranks, ep, shard, family, train
    (1, 1, 1, "olmoe", {}),
    (1, 1, 1, "mixtral", {**AGAIN, **PARTS}),
    (1, 1, 1, "mixtral", {"precision": "bf16", "batch": 4, **AGAIN}),
    (1, 1, 1, "dense", {"precision": "bf16", "batch": 4}),
    (1, 1, 1, "latent", {}),
    (1, 1, 1, "wide vocabulary, tied", PARTS),
    (2, 1, 1, "olmoe", PARTS),
    (2, 1, 2, "dense", {**AGAIN, **PARTS}),
    (2, 1, 2, "wide vocabulary, tied", {}),
    (2, 2, 1, "olmoe", {}),
    (2, 2, 2, "mixtral", AGAIN),
    (1, 1, 1, "deepseek", {}),
    (2, 1, 2, "deepseek", PARTS),
    (2, 2, 2, "deepseek", AGAIN),
    (2, 2, 1, "latent", {"precision": "bf16", "batch": 4, **AGAIN}),
    (2, 2, 1, "qwen3", {}),
    (4, 2, 1, "mixtral", {}),
    (4, 2, 2, "olmoe", PARTS),
    (4, 4, 4, "mixtral", {}),
]


class Documents(RandomSamples):
    """Samples of two documents each, so that attention always has a mask."""

    def batch(self, indices: Sequence[int], *, shuffled: bool = True) -> Batch:
        """The samples of `indices`."""
        batch = super().batch(indices, shuffled=shuffled)
        second = torch.arange(batch.inputs.shape[1]) >= batch.inputs.shape[1] // 2
        return replace(batch, documents=second.int().expand(batch.inputs.shape))


def make_job(
    layout: dict[str, Any], family: str, train: dict[str, Any], **tables: dict[str, Any]
) -> Job:
    return tiny_job(
        model=FAMILIES[family], layout=layout,
        data={"sequence": 128}, train={"batch": 8, "precision": "fp32", **train},
        routing=EVEN if FAMILIES[family]["experts"] else {},
        checkpoint={"asynchronous": False}, **tables,
    )  # fmt: skip


def peaks(world: World, job: Job) -> list[int]:
    """What each of three steps of a run allocates at its fullest."""
    plan = lay_out(job.layout, job.model, world.size)
    samples, runs = Documents(job.model.vocab, job.data.sequence), []

    def start() -> None:
        runs.append(assemble(job, plan, world, InitialSource(job.seed, job.model.init_std)))

    def step() -> None:
        runs[0].step(samples)

    steps = most_allocated(start, step, step, step)[1:]
    runs[0].close()
    return steps


@pytest.mark.parametrize("case", sparing(CASES, 5), ids=str)
def test_torch_allocates_what_is_predicted(
    ranks: Ranks, case: tuple[int, int, int, str, dict[str, Any]]
) -> None:
    """In the first step and in later ones."""
    size, ep, shard, family, train = case
    job = make_job({"ep": ep, "shard": shard}, family, train)
    first, *later = ranks.run(size, peaks, job, timeout_s=60.0)[-1]
    needs = memory(job, lay_out(job.layout, job.model, size))
    assert needs.peak_bytes == pytest.approx(min(first, *later), rel=0.02)
    # A thread of gloo may still hold a message then, the more so where cores are busy.
    assert first == pytest.approx(min(later), rel=0.1)


def peaks_by(world: World, job: Job, onednn: bool) -> list[int]:
    """The same with one library or the other."""
    if onednn and not torch.backends.mkldnn.is_available():
        return []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices, "prefers_onednn", lambda: onednn)
        patch.setattr(devices, "prefers_copies", lambda: onednn)
        return peaks(world, job)


@pytest.mark.parametrize("onednn", [True, False], ids=["onednn", "torch"])
@pytest.mark.parametrize("train", [{"batch": 32}, AGAIN], ids=str)
def test_it_is_the_same_for_either_library(
    ranks: Ranks, train: dict[str, Any], onednn: bool
) -> None:
    """oneDNN's results stand beside their places: wide experts of many rows would show it."""
    job = make_job({}, "wide", train)
    (found,) = ranks.run(1, peaks_by, job, onednn, timeout_s=60.0)
    if not found:
        pytest.skip("this build of torch has no oneDNN")
    needs = memory(job, lay_out(job.layout, job.model, 1))
    assert needs.peak_bytes == pytest.approx(min(found), rel=0.02)


TWO, FOUR = {"tp": 2}, {"micro_batches": 4}
SLICES: list[tuple[int, dict[str, Any], str, dict[str, Any]]] = [
    # ranks, layout, family, train
    (2, TWO, "olmoe", {}),
    (2, TWO, "dense", {**AGAIN, **PARTS}),
    (2, TWO, "wide vocabulary, tied", PARTS),
    (2, TWO, "deepseek", {"precision": "bf16"}),
    (2, TWO, "latent", PARTS),
    (2, {**TWO, "ep": 2}, "qwen3", {}),
    (2, {**TWO, "ep": 2}, "mixtral", {"precision": "bf16", **AGAIN}),
    (4, {**TWO, "shard": 2}, "dense", {}),
    (4, {**TWO, "ep": 4, "shard": 2}, "deepseek", PARTS),
    (2, {**TWO, "etp": 2}, "olmoe", {}),
    (2, {**TWO, "etp": 2}, "deepseek", {**PARTS, "precision": "bf16"}),
    (4, {**TWO, "etp": 2, "ep": 2}, "mixtral", {}),
]


@pytest.mark.parametrize("case", sparing(SLICES, 5), ids=str)
def test_slices_allocate_what_is_predicted(
    ranks: Ranks, case: tuple[int, dict[str, Any], str, dict[str, Any]]
) -> None:
    size, layout, family, train = case
    job = make_job(layout, family, train)
    first, *later = ranks.run(size, peaks, job)[-1]
    needs = memory(job, lay_out(job.layout, job.model, size))
    assert needs.peak_bytes == pytest.approx(min(first, *later), rel=0.02)
    assert needs.peak_bytes <= needs.total_bytes


FEW = {"batch": 2}
BUCKETS: list[tuple[int, dict[str, Any], str, dict[str, Any]]] = [
    # ranks, layout, family, train
    (2, {}, "olmoe", {}),
    (2, {}, "dense", {}),
    (2, {}, "wide vocabulary", PARTS),
    (2, {}, "words", FEW),
    (2, {}, "words, tied", FEW),
    (2, {}, "words, tied", {**PARTS, "batch": 4}),
    (2, {"pp": 2}, "words", {**PARTS, **FEW}),
]


@pytest.mark.parametrize("case", BUCKETS, ids=str)
def test_buckets_of_gradients_are_there_from_their_first_one_on(
    ranks: Ranks, case: tuple[int, dict[str, Any], str, dict[str, Any]]
) -> None:
    size, layout, family, train = case
    job = make_job(layout, family, train)
    found = min(ranks.run(size, peaks, job)[-1])
    needs = memory(job, lay_out(job.layout, job.model, size))
    assert needs.peak_bytes == pytest.approx(found, rel=0.01)
    assert needs.peak_bytes <= needs.total_bytes


LINE: list[tuple[int, dict[str, Any], str, dict[str, Any]]] = [
    # ranks, layout, family, train
    (2, {"schedule": "gpipe"}, "dense", FOUR),
    (2, {"schedule": "gpipe"}, "deep", {**FOUR, **AGAIN}),
    (2, {"schedule": "1f1b"}, "deep", FOUR),
    (2, {"schedule": "1f1b"}, "wide vocabulary, tied", {**FOUR, "precision": "bf16"}),
    (2, {"schedule": "interleaved"}, "deep", FOUR),
    (2, {"schedule": "interleaved"}, "deep", {**FOUR, **AGAIN}),
    (2, {"schedule": "zero-bubble"}, "dense", FOUR),
    (2, {"schedule": "zero-bubble"}, "deep", FOUR),
    (4, {"schedule": "1f1b", "tp": 2}, "deep", FOUR),
    (4, {"schedule": "gpipe", "shard": 2}, "dense", FOUR),
    (4, {"schedule": "interleaved", "ep": 2}, "deep", FOUR),
]


@pytest.mark.parametrize("case", sparing(LINE, 5), ids=str)
def test_parts_of_a_pipeline_allocate_what_is_predicted(
    ranks: Ranks, case: tuple[int, dict[str, Any], str, dict[str, Any]]
) -> None:
    """The first part and the last hold unlike things, and different numbers of micro-batches."""
    size, layout, family, train = case
    job = make_job({"pp": 2, **layout}, family, {"batch": 16, **train})
    plan = lay_out(job.layout, job.model, size)
    found = [min(steps) for steps in ranks.run(size, peaks, job)]
    for rank in (0, size - 1):
        needs = memory(job, plan, rank)
        assert needs.peak_bytes == pytest.approx(found[rank], rel=0.02), rank
        assert needs.peak_bytes <= needs.total_bytes


LORA = {"method": "lora", "rank": 8}
EVERY = ["attention", "experts", "ffn", "shared"]
ADAPTED: list[tuple[int, dict[str, Any], str, dict[str, Any], dict[str, Any]]] = [
    # ranks, layout, family, train, finetune
    (1, {}, "olmoe", {}, LORA),
    (1, {}, "olmoe", AGAIN, LORA),
    (1, {}, "mixtral", PARTS, LORA),
    (1, {}, "dense", {"precision": "bf16"}, {**LORA, "targets": ["attention"]}),
    (1, {}, "deepseek", {**AGAIN, **PARTS}, {**LORA, "targets": EVERY, "router": "train"}),
    (1, {}, "deepseek", {"precision": "bf16"}, LORA),
    (2, {"ep": 2}, "qwen3", PARTS, LORA),
    (2, {"shard": 2}, "mixtral", {}, LORA),
    (2, TWO, "olmoe", AGAIN, LORA),
    (2, {"pp": 2, "schedule": "1f1b"}, "deep", {**FOUR, "batch": 16}, LORA),
]


@pytest.mark.parametrize("case", sparing(ADAPTED, 3), ids=str)
def test_adapters_allocate_about_what_is_predicted(
    ranks: Ranks, case: tuple[int, dict[str, Any], str, dict[str, Any], dict[str, Any]]
) -> None:
    """What lasts is predicted byte by byte, activations as if all of the model learnt and had no
    adapters: there is less of the one, and more of the other."""
    size, layout, family, train, finetune = case
    job = make_job(layout, family, train, finetune=finetune)
    needs = memory(job, lay_out(job.layout, job.model, size))
    found = min(ranks.run(size, peaks, job)[-1])
    assert 0.94 * found < needs.peak_bytes < 1.2 * found
    full = make_job(layout, family, train)
    assert found < 0.9 * memory(full, lay_out(full.layout, full.model, size)).peak_bytes


def holdings(world: World, job: Job) -> tuple[int, int, int]:
    """Bytes of parameters, of moments and of what a checkpoint is written from."""
    plan = lay_out(job.layout, job.model, world.size)
    run = assemble(job, plan, world, InitialSource(job.seed, job.model.init_std))
    biases = sum(router.bias.nbytes for _, router in run.model.sigmoid_routers())
    held = sum(item.local.nbytes for item in run.holdings) + biases
    moments = sum(t.nbytes for pair in run.optimizer.moments.values() for t in pair)
    staging = Staging(world.rank, torch.device("cpu"), 1 << 30)
    staged = sum(part.num_bytes for part in staging.lay_out(run.state().pieces).parts)
    run.close()
    return held, moments, staged


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (2, {"tp": 2, "ep": 2}),
        (2, {"pp": 2}),
        (4, {"tp": 2, "shard": 2, "ep": 4}),
        (4, {"pp": 2, "tp": 2}),
        (4, {"tp": 2, "etp": 2}),
        (4, {"pp": 2, "ep": 2, "schedule": "interleaved"}),
        (4, {"ep": 2, "shard": 2, "embedding": "columns"}),
        (4, {"pp": 2, "embedding": "columns"}),
        (4, {"pp": 2, "ep": 2, "rehome_every": 3}),
        (2, {"ep": 2, "rehome_every": 3}),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_what_ranks_hold_is_what_runs_have(
    ranks: Ranks, size: int, layout: dict[str, Any], tied: bool
) -> None:
    model = {**FAMILIES["deepseek"], "layers": 4, "tied": tied}
    moves = {"rehome_every": layout.get("rehome_every", 0)}
    layout = {key: value for key, value in layout.items() if key != "rehome_every"}
    job = tiny_job(
        model=model, layout=layout, train={"micro_batches": 2}, routing=EVEN, balance=moves
    )
    plan = lay_out(job.layout, job.model, size)
    for rank, held in enumerate(ranks.run(size, holdings, job)):
        needs = memory(job, plan, rank)
        assert (needs.parameters_bytes, needs.moments_bytes, needs.staging_bytes) == held


CHUNKS: list[tuple[int, dict[str, Any], str, dict[str, Any]]] = [
    # ranks, layout, family, train
    (2, {"ep": 2, "chunks": 4}, "olmoe", {}),
    (
        2, {"ep": 2, "dispatch": "visits", "chunks": 2}, "deepseek",
        {"precision": "bf16", **AGAIN},
    ),
    (4, {"ep": 4, "shard": 2, "dispatch": "visits", "hosts": 2, "chunks": 4}, "mixtral", PARTS),
    (4, {"ep": 4, "dispatch": "rows", "hosts": 2, "chunks": 2}, "qwen3", {}),
    (2, {"ep": 2, "dispatch": "rows", "local": "first"}, "olmoe", {}),
    (2, {"ep": 2, "dispatch": "visits", "local": "first"}, "deepseek", {"precision": "bf16"}),
    (4, {"ep": 4, "dispatch": "visits", "hosts": 2, "local": "first"}, "mixtral", PARTS),
    (4, {"ep": 4, "dispatch": "rows", "chunks": 2, "local": "first"}, "qwen3", AGAIN),
]  # fmt: skip


@pytest.mark.parametrize("case", sparing(CHUNKS, 3), ids=str)
def test_chunks_allocate_what_is_predicted(
    ranks: Ranks, case: tuple[int, dict[str, Any], str, dict[str, Any]]
) -> None:
    size, layout, family, train = case
    job = make_job(layout, family, train)
    needs = memory(job, lay_out(job.layout, job.model, size))
    found = min(ranks.run(size, peaks, job)[-1])
    assert needs.peak_bytes == pytest.approx(found, rel=0.02)


COLUMNS: list[tuple[int, dict[str, Any], str, dict[str, Any]]] = [
    # ranks, layout, family, train
    (2, {}, "dense", {}),
    (2, {}, "wide vocabulary", PARTS),
    (2, {}, "wide vocabulary, tied", {}),
    (2, {}, "wide vocabulary, tied", PARTS),
    (4, {}, "wide vocabulary, tied", {"precision": "bf16", "batch": 16, **AGAIN}),
    (4, {}, "wide vocabulary", {**PARTS, "batch": 6}),
    (4, {"ep": 4}, "olmoe", {}),
    (2, {"shard": 2}, "wide vocabulary", {}),
    (4, {"shard": 2}, "wide vocabulary, tied", PARTS),
    (4, {"pp": 2, "schedule": "gpipe"}, "wide vocabulary", {**FOUR, "batch": 16}),
    (4, {"pp": 2, "schedule": "1f1b"}, "wide vocabulary, tied", {**FOUR, "batch": 16}),
    (4, {"pp": 2, "schedule": "zero-bubble"}, "wide vocabulary, tied", {**FOUR, "batch": 16}),
    (4, {"pp": 2, "shard": 2, "schedule": "1f1b"}, "wide vocabulary", {**FOUR, "batch": 16}),
]


@pytest.mark.parametrize("case", sparing(COLUMNS, 3), ids=str)
def test_columns_of_the_embedding_allocate_what_is_predicted(
    ranks: Ranks, case: tuple[int, dict[str, Any], str, dict[str, Any]]
) -> None:
    """On the last rank, and on the first one too if it is in another part."""
    size, layout, family, train = case
    job = make_job({"embedding": "columns", **layout}, family, train)
    plan = lay_out(job.layout, job.model, size)
    found = [min(steps) for steps in ranks.run(size, peaks, job)]
    for rank in (0, size - 1) if plan.pp > 1 else (size - 1,):
        needs = memory(job, plan, rank)
        assert needs.peak_bytes == pytest.approx(found[rank], rel=0.02), rank
        assert needs.peak_bytes <= needs.total_bytes


def seen(world: World, job: Job) -> Watched:
    return watch(job, lay_out(job.layout, job.model, world.size), world)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["olmoe", "qwen3", "deepseek", "latent", "dense"])
def test_slices_keep_what_is_predicted(ranks: Ranks, family: str, precision: str) -> None:
    job = make_job({"tp": 2}, family, {"precision": precision})
    assert_kept(ranks, job, 2)


TRAVELS = [
    [dispatch, hosts, num, local, *model]
    for dispatch in ("rows", "visits")
    for hosts in (1, 2)
    for num in (1, 3)
    for local in ("along", "first")
    for model in (("olmoe", {"precision": "bf16"}), ("deepseek", {}))
]


@pytest.mark.parametrize(
    ("dispatch", "hosts", "num", "local", "family", "train"), sparing(TRAVELS, 3), ids=str
)
def test_however_tokens_travel_ranks_keep_what_is_predicted(
    ranks: Ranks,
    dispatch: str,
    hosts: int,
    num: int,
    local: str,
    train: dict[str, Any],
    family: str,
) -> None:
    layout = {
        "ep": 2 * hosts,
        "dispatch": dispatch,
        "hosts": hosts,
        "chunks": num,
        "local": local,
    }
    job = make_job(layout, family, {**train, "batch": 6 * hosts})
    assert_kept(ranks, job.model_copy(update={"routing": RoutingConfig()}), 2 * hosts)


def assert_kept(ranks: Ranks, job: Job, size: int) -> None:
    plan = lay_out(job.layout, job.model, size)
    for rank, found in enumerate(ranks.run(size, seen, job)):
        expected = activations(job, plan, rank, found.loads)
        assert found.kept == {name: num for name, num in expected.items() if name != "context"}

"""Work of FSDP: all-gathers of parameters, and reduce-scatters of gradients."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.facts.workload import collectives
from moesaic.facts.workload.block_work import Block, BlockWork, concat_work, extend_block
from moesaic.facts.workload.ops import Op
from moesaic.facts.workload.parameters import Parameter
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import STORED_BYTES


def add_fsdp(
    blocks: Sequence[Block], by_block: dict[str, list[Parameter]], params: RankParams
) -> list[Block]:
    """Return blocks with FSDP's work: one group per layer, and one of embedding and head.

    Trainable parameters reduce-scatter their gradients. A layer with backward is gathered again,
    and so is the layer before the first of them. Embedding and head stay gathered between forward
    and backward.

    In a pipeline, stages stay gathered from the first micro-batch to the last. Then they
    reduce-scatter the accumulated gradients, as part of the update.
    """
    plan, element_bytes = params.plan, STORED_BYTES[params.job.train.precision]
    ranks = collectives.group_of(plan.dp_shard_groups(), params.rank)
    replica_ranks = collectives.group_of(plan.dp_replicate_groups(), params.rank)
    by_name = {block.name: block for block in blocks}
    with_backward = {
        name.rpartition(".")[0] for name, block in by_name.items() if block.backward.ops
    }
    groups: dict[str, list[str]] = {}
    for name in by_name:
        prefix = name.rpartition(".")[0]  # Empty for embedding and head.
        groups.setdefault(prefix, []).append(name)
    for prefix, names in groups.items():
        dense = [
            p for name in names for p in by_block[name] if p.is_dense and not p.is_column_shard
        ]
        if not dense:  # A column-sharded embedding by itself, which FSDP skips.
            continue
        trained = [p for p in dense if p.name in params.trainable]
        gathered = collectives.fsdp_all_gather(dense, ranks, element_bytes)
        first, last = names[0], names[-1]
        moved_bytes = 2 * gathered.num_bytes + 2 * gathered.num_bytes // plan.dp_shard
        unshard, reshard, replica_reduce = (
            BlockWork((Op("unshard", (), moved_bytes, 2),), (gathered,)),
            BlockWork(),
            BlockWork(),
        )
        if trained:
            reduce_scatter, replica_reduces = collectives.fsdp_reduce_scatter(
                trained, ranks, replica_ranks, element_bytes
            )
            reshard = BlockWork(
                (Op("reshard", (), 2 * reduce_scatter.num_bytes, 1),), (reduce_scatter,)
            )
            replica_reduce = BlockWork((), replica_reduces)
        if plan.pp > 1:
            by_name[first] = extend_block(
                by_name[first], update=concat_work(unshard, reshard, replica_reduce)
            )
            continue
        by_name[first] = extend_block(by_name[first], forward=unshard)
        if prefix and by_name[last].backward.ops:
            by_name[last] = extend_block(by_name[last], backward=unshard)
        elif (
            prefix and f"layers.{int(prefix.partition('.')[2]) + 1}" in with_backward
        ):  # FSDP prefetches it.
            by_name[last] = extend_block(by_name[last], backward=BlockWork((), (gathered,)))
        by_name[first] = extend_block(by_name[first], after=reshard, update=replica_reduce)
    return list(by_name.values())

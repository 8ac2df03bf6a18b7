"""Workload of a model: its parameters, and the operations, collectives and memory of each rank."""

from moesaic.facts.workload.blocks import STEP, Block, BlockWork, workload
from moesaic.facts.workload.collectives import RESULTS, TOKENS, CollectiveCall
from moesaic.facts.workload.experts import EXPERTS
from moesaic.facts.workload.memory import Memory, memory
from moesaic.facts.workload.operation import GROUPED_MM, MatmulShape, Op
from moesaic.facts.workload.parameters import (
    Parameter,
    count_parameters,
    expert_name,
    parameters,
)
from moesaic.facts.workload.parts import Part, job_parts, memory_of_parts
from moesaic.facts.workload.rank_params import expert_bytes
from moesaic.facts.workload.sizes import COMPUTED_BYTES, STORED_BYTES
from moesaic.facts.workload.spec import BlockSpec, block_specs
from moesaic.facts.workload.traced import TracedModel, load_traced, traced_blocks, traced_memory

__all__ = [
    "COMPUTED_BYTES",
    "EXPERTS",
    "GROUPED_MM",
    "RESULTS",
    "STEP",
    "STORED_BYTES",
    "TOKENS",
    "Block",
    "BlockSpec",
    "BlockWork",
    "CollectiveCall",
    "MatmulShape",
    "Memory",
    "Op",
    "Parameter",
    "Part",
    "TracedModel",
    "block_specs",
    "count_parameters",
    "expert_bytes",
    "expert_name",
    "job_parts",
    "load_traced",
    "memory",
    "memory_of_parts",
    "parameters",
    "traced_blocks",
    "traced_memory",
    "workload",
]

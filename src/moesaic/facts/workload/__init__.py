"""The workload: what a model consists of, and what training it asks of one rank."""

from moesaic.facts.workload.blocks import STEP, Block, Work, workload
from moesaic.facts.workload.file import (
    Traced,
    load_traced,
    traced_blocks,
    traced_memory,
)
from moesaic.facts.workload.memory import Memory, memory
from moesaic.facts.workload.messages import RESULTS, TOKENS, Message
from moesaic.facts.workload.ops import SLOTS, Op, Product
from moesaic.facts.workload.parameters import Counts, Parameter, count, expert_name, parameters
from moesaic.facts.workload.share import expert_bytes
from moesaic.facts.workload.sizes import COMPUTED_BYTES, STORED_BYTES
from moesaic.facts.workload.sparse import EXPERTS

__all__ = [
    "COMPUTED_BYTES",
    "EXPERTS",
    "RESULTS",
    "SLOTS",
    "STEP",
    "STORED_BYTES",
    "TOKENS",
    "Block",
    "Counts",
    "Memory",
    "Message",
    "Op",
    "Parameter",
    "Product",
    "Traced",
    "Work",
    "count",
    "expert_bytes",
    "expert_name",
    "load_traced",
    "memory",
    "parameters",
    "traced_blocks",
    "traced_memory",
    "workload",
]

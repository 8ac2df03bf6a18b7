"""Parts of a job that train together: the model, and each student with its distillation losses.

Work is that of the fullest step, in which all losses count. `Part.share_of_steps` tells how many
steps a block computes in.

Each part has the work and the memory of a job of its own. A student adds its auxiliary weights and
the losses against its teacher; a frozen teacher has neither backward nor update. Matmuls are exact,
except for a student that learns from attention alone, without an auxiliary layer: half of its last
layer has no backward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from numpy.typing import ArrayLike

from moesaic.facts.job import Job, ModelConfig, StudentConfig, students_in_order, teacher_job
from moesaic.facts.job.distill import AUXILIARY, TEACHER, student_prefix
from moesaic.facts.plan import Plan, student_plan
from moesaic.facts.workload import ops
from moesaic.facts.workload.attention import banded_blocks
from moesaic.facts.workload.blocks import STEP, Block, BlockWork, workload
from moesaic.facts.workload.collectives import collective
from moesaic.facts.workload.memory import Memory, logits_bytes, memory
from moesaic.facts.workload.operation import MatmulShape, Op, Operation
from moesaic.facts.workload.parameters import Parameter, count_parameters, moment_bytes
from moesaic.facts.workload.rank_params import RankParams
from moesaic.facts.workload.sizes import (
    FOLLOWER_CHUNK_TOKENS,
    STORED_BYTES,
    Sizes,
    divergence_queries,
    divergence_rows,
)
from moesaic.facts.workload.spec import BlockSpec

_TEACHER_PASSES, _STUDENT_PASSES = 7, 14
"""Elements read and written for each score of a teacher, and of a student with its gradient."""
_SCORE_COPIES = 4
"""Tensors of scores at once: of teacher and student, as probabilities and as differences."""
_LOGITS_PASSES = {"forward": 9, "reverse": 9, "jensen": 19}
"""Elements read and written for each logit of a student, by its divergence."""
_COUNTERS = frozenset({"targets", "losses", "loads", "expert counts"})
"""Collectives of numbers that a frozen model still counts."""


@dataclass(frozen=True)
class Part:
    """One model of a job with its plan, on the ranks that train all parts."""

    name: str
    """Name of the student; "model" for the job's own model."""
    job: Job
    """Job of this part alone."""
    plan: Plan
    """Plan of this part alone."""
    student: StudentConfig | None = None
    """Settings of the student; None for the job's own model."""
    teacher: ModelConfig | None = None
    """Model of the student's teacher."""
    is_frozen: bool = False
    """True if it computes only forward."""
    running_share: float = 1.0
    """Share of the steps in which the model computes; less than 1 for a frozen teacher from which
    students learn at intervals."""
    computes_teacher_scores: bool = False
    """True for one student of those that compare attention with this teacher, the one with the
    shortest interval; the teacher's scores are computed once."""
    teaches_logits: bool = False
    """True for a student whose logits another one learns from."""

    @property
    def prefix(self) -> str:
        """Start of the names of its blocks; empty for the job's own model."""
        return "" if self.student is None else student_prefix(self.name)

    @property
    def num_parameters(self) -> int:
        """Parameters that an export has."""
        return count_parameters(self.job.model).total

    @cached_property
    def auxiliary(self) -> list[Parameter]:
        """Auxiliary weights, whole on every rank."""
        if self.student is None or self.teacher is None:
            return []
        return list(auxiliary_parameters(self.student, self.teacher))

    def share_of_steps(self, block: str) -> float:
        """Return the share of the steps in which `block`, without the prefix, computes."""
        if block == STEP:
            return 1.0
        is_auxiliary = self.student is not None and block == AUXILIARY
        interval = self.student.interval if self.student is not None and is_auxiliary else 1
        return self.running_share / interval

    def blocks(
        self, rank: int, loads: Sequence[ArrayLike] | None = None, *, on_cpu: bool = True
    ) -> list[Block]:
        """Return the work of `rank`; names start without the prefix. Loads are the teacher's."""
        if self.student is None:
            found = workload(self.job, self.plan, rank, loads, on_cpu=on_cpu)
            return _forward_only(found) if self.is_frozen else found
        *found, last = workload(self.job, self.plan, rank, on_cpu=on_cpu)
        losses = self.student.losses
        if not (losses.text or losses.logits):
            found = [_without_loss(one, keeps_logits=self.teaches_logits) for one in found]
        return [*found, self._auxiliary_block(Sizes(self.job, self.plan, rank, on_cpu)), last]

    def memory(
        self,
        rank: int | None = None,
        loads: Sequence[ArrayLike] | None = None,
        *,
        on_cpu: bool = True,
    ) -> Memory:
        """Return the memory of `rank` (None: the last) for this part."""
        rank = self.plan.ranks - 1 if rank is None else rank
        if self.student is None:
            found = memory(self.job, self.plan, rank, loads, on_cpu=on_cpu)
            return self._forward_memory(found, rank, on_cpu) if self.is_frozen else found
        found = memory(self.job, self.plan, rank, on_cpu=on_cpu)
        sizes = Sizes(self.job, self.plan, rank, on_cpu)
        weights = sum(p.size for p in self.auxiliary) * sizes.stored_bytes
        moments = self._auxiliary_moments
        return replace(
            found,
            parameters_bytes=found.parameters_bytes + weights,
            moments_bytes=found.moments_bytes + moments,
            staging_bytes=found.staging_bytes
            + (found.staging_bytes > 0) * (weights + moments) // self.plan.ranks,
            gradients_bytes=found.gradients_bytes + weights,
            activations_bytes=found.activations_bytes + self._auxiliary_block(sizes).saved_bytes,
        )

    def score_bytes(self, s: Sizes, threads: int) -> int:
        """Return the most bytes that scores of attention need while they are compared.

        Each of a CPU's `threads` compares other rows.
        """
        if self.student is None or self.teacher is None or not self.student.losses.needs_attention:
            return 0
        length, window = s.job.data.sequence, self.teacher.window
        heads = max(s.model.heads, self.teacher.heads)
        queries = min(divergence_queries(heads, length, window, s.stored_bytes), length)
        row_bytes = heads * queries * min(length, (window or length) + queries) * s.stored_bytes
        samples = max(s.tokens // length, 1)
        rows = divergence_rows(row_bytes, samples, on_cpu=s.on_cpu)
        blocks = min(threads, math.ceil(samples / rows)) if s.on_cpu else 1
        return _SCORE_COPIES * blocks * rows * row_bytes

    def describe(self, needs: Memory) -> dict[str, Any]:
        """Return the part with the memory of a rank, without temporaries, as plain data."""
        return {
            "name": self.name, "teacher": None if self.student is None else self.student.teacher,
            "frozen": self.is_frozen, "parameters": self.num_parameters,
            "auxiliary_parameters": sum(one.size for one in self.auxiliary),
            "memory_bytes": needs.peak_bytes - needs.working_bytes,
        }  # fmt: skip

    def checkpoint_bytes(self, rank: int) -> int:
        """Return bytes that `rank` writes to a checkpoint for this part."""
        params = RankParams(self.job, self.plan, rank)
        if self.is_frozen:
            whole = memory(self.job, self.plan, rank)
            total = whole.parameters_bytes + whole.moments_bytes
            return params.checkpoint_bytes() * whole.parameters_bytes // total
        weights = sum(p.size for p in self.auxiliary) * STORED_BYTES[self.job.train.precision]
        return params.checkpoint_bytes() + (weights + self._auxiliary_moments) // self.plan.ranks

    @property
    def _auxiliary_moments(self) -> int:
        return sum(sum(moment_bytes(p, p.size, self.job)) for p in self.auxiliary)

    def _forward_memory(self, found: Memory, rank: int, on_cpu: bool) -> Memory:
        """Return the memory without backward, which frees most activations as it goes."""
        blocks = workload(self.job, self.plan, rank, on_cpu=on_cpu)
        sizes = Sizes(self.job, self.plan, rank, on_cpu)
        state = found.parameters_bytes + found.moments_bytes
        layer_bytes = max(block.saved_bytes for block in blocks if block.spec.layer is not None)
        return replace(
            found,
            moments_bytes=0,
            staging_bytes=found.staging_bytes * found.parameters_bytes // state,
            gradients_bytes=0,
            activations_bytes=sizes.stream_elements * sizes.stored_bytes,
            working_bytes=max(logits_bytes(sizes), layer_bytes // 2),
        )

    def _auxiliary_block(self, s: Sizes) -> Block:
        """Return the work of the auxiliary weights, and of the losses against the teacher."""
        operations = list(self._operations(s))
        forward = tuple(one.forward for one in operations if one.forward is not None)
        backward = tuple(one.backward for one in reversed(operations) if one.backward is not None)
        num_bytes = sum(p.size for p in self.auxiliary) * s.stored_bytes
        norm, clip, update = ops.optimizer_update(num_bytes, len(self.auxiliary))
        updates = [norm, clip, update] if self.job.train.clip else [norm, update]
        reduction = collective("reduce", "all_reduce", s.stage_ranks, num_bytes)
        return Block(
            BlockSpec(AUXILIARY, "other"),
            BlockWork(forward),
            BlockWork(backward),
            BlockWork(tuple(updates), reduction) if self.auxiliary else BlockWork(),
            sum(one.saved_bytes for one in operations),
        )

    def _operations(self, s: Sizes) -> Iterator[Operation]:
        """Yield the operations of the auxiliary weights and of the losses."""
        assert self.student is not None
        assert self.teacher is not None
        student, teacher, own = self.student, self.teacher, s.model
        losses, hidden = student.losses, own.hidden
        heads = teacher if student.auxiliary_layer else own
        q_width, kv_width = heads.heads * own.head_dim, heads.kv_heads * own.head_dim
        if student.auxiliary_layer:
            yield ops.norm(s, hidden, num_gradients=2, saves_result=True)
            yield ops.linear("auxiliary q", s, q_width, hidden, casts_input=True)
            yield ops.linear("auxiliary k", s, kv_width, hidden, casts_input=True)
        if losses.attention:
            widths = self.computes_teacher_scores * teacher.head_dim, own.head_dim
            both = heads.heads, heads.kv_heads
            yield _divergence(s, "attention", both, widths, teacher.window)
        if losses.relations:
            # Every relation has the keys' or the queries' channels, split into equal heads.
            for width, other in (
                (q_width, teacher.heads * teacher.head_dim),
                (kv_width, teacher.kv_heads * teacher.head_dim),
            ):
                count = relation_heads(width, other, teacher.heads)
                widths = other // count, width // count
                yield _divergence(s, "relations", (count, count), widths, teacher.window)
        if losses.hidden:
            if hidden != teacher.hidden:
                yield ops.linear("auxiliary projection", s, teacher.hidden, hidden)
            moved = 8 * s.tokens * teacher.hidden * s.stored_bytes
            yield Operation(
                Op("hidden distance", (), moved, 8), Op("hidden distance", (), moved, 8)
            )
        if losses.logits:
            logits = s.tokens * own.vocab
            moved = _LOGITS_PASSES[student.divergence] * logits * s.stored_bytes
            yield Operation(Op("divergence", (), moved, 8, num_transcendentals=2 * logits))


def job_parts(job: Job, plan: Plan) -> list[Part]:
    """Return the parts of `job` under `plan`: its own model, then students behind their teachers.

    `plan` rules the model; those of students follow from it.
    """
    first = Part(TEACHER, teacher_job(job) if job.student else job, plan)
    parts, students = [first], students_in_order(job.student)
    if job.distill.frozen:
        learning = [one.interval for one in students if one.learns_from_model_at(0)]
        parts = [replace(first, is_frozen=True, running_share=_share_of_multiples(learning))]
    for student in students:
        siblings = [
            one for one in students if one.losses.attention and one.teacher == student.teacher
        ]
        is_first = bool(siblings) and min(siblings, key=lambda one: one.interval) is student
        alone, own_plan = student_plan(plan, job, student)
        parts.append(
            Part(
                student.name, alone, own_plan, student, job.model_of(student.teacher),
                computes_teacher_scores=is_first,
                teaches_logits=any(
                    one.losses.logits and one.teacher == student.name for one in job.student
                ),
            )
        )  # fmt: skip
    return parts


def _share_of_multiples(intervals: Iterable[int]) -> float:
    """Return the share of all numbers that are multiples of one of `intervals`, or of several."""
    terms = Counter[int]()
    for interval in set(intervals):
        both = Counter({interval: 1})
        for common, sign in terms.items():
            both[math.lcm(common, interval)] -= sign
        terms.update(both)
    return sum(sign / common for common, sign in terms.items())


def memory_of_parts(
    parts: Sequence[Part],
    rank: int | None = None,
    loads: Sequence[ArrayLike] | None = None,
    *,
    on_cpu: bool = True,
    threads: int = 1,
) -> Memory:
    """Return the memory of `rank` (None: the last) for parts that train together.

    All keep their state and activations until the one backward pass of all. Temporaries are those
    of one part at a time, except for the losses. The teacher's logits, or its scores of attention,
    stand beside a student's, and so do log-probabilities of each student that teaches logits. A CPU
    compares scores in `threads` threads.
    """
    each = [part.memory(rank, loads, on_cpu=on_cpu) for part in parts]
    if len(each) == 1:
        return each[0]
    sizes = [
        Sizes(part.job, part.plan, part.plan.ranks - 1 if rank is None else rank, on_cpu)
        for part in parts
    ]
    chunks = [min(FOLLOWER_CHUNK_TOKENS, s.tokens) * s.vocab * s.stored_bytes for s in sizes]
    taught = sum(chunk for part, chunk in zip(parts, chunks, strict=True) if part.teaches_logits)
    at_loss = logits_bytes(sizes[0]) + 2 * max(chunks[1:]) + taught
    at_scores = max(part.score_bytes(s, threads) for part, s in zip(parts, sizes, strict=True))
    total = {kind: sum(getattr(one, kind) for one in each) for kind in each[0].by_kind()}
    working = max(at_loss, at_scores, *(one.working_bytes for one in each))
    return Memory(**total | {"working_bytes": working})


def auxiliary_parameters(student: StudentConfig, teacher: ModelConfig) -> Iterator[Parameter]:
    """Yield the auxiliary weights of `student` beside `teacher`, with the student's own names."""
    own = student.model
    q_width, kv_width = teacher.heads * own.head_dim, teacher.kv_heads * own.head_dim
    if student.auxiliary_layer:
        layer = f"{AUXILIARY}.layer."
        yield Parameter(f"{layer}norm.weight", (own.hidden,), "norm")
        for name, width in (("q", q_width), ("k", kv_width)):
            yield Parameter(f"{layer}{name}.weight", (width, own.hidden), "dense")
            if own.qk_norm is not None:
                normed = own.head_dim if own.qk_norm == "heads" else width
                yield Parameter(f"{layer}{name}_norm.weight", (normed,), "norm")
    if student.losses.hidden and own.hidden != teacher.hidden:
        shape = teacher.hidden, own.hidden
        yield Parameter(f"{AUXILIARY}.projection.weight", shape, "dense")


def relation_heads(width: int, teacher_width: int, max_heads: int) -> int:
    """Return the most relation heads, up to `max_heads`, that divide both widths."""
    common = math.gcd(width, teacher_width)
    return max(count for count in range(1, max_heads + 1) if common % count == 0)


def _divergence(
    s: Sizes, name: str, heads: tuple[int, int], widths: tuple[int, int], window: int | None
) -> Operation:
    """Return the divergence of attention with its gradient, a few queries at a time.

    Args:
        s: the sizes.
        name: name of the ops.
        heads: heads of queries and of keys.
        widths: channels of a head of the teacher and of the student; 0 for a teacher whose scores
            another student computes.
        window: keys that a query attends to at most; None for all.
    """
    length, (teacher_width, width) = s.job.data.sequence, widths
    samples, dtype = s.tokens // length, s.precision if s.precision == "fp64" else "fp32"
    queries = divergence_queries(heads[0], length, window, s.stored_bytes)
    blocks = banded_blocks(length, min(window or length, length), queries)
    matmuls, batch = list[MatmulShape](), samples * heads[0]
    for queries, keys in blocks:
        matmuls += [
            MatmulShape(queries, keys, width, batch), MatmulShape(queries, width, keys, batch),
            MatmulShape(keys, width, queries, batch),
        ]  # fmt: skip
        if teacher_width:
            matmuls.append(MatmulShape(queries, keys, teacher_width, batch))
    scores = batch * sum(queries * keys for queries, keys in blocks)
    passes = _STUDENT_PASSES + (teacher_width > 0) * _TEACHER_PASSES
    transcendentals = (2 + 2 * (teacher_width > 0)) * scores
    gradients = s.tokens * sum(heads) * width * s.stored_bytes
    return Operation(
        Op(name, tuple(matmuls), passes * scores * s.stored_bytes, 20 * len(blocks), dtype,
           num_transcendentals=transcendentals),
        Op(name, (), 2 * gradients, 2),
        gradients,
    )  # fmt: skip


def _forward_only(blocks: Sequence[Block]) -> list[Block]:
    """Return blocks without backward and update; the head has logits but no gradients."""
    found = []
    for block in blocks:
        block = replace(block, backward=BlockWork(), saved_bytes=0, captured_bytes=0)
        if block.name == "head":
            forward_ops = tuple(_logits_only(op) for op in block.forward.ops)
            block = replace(block, forward=replace(block.forward, ops=forward_ops))
        calls = [one for one in block.update.collectives if one.name in _COUNTERS]
        found.append(replace(block, update=BlockWork((), tuple(calls))))
    return found


def _logits_only(op: Op) -> Op:
    """Return the work of a loss without its gradients, which are most of what it moves."""
    if op.name != "loss":
        return op
    # For each size of chunks: logits, then the gradients of input and weight.
    return replace(op, matmuls=op.matmuls[::3], moved_bytes=op.moved_bytes // 2)


def _without_loss(block: Block, *, keeps_logits: bool) -> Block:
    """Return the block without the loss on logits, if it has one, or with its logits alone."""
    if block.name != "head":
        return block
    forward, backward = (
        tuple(op for op in work.ops if op.name != "loss")
        for work in (block.forward, block.backward)
    )
    if keeps_logits:
        forward = tuple(_logits_only(op) for op in block.forward.ops)
    return replace(
        block,
        forward=replace(block.forward, ops=forward),
        backward=replace(block.backward, ops=backward),
    )

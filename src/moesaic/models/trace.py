"""Trace of any PyTorch model: the workload of one micro-batch, measured by running it once.

The micro-batch runs forward and backward. A model on `meta` runs without memory: fake CPU tensors
replace its tensors. The model itself stays unchanged, because the run uses substitutes of its
parameters and buffers.

A backward kernel counts for the block whose forward created its autograd node. Node sequence
numbers tell which.
"""

from __future__ import annotations

import fnmatch
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from moesaic.base import keys
from moesaic.base.errors import ConfigError, UserError
from moesaic.facts.workload import STEP, Op, TracedModel
from moesaic.facts.workload.traced import (
    VERSION,
    TracedBlock,
    TracedInput,
    TracedMatmul,
    TracedOp,
    TracedWork,
)
from moesaic.models.kernel_counter import KernelCounter, KernelCounts, Kwargs, storage_key

OUTSIDE = "(outside)"
"""Block name of work outside every block."""


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    blocks: Sequence[str] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    name: str | None = None,
) -> TracedModel:
    """Return the workload of one micro-batch of `model`, in its current mode (train or eval).

    Args:
        model: any module; if a parameter is on `meta`, nothing is allocated.
        example_inputs: a tensor, a tuple or list of arguments, or a dict of keyword arguments.
        blocks: module names, where `*` matches one component; None: the direct children, with
            module lists expanded to their items.
        loss: function from the model's output to a loss; None: the output's `loss`, or the whole
            output.
        name: name of the model; None: its class.
    """
    names = block_names(model, blocks)
    _check_reserved(names)
    tracker = BlockTracker(model, names)
    substitution = TensorSubstitution.from_model(model)
    args, kwargs = _split_arguments(example_inputs)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(substitution.fake_mode or nullcontext())
        substitutes = substitution.substitute_parameters(model)
        tracker.register_tensors(model, substitutes)
        stack.enter_context(tracker.hooks(model))
        keep = torch.autograd.graph.saved_tensors_hooks(tracker.save_tensor, lambda tensor: tensor)
        with keep, TracingCounter(tracker.forward_counts, substitution):
            fake_inputs = tree_map(substitution.substitute, (args, kwargs))
            out = functional_call(model, substitutes, *fake_inputs, tie_weights=False)
            roots = _backward_roots(loss(out) if loss is not None else out)
        seeds = [torch.ones_like(root) for root in roots]
        with TracingCounter(tracker.backward_counts, substitution):
            torch.autograd.backward(roots, seeds)
    inputs = _traced_inputs(args, kwargs)
    return TracedModel(
        version=VERSION,
        name=name or type(model).__name__,
        torch=str(torch.__version__),
        batch=next((one.shape[0] for one in inputs if one.shape and one.shape[0]), 1),
        inputs=inputs,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        blocks=tracker.traced_blocks(model),
    )


def block_names(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """Return the block names of `model` that match `patterns`, or its default blocks."""
    if patterns is None:
        return list(_default_blocks(model, ""))
    known = [name for name, _ in model.named_modules() if name]
    names: list[str] = []
    for pattern in patterns:
        found = [name for name in known if _matches(name, pattern)]
        if not found:
            candidates = [name for name in known if name.count(".") == pattern.count(".")] or known
            hint = (
                f"one such as {keys.join_words(candidates[:5])}"
                if candidates
                else "none: it has no modules"
            )
            remedy = keys.suggest_choice(pattern, candidates, hint)
            raise ConfigError(f"blocks = '{pattern}' is no module of the model: {remedy}")
        names += [name for name in found if name not in names]
    return names


def _check_reserved(names: Sequence[str]) -> None:
    """Raise if a block has the name of work outside all blocks."""
    for name in names:
        if name in (STEP, OUTSIDE):
            raise UserError(
                f"the block of module '{name}' has the name of work outside all blocks: give the "
                "module another name, or choose blocks (--block) without it"
            )


def _default_blocks(module: nn.Module, prefix: str) -> Iterator[str]:
    """Yield the children; module lists, and children that contain one, are expanded."""
    for name, child in module.named_children():
        child_name = f"{prefix}{name}"
        if isinstance(child, _MODULE_LISTS):
            yield from (f"{child_name}.{inner}" for inner, _ in child.named_children())
        elif any(isinstance(inner, _MODULE_LISTS) for inner in child.modules()):
            yield from _default_blocks(child, f"{child_name}.")
        else:
            yield child_name


_MODULE_LISTS = (nn.ModuleList, nn.ModuleDict)


def _matches(name: str, pattern: str) -> bool:
    """Match component by component, so that `h.*` does not match names inside `h.0`."""
    components, wanted_components = name.split("."), pattern.split(".")
    pairs = zip(components, wanted_components, strict=False)
    return len(components) == len(wanted_components) and all(
        fnmatch.fnmatchcase(*pair) for pair in pairs
    )


@dataclass
class TensorSubstitution:
    """Substitutes for a model's tensors: detached ones, or fake ones if the model is on `meta`."""

    fake_mode: Any = None
    """Fake tensor mode, if the model has no values."""
    _substitutes: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """(original, substitute) by id of the original, which is kept alive so that its id stays
    unique."""

    @classmethod
    def from_model(cls, model: nn.Module) -> TensorSubstitution:
        """Return the substitution for `model`."""
        if not any(one.is_meta for one in (*model.parameters(), *model.buffers())):
            return cls()
        from torch._subclasses.fake_tensor import FakeTensorMode

        return cls(FakeTensorMode(allow_non_fake_inputs=True))

    def substitute(self, value: Any) -> Any:
        """Return the substitute of a tensor of a model without values; anything else is returned as
        is."""
        if self.fake_mode is None or not isinstance(value, Tensor) or self._is_own_fake(value):
            return value
        if id(value) not in self._substitutes:
            with self.fake_mode:
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            self._substitutes[id(value)] = (value, fake.requires_grad_(value.requires_grad))
        return self._substitutes[id(value)][1]

    def substitute_meta(self, value: Any) -> Any:
        """Return the substitute of a tensor on `meta` that the forward created; other values are
        returned as is."""
        return self.substitute(value) if isinstance(value, Tensor) and value.is_meta else value

    def _is_own_fake(self, tensor: Tensor) -> bool:
        return getattr(tensor, "fake_mode", None) is self.fake_mode

    def substitute_parameters(self, model: nn.Module) -> dict[str, Tensor]:
        """Return substitutes of all parameters and buffers by name; tied ones share one."""
        substitutes: dict[int, Tensor] = {}
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        for _, tensor in named:
            if id(tensor) in substitutes:
                continue
            is_parameter = isinstance(tensor, nn.Parameter)
            if self.fake_mode is not None:
                data = self.substitute(tensor)
            else:
                data = tensor.detach() if is_parameter else tensor.clone()
            substitutes[id(tensor)] = (
                nn.Parameter(data, requires_grad=tensor.requires_grad) if is_parameter else data
            )
        return {name: substitutes[id(tensor)] for name, tensor in named}


class TracingCounter(KernelCounter):
    """Kernel counter that runs a model with substituted tensors."""

    def __init__(
        self, current_counts: Callable[[], KernelCounts], substitution: TensorSubstitution
    ) -> None:
        super().__init__(current_counts)
        self._substitution = substitution

    def run_op(self, func: Any, args: Any, kwargs: Kwargs) -> Any:
        """Run `func` with substitutes; raise if it needs values that fake tensors lack."""
        if self._substitution.fake_mode is None:
            return func(*args, **kwargs)
        from torch._subclasses import fake_tensor as fakes

        args, kwargs = tree_map(self._substitution.substitute_meta, (args, kwargs))
        try:
            if func is torch.ops.aten._grouped_mm.default:
                return _run_grouped_mm_fake(func, args, kwargs)
            return func(*args, **kwargs)
        except (fakes.DataDependentOutputException, fakes.DynamicOutputShapeException):
            raise UserError(
                f"the model asks for values of a tensor ({func}), which tensors on meta lack: "
                "trace it with real tensors (--real), or change its configuration"
            ) from None
        except fakes.UnsupportedOperatorException:
            raise UserError(
                f"{func} has no fake implementation: trace the model with real tensors (--real), "
                "or register one with torch.library.register_fake"
            ) from None


def _run_grouped_mm_fake(func: Any, args: Any, kwargs: Kwargs) -> Tensor:
    """Return the fake result of a grouped matmul; torch's fake kernel supports bf16 only."""
    bf16_args = [arg.bfloat16() if _is_float(arg) else arg for arg in args]
    result: Tensor = func(*bf16_args, **kwargs).to(args[0].dtype)
    return result


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class BlockTracker:
    """Attribution of kernels and saved tensors to blocks."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._names = list(names)
        self._stack: list[str] = []
        self._execution_order: list[str] = []
        self._node_starts: list[int] = []
        self._node_blocks: list[str] = []
        """Block of the autograd nodes from the sequence number at the same index of `_node_starts`.
        """
        self._forward_counts: dict[str, KernelCounts] = {}
        self._backward_counts: dict[str, KernelCounts] = {}
        self._last_block = OUTSIDE
        self._output_bytes: dict[str, int] = {}
        self._known_storages: set[int] = set()
        self._saved_tensors: dict[int, tuple[Tensor, str]] = {}
        """(tensor, block that saved it first) by storage; the tensor keeps the storage alive."""
        self._block_of_parameter = block_by_parameter(model, self._names)
        self._block_by_id: dict[int, str] = {}

    def register_tensors(self, model: nn.Module, substitutes: dict[str, Tensor]) -> None:
        """Register the substitutes of the model's parameters and buffers."""
        self._known_storages = {storage_key(one) for one in substitutes.values()}
        named = model.named_parameters()
        self._block_by_id = {
            id(substitutes[name]): self._block_of_parameter[name] for name, _ in named
        }

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Install forward hooks that track the current block."""
        handles = []
        for name in self._names:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(self._forward_pre_hook(name)))
            handles.append(module.register_forward_hook(self._forward_hook(name), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _forward_pre_hook(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            self._stack.append(name)
            self._record_node_start()
            if name not in self._execution_order:
                self._execution_order.append(name)

        return enter

    def _forward_hook(self, name: str) -> Any:
        def leave(_: Any, __: Any, out: Any) -> None:
            self._stack.pop()
            self._record_node_start()
            size = sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
            self._output_bytes[name] = self._output_bytes.get(name, 0) + size

        return leave

    def _record_node_start(self) -> None:
        """Assign the autograd nodes created from here on to the current block."""
        self._node_starts.append(torch._C._autograd._get_sequence_nr())
        self._node_blocks.append(self._current_block())

    def _current_block(self) -> str:
        return self._stack[-1] if self._stack else OUTSIDE

    def forward_counts(self) -> KernelCounts:
        """Return the forward counts of the current block."""
        return self._forward_counts.setdefault(self._current_block(), KernelCounts())

    def backward_counts(self) -> KernelCounts:
        """Return the backward counts of the block that created the current node, or that is
        recomputed."""
        node = torch._C._current_autograd_node()
        if self._stack:
            self._last_block = self._current_block()
        elif hasattr(node, "variable"):  # A gradient reaches a parameter.
            self._last_block = self._block_by_id.get(id(node.variable), self._last_block)
        elif node is not None:
            index = bisect_right(self._node_starts, node._sequence_nr()) - 1
            self._last_block = self._node_blocks[index] if index >= 0 else OUTSIDE
        return self._backward_counts.setdefault(self._last_block, KernelCounts())

    def save_tensor(self, tensor: Tensor) -> Tensor:
        """Record that autograd saves `tensor`, and return it."""
        key = storage_key(tensor)
        if key not in self._known_storages:
            self._saved_tensors.setdefault(key, (tensor, self._current_block()))
        return tensor

    def traced_blocks(self, model: nn.Module) -> list[TracedBlock]:
        """Return the blocks in execution order, then those that did not run."""
        idle = [name for name in self._names if name not in self._execution_order]
        saved: dict[str, int] = {}
        for tensor, name in self._saved_tensors.values():
            saved[name] = saved.get(name, 0) + tensor.untyped_storage().nbytes()
        parameters: dict[str, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            parameters.setdefault(self._block_of_parameter[name], []).append(parameter)
        done = (
            self._forward_counts.keys()
            | self._backward_counts.keys()
            | parameters.keys()
            | saved.keys()
        )
        names = [*self._execution_order, *idle, *([OUTSIDE] if OUTSIDE in done else [])]
        return [
            self._traced_block(name, parameters.get(name, []), saved.get(name, 0)) for name in names
        ]

    def _traced_block(
        self, name: str, parameters: Sequence[nn.Parameter], saved_bytes: int
    ) -> TracedBlock:
        return TracedBlock(
            name=name,
            parameters=sum(one.numel() for one in parameters),
            parameter_bytes=sum(one.nbytes for one in parameters),
            gradients=[one.nbytes for one in parameters if one.requires_grad],
            forward=_traced_work(self._forward_counts.get(name, KernelCounts())),
            backward=_traced_work(self._backward_counts.get(name, KernelCounts())),
            saved_bytes=saved_bytes,
            output_bytes=self._output_bytes.get(name, 0),
        )


def block_by_parameter(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return the block of each parameter: the innermost one that contains it."""
    result = {}
    for name, _ in model.named_parameters():
        containing = [block for block in names if name.startswith(f"{block}.")]
        result[name] = max(containing, key=len, default=OUTSIDE)
    return result


def _traced_work(counts: KernelCounts) -> TracedWork:
    grouped: dict[Op, list[TracedMatmul]] = {}
    for op, count in counts.ops.items():
        # Attention of another size is another kernel.
        key = replace(op, matmuls=()) if op.name == "matmuls" else op
        grouped.setdefault(key, []).extend(
            TracedMatmul(rows=one.rows, columns=one.columns, inner=one.inner, count=count)
            for one in op.matmuls
            if count
        )
    return TracedWork(
        matmuls=[
            TracedOp(
                name=op.name,
                matmuls=matmuls,
                dtype=op.dtype,
                num_transcendentals=op.num_transcendentals * counts.ops[op],
                kind=op.kind or None,  # type: ignore[arg-type]
                causal_fraction=op.causal_fraction,
            )
            for op, matmuls in grouped.items()
            if matmuls
        ],
        moved_bytes=counts.moved_bytes,
        num_kernels=counts.num_kernels,
        num_transcendentals=counts.num_transcendentals,
    )


def _split_arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments."""
    if isinstance(example, dict):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def _traced_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[TracedInput]:
    found, _ = tree_flatten_with_path(kwargs or args)
    return [
        TracedInput(
            name=keystr(path), shape=list(leaf.shape), dtype=str(leaf.dtype).removeprefix("torch.")
        )
        for path, leaf in found
        if isinstance(leaf, Tensor)
    ]


def _backward_roots(out: Any) -> list[Tensor]:
    """Return the tensors that backward starts from."""
    loss = getattr(out, "loss", None)
    leaves = tree_leaves(out if loss is None else loss)
    roots = [one for one in leaves if isinstance(one, Tensor) and one.requires_grad]
    if not roots:
        raise UserError(
            "no output of the model has a gradient: let parameters require one, or pass "
            "a loss of the output"
        )
    return roots

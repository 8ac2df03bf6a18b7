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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from moesaic.base import keys
from moesaic.base.errors import ConfigError, UserError
from moesaic.facts.workload import STEP, TracedModel
from moesaic.facts.workload.traced import (
    VERSION,
    TracedBlock,
    TracedInput,
    TracedMatmul,
    TracedOp,
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
    tracer = Tracer(model, names)
    args, kwargs = _split_arguments(example_inputs)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(tracer.fake_mode or nullcontext())
        substitutes = tracer.substitute_parameters(model)
        stack.enter_context(tracer.hooks(model))
        keep = torch.autograd.graph.saved_tensors_hooks(tracer.save_tensor, lambda tensor: tensor)
        with keep, tracer:
            fake_inputs = tree_map(tracer.substitute, (args, kwargs))
            out = functional_call(model, substitutes, *fake_inputs, tie_weights=False)
            roots = _backward_roots(loss(out) if loss is not None else out)
        seeds = [torch.ones_like(root) for root in roots]
        tracer.direction = "backward"
        with tracer:
            torch.autograd.backward(roots, seeds)
    inputs = _traced_inputs(args, kwargs)
    return TracedModel(
        version=VERSION,
        name=name or type(model).__name__,
        torch=str(torch.__version__),
        batch=next((one.shape[0] for one in inputs if one.shape and one.shape[0]), 1),
        inputs=inputs,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        blocks=tracer.traced_blocks(model),
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


class Tracer(KernelCounter):
    """Dispatch mode that runs a model with substitutes of its tensors, block by block.

    Substitutes are detached tensors, or fake ones if the model is on `meta`.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__(self._current_counts)
        self.direction = "forward"
        """Pass that runs, forward or backward."""
        self.fake_mode: Any = None
        """Fake tensor mode, if the model has no values."""
        if any(one.is_meta for one in (*model.parameters(), *model.buffers())):
            from torch._subclasses.fake_tensor import FakeTensorMode

            self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}
        """(original, fake) by id of the original, which is kept alive so that its id stays unique.
        """
        self._names = list(names)
        self._stack: list[str] = []
        self._node_starts: list[tuple[int, str]] = []
        """(sequence number of the first autograd node, block), whenever the block changed."""
        self._counts: dict[tuple[str, str], KernelCounts] = {}
        """Counts by direction and block."""
        self._last_block = OUTSIDE
        self._output_bytes: dict[str, int] = {}
        """Bytes of outputs by block, in execution order."""
        self._known_storages: set[int] = set()
        self._saved_tensors: dict[int, tuple[Tensor, str]] = {}
        """(tensor, block that saved it first) by storage; the tensor keeps the storage alive."""
        self._parameter_blocks = block_by_parameter(model, names)
        self._block_by_id: dict[int, str] = {}

    def substitute(self, value: Any) -> Any:
        """Return the substitute of a tensor of a model without values; anything else is returned as
        is."""
        is_own = getattr(value, "fake_mode", None) is self.fake_mode
        if self.fake_mode is None or not isinstance(value, Tensor) or is_own:
            return value
        if id(value) not in self._fakes:
            with self.fake_mode:
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            self._fakes[id(value)] = (value, fake.requires_grad_(value.requires_grad))
        return self._fakes[id(value)][1]

    def substitute_parameters(self, model: nn.Module) -> dict[str, Tensor]:
        """Return substitutes of all parameters and buffers by name; tied ones share one."""
        found: dict[int, Tensor] = {}
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        for name, tensor in named:
            if id(tensor) in found:
                continue
            data = self.substitute(tensor)
            if isinstance(tensor, nn.Parameter):
                data = nn.Parameter(data.detach(), requires_grad=tensor.requires_grad)
                self._block_by_id[id(data)] = self._parameter_blocks[name]
            elif self.fake_mode is None:
                data = tensor.clone()
            found[id(tensor)] = data
        self._known_storages = {storage_key(one) for one in found.values()}
        return {name: found[id(tensor)] for name, tensor in named}

    def run_op(self, func: Any, args: Any, kwargs: Kwargs) -> Any:
        """Run `func` with substitutes of tensors on `meta`, such as those that forward created.

        Raise if it needs values that fake tensors lack.
        """
        if self.fake_mode is None:
            return func(*args, **kwargs)
        from torch._subclasses import fake_tensor as fakes

        args, kwargs = tree_map(
            lambda one: self.substitute(one) if getattr(one, "is_meta", False) else one,
            (args, kwargs),
        )
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

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Install forward hooks that track the current block."""

        def enter(name: str) -> None:
            self._stack.append(name)
            self._record_node_start()
            self._output_bytes.setdefault(name, 0)

        def leave(name: str, out: Any) -> None:
            self._stack.pop()
            self._record_node_start()
            tensors = (one for one in tree_leaves(out) if isinstance(one, Tensor))
            self._output_bytes[name] += sum(one.nbytes for one in tensors)

        with ExitStack() as handles:
            for name in self._names:
                module = model.get_submodule(name)
                before = module.register_forward_pre_hook(lambda *_, name=name: enter(name))
                after = module.register_forward_hook(
                    lambda _module, _args, out, name=name: leave(name, out), always_call=True
                )
                handles.callback(before.remove)
                handles.callback(after.remove)
            yield

    def _record_node_start(self) -> None:
        """Assign the autograd nodes created from here on to the current block."""
        number = torch._C._autograd._get_sequence_nr()
        self._node_starts.append((number, self._current_block()))

    def _current_block(self) -> str:
        return self._stack[-1] if self._stack else OUTSIDE

    def _current_counts(self) -> KernelCounts:
        """Return the counts of the current block; in backward of the block that created the current
        node, or that is recomputed."""
        block = self._current_block()
        if self.direction == "backward":
            block = self._last_block = block if self._stack else self._block_of_node()
        return self._counts.setdefault((self.direction, block), KernelCounts())

    def _block_of_node(self) -> str:
        """Return the block that created the current autograd node."""
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return self._last_block
        if hasattr(node, "variable"):  # A gradient reaches a parameter.
            return self._block_by_id.get(id(node.variable), self._last_block)
        index = bisect_right(self._node_starts, node._sequence_nr(), key=itemgetter(0)) - 1
        return self._node_starts[index][1] if index >= 0 else OUTSIDE

    def save_tensor(self, tensor: Tensor) -> Tensor:
        """Record that autograd saves `tensor`, and return it."""
        key = storage_key(tensor)
        if key not in self._known_storages:
            self._saved_tensors.setdefault(key, (tensor, self._current_block()))
        return tensor

    def traced_blocks(self, model: nn.Module) -> list[TracedBlock]:
        """Return the blocks in execution order, then those that did not run."""
        saved: Counter[str] = Counter()
        for tensor, name in self._saved_tensors.values():
            saved[name] += tensor.untyped_storage().nbytes()
        parameters: dict[str, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            parameters.setdefault(self._parameter_blocks[name], []).append(parameter)
        done = {*parameters, *saved, *(name for _, name in self._counts)}
        names = dict.fromkeys([*self._output_bytes, *self._names, *({OUTSIDE} & done)])
        return [
            TracedBlock(
                name=name,
                parameters=sum(one.numel() for one in parameters.get(name, ())),
                parameter_bytes=sum(one.nbytes for one in parameters.get(name, ())),
                gradients=[one.nbytes for one in parameters.get(name, ()) if one.requires_grad],
                forward=_traced_ops(self._counts.get(("forward", name), KernelCounts())),
                backward=_traced_ops(self._counts.get(("backward", name), KernelCounts())),
                saved_bytes=saved[name],
                output_bytes=self._output_bytes.get(name, 0),
            )
            for name in names
        ]


def _run_grouped_mm_fake(func: Any, args: Any, kwargs: Kwargs) -> Tensor:
    """Return the fake result of a grouped matmul; torch's fake kernel supports bf16 only."""
    left, right, *rest = args
    result: Tensor = func(left.bfloat16(), right.bfloat16(), *rest, **kwargs).to(left.dtype)
    return result


def block_by_parameter(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """Return the block of each parameter: the innermost one that contains it."""
    result = {}
    for name, _ in model.named_parameters():
        containing = [block for block in names if name.startswith(f"{block}.")]
        result[name] = max(containing, key=len, default=OUTSIDE)
    return result


def _traced_ops(counts: KernelCounts) -> list[TracedOp]:
    """Return the matmuls by shape, attention, and one op for all elementwise kernels."""
    ops = [
        TracedOp(
            name=op.name,
            matmuls=[
                TracedMatmul(rows=one.rows, columns=one.columns, inner=one.inner, count=count)
                for one in op.matmuls
            ],
            dtype=op.dtype,
            num_transcendentals=op.num_transcendentals * count,
            kind=op.kind,  # type: ignore[arg-type]
            causal_fraction=op.causal_fraction,
        )
        for op, count in counts.ops.items()
        if count
    ]
    elementwise = TracedOp(
        name="elementwise",
        moved_bytes=counts.moved_bytes,
        num_kernels=counts.num_kernels,
        num_transcendentals=counts.num_transcendentals,
    )
    return [*ops, elementwise]


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

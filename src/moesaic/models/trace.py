"""A foreign model, run once and watched: what `facts.workload` says of the house's own by formula.

One micro-batch goes forward and backward. A model on `meta` is run without memory: every tensor
stands for one on a CPU and has no values. The model is left as it was: parameters and buffers are
others for the time of the run.

Backward belongs to the block whose forward made it: autograd numbers its nodes as they are made.
"""

from __future__ import annotations

import fnmatch
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from moesaic.base import keys
from moesaic.base.errors import ConfigError, UserError
from moesaic.facts.workload import STEP, Traced
from moesaic.facts.workload.file import (
    VERSION,
    TracedAttention,
    TracedBlock,
    TracedInput,
    TracedProduct,
    TracedWork,
)
from moesaic.models.kernels import Heads, Named, Passes, Seen, Shape, storage_key

OUTSIDE = "(outside)"
"""The block of what is in no block."""


def trace(
    model: nn.Module,
    example_inputs: Any,
    *,
    blocks: Sequence[str] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    name: str | None = None,
) -> Traced:
    """What one micro-batch of `model` asks of a rank, in the mode (train or eval) that it is in.

    Args:
        model: any; where a parameter is on `meta`, nothing is allocated.
        example_inputs: a tensor, a tuple or list of arguments, or a dict of arguments by name.
        blocks: dotted names of modules, `*` for any one part of a name; absent: the direct
            children; those that a list of modules lies in are opened, down to its items.
        loss: what makes a loss of the model's output; absent: its `loss`, or all of the output.
        name: what to call the model; absent: its class.
    """
    names = block_names(model, blocks)
    _check_told(names)
    watch = Watch(model, names)
    stage = Stage.of(model)
    args, kwargs = _arguments(example_inputs)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(stage.fake or nullcontext())
        stand_ins = stage.stand_ins(model)
        watch.know(model, stand_ins)
        stack.enter_context(watch.hooks(model))
        keep = torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda tensor: tensor)
        with keep, Watching(watch.forward, stage):
            given = tree_map(stage.stand_in, (args, kwargs))
            out = functional_call(model, stand_ins, *given, tie_weights=False)
            roots = _roots(loss(out) if loss is not None else out)
        seeds = [torch.ones_like(root) for root in roots]
        with Watching(watch.backward, stage):
            torch.autograd.backward(roots, seeds)
    inputs = _inputs(args, kwargs)
    return Traced(
        version=VERSION,
        name=name or type(model).__name__,
        torch=str(torch.__version__),
        batch=next((one.shape[0] for one in inputs if one.shape and one.shape[0]), 1),
        inputs=inputs,
        buffer_bytes=sum(buffer.nbytes for buffer in model.buffers()),
        blocks=watch.found(model),
    )


def block_names(model: nn.Module, wanted: Sequence[str] | None = None) -> list[str]:
    """The blocks of `model`: those that `wanted` names, or its own."""
    if wanted is None:
        return list(_opened(model, ""))
    known = [name for name, _ in model.named_modules() if name]
    names: list[str] = []
    for pattern in wanted:
        found = [name for name in known if _matches(name, pattern)]
        if not found:
            words = [name for name in known if name.count(".") == pattern.count(".")] or known
            some = f"one such as {keys.listed(words[:5])}" if words else "none: it has no modules"
            remedy = keys.choose(pattern, words, some)
            raise ConfigError(f"blocks = '{pattern}' is no module of the model: {remedy}")
        names += [name for name in found if name not in names]
    return names


def _told(name: str) -> str:
    """What the block of a module called `name` is called."""
    return f"{name} (module)" if name == STEP else name


def _check_told(names: Sequence[str]) -> None:
    """Refuse blocks that could not be told apart."""
    told = [OUTSIDE, *map(_told, names)]
    for name in names:
        if told.count(_told(name)) > 1:
            raise UserError(
                f"the block of module '{name}' would be called '{_told(name)}', as another one is: "
                "give the module another name, or choose blocks (--block) without it"
            )


def _opened(module: nn.Module, prefix: str) -> Iterator[str]:
    """Children; lists of modules, and children that such a list lies in, are opened."""
    for name, child in module.named_children():
        at = f"{prefix}{name}"
        if isinstance(child, _LISTS):
            yield from (f"{at}.{inner}" for inner, _ in child.named_children())
        elif any(isinstance(inner, _LISTS) for inner in child.modules()):
            yield from _opened(child, f"{at}.")
        else:
            yield at


_LISTS = (nn.ModuleList, nn.ModuleDict)


def _matches(name: str, pattern: str) -> bool:
    """Part by part, so that `h.*` is not what lies within `h.0`."""
    parts, wanted = name.split("."), pattern.split(".")
    pairs = zip(parts, wanted, strict=False)
    return len(parts) == len(wanted) and all(fnmatch.fnmatchcase(*pair) for pair in pairs)


@dataclass
class Stage:
    """Where a model runs: with its own numbers, or with none."""

    fake: Any = None
    """Torch's mode of tensors without values, if the model has none."""
    _known: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Stand-ins by the identity of what they stand for, which is kept so that it stays its own."""

    @classmethod
    def of(cls, model: nn.Module) -> Stage:
        """That of `model`."""
        if not any(one.is_meta for one in (*model.parameters(), *model.buffers())):
            return cls()
        from torch._subclasses.fake_tensor import FakeTensorMode

        return cls(FakeTensorMode(allow_non_fake_inputs=True))

    def stand_in(self, one: Any) -> Any:
        """What takes the place of a tensor without values; anything else is itself."""
        if self.fake is None or not isinstance(one, Tensor) or self._is_ours(one):
            return one
        if id(one) not in self._known:
            with self.fake:
                made = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype)
            self._known[id(one)] = (one, made.requires_grad_(one.requires_grad))
        return self._known[id(one)][1]

    def stray(self, one: Any) -> Any:
        """The same for a tensor that a model met on its way: only those on `meta` are replaced."""
        return self.stand_in(one) if isinstance(one, Tensor) and one.is_meta else one

    def _is_ours(self, one: Tensor) -> bool:
        return getattr(one, "fake_mode", None) is self.fake

    def stand_ins(self, model: nn.Module) -> dict[str, Tensor]:
        """Tensors by name for all parameters and buffers; tied ones are one."""
        made: dict[int, Tensor] = {}
        result: dict[str, Tensor] = {}
        for name, own in model.named_parameters(remove_duplicate=False):
            if id(own) not in made:
                data = self.stand_in(own) if self.fake is not None else own.detach()
                made[id(own)] = nn.Parameter(data, requires_grad=own.requires_grad)
            result[name] = made[id(own)]
        for name, buffer in model.named_buffers(remove_duplicate=False):
            if id(buffer) not in made:
                copy = self.stand_in(buffer) if self.fake is not None else buffer.clone()
                made[id(buffer)] = copy
            result[name] = made[id(buffer)]
        return result


class Watching(Passes):
    """Counts on a stage; what has no values is refused with the name of the operation."""

    def __init__(self, place: Callable[[], Seen], stage: Stage) -> None:
        super().__init__(place)
        self._stage = stage

    def call(self, func: Any, args: Any, kwargs: Named) -> Any:
        """With stand-ins for tensors that the model brought along."""
        if self._stage.fake is None:
            return func(*args, **kwargs)
        from torch._subclasses import fake_tensor as fakes

        args, kwargs = tree_map(self._stage.stray, (args, kwargs))
        try:
            if func is torch.ops.aten._grouped_mm.default:
                return _grouped_sizes(func, args, kwargs)
            return func(*args, **kwargs)
        except (fakes.DataDependentOutputException, fakes.DynamicOutputShapeException):
            raise UserError(
                f"the model asks for values of a tensor ({func}), and on meta there are none: "
                "trace it with real tensors (--real), or give its configuration another way"
            ) from None
        except fakes.UnsupportedOperatorException:
            raise UserError(
                f"{func} does not say what it returns: trace the model with real tensors (--real), "
                "or register a fake for it with torch.library.register_fake"
            ) from None


def _grouped_sizes(func: Any, args: Any, kwargs: Named) -> Tensor:
    """What a grouped product returns: without values, torch takes bfloat16 alone."""
    narrow = [one.bfloat16() if _is_float(one) else one for one in args]
    result: Tensor = func(*narrow, **kwargs).to(args[0].dtype)
    return result


def _is_float(one: Any) -> bool:
    return isinstance(one, Tensor) and one.is_floating_point()


class Watch:
    """Which block is at work, and what was seen of each."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self._names = list(names)
        self._inside: list[str] = []
        self._order: list[str] = []
        self._starts: list[int] = []
        self._made_by: list[str] = []
        """Whose the nodes are from the number beside it in `_starts`."""
        self._forward: dict[str, Seen] = {}
        self._backward: dict[str, Seen] = {}
        self._last = OUTSIDE
        self._output_bytes: dict[str, int] = {}
        self._known: set[int] = set()
        self._kept: dict[int, tuple[Tensor, str]] = {}
        """By storage: a tensor of it, which keeps it alive, and the block that kept it first."""
        self._owners = owners(model, self._names)
        self._owner_of: dict[int, str] = {}

    def know(self, model: nn.Module, stand_ins: dict[str, Tensor]) -> None:
        """What takes the place of the model's own tensors."""
        self._known = {storage_key(one) for one in stand_ins.values()}
        named = model.named_parameters()
        self._owner_of = {id(stand_ins[name]): self._owners[name] for name, _ in named}

    @contextmanager
    def hooks(self, model: nn.Module) -> Iterator[None]:
        """Sees blocks come and go."""
        handles = []
        for name in self._names:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(self._entering(name)))
            handles.append(module.register_forward_hook(self._leaving(name), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Any:
        def enter(*_: Any) -> None:
            self._inside.append(name)
            self._mark()
            if name not in self._order:
                self._order.append(name)

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(_: Any, __: Any, out: Any) -> None:
            self._inside.pop()
            self._mark()
            size = sum(t.nbytes for t in tree_leaves(out) if isinstance(t, Tensor))
            self._output_bytes[name] = self._output_bytes.get(name, 0) + size

        return leave

    def _mark(self) -> None:
        """From here on, nodes are made by another block."""
        self._starts.append(torch._C._autograd._get_sequence_nr())
        self._made_by.append(self._here())

    def _here(self) -> str:
        return self._inside[-1] if self._inside else OUTSIDE

    def forward(self) -> Seen:
        """Of the block that is at work."""
        return self._forward.setdefault(self._here(), Seen())

    def backward(self) -> Seen:
        """Of the block whose forward made the node that is at work, or is made again."""
        node = torch._C._current_autograd_node()
        if self._inside:
            self._last = self._here()
        elif hasattr(node, "variable"):  # A gradient arrives at a parameter.
            self._last = self._owner_of.get(id(node.variable), self._last)
        elif node is not None:
            place = bisect_right(self._starts, node._sequence_nr()) - 1
            self._last = self._made_by[place] if place >= 0 else OUTSIDE
        return self._backward.setdefault(self._last, Seen())

    def keep(self, tensor: Tensor) -> Tensor:
        """Autograd saves `tensor`."""
        key = storage_key(tensor)
        if key not in self._known:
            self._kept.setdefault(key, (tensor, self._here()))
        return tensor

    def found(self, model: nn.Module) -> list[TracedBlock]:
        """What each block did, those that ran first first."""
        idle = [name for name in self._names if name not in self._order]
        saved: dict[str, int] = {}
        for tensor, name in self._kept.values():
            saved[name] = saved.get(name, 0) + tensor.untyped_storage().nbytes()
        held: dict[str, list[nn.Parameter]] = {}
        for name, parameter in model.named_parameters():
            held.setdefault(self._owners[name], []).append(parameter)
        done = self._forward.keys() | self._backward.keys() | held.keys() | saved.keys()
        names = [*self._order, *idle, *([OUTSIDE] if OUTSIDE in done else [])]
        return [self._block(name, held.get(name, []), saved.get(name, 0)) for name in names]

    def _block(self, name: str, held: Sequence[nn.Parameter], saved: int) -> TracedBlock:
        return TracedBlock(
            name=_told(name),
            parameters=sum(one.numel() for one in held),
            parameter_bytes=sum(one.nbytes for one in held),
            gradients=[one.nbytes for one in held if one.requires_grad],
            forward=_work(self._forward.get(name, Seen())),
            backward=_work(self._backward.get(name, Seen())),
            saved_bytes=saved,
            output_bytes=self._output_bytes.get(name, 0),
        )


def owners(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The block of each parameter: the innermost whose name its own begins with."""
    result = {}
    for name, _ in model.named_parameters():
        above = [block for block in names if name.startswith(f"{block}.")]
        result[name] = max(above, key=len, default=OUTSIDE)
    return result


def _work(seen: Seen) -> TracedWork:
    found = [(shape, kind, count) for (shape, kind), count in seen.products.items() if count]
    return TracedWork(
        products=[
            TracedProduct(**shape._asdict(), count=count, type=kind)
            for shape, kind, count in found
            if isinstance(shape, Shape)
        ],
        attention=[
            TracedAttention(**shape._asdict(), count=count, type=kind)
            for shape, kind, count in found
            if isinstance(shape, Heads)
        ],
        moved_bytes=seen.moved_bytes,
        calls=seen.calls,
        specials=seen.specials,
    )


def _arguments(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """By place and by name."""
    if isinstance(example, dict):
        return (), dict(example)
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[TracedInput]:
    found, _ = tree_flatten_with_path(kwargs or args)
    return [
        TracedInput(
            name=keystr(path), shape=list(leaf.shape), dtype=str(leaf.dtype).removeprefix("torch.")
        )
        for path, leaf in found
        if isinstance(leaf, Tensor)
    ]


def _roots(out: Any) -> list[Tensor]:
    """What backward starts from."""
    loss = getattr(out, "loss", None)
    leaves = tree_leaves(out if loss is None else loss)
    roots = [one for one in leaves if isinstance(one, Tensor) and one.requires_grad]
    if not roots:
        raise UserError(
            "no output of the model has a gradient: let parameters require one, or give a loss of "
            "the output"
        )
    return roots

"""numba compilation: a cached `njit`, blocks of numbers in vector registers, prefetching.

Importing numba takes long, so callers import this module where they use it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.event import Event, Listener, install_listener
from numba.extending import intrinsic

BLOCK = 8
"""Numbers of a block; LLVM maps it to the registers of the processor."""


def cached_njit(function: Any = None, **options: Any) -> Any:
    """Return `function`, compiled on its first call and cached on disk where that is possible.

    Compiled code does not hold the GIL. With options of `njit` alone, return a decorator.
    """
    if function is None:
        return lambda decorated: cached_njit(decorated, **options)
    options = {"nogil": True, **options}
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError:  # Neither the source's directory nor the user's cache is writable.
        compiled = njit(**options)(function)
    if isinstance(compiled, Dispatcher):  # NUMBA_DISABLE_JIT leaves the function as it is.
        setattr(compiled, "compile", partial(_on_other_thread, compiled.compile))  # noqa: B010
    return compiled


def _on_other_thread(compile_for: Callable[[Any], Any], signature: Any) -> Any:
    """Compile for a signature while the main thread waits.

    Signal handlers run on the main thread. An error that one raises inside numba or llvmlite may be
    swallowed, replaced or printed.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or global_compiler_lock.is_locked():  # It compiles another one.
        return compile_for(signature)
    done = Future[Any]()

    def work() -> None:
        try:
            done.set_result(compile_for(signature))
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            done.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return done.result()


def cached_loop(function: Any) -> Any:
    """Return `function` as `cached_njit` does, for loops over given arrays.

    It can make no arrays, and so spends no time on counts of references."""
    return cached_njit(function, _nrt=False)


def _address(context: Any, builder: Any, kind: Any, array: Any, index: Any, to: Any) -> Any:
    """Return the address of `array[index]`, of a flat array, as a pointer to the LLVM type `to`."""
    values = context.make_array(kind)(context, builder, array)
    return builder.bitcast(builder.gep(values.data, [index]), to.as_pointer())


def _typed_intrinsic(function: Any) -> Any:
    """Return numba's intrinsic; compiled functions call it without the first argument."""
    return intrinsic(function)


class _Blocks:
    """Blocks of the flat arrays that an intrinsic is called with."""

    def __init__(self, context: Any, builder: Any, signature: Any, arguments: Any) -> None:
        self.builder = builder
        number = context.get_value_type(signature.args[0].dtype)
        self.block = ir.VectorType(number, BLOCK)
        self._align = context.get_abi_sizeof(number)
        self._addresses = [
            _address(context, builder, kind, arguments[place], arguments[place + 1], self.block)
            for place, kind in enumerate(signature.args)
            if isinstance(kind, types.Array)
        ]

    def load(self, array: int) -> Any:
        """Return the block of an array, counted from 0."""
        return self.builder.load(self._addresses[array], align=self._align)

    def store(self, array: int, value: Any) -> None:
        """Write the block of an array."""
        self.builder.store(value, self._addresses[array], align=self._align)

    def repeat(self, number: Any) -> Any:
        """Return a block of equal numbers."""
        one = self.builder.insert_element(
            ir.Constant(self.block, ir.Undefined), number, ir.Constant(ir.IntType(32), 0)
        )
        places = ir.Constant(ir.VectorType(ir.IntType(32), BLOCK), [0] * BLOCK)
        return self.builder.shuffle_vector(one, one, places)

    def sum(self, value: Any) -> Any:
        """Return the sum of a block's numbers, of halves of it first."""
        width = BLOCK
        while width > 1:
            width //= 2
            low, high = (
                self.builder.shuffle_vector(
                    value,
                    value,
                    ir.Constant(
                        ir.VectorType(ir.IntType(32), width), list(range(start, start + width))
                    ),
                )
                for start in (0, width)
            )
            value = self.builder.fadd(low, high)
        return self.builder.extract_element(value, ir.Constant(ir.IntType(32), 0))


@_typed_intrinsic
def copy_block(typing: Any, target: Any, at: Any, source: Any, start: Any) -> Any:
    """Set target[at : at + BLOCK] = source[start : start + BLOCK], of flat arrays."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        blocks = _Blocks(context, builder, signature, arguments)
        blocks.store(0, blocks.load(1))
        return context.get_dummy_value()

    return types.void(target, at, source, start), generate


@_typed_intrinsic
def accumulate_block(typing: Any, target: Any, at: Any, source: Any, start: Any, keep: Any) -> Any:
    """Set target[at : at + BLOCK] to source[start : start + BLOCK], of flat arrays, plus the old
    values if `keep`; return whether all new values are finite."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        blocks = _Blocks(context, builder, signature, arguments)
        zeros = ir.Constant(blocks.block, [0.0] * BLOCK)
        old = builder.select(builder.trunc(arguments[4], ir.IntType(1)), blocks.load(0), zeros)
        new = builder.fadd(old, blocks.load(1))
        blocks.store(0, new)
        finite = builder.fcmp_ordered("==", builder.fsub(new, new), zeros)
        bits = ir.IntType(BLOCK)
        return builder.icmp_unsigned("==", builder.bitcast(finite, bits), bits(2**BLOCK - 1))

    return types.boolean(target, at, source, start, types.boolean), generate


@_typed_intrinsic
def subtract_scaled_block(
    typing: Any, target: Any, at: Any, source: Any, start: Any, factor: Any
) -> Any:
    """Subtract factor * source[start : start + BLOCK] from target[at : at + BLOCK]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        blocks = _Blocks(context, builder, signature, arguments)
        scaled = builder.fmul(blocks.repeat(arguments[4]), blocks.load(1))
        blocks.store(0, builder.fsub(blocks.load(0), scaled))
        return context.get_dummy_value()

    return types.void(target, at, source, start, target.dtype), generate


@_typed_intrinsic
def adagrad_block(
    typing: Any, target: Any, at: Any, distance: Any, source: Any, start: Any, factor: Any,
    epsilon: Any,
) -> Any:  # fmt: skip
    """Add the squares of source[start : start + BLOCK] to the block `distance` after target[at],
    and subtract factor * source / (sqrt(sum) + epsilon) from target[at : at + BLOCK]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        blocks = _Blocks(context, builder, signature, arguments)
        sums_at = builder.add(arguments[1], arguments[2])
        sums = _Blocks(context, builder, signature, [arguments[0], sums_at, *arguments[2:]])
        grads = blocks.load(1)
        total = builder.fadd(sums.load(0), builder.fmul(grads, grads))
        sums.store(0, total)
        name = f"llvm.sqrt.v{BLOCK}{blocks.block.element.intrinsic_name}"
        sqrt = builder.module.globals.get(name) or ir.Function(
            builder.module, ir.FunctionType(blocks.block, [blocks.block]), name
        )
        root = builder.fadd(builder.call(sqrt, [total]), blocks.repeat(arguments[6]))
        change = builder.fdiv(builder.fmul(blocks.repeat(arguments[5]), grads), root)
        blocks.store(0, builder.fsub(blocks.load(0), change))
        return context.get_dummy_value()

    number = target.dtype
    return types.void(target, at, at, source, start, number, number), generate


@_typed_intrinsic
def sum_squares_block(typing: Any, source: Any, start: Any) -> Any:
    """Return the sum of squares of source[start : start + BLOCK], of a flat array."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        blocks = _Blocks(context, builder, signature, arguments)
        value = blocks.load(0)
        return blocks.sum(builder.fmul(value, value))

    return source.dtype(source, start), generate


@_typed_intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Load the cache line of `array[index]`, of a flat array, without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8), ir.IntType(32)
        array_at, index_at = arguments
        address = _address(context, builder, signature.args[0], array_at, index_at, byte)
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name)
        if function is None:
            kind = ir.FunctionType(ir.VoidType(), [byte.as_pointer(), number, number, number])
            function = ir.Function(builder.module, kind, name)
        # Arguments: a read, of data that is used soon again, into the data cache.
        builder.call(function, [address, *(ir.Constant(number, value) for value in (0, 3, 1))])
        return context.get_dummy_value()

    return types.void(array, index), generate


class _CompileListener(Listener):
    """A numba listener that reports the first compilation, not loads from the disk cache."""

    def __init__(self, on_compile: Callable[[bool], object]) -> None:
        self._on_compile: Callable[[bool], object] | None = on_compile

    def on_start(self, event: Event) -> None:
        """Report the first compilation."""
        callback, self._on_compile = self._on_compile, None
        if callback is not None:
            callback(event.data["dispatcher"].stats.cache_path is not None)

    def on_end(self, event: Event) -> None:
        """Do nothing; numba calls this method."""


@contextmanager
def notify_on_compile(on_compile: Callable[[bool], object]) -> Iterator[None]:
    """Call `on_compile` once, at the first compilation inside the block.

    Its argument is True if the compiled code is cached on disk.
    """
    with install_listener("numba:compile", _CompileListener(on_compile)):
        yield

"""numba compilation: a cached `njit`, a prefetch, and a hook for the first compilation.

Importing numba takes long, so callers import this module where they use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core.event import Event, Listener, install_listener
from numba.extending import intrinsic


def cached_njit(function: Any = None, **options: Any) -> Any:
    """Return `function`, compiled on its first call and cached on disk where that is possible.

    Compiled code does not hold the GIL. With options of `njit` alone, return a decorator.
    """
    if function is None:
        return lambda decorated: cached_njit(decorated, **options)
    options = {"nogil": True, **options}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # Neither the source's directory nor the user's cache is writable.
        return njit(**options)(function)


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Load the cache line of `array[index]`, of a flat array, without waiting for it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values = context.make_array(signature.args[0])(context, builder, arguments[0])
        byte_pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(values.data, [arguments[1]]), byte_pointer)
        name = "llvm.prefetch.p0"
        function = builder.module.globals.get(name)
        if function is None:
            signature_type = ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number])
            function = ir.Function(builder.module, signature_type, name)
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

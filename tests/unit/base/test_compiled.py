"""Compilation by numba."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SIGNALLED = """
import os, signal, sys, time
from numba.core.event import Listener, install_listener
from moesaic.base.compiled import cached_njit

number = int(sys.argv[1])

class Swallow(Listener):
    def on_start(self, event):
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        except BaseException:
            raise ValueError("as a library makes of an error inside it") from None
    def on_end(self, event):
        pass

def end(*_):
    raise RuntimeError("ended")

signal.signal(number, end)
double = cached_njit(lambda x: 2 * x)
with install_listener("numba:compile", Swallow()):
    try:
        double(1)
    except RuntimeError as error:
        print(error)
"""
"""Program that a signal hits while numba compiles, where an error would be replaced."""


@pytest.mark.parametrize("number", [2, 15])
def test_a_signal_ends_a_compilation(number: int) -> None:
    command = [sys.executable, "-c", SIGNALLED, str(number)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("ended\n", "", 0)


WRONG = """
from moesaic.base.compiled import cached_njit

missing = cached_njit(lambda x: x.missing)
try:
    missing(1)
except Exception as error:
    print(type(error).__name__)
"""


def test_an_error_of_the_compiler_reaches_the_caller() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WRONG], capture_output=True, text=True, timeout=50, check=False
    )
    assert (ended.stdout, ended.stderr) == ("TypingError\n", "")


def test_compilation_can_be_turned_off() -> None:
    program = (
        "from moesaic.base.compiled import cached_njit; print(cached_njit(lambda x: 2 * x)(1))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert (ended.stdout, ended.stderr) == ("2\n", "")

"""`python -m moesaic` is `moesaic`."""

import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    """The command line."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _end_at_interrupt)
    from moesaic.api.start import exit_process, run_main

    with _at_sigterm(sys.argv[1:]):
        status = run_main("moesaic.cli.main", handler=handler)
    exit_process(status)


def _end_at_interrupt(_number: int, _frame: FrameType | None) -> None:
    """End the process with one line, until `run_main` hears interrupts."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _at_sigterm(arguments: list[str]) -> AbstractContextManager[None]:
    """Return a context for the end by SIGTERM of commands that a service manager may end."""
    from moesaic.api.start import SAME_COMMAND, exit_on_sigterm

    if arguments[:1] == ["train"]:
        return exit_on_sigterm(f"error: {SAME_COMMAND}")
    if arguments[:1] == ["serve"] and "--dry-run" not in arguments:  # As once it serves: no error.
        return exit_on_sigterm("ended by SIGTERM", 0)
    return nullcontext()


if __name__ == "__main__":
    main()

"""`python -m moesaic` is `moesaic`."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from moesaic.api.start import SAME_COMMAND, exit_on_sigterm, exit_process, run_main


def main() -> NoReturn:
    """The command line."""
    with _at_sigterm(sys.argv[1:]):
        status = run_main("moesaic.cli.main")
    exit_process(status)


def _at_sigterm(arguments: list[str]) -> AbstractContextManager[None]:
    """Return a context for the end by SIGTERM of commands that a service manager may end."""
    if arguments[:1] == ["train"]:
        return exit_on_sigterm(f"error: {SAME_COMMAND}")
    if arguments[:1] == ["serve"] and "--dry-run" not in arguments:  # As once it serves: no error.
        return exit_on_sigterm("ended by SIGTERM", 0)
    return nullcontext()


if __name__ == "__main__":
    main()

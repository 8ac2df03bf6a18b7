"""`python -m moesaic` is `moesaic`."""

import sys
from contextlib import nullcontext
from typing import NoReturn

from moesaic.api.start import SAME_COMMAND, exit_on_sigterm, exit_process, run_main


def main() -> NoReturn:
    """The command line."""
    trains = sys.argv[1:2] == ["train"]
    with exit_on_sigterm(SAME_COMMAND) if trains else nullcontext():
        status = run_main("moesaic.cli.main")
    exit_process(status)


if __name__ == "__main__":
    main()

"""`python -m moesaic` is `moesaic`."""

from typing import NoReturn

from moesaic.api.start import exit_process, run_main


def main() -> NoReturn:
    """The command line."""
    exit_process(run_main("moesaic.cli.main"))


if __name__ == "__main__":
    main()

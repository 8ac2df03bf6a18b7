"""`python -m moesaic` is `moesaic`."""

from typing import NoReturn

from moesaic.cli.start import begin, leave


def main() -> NoReturn:
    """The command line."""
    leave(begin("moesaic.cli.main"))


if __name__ == "__main__":
    main()

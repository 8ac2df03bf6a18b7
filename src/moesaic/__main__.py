"""`python -m moesaic` is `moesaic`."""

import sys

from moesaic.cli.start import begin


def main() -> int:
    """The command line."""
    return begin("moesaic.cli.main")


if __name__ == "__main__":
    sys.exit(main())

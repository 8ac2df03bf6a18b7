"""`python -m moesaic` is `moesaic`."""

import sys

from moesaic.cli.main import main

sys.exit(main())

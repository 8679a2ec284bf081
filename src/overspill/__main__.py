"""`python -m overspill` is the command `overspill`."""

import sys

from .cli import main

sys.exit(main())

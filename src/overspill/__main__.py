"""`python -m overspill` is the command `overspill`."""

import sys

from overspill.cli import main

sys.exit(main())

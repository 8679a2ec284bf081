"""Commands that this package adds to `overspill`."""

import overspill.cli  # noqa: F401  # whole before a command here, which imports parts of it and is loaded by it

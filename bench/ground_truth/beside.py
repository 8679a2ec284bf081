"""Packages that a benchmark reads beside the environment: from a directory that an environment variable names."""

from __future__ import annotations

import os
import sys
from pathlib import Path

DEFINITIONS = Path(__file__).parents[2] / "build" / "definitions"
"""Where `make definitions` puts the packages; used where the environment variable is not set."""


def add_directory(variable: str, *, first: bool) -> Path | None:
    """Returns the directory that `variable` names, now on `sys.path` (before or after the rest); None if there is none."""
    value = os.environ.get(variable)
    directory = Path(value) if value else DEFINITIONS / variable.removeprefix("OVERSPILL_").lower()
    if not directory.is_dir():
        if not value:
            return None
        raise SystemExit(f"{variable}={value} is no directory; set it to the --target DIR of pip install, or unset it")
    if str(directory) not in sys.path:
        sys.path.insert(0 if first else len(sys.path), str(directory))
    return directory

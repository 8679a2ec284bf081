"""Packages that a benchmark reads beside the environment: from a directory that an environment variable names."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def add_directory(variable: str, *, first: bool) -> Path | None:
    """Returns the directory that `variable` names, now on `sys.path` (before or after the rest); None if it is not set."""
    value = os.environ.get(variable)
    if not value:
        return None
    directory = Path(value)
    if not directory.is_dir():
        raise SystemExit(f"{variable}={value} is no directory; set it to the --target DIR of pip install, or unset it")
    if str(directory) not in sys.path:
        sys.path.insert(0 if first else len(sys.path), str(directory))
    return directory

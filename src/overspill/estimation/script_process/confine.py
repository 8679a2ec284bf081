"""Keep an estimated script from changing files for good.

Each of three methods covers a case that no other covers:

- An overlay alone lets a script read back its own writes.
  It needs user namespaces, which containers and Ubuntu 24.04 forbid.
- Landlock stops C code and child processes there. It needs a kernel of Linux 5.13 that has it switched on.
- Audit hooks stop Python alone, everywhere.

`bwrap` needs user namespaces too, and has overlays only since release 0.11.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from .audit import refuse_changes
from .landlock import forbid_writes
from .overlay import cover_with_overlay

WAYS = ("overlay", "landlock", "audit")
"""The methods that keep writes from the disk, best first. The first one that the system allows is taken; the last
always works."""

_REFUSALS = {
    "overlay": {errno.EROFS, errno.EOVERFLOW, errno.EXDEV},
    "landlock": {errno.EACCES, errno.EPERM, errno.EXDEV},
    "audit": {errno.EACCES},
}


def confine(scratch: Path, ways: tuple[str, ...] = WAYS) -> str:
    """Confine this process's writes for good, and return the method used.

    Writes of the process and its children do not reach real files. With `overlay` all changes go below `scratch`, and
    the process sees them at their original paths. Otherwise they are refused (PermissionError), except below the
    temporary directory, which is then in `scratch`.
    """
    for way in ways:
        try:
            _WAYS[way](scratch)
        except OSError:
            if way == ways[-1]:
                raise
        else:
            return way
    return ""


def is_refusal(error: BaseException, way: str) -> bool:
    """Return whether `error` is how a write fails that the method `way` cannot isolate."""
    return isinstance(error, OSError) and error.errno in _REFUSALS.get(way, ())


def _landlock(scratch: Path) -> None:
    forbid_writes((str(_own_temporary(scratch)), "/dev", "/proc"))
    refuse_changes((str(scratch), "/dev", "/proc"), metadata_alone=True)


def _audit(scratch: Path) -> None:
    refuse_changes((str(_own_temporary(scratch)), "/dev", "/proc"))


def _own_temporary(scratch: Path) -> Path:
    """Return the temporary directory of this process from here on."""
    made = scratch / "tmp"
    made.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(made)
    return made


_WAYS: dict[str, Callable[[Path], None]] = {"overlay": cover_with_overlay, "landlock": _landlock, "audit": _audit}

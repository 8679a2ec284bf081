"""The files that users name: read with a limit, written as a whole or left as they were."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from .errors import RequestError
from .units import format_bytes

MOST_STREAMED_BYTES = 256 << 20
"""How much is read of a device or a pipe, which may have no end; a file is read however long it is."""


def read_whole(path: str | Path) -> bytes:
    """The bytes of the file at `path`. Raises RequestError where it cannot be read, or has no end."""
    try:
        with Path(path).open("rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read()
            content = file.read(MOST_STREAMED_BYTES + 1)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > MOST_STREAMED_BYTES:
        raise RequestError(
            f"cannot read {path}: it is no file, and gives more than {format_bytes(MOST_STREAMED_BYTES)}; save them as "
            "a file first"
        )
    return content


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Put `content` (a text as UTF-8) at `path` at once, unless a device or a pipe is there, which gets it as it comes.

    Raises RequestError where that fails; what was there before is then as it was.
    """
    content = content.encode() if isinstance(content, str) else content
    try:
        there = _mode(path)
        if there is not None and not stat.S_ISREG(there):
            Path(path).write_bytes(content)
            return
        target = Path(os.path.realpath(path))
        part = target.with_name(f".overspill-{secrets.token_hex(8)}.part")
        with part.open("xb") as file:  # new: what lies at a name that somebody guessed, a link too, is refused
            try:
                if there is not None:
                    os.fchmod(file.fileno(), stat.S_IMODE(there))
                file.write(content)
                file.close()
                part.replace(target)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}") from None


def _mode(path: str | Path) -> int | None:
    """What is at `path`, through links, and who may do what with it; None where nothing is."""
    try:
        return Path(path).stat().st_mode
    except FileNotFoundError:
        return None

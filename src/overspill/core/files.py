"""Read and write files that users name, atomically."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from .errors import RequestError
from .units import format_bytes

MOST_STREAMED_BYTES = 256 << 20
"""Most bytes read of a device or pipe, which may have no end; files are read at any length."""


def read_whole(path: str | Path) -> bytes:
    """Return the bytes of the file at `path`.

    Raises RequestError if it cannot be read, or is a device or pipe with more than MOST_STREAMED_BYTES.
    """
    try:
        with Path(path).open("rb") as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read()
            content = file.read(MOST_STREAMED_BYTES + 1)
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; name a file that is there and may be read") from None
    if len(content) > MOST_STREAMED_BYTES:
        raise RequestError(
            f"cannot read {path}: it is no file, and gives more than {format_bytes(MOST_STREAMED_BYTES)}; save them as "
            "a file first"
        )
    return content


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path`, atomically if that is a file.

    Raises RequestError if that fails; a file at `path` is then unchanged.
    """
    content = content.encode() if isinstance(content, str) else content
    try:
        there = _mode(path)
        if there is not None and not stat.S_ISREG(there):
            Path(path).write_bytes(content)
            return
        _replace(Path(os.path.realpath(path)), content, None if there is None else stat.S_IMODE(there))
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; name another file") from None


def _replace(target: Path, content: bytes, mode: int | None) -> None:
    """Atomically put a file with `content` at `target`. Raises OSError.

    The file is written without a name where the system allows that. A process that is killed then leaves nothing
    behind. Between the last two system calls it leaves a complete file `.overspill-….part`.
    """
    part = target.with_name(f".overspill-{secrets.token_hex(8)}.part")
    nameless = _nameless(target.parent)
    # O_EXCL refuses anything that already has this name, such as a planted link.
    file = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666) if nameless is None else nameless
    try:
        with open(file, "wb") as opened:  # noqa: PTH123 - a descriptor
            if mode is not None:
                os.fchmod(file, mode)
            opened.write(content)
            opened.flush()
            if nameless is not None:
                # The name must be new. Python makes the system follow the link only if a directory is given, whichever.
                os.link(f"/proc/self/fd/{file}", part, src_dir_fd=file, follow_symlinks=True)
            part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _nameless(directory: Path) -> int | None:
    """Return the descriptor of a new nameless file in `directory`; None if the system has no such files."""
    if not Path("/proc/self/fd").is_dir():  # by which it gets its name
        return None
    try:
        return os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError:  # another file system, or no such directory: opening a named file there then says so
        return None


def _mode(path: str | Path) -> int | None:
    """Return the type and permissions of the file at `path`, links followed; None if no file is there."""
    try:
        return Path(path).stat().st_mode
    except FileNotFoundError:
        return None

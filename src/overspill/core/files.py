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
        raise RequestError(f"cannot read {path}: {error.strerror}; name a file that is there and may be read") from None
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
        _replace(Path(os.path.realpath(path)), content, None if there is None else stat.S_IMODE(there))
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror}; name another file") from None


def _replace(target: Path, content: bytes, mode: int | None) -> None:
    """Let a file of `content` be at `target`, at once. Raises OSError.

    Where the system has files without a name, it is written as one: a process that is killed leaves nothing behind, or
    between the last two system calls a whole file `.overspill-….part`.
    """
    part = target.with_name(f".overspill-{secrets.token_hex(8)}.part")
    nameless = _nameless(target.parent)
    # A new one: what lies at a name that somebody guessed, a link too, is refused.
    file = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666) if nameless is None else nameless
    try:
        with open(file, "wb") as opened:  # noqa: PTH123 - a descriptor
            if mode is not None:
                os.fchmod(file, mode)
            opened.write(content)
            opened.flush()
            if nameless is not None:
                # Its name must be new. With a directory given, any, Python asks the system to follow the link.
                os.link(f"/proc/self/fd/{file}", part, src_dir_fd=file, follow_symlinks=True)
            part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _nameless(directory: Path) -> int | None:
    """The descriptor of a new file without a name on the file system of `directory`; None where there are no such files."""
    if not Path("/proc/self/fd").is_dir():  # by which it gets its name
        return None
    try:
        return os.open(directory, os.O_TMPFILE | os.O_WRONLY, 0o666)
    except OSError:  # another file system; or no such directory, as who opens a named one there is told
        return None


def _mode(path: str | Path) -> int | None:
    """What is at `path`, through links, and who may do what with it; None where nothing is."""
    try:
        return Path(path).stat().st_mode
    except FileNotFoundError:
        return None

"""Output streams that may fail, and text safe for terminals."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import TYPE_CHECKING, Any

import msgspec

from overspill.core.text import spelled_out

if TYPE_CHECKING:  # rich is imported when there is something to print
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_PLAIN = "\n\t\u00a0"
_MOST_LETTERS = 300
"""The longest word that is printed whole in a line: longer than any file's own name."""


class OutputStream:
    """Standard output or error that does not raise on failure.

    It drops text that cannot be written, and `failure` has the reason. So a failure of this stream is not taken for one
    of the model or the script that printed. Characters that its encoding lacks are written as Python escapes them.
    `inner` is None for a stream that was closed when the process began.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.failure: Exception | None = None

    def write(self, text: str) -> int:
        """Write `text`, or note the failure."""
        if self.failure is None:
            try:
                self._write(text)
            except (OSError, ValueError) as error:  # the latter for a stream that is closed
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Flush the written text, or note the failure."""
        if self.failure is None and self.inner is not None:
            try:
                self.inner.flush()
            except (OSError, ValueError) as error:
                self._fail(error)

    def _write(self, text: str) -> None:
        if self.inner is None:
            raise ValueError("it is closed")
        try:
            self.inner.write(text)
        except UnicodeEncodeError:
            encoding = self.inner.encoding
            text = re.sub("[\u2580-\u259f]", "#", text)  # the bars of a table
            self.inner.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def _fail(self, error: Exception) -> None:
        self.failure = error
        # Python keeps what it could not write, and would try once more when it ends.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.inner.fileno())

    def isatty(self) -> bool:
        """Return whether the stream is a terminal."""
        return self.inner is not None and not self.inner.closed and bool(self.inner.isatty())

    @property
    def encoding(self) -> str:
        """The encoding of the stream."""
        return getattr(self.inner, "encoding", None) or "utf-8"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextlib.contextmanager
def streams() -> Iterator[OutputStream]:
    """Replace standard output and error by OutputStreams, and yield the first."""
    for descriptor in range(3):  # a closed one would be given to the next file, and what is printed would land there
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr
    out, err = OutputStream(sys.stdout), OutputStream(sys.stderr)
    sys.stdout, sys.stderr = out, err
    try:
        yield out
    finally:
        out.flush()
        err.flush()
        sys.stdout, sys.stderr = before


def shown(text: str) -> str:
    """Return `text` in one line, safe for a terminal.

    Control characters are spelled out, and very long words are shortened.
    """
    return spelled_out(
        re.sub(rf"\S{{{_MOST_LETTERS + 1},}}", lambda word: f"{word[0][:200]}…{word[0][-60:]}", text), _PLAIN
    )


def print_error(message: str) -> None:
    """Print the one line that explains a failure.

    A failure of standard error itself is ignored.
    """
    sys.stderr.write(f"error: {message}\n")


def print_json(answer: Mapping[str, Any]) -> None:
    """Print one JSON object on standard output, in ASCII.

    All encodings include ASCII. Infinities and NaN become null.
    """
    encoded = msgspec.json.encode(_encodable(msgspec.to_builtins(answer)))
    sys.stdout.write(json.dumps(msgspec.json.decode(encoded), separators=(",", ":")) + "\n")


def print_human(human: RenderableType) -> None:
    """Print for a reader; into a file or pipe, wide enough for the tables."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(_Harmless(human), crop=False)  # lines to paste may be longer
        return
    text = StringIO()  # a terminal needs no blanks at the ends of lines, and a file does not either
    width = None if "COLUMNS" in os.environ else 120
    Console(width=width, highlight=False, file=text).print(_Harmless(human), crop=False)
    sys.stdout.write("".join(f"{line.rstrip(' ')}\n" for line in text.getvalue().splitlines()))


class _Harmless:
    """Rendered text without control characters except colours. Lines stay unchanged."""

    def __init__(self, inner: RenderableType) -> None:
        self.inner = inner

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.segment import Segment

        for segment in console.render(self.inner, options):
            yield segment if segment.control else Segment(spelled_out(segment.text, _PLAIN), segment.style)


def _encodable(value: Any) -> Any:
    """Return `value` with those bytes of file names escaped that are not UTF-8."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_encodable(key): _encodable(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_encodable(inner) for inner in value]
    return value

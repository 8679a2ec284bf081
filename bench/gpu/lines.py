"""The record of a campaign: one JSON object a line, one line an experiment, each of them complete by itself."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .experiment import Figures

OK = "ok"
FAILED = "failed"
TIMEOUT = "timeout"
CUT = "cut"
WAITING = "waiting"
STATUSES = {
    OK: "it ran to its end",
    FAILED: "an error ended it, which the line has",
    TIMEOUT: "it was stopped after its own limit",
    CUT: "the campaign's deadline or a signal stopped it; it will be run again",
    WAITING: "an experiment that it needs has no figures; it will be run again",
}
FINISHED = (OK, FAILED, TIMEOUT)


@dataclass(frozen=True)
class Line:
    """One experiment's outcome: what it found, on what, by which command and when (UTC)."""

    experiment: str
    status: str
    seconds: float
    figures: Figures = field(default_factory=dict)
    error: str = ""
    device: dict[str, object] = field(default_factory=dict)
    versions: dict[str, object] = field(default_factory=dict)
    command: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        """Refuse a status that nobody knows."""
        if self.status not in STATUSES:
            raise ValueError(f"{self.experiment}: there is no status {self.status!r}")


def reason(error: str) -> str:
    """The line of a traceback that names the error, or the last line of another text."""
    rows = error.strip().splitlines() or [""]
    return next((row for row in reversed(rows) if re.match(r"[A-Za-z_][\w.]*: ", row)), rows[-1])


def append(path: Path, line: Line) -> None:
    """Add a line, which is on the disk when this returns. Half a line at the end, whose writer was killed, goes."""
    with path.open("ab+") as file:
        file.seek(0)
        whole = file.read().rfind(b"\n") + 1
        file.truncate(whole)
        file.write(json.dumps(asdict(line)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(paths: Iterable[Path]) -> list[Line]:
    """All lines, in order. Raises ValueError, with file and line, for what is no line of a campaign.

    The last line of a file may be half a line: its writer was killed.
    """
    found = []
    for path in paths:
        rows = path.read_text(encoding="utf-8").split("\n")
        for number, text in enumerate(rows, 1):
            if not text.strip():
                continue
            try:
                found.append(Line(**json.loads(text)))
            except (ValueError, TypeError) as error:
                if number == len(rows):  # without a newline
                    continue
                raise ValueError(f"{path}:{number} is no line of a campaign: {error}") from None
    return found


def latest(lines: Iterable[Line]) -> dict[str, Line]:
    """The line that counts of each experiment: the last one that is finished, else the last."""
    found: dict[str, Line] = {}
    for line in lines:
        known = found.get(line.experiment)
        if known is None or line.status in FINISHED or known.status not in FINISHED:
            found[line.experiment] = line
    return found

"""What is known of jobs that do not simply train; all others have the same bits."""

from __future__ import annotations

from typing import NamedTuple


class Known(NamedTuple):
    """The kind of the outcome, the name of the error, and why it is so."""

    kind: str
    error: str
    reason: str


KNOWN: dict[tuple[str, str], Known] = {}
"""By job and way."""

"""CUDA compute capabilities as comparable numbers: 10.0 is more than 8.6."""

from __future__ import annotations

import re

from overspill.core.errors import RequestError


def capability_of(text: str) -> tuple[int, int]:
    """Return `8.6` as (8, 6). Raises RequestError for anything else."""
    match = re.fullmatch(r"(\d+)\.(\d)", text, re.ASCII)
    if match is None:
        raise RequestError(f"{text!r} is not a compute capability; write it as 8.6")
    return int(match.group(1)), int(match.group(2))

"""Encode a page's content as JSON that is safe inside HTML.

Columns of numbers are base64. Text has no invisible characters.
"""

from __future__ import annotations

import base64
import json
import math
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from overspill.core.text import spelled_out

from .sections import Page

MOST_LETTERS = 500
"""The longest name that is kept whole."""
MOST_OF_A_NOTE = 10_000
_SHORT_COLUMN = 64
_IN_HTML = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"})


def encode(page: Page) -> str:
    """Return `page` as JSON that cannot end a `<script>` element."""
    content = {name: _plain(getattr(page, name)) for name in ("title", "verdict", "sections")}
    content["notes"] = [visible(note, MOST_OF_A_NOTE) for note in page.notes]
    content["next"] = [f"# {visible(line.why, MOST_OF_A_NOTE)}\n{visible(line.text)}" for line in page.next]
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).translate(_IN_HTML)


def visible(text: str, most: int = MOST_LETTERS) -> str:
    """Return `text` with invisible characters spelled out, cut to `most` characters.

    Direction marks are examples of invisible characters.
    """
    text = text if len(text) <= most else f"{text[: most - 100]}…{text[-99:]}"
    return spelled_out(text)


def _plain(value: Any) -> Any:
    """Return `value` in types of JSON; a section names its type."""
    if isinstance(value, Enum):
        value = value.value
    elif isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, np.ndarray):
        return _column(value)
    return _collection(value)


def _collection(value: Any) -> Any:
    """Return a section as an object with its type's name, or a list."""
    if is_dataclass(value):
        content = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"is": type(value).__name__, **content}
    return [_plain(item) for item in value]


def _column(numbers: NDArray[Any]) -> Any:
    """Return a column of numbers: a list if short, otherwise base64 of the smallest type that holds them."""
    if len(numbers) <= _SHORT_COLUMN:
        return [_plain(number) for number in numbers.tolist()]
    kind = "f8"
    if numbers.dtype.kind == "i" and np.abs(numbers).max() < 2**31:
        kind = "i4"
    return {"type": kind, "base64": base64.b64encode(numbers.astype(f"<{kind}").tobytes()).decode()}

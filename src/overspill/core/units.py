"""Parse and format sizes and times; internally `int` bytes and `float` seconds."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from math import floor

from .errors import RequestError

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*(-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))\s*([A-Za-z]*|%)\s*")


def parse_bytes(text: str | float, *, of_bytes: int | None = None) -> int:
    """Parse `12GiB`, `12GB`, `500MiB`, `1048576`, `0.5` or `50%` to bytes.

    A share is of `of_bytes`. Raises RequestError if the text is not a positive size, or is a share without `of_bytes`.
    """
    match, shown = _SIZE.fullmatch(str(text)), repr(str(text))
    unit = match.group(2).upper() if match else "?"
    if match is None or (unit != "%" and unit not in _UNITS):
        raise RequestError(f"{shown} is not a size; write 12GiB, 12GB, 500MiB, a number of bytes, or a share like 0.5")
    if len(match.group(1)) > 30:
        raise RequestError(f"{str(text)[:30]!r}… is not a size that any machine has; write one like 12GiB")
    number = float(match.group(1))
    # A share, or a size; a number with a point and no unit must be one of them.
    if is_share(text):
        if of_bytes is None:
            raise RequestError(
                f"{shown} is a share, and there is nothing here to take a share of; write a size like 12GiB"
            )
        nbytes = int(number / (100 if unit == "%" else 1) * of_bytes)
    elif unit == "" and not number.is_integer():
        raise RequestError(
            f"{shown} is neither a share (at most 1.0) nor a whole number of bytes; write a size like 12GiB"
        )
    else:
        nbytes = int(Fraction(match.group(1)) * _UNITS[unit])
    if nbytes <= 0:
        raise RequestError(f"{shown} is not a positive size; write one above 0, like 12GiB")
    return nbytes


def parse_with_unit(asked: str | float, least_bytes: int, *, share: bool = False) -> int:
    """Return the bytes of `asked`, of which a whole number below `least_bytes` must have a unit.

    `share`: whether a percentage could be meant too. Raises RequestError as `parse_bytes` does.
    """
    nbytes, text = parse_bytes(asked), str(asked).strip()
    if text.isdecimal() and nbytes < least_bytes:
        percent = f"{text}%, " if share and nbytes <= 100 else ""
        raise RequestError(f"{text!r} is a size without a unit; write {text}GiB, {text}MiB, {percent}or {text}B")
    return nbytes


def is_share(text: str | float) -> bool:
    """Return whether `text` is a share (`0.5`, `50%`) rather than a size in bytes."""
    match = _SIZE.fullmatch(str(text))
    if match is None:
        return False
    return match.group(2) == "%" or (match.group(2) == "" and "." in match.group(1) and float(match.group(1)) <= 1.0)


def format_bytes(nbytes: float) -> str:
    """Return `nbytes` as text in binary units, half rounded up: `11.3 GiB`, `512 B`."""
    size, sign = abs(nbytes), "-" if nbytes < 0 else ""
    if size < 2**10:
        return f"{sign}{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 2**10
        if size < 1023.95:
            return f"{sign}{_one_decimal(size)} {unit}"
    return f"{sign}{_one_decimal(size / 2**10)} TiB"


def size_between(least: int, most: int) -> str:
    """Return `most` bytes as a size in MiB with up to three decimals, else the shortest such size from `least` on.

    It is in bytes if there is none.
    """
    if most >= 2**20:
        texts = [f"{Decimal(-(-(most + 1) * 10**digits >> 20) - 1).scaleb(-digits)}MiB" for digits in range(4)]
        sizes = [parse_bytes(text) for text in texts]
        for enough in (most, least):
            if found := next((text for text, size in zip(texts, sizes, strict=True) if size >= enough), None):
                return found
    return f"{most}B"


def size_enough(nbytes: int) -> str:
    """Return a short size in MiB that is enough for `nbytes`, and at most a hundredth more; bytes below 1 MiB."""
    return size_between(nbytes, nbytes + min(2**20 - 1, nbytes // 100)) if nbytes >= 2**20 else f"{nbytes}B"


def _one_decimal(size: float) -> str:
    return f"{floor(10 * size + 0.5) / 10:.1f}"


def format_apart(one: int, other: int) -> tuple[str, str]:
    """Return two sizes as text, with exact bytes if they would otherwise read the same."""
    texts = format_bytes(one), format_bytes(other)
    if one != other and texts[0] == texts[1]:
        return f"{texts[0]} ({one} bytes)", f"{texts[1]} ({other} bytes)"
    return texts


def format_seconds(seconds: float) -> str:
    """Return `seconds` as text: `1.25 s`, `3.1 ms`, `12 µs`."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"

"""Parse configuration fields in a model's name: `n_layer=6,n_embd=384`."""

from __future__ import annotations

from typing import Any

from overspill.core.errors import RequestError


def parsed_fields(name: str, parts: list[str]) -> dict[str, Any]:
    """Return the fields of `key=value` parts.

    A value is a number, true or false, or otherwise text.
    """
    fields: dict[str, Any] = {}
    for part in parts:
        key, equals, text = part.partition("=")
        if not equals or not key.isidentifier() or not text:
            raise RequestError(f"{name}: cannot read {part!r}; write key=value, with commas between")
        fields[key] = _value(text)
    return fields


def _value(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float) if text.isascii() else ():
        try:
            return number(text)
        except ValueError:
            continue
    return text

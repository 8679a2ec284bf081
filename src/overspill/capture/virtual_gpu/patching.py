"""Attributes replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Patches = list[tuple[Any, str, Any]]


@contextmanager
def patched(replacements: Patches) -> Iterator[None]:
    """The attributes (owner, name, replacement) are replaced inside and put back after, also the missing ones."""
    saved = [(owner, name, owner.__dict__.get(name, patched)) for owner, name, _ in replacements]
    try:
        for owner, name, replacement in replacements:
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in reversed(saved):
            if original is patched:
                delattr(owner, name)
            else:
                setattr(owner, name, original)

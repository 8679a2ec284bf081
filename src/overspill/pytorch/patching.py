"""Replace attributes of PyTorch's modules and classes for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

Patches = list[tuple[Any, str, Any]]


class Target(NamedTuple):
    """An attribute that is replaced: `(*target, replacement)` is one of the Patches."""

    owner: Any
    name: str

    @property
    def is_there(self) -> bool:
        """Whether this release of PyTorch has the attribute."""
        return hasattr(self.owner, self.name)

    @property
    def now(self) -> Any:
        """The attribute's present value."""
        return getattr(self.owner, self.name)


_in_force: list[Patches] = []  # the originals of what is replaced now, outermost first


@contextmanager
def patched(replacements: Patches) -> Iterator[None]:
    """Set attributes (owner, name, replacement) inside the block, then restore them.

    Attributes that were missing are deleted again.
    """
    saved = [(owner, name, owner.__dict__.get(name, patched)) for owner, name, _ in replacements]
    _in_force.append(saved)
    try:
        for owner, name, replacement in replacements:
            setattr(owner, name, replacement)
        yield
    finally:
        del _in_force[next(index for index, other in enumerate(_in_force) if other is saved)]
        _put_back(saved)


@contextmanager
def originals() -> Iterator[None]:
    """Restore all patched attributes inside the block."""
    replacements = [
        [(owner, name, owner.__dict__.get(name, patched)) for owner, name, _ in saved] for saved in _in_force
    ]
    for saved in reversed(_in_force):
        _put_back(saved)
    try:
        yield
    finally:
        for again in replacements:
            _put_back(again[::-1])


def _put_back(saved: Patches) -> None:
    for owner, name, original in reversed(saved):
        if original is not patched:
            setattr(owner, name, original)
        elif name in owner.__dict__:
            delattr(owner, name)

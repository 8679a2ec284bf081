"""Shell completion for names of options.

After `overspill --install-completion`. torch is not imported for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from overspill import models

Complete = Callable[[str], list[str]]


def _of(names: Callable[[], Iterable[str]], *, separated: bool = False) -> Complete:
    """Those of `names` that begin as the typed text.

    Where they are `separated` by commas, as the last of them.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if separated else ("", "", incomplete)
        return [before + comma + name for name in names() if name.startswith(last)]

    return complete


def constants(*names: str) -> Complete:
    """Those that are few and do not change."""
    return _of(lambda: names)


def _devices() -> Iterable[str]:
    from overspill.devices import device_names

    return device_names()


def _policies() -> Iterable[str]:
    from overspill.policies import POLICIES

    return POLICIES


def _placers() -> Iterable[str]:
    from overspill.placement.place import PLACERS

    return PLACERS


def _solvers() -> Iterable[str]:
    from overspill.placement.packing import SOLVERS

    return SOLVERS


def _allocators() -> Iterable[str]:
    from overspill.placement.allocators.registry import ALLOCATORS

    return ALLOCATORS


model = _of(models.names)
optimizer = _of(models.optimizer_names)
device = _of(_devices)
policy, policies = _of(_policies), _of(_policies, separated=True)
placer, placers = _of(_placers), _of(_placers, separated=True)
solver, allocator = _of(_solvers), _of(_allocators)

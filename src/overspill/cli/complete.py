"""Shell completion for names of options, without importing torch.

`overspill --install-completion` installs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from overspill import models

Complete = Callable[[str], list[str]]


def _of(names: Callable[[], Iterable[str]], *, separated: bool = False) -> Complete:
    """Return the completion by those of `names` that begin with the typed text.

    If they are `separated` by commas, the text after the last comma counts.
    """

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",") if separated else ("", "", incomplete)
        return [before + comma + name for name in names() if name.startswith(last)]

    return complete


def constants(*names: str) -> Complete:
    """Return the completion by a few fixed names."""
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


model = _of(lambda: (*models.names(), *models.SHORT))
optimizer = _of(models.optimizer_names)
device = _of(_devices)
policy, policies = _of(_policies), _of(_policies, separated=True)
placer, placers = _of(_placers), _of(_placers, separated=True)
solver, allocator = _of(_solvers), _of(_allocators)

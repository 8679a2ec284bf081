"""Move the weights and state of a train step into its arena, and out of it."""

from __future__ import annotations

from collections.abc import Container, Mapping
from functools import partial

import torch

from overspill.runtime.arena import StepArena, kept_storage_at
from overspill.runtime.transfer.engine import TransferEngine

from .residency import Residency


def settle(
    residency: Residency,
    arena: StepArena,
    nbytes: int,
    between: Mapping[str, int],
    engine: TransferEngine,
    where: torch.device,
    copied: Container[str] = (),
) -> None:
    """Make an arena of `nbytes` that holds the tensors `between` at these offsets, and no others.

    Those `copied` are in the store too. Tensors at other places go to the store first, so that the arena fits. Raises
    StoreError.
    """
    if not nbytes and not arena.nbytes:
        return
    suits = arena.nbytes == nbytes
    leaving = []
    for name, resident in residency.residents.items():
        here = resident.here
        if here is None:
            continue
        stays = suits and name in between and arena.has_at(between[name], here)
        if not stays and (name in between or arena.holds(here)):
            leaving.append(name)
    residency.send(leaving, engine)
    if not suits:
        arena.renew(nbytes, where)
    if between:
        into = {name: partial(kept_storage_at, arena.taken(), offset) for name, offset in between.items()}
        coming = (name for name in into if residency[name].here is None)
        residency.bring(coming, engine, into, copied=copied)


def leave(residency: Residency, arena: StepArena, engine: TransferEngine, where: torch.device) -> None:
    """Free the arena; tensors in it get memory of their own. Raises StoreError."""
    inside = [name for name, of in residency.residents.items() if of.here is not None and arena.holds(of.here)]
    settle(residency, arena, 0, {}, engine, where)
    if residency.from_host_to is None:  # otherwise they are read from the store, into host memory
        residency.bring(inside, engine)

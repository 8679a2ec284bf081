"""Move the weights and state of a train step into its arena, and out of it."""

from __future__ import annotations

from collections.abc import Mapping
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
) -> None:
    """Make an arena of `nbytes` that holds the tensors `between` at these offsets, and no others.

    Tensors at other places go to the store first, so that the arena fits. Raises StoreError.
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
        residency.bring((name for name in into if residency[name].here is None), engine, into)


def leave(residency: Residency, arena: StepArena, engine: TransferEngine, where: torch.device) -> None:
    """Free the arena; tensors in it get memory of their own. Raises StoreError."""
    inside = [name for name, of in residency.residents.items() if of.here is not None and arena.holds(of.here)]
    settle(residency, arena, 0, {}, engine, where)
    residency.bring(inside, engine)

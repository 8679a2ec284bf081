"""The policies, by name. A policy is one file here and one line in the registry."""

from __future__ import annotations

from difflib import get_close_matches

from overspill.core.errors import RequestError

from .auto import Auto
from .base import MEMORY_OPTIMAL
from .base import Policy as Policy
from .checkpoint import Checkpoint, CheckpointCost
from .dymem import Dymem
from .in_core import InCore, Liveness, Oracle
from .lms import LargeModelSupport
from .superneurons import Superneurons, SuperneuronsOffload
from .vdnn import Sequential, VdnnAll, VdnnConv, VdnnDynamic
from .window import Window

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Auto,
        InCore,
        Liveness,
        VdnnAll,
        VdnnConv,
        VdnnDynamic,
        Dymem,
        Sequential,
        Checkpoint,
        CheckpointCost,
        Superneurons,
        SuperneuronsOffload,
        LargeModelSupport,
        Window,
        Oracle,
    )
}


def policy_named(name: str) -> Policy:
    """The policy registered as `name`, or as `name` without `:m`. Raises RequestError with the names that exist."""
    try:
        return POLICIES[name.removesuffix(MEMORY_OPTIMAL)](memory_optimal=name.endswith(MEMORY_OPTIMAL))
    except KeyError:
        close = get_close_matches(name, POLICIES, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else "."
        raise RequestError(f"unknown policy {name!r}{hint} Policies: {', '.join(POLICIES)}") from None

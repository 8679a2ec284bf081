"""The policies, by name. A policy is one file here and one line in the registry."""

from __future__ import annotations

from overspill.core.registry import Registry

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

POLICIES: Registry[type[Policy]] = Registry(
    "policy",
    "policies",
    {
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
    },
)


def policy_named(name: str) -> Policy:
    """The policy registered as `name`, or as `name` without `:m`. Raises RequestError with the names that exist."""
    if name.endswith(MEMORY_OPTIMAL) and name not in POLICIES:
        return POLICIES.named(name.removesuffix(MEMORY_OPTIMAL))(memory_optimal=True)
    return POLICIES.named(name)()

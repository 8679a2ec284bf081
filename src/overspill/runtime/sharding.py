"""Models that the user has sharded with `fully_shard` (FSDP2)."""

from __future__ import annotations

import sys

from torch import nn

from overspill.core.errors import UnsupportedError


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of `model` to which `fully_shard` was applied."""
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is None:  # then nobody can have applied it
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def refuse_compiled(model: nn.Module) -> None:
    """Raise UnsupportedError for a sharded model, whose gathers no compiled graph has."""
    if sharded_modules(model):
        raise UnsupportedError(
            f"{type(model).__name__} is sharded by fully_shard (FSDP2), whose hooks gather its parameters outside of a compiled "
            "graph and its budget; give it to overspill.train_step, which plans the gathers too"
        )

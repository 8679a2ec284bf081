"""Activation checkpointing: blocks whose activations are dropped after forward and computed again in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from overspill.core.errors import RequestError

from .wrappers import repeated_blocks


def checkpoint_blocks(module: nn.Module, classes: tuple[str, ...] = ()) -> None:
    """Checkpoint the modules of these `classes`, without them the `repeated_blocks`; torch's own checkpoint runs.

    Without reentrance, as torch recommends; `gradient_checkpointing_enable` of transformers does so to the same blocks.
    Raises RequestError where there is none to checkpoint.
    """
    if classes:
        blocks = [part for part in module.modules() if type(part).__name__ in classes]
        missing = f"has no module of class {' or '.join(classes)}"
    else:
        blocks = list(repeated_blocks(module))
        missing = "repeats no block that could be computed again by itself; name the classes of those that shall be"
    if not blocks:
        raise RequestError(f"{type(module).__name__} {missing}")
    for block in blocks:
        block.forward = _again(block.forward)


def _again(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed

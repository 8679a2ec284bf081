"""Activation checkpointing: the activations of blocks are dropped after forward and recomputed in backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from overspill.core.errors import RequestError
from overspill.job.parallel import Parallel

_CONTAINERS = (nn.ModuleList, nn.Sequential)
_PLAIN = (bool, int, float, str, torch.dtype, type(None))


def checkpoint_blocks(module: nn.Module, classes: tuple[str, ...] = (), *, reentrant: bool = False) -> None:
    """Checkpoint the modules of these `classes`, or the `repeated_blocks`.

    It is torch's own checkpoint, non-reentrant as torch recommends, or `reentrant`. transformers'
    `gradient_checkpointing_enable` checkpoints the same blocks. Raises RequestError if no block matches.
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
        block.__class__ = _checkpointed(type(block), reentrant)  # type: ignore[arg-type]


@cache
def _checkpointed(kind: type[nn.Module], reentrant: bool) -> type[nn.Module]:
    """Return a subclass of `kind`, by the same name, that recomputes its forward in backward."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not reentrant:
            return checkpoint(kind.forward, self, *args, use_reentrant=False, **kwargs)
        # What the first block reads has a gradient too, as by `enable_input_require_grads` of transformers.
        if torch.is_grad_enabled() and not args[0].requires_grad:
            args[0].requires_grad_()
        return checkpoint(partial(kind.forward, self, **kwargs), *args, use_reentrant=True)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def repeated_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the repeated blocks of a model, such as the layers of a transformer.

    They are modules in a ModuleList or Sequential, two or more of one class, made of other modules. They are the layers
    of a transformer's encoder and decoder, or the blocks of a ResNet's stages. Blocks within such a block do not count,
    nor do containers and modules that train nothing.
    """
    children = list(module.children())
    classes = Counter(type(child) for child in children)
    for child in children:
        repeated = isinstance(module, _CONTAINERS) and classes[type(child)] > 1
        if not repeated or isinstance(child, _CONTAINERS) or not list(child.children()):
            yield from repeated_blocks(child)
        elif any(parameter.requires_grad for parameter in child.parameters()):
            yield child


def stack_of_blocks(module: nn.Module) -> nn.ModuleList | nn.Sequential | None:
    """Return the container of the `repeated_blocks`, if it is the only one and they are alike but for their numbers."""
    blocks = list(repeated_blocks(module))
    stacks = [part for part in module.modules() if isinstance(part, _CONTAINERS) and [*part] == blocks]
    if len(stacks) != 1 or any(_tells_apart(part, len(blocks)) for part in module.modules()):
        return None
    return stacks[0] if all(_are_alike(blocks[0], block, number) for number, block in enumerate(blocks)) else None


def _tells_apart(part: nn.Module, blocks: int) -> bool:
    """Return whether a module or its `config` lists something for each block, as `layer_types`, that differs."""
    owners = (part, getattr(part, "config", None))
    listed = (value for owner in owners for value in getattr(owner, "__dict__", {}).values())
    return any(isinstance(of, (list, tuple)) and len(of) == blocks and any(o != of[0] for o in of) for of in listed)


def _are_alike(first: nn.Module, block: nn.Module, number: int) -> bool:
    """Return whether a block has the parts, plain attributes and weights of the first; attributes may count blocks."""
    parts, others = [*first.named_modules()], [*block.named_modules()]
    if [(name, type(part)) for name, part in parts] != [(name, type(part)) for name, part in others]:
        return False
    if [*map(_described, first.parameters())] != [*map(_described, block.parameters())]:
        return False
    plain = ((_plain(a), _plain(b)) for (_, a), (_, b) in zip(parts, others, strict=True))
    return all(
        a.keys() == b.keys()
        and all(a[key] == b[key] or (type(a[key]) is int and a[key] + number == b[key]) for key in a)
        for a, b in plain
    )


def _described(weight: nn.Parameter) -> tuple[Any, ...]:
    return weight.shape, weight.dtype, weight.requires_grad


def _plain(part: nn.Module) -> dict[str, Any]:
    return {key: value for key, value in vars(part).items() if isinstance(value, _PLAIN)}


def sharded_blocks(module: nn.Module, parallel: Parallel) -> list[nn.Module]:
    """Return the modules that `fully_shard` is called on one by one. Raises RequestError if there are none."""
    if parallel.blocks:
        found = [m for m in module.modules() if m is not module and type(m).__name__ in parallel.blocks]
        if not found:
            raise RequestError(f"{type(module).__name__} has no module of class {' or '.join(parallel.blocks)}")
        return found
    found = list(repeated_blocks(module))
    if not found:
        raise RequestError(
            f"{type(module).__name__} repeats no block that could be sharded by itself; "
            "name the classes of those that shall be with blocks=(...)"
        )
    return found

"""Mark a checkpoint's ops for Inductor's partitioner, as `torch.compile` does.

Dynamo marks each op of a checkpoint while AOTAutograd traces it, and the partitioner recomputes these. A trace that
runs the user's Python itself has to do the same. Otherwise the partition differs, and so do the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import count
from types import CellType
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import preserve_node_meta
from torch.utils import checkpoint

from overspill.core.errors import UnsupportedError
from overspill.pytorch.autograd import CHECKPOINT, is_compiling_checkpoint
from overspill.pytorch.patching import patched
from overspill.pytorch.trees import tree_flatten_with_path

_numbers = count()
_AGAIN = (checkpoint.CheckpointPolicy.MUST_RECOMPUTE, checkpoint.CheckpointPolicy.PREFER_RECOMPUTE)


def checkpoint_of(node: fx.Node) -> int | None:
    """Return the checkpoint that computes `node` again in backward, by a number unique in this process, or None."""
    return int(node.meta.get("ac_graph_id", 0)) if node.meta.get("recompute") in _AGAIN else None


@contextmanager
def checkpoints_marked() -> Iterator[None]:
    """Mark the ops of traced checkpoints, inside the block."""
    plain = CHECKPOINT.now
    parameters = signature(plain)

    def marking(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        if not is_compiling_checkpoint(function, args, kwargs):
            yield from plain(function, *args, **kwargs)
            return
        given = parameters.bind(function, *args, **kwargs)
        given.apply_defaults()
        # The partition hands forward's dropout masks to backward, whatever the generator does here.
        given.arguments |= {"preserve_rng_state": False, "early_stop": False}
        given.arguments["context_fn"] = _numbered(given.arguments["context_fn"])
        with preserve_node_meta(), left_as_given(function, given.arguments["args"], given.arguments["kwargs"]):
            yield from plain(*given.args, **given.kwargs)

    with patched([(*CHECKPOINT, marking)]):
        yield


@contextmanager
def left_as_given(function: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Refuse a checkpointed `function` that changes what `args` or its closure hold.

    It may neither take an element out nor change a number. Plain PyTorch runs it again in backward, on the values at
    that time, and a plan does not. Raises UnsupportedError.
    """

    def held() -> dict[Any, Any]:
        cells = enumerate(getattr(function, "__closure__", None) or ())
        filled = {number: cell.cell_contents for number, cell in cells if cell != CellType()}
        return dict(tree_flatten_with_path((args, filled))[0])

    before = held()
    yield
    now = held() if torch.is_grad_enabled() else before
    numbers = (int, float)
    if any(
        path not in now or (isinstance(leaf, numbers) and isinstance(now[path], numbers) and leaf != now[path])
        for path, leaf in before.items()
    ):
        raise UnsupportedError(
            "a function under torch.utils.checkpoint changes what it is given or finds, and plain PyTorch runs it "
            "again in backward, on what is there then; let it work on a copy"
        )


def _numbered(contexts: Callable[[], Any]) -> Callable[[], Any]:
    """Return the user's checkpoint `contexts`, or ones that recompute everything, with a number of their own."""

    def numbered() -> Any:
        found = _all_again() if contexts is checkpoint.noop_context_fn else contexts()
        found[0].ac_graph_id = next(_numbers)
        return found

    return numbered


def _all_again() -> Any:
    return checkpoint.create_selective_checkpoint_contexts(
        lambda *_args, **_kwargs: checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    )

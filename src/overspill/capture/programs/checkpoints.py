"""Checkpoints in a trace for Inductor, as `torch.compile` has them: their ops are marked, and its partition computes them again.

Dynamo calls a checkpoint so that each op is marked while AOTAutograd traces it; a trace that runs the user's Python itself has
to do the same, or the partition would be another one, and the bits.

Names private to PyTorch that this file relies on (2.11 to 2.14): `_checkpoint_without_reentrant_generator` of
torch.utils.checkpoint and its parameters, `noop_context_fn`, the attribute `ac_graph_id` of the mode that marks, and
`torch.fx.traceback.preserve_node_meta`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import signature
from itertools import count
from typing import Any
from unittest.mock import patch

from torch import fx
from torch.fx.traceback import preserve_node_meta
from torch.utils import checkpoint

_numbers = count()
_AGAIN = (checkpoint.CheckpointPolicy.MUST_RECOMPUTE, checkpoint.CheckpointPolicy.PREFER_RECOMPUTE)


def checkpoint_of(node: fx.Node) -> int:
    """The number, from 1, of the checkpoint that computes `node` again in backward; 0: none does."""
    return 1 + node.meta.get("ac_graph_id", 0) if node.meta.get("recompute") in _AGAIN else 0


@contextmanager
def checkpoints_marked() -> Iterator[None]:
    """While this lasts, the ops of a checkpoint that is traced are marked."""
    plain = checkpoint._checkpoint_without_reentrant_generator
    parameters = signature(plain)

    def marking(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        if not checkpoint._is_compiling(function, args, kwargs):
            yield from plain(function, *args, **kwargs)
            return
        given = parameters.bind(function, *args, **kwargs)
        given.apply_defaults()
        # The masks that backward needs are those of forward by the partition, whatever the generator does here.
        given.arguments |= {"preserve_rng_state": False, "early_stop": False}
        given.arguments["context_fn"] = _numbered(given.arguments["context_fn"])
        with preserve_node_meta():
            yield from plain(*given.args, **given.kwargs)

    with patch.object(checkpoint, "_checkpoint_without_reentrant_generator", marking):
        yield


def _numbered(contexts: Callable[[], Any]) -> Callable[[], Any]:
    """The user's `contexts`, or those that compute all again; what they mark has a number of its own."""

    def numbered() -> Any:
        found = _all_again() if contexts is checkpoint.noop_context_fn else contexts()
        found[0].ac_graph_id = next(_numbers)
        return found

    return numbered


def _all_again() -> Any:
    return checkpoint.create_selective_checkpoint_contexts(
        lambda *_args, **_kwargs: checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    )

"""Whether a call of a compiled model ran by its plans: if not, the budget was not in force, and the user is told.

Dynamo gives way silently: what it cannot trace, or has compiled too often, runs eagerly. So after a call it is looked at
what really happened. That no graph of ours ran is seen by a counter; that ops ran beside our graphs, by the autograd graph
of the result, in which they have nodes of their own. What these keep for backward must have room beside the plans.

Names private to PyTorch that this file relies on (2.11 to 2.14): `torch._dynamo.config` and its `recompile_limit`,
`accumulated_recompile_limit`, `fail_on_recompile_limit_hit`, `allow_rnn`, `skip_nnmodule_hook_guards` and `trace_autograd_ops`,
`torch._dynamo.utils.counters`, `FailOnRecompileLimitHit`, `TorchDynamoException`, and the name of AOTAutograd's node in the autograd graph.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from overspill.capture.frames import shown_path
from overspill.core.errors import UnplannedError, is_out_of_memory
from overspill.core.units import format_bytes

from .leaves import follow_leaves

MOST_PLANS = 512
"""So many kinds of inputs (shapes above all) one function may have, each with a plan of its own."""
PLANNED_NODE = "CompiledFunctionBackward"
CURE = "take the rest out of the model, or use overspill.train_step, or pass on_unplanned='warn' to train without the promise"
OF_VALUES = (
    "let no shape or branch in a loop follow from values (experts by masks or grouped products, torch.nn.functional.grouped_mm), "
    "or pass on_unplanned='warn' to train without the promise"
)
"""What works where Dynamo gives a frame up for what a whole step could not follow either."""
SAID = ("graph_break", "unimplemented")
"""Counters in which Dynamo keeps why it stopped."""
SETTINGS: dict[str, Any] = {
    "allow_rnn": True,
    "recompile_limit": MOST_PLANS,
    "accumulated_recompile_limit": 8 * MOST_PLANS,
    "fail_on_recompile_limit_hit": True,
    "skip_nnmodule_hook_guards": False,
}
"""Of Dynamo, while a model of ours is called: it traces recurrent layers, never stops compiling without a word, and compiles
anew once a module has other hooks."""
OF_EAGER: dict[str, Any] = {"trace_autograd_ops": True}
"""With eager's kernels it also traces `torch.autograd.grad`, so that a gradient in a loss is planned with it, and its own gradient too."""


@contextmanager
def plans_needed(backend: str) -> Iterator[None]:
    """While this lasts Dynamo compiles what it can. Raises UnplannedError where there are more kinds of inputs than plans.

    Where this machine's memory runs out meanwhile, that is a MemoryError as anywhere, not one of Dynamo's.
    """
    config = torch._dynamo.config
    settings = SETTINGS | (OF_EAGER if backend == "eager" else {})
    before = {name: getattr(config, name) for name in settings}
    for name, value in settings.items():  # not config.patch, which takes longer; this is around every call of a model
        setattr(config, name, value)
    follow_leaves(backend == "eager")  # stock torch.compile, whose bits Inductor has, ends its graphs
    try:
        yield
    except FailOnRecompileLimitHit:
        raise too_many_kinds() from None
    except TorchDynamoException as failure:
        if not is_out_of_memory(failure):
            raise
        raise MemoryError(
            "no memory was left on this machine to compile the model; call it again once there is"
        ) from None
    finally:
        follow_leaves(False)
        for name, value in before.items():
            setattr(config, name, value)


def too_many_kinds() -> UnplannedError:
    """The error for inputs of ever new kinds."""
    return UnplannedError(
        f"this model was called with more than {MOST_PLANS} kinds of inputs, each of which needs a plan; "
        "pad them to a few lengths (docs/shapes.md)"
    )


_SKIPPED = re.compile(r"frame skipped: .* \((.*) line (\d+)\)")
_VALUES = re.compile(r"depends on input Tensor data|Data dependent operator")


class Watch:
    """Looks after each call whether it ran by plans. `graphs_run` counts the runs of planned graphs, `backwards_run` those backward."""

    def __init__(self, on_unplanned: str) -> None:
        self.graphs_run = self.backwards_run = 0
        self._steps: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._warns = on_unplanned == "warn"
        self._said_before = {kind: Counter(counters[kind]) for kind in SAID}
        self._seen: set[Any] = set()
        self._warned: set[str] = set()

    def check(
        self, model: str, before: int, room_bytes: Callable[[], int], args: Any, kwargs: Any, result: Any
    ) -> None:
        """Raise UnplannedError, or warn once, if the call did not run by plans.

        `before`: the graphs that had run. `room_bytes`: what there is in the budget beside the plans.
        """
        if self.graphs_run == before:
            if _computed(args, kwargs, result):
                reason = self._reason()
                self._tell(f"{model} ran without a plan: {reason}; {OF_VALUES if _VALUES.search(reason) else CURE}")
            return
        # Dynamo decides when it compiles: what it has decided needs to be looked at once.
        now = (counters["frames"]["total"], torch.is_grad_enabled())
        if now in self._seen:
            return
        self._seen.add(now)
        kept = _kept_outside(args, kwargs, result)
        if (nbytes := sum(kept.values())) > room_bytes():
            what, verb = ", ".join(sorted(kept)[:3]), "keeps" if len(kept) == 1 else "keep"
            self._tell(
                f"a part of {model} ran without a plan, and what it keeps does not fit beside the plans ({what} {verb} "
                f"{format_bytes(nbytes)} for backward): {self._reason()}; set it aside with reserve='{nbytes}', or {CURE}"
            )

    def check_step(self, optimizer: Optimizer) -> None:
        """Before `optimizer` steps on gradients of the models: raise UnplannedError, or warn once, where none came from a planned backward.

        Not before its second step in a row: the first may be for its state alone, as where a checkpoint is loaded.
        """
        before, unplanned = self._steps.get(optimizer, (0, 0))
        unplanned = unplanned + 1 if before == self.backwards_run else 0
        self._steps[optimizer] = self.backwards_run, unplanned
        if unplanned > 1:
            self._tell(
                "the model is trained without a plan: two optimizer steps in a row follow from no call of it; where a part of it is "
                "called (compiled.model(...)), compile the function that does so: overspill.compile(loss_fn), or "
                "overspill.train_step, or pass on_unplanned='warn' to train without the promise"
            )

    def _tell(self, message: str) -> None:
        if not self._warns:
            raise UnplannedError(message)
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def _reason(self) -> str:
        """What Dynamo said last of what it could not trace."""
        if torch._dynamo.config.disable:
            return "torch.compile is switched off (TORCHDYNAMO_DISABLE)"
        said = [text for kind in SAID for text in counters[kind] - self._said_before[kind]]
        lines = [line.strip() for line in said[-1].splitlines() if line.strip()] if said else []
        if not lines:
            return "torch.compile skipped it"
        place = _SKIPPED.search(said[-1])
        at = f", in the function at {shown_path(place[1])}, line {place[2]}" if place else ""
        return f"torch.compile could not trace it ({'; '.join(lines[:2]).rstrip('.')}{at})"


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _computed(args: Any, kwargs: Any, result: Any) -> bool:
    """Whether the result has a tensor that was not given: something was computed."""
    given = {id(tensor) for tensor in _tensors(args, kwargs)}
    return any(id(tensor) not in given for tensor in _tensors(result))


def _kept_outside(args: Any, kwargs: Any, result: Any) -> dict[str, int]:
    """Bytes that ops of the call, but not of planned graphs, keep for backward, by the op's name."""
    theirs = {t.untyped_storage().data_ptr() for t in _tensors(args, kwargs, result)}
    pending = [t.grad_fn for t in _tensors(result) if t.grad_fn is not None]
    seen: set[Node] = {t.grad_fn for t in _tensors(args, kwargs) if t.grad_fn is not None}  # what came before the call
    found: dict[str, int] = {}
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() != PLANNED_NODE and (nbytes := _saved_bytes(node, theirs)):
            name = node.name().removesuffix("0").removesuffix("Backward")
            found[name] = found.get(name, 0) + nbytes
        pending.extend(next_node for next_node, _ in node.next_functions if next_node is not None)
    return found


def _saved_bytes(node: Node, theirs: set[int]) -> int:
    """Bytes of the tensors that `node` saves, parameters and storages of the caller aside."""
    saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
    if hasattr(node, "saved_tensors"):
        saved += node.saved_tensors
    kept = [t for t in tree_leaves(saved) if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
    return sum(t.nbytes for t in kept if t.untyped_storage().data_ptr() not in theirs)

"""Detect model calls that ran without a plan; raise or warn.

Dynamo falls back silently: code that it cannot trace, or has recompiled too often, runs eagerly, outside the budget. So
each call is checked afterwards. A counter shows whether any planned graph ran. The autograd graph of the result shows
whether other ops ran too, because they have their own nodes. The tensors that they keep for backward must fit in the
budget alongside the plans.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from overspill.capture.compiled.chosen_rows import GROUPED
from overspill.capture.compiled.compiling import not_exporting
from overspill.capture.frames import shown_path
from overspill.core.errors import UnplannedError, is_out_of_memory
from overspill.core.units import format_bytes
from overspill.pytorch.autograd import SAVED
from overspill.pytorch.dynamo import FailOnRecompileLimitHit, TorchDynamoException, counters, dynamo_config
from overspill.pytorch.storages import base_of
from overspill.pytorch.trees import tree_leaves

from .double_backward import COMPILED
from .dynamo_gaps import BY_VALUES, OF_EAGER, OWN_BACKWARD, PATCHES
from .renewal import Renewal
from .routed_rows import SPARE, RoutedRows
from .unplanned_backward import measure_backward, name_of

MOST_PLANS = 512
"""Most kinds of inputs (shapes above all) of one function; each has a plan of its own."""
WARN_INSTEAD = "or pass on_unplanned='warn' to train without the promise"
CURES = {
    BY_VALUES: (
        f"let no shape or branch in a loop follow from values (experts by masks or grouped products, {GROUPED}), "
        f"{WARN_INSTEAD}"
    ),
    r"sparse Tensor": f"let it be dense, {WARN_INSTEAD}",
    r"[Rr]andom\.": f"draw with torch, or before the call, {WARN_INSTEAD}",
    "": f"take the rest out of the model, or use overspill.train_step, {WARN_INSTEAD}",
}
"""The remedies by patterns of the reason. `train_step` does not support the cases before the last."""
SAID = ("graph_break", "unimplemented")
"""Dynamo's counters that record why it stopped tracing."""
SETTINGS: dict[str, Any] = {
    "allow_rnn": True,
    "recompile_limit": MOST_PLANS,
    "accumulated_recompile_limit": 8 * MOST_PLANS,
    "fail_on_recompile_limit_hit": True,
    "skip_nnmodule_hook_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "use_lamba_guard_for_object_aliasing": True,  # the guards of dynamo_gaps.py; off by default since 2.14
}
"""Dynamo's settings during a call: trace recurrent layers, never give up compiling silently, and recompile when a
module's hooks change, or which of its weights train (PyTorch 2.11 would not see that)."""
EAGER_SETTINGS: dict[str, Any] = {"trace_autograd_ops": True, "use_numpy_random_stream": True}
"""More settings with the eager backend: trace `torch.autograd.grad`, so that a gradient in a loss, and its own
gradient, are planned; and let NumPy draw its own random numbers, not PyTorch in its place."""


@contextmanager
def plans_needed(backend: str) -> Iterator[None]:
    """Make Dynamo compile all it can and report failure, within the context.

    Raises UnplannedError if a model gets more kinds of inputs than plans. Raises MemoryError, not an exception of
    Dynamo, if this machine runs out of memory.
    """
    is_eager = backend == "eager"
    settings = SETTINGS | (EAGER_SETTINGS if is_eager else {})
    # Not config.patch, which takes longer; this is around every call of a model.
    places = [(dynamo_config, *setting) for setting in settings.items()]
    places += PATCHES + (OF_EAGER if is_eager else [])
    before = [(where, name, getattr(where, name)) for where, name, _ in places]
    for where, name, value in places:
        setattr(where, name, value)
    try:
        with not_exporting() if is_eager else nullcontext():
            yield
    # Dynamo's failures as ours.
    except FailOnRecompileLimitHit:
        raise too_many_kinds() from None
    except TorchDynamoException as failure:
        if not is_out_of_memory(failure):
            raise
        raise MemoryError(
            "no memory was left on this machine to compile the model; call it again once there is"
        ) from None
    finally:
        for where, name, value in before:
            setattr(where, name, value)


def too_many_kinds() -> UnplannedError:
    """Return the error for a model called with too many input shapes."""
    return UnplannedError(
        f"this model was called with more than {MOST_PLANS} kinds of inputs, each of which needs a plan; "
        "pad them to a few lengths (docs/shapes.md)"
    )


_SKIPPED = re.compile(r"frame skipped: .* \((.*) line (\d+)\)")


class RoomInPlans(Protocol):
    """What plans leave free."""

    def room_bytes(self) -> int:
        """Return the bytes of the budget that every plan leaves free."""

    def between_bytes(self) -> int:
        """Return the bytes that every plan leaves free between forward and backward."""


class PlanCheck:
    """Checks after each call that it ran by plans.

    Steps of optimizers are checked by `step_check`.

    `graphs_run` and `backwards_run` count runs of planned graphs, forward and backward.
    """

    def __init__(self, on_unplanned: str, renewal: Renewal) -> None:
        self.graphs_run = self.backwards_run = 0
        self._kept_bytes = self._taken_bytes = 0
        self._routed: weakref.WeakSet[RoutedRows] = weakref.WeakSet()
        self._aside: tuple[int, int] | None = None
        self._renewal = renewal
        self.checks_steps = True
        """Whether each optimizer's steps are checked. A trainer's callback checks them itself."""
        self._steps: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._warns = on_unplanned == "warn"
        self._said_before = {kind: Counter(counters[kind]) for kind in SAID}
        self._seen: set[Any] = set()
        self._most: dict[str, int] = {}
        """The most bytes that ops outside of planned graphs have kept, by their names."""
        self._warned: set[str] = set()

    def rows(self, room: RoomInPlans) -> RoutedRows:
        """Return what watches the rows that values choose in calls of one model."""
        made = RoutedRows(lambda of, bound: self._has_room(*of.needs(bound), room), self._renewal)
        self._routed.add(made)
        return made

    def begin_plans(self) -> None:
        """Note that there are no plans any more."""
        self._aside = None

    def needs_aside(self) -> tuple[int, int]:
        """Return the bytes for ops outside of planned graphs.

        They are the most that such ops keep for backward in a call, and the most that is taken at once besides.
        """
        needs = [rows.needs(rows.bound) for rows in self._routed if rows.bound is not None]
        kept, taken = (max(each, default=0) for each in zip(*needs, strict=True)) if needs else (0, 0)
        return max(self._kept_bytes, kept), max(self._taken_bytes, taken)

    def set_aside(self) -> tuple[int, int]:
        """Return the same, of a plan that is made now and sets them aside."""
        now = self.needs_aside()
        self._aside = now if self._aside is None else self._aside  # the bounds only grow
        return now

    def _has_room(self, kept: int, taken: int, room: RoomInPlans) -> bool:
        """Return whether all plans have memory for what such ops keep for backward, and take at once besides."""
        aside, _ = self._aside or (0, 0)
        more = max(0, kept - aside)
        return more <= room.room_bytes() and taken + more <= room.between_bytes()

    def check(
        self,
        model: str,
        before: int,
        room: RoomInPlans,
        args: Any,
        kwargs: Any,
        result: Any,
        rows: RoutedRows | None = None,
    ) -> None:
        """Raise UnplannedError, or warn once, if the call ran unplanned.

        `before` is `graphs_run` before the call. `rows` has watched those that values choose.
        """
        # Nothing planned ran at all.
        if self.graphs_run == before:
            if _computed(args, kwargs, result):
                reason = self._reason()
                self.tell(f"{model} ran without a plan: {reason}; {_cure(reason)}")
            return
        # Dynamo decides at compile time: each compilation is checked once. Where it leaves out a part that keeps
        # something, each call is: sizes may follow from values, as the rows of an expert do.
        now = (counters["frames"]["total"], torch.is_grad_enabled())
        if now in self._seen and not self._most:
            return
        self._seen.add(now)
        part = f"has a part of {model} that torch.compile does not trace"
        routed = rows if rows is not None and rows.seen.total else None
        self._check_outside(part, room, dict(_saved_outside(args, kwargs, result)), routed)

    def _check_outside(
        self, part: str, room: RoomInPlans, saved: Mapping[Node, list[Tensor]], rows: RoutedRows | None
    ) -> None:
        """Have plans set aside what ops outside of them keep for backward, and take there, if it is more than ever."""
        spare = SPARE if self._most else 1
        kept = {name_of(node) for node, of in saved.items() if of}
        nbytes = sum(t.nbytes for of in saved.values() for t in of)
        keeps = f"{part} ({', '.join(sorted(kept)[:3])}), which keeps {format_bytes(nbytes)} for backward"
        if rows is not None:
            rows.kept.see(rows.seen.total, nbytes)
            self._learn(rows, (nbytes, 0), room, keeps)
        elif nbytes > self._kept_bytes + room.room_bytes():
            self._kept_bytes = int(spare * nbytes)
            self._ask(keeps)

        # What the backwards of these take is known once they have run.
        chosen = set() if rows is None else {*rows.counts}

        def took(name: str, nbytes: int, lengths: set[int]) -> None:
            takes = f"{part} ({name}), whose backward takes {format_bytes(nbytes)}"
            if rows is not None:
                rows.taken[name].see(max(lengths & chosen, default=0), nbytes)
                self._learn(rows, (0, nbytes), room, takes)
            elif nbytes > self._taken_bytes:
                self._taken_bytes = int(spare * nbytes)
                if nbytes > room.between_bytes():
                    self._ask(takes)

        # The more an op keeps, the more its backward takes.
        most = dict(self._most)
        for node, of in saved.items():
            keeps, name = sum(t.nbytes for t in of), name_of(node)
            if keeps > self._most.get(name, -1):
                most[name] = max(keeps, most.get(name, -1))
                measure_backward(node, of, took)
        if kept:
            self._most = most

    def _learn(self, rows: RoutedRows, measured: tuple[int, int], room: RoomInPlans, what: str) -> None:
        """Plan for more rows than were seen; say `what` was measured if plans had no memory for that."""
        if rows.bound is None:
            rows.offer()
        assert rows.bound is not None
        if not self._has_room(*measured, room):
            self._ask(what)
        elif rows.fallback is not None and not self._has_room(*rows.needs(rows.bound), room):  # no call has run by it
            self._renewal.is_asked = True
            self._renewal.begin_rounds()

    def _ask(self, what: str) -> None:
        self._renewal.begin_rounds()
        self._renewal.is_asked = False  # what was to be planned anew anyway is no reason to say nothing
        self._renewal.ask(what)

    def unplanned_steps(self, optimizer: Optimizer) -> int:
        """Return how many steps in a row, the coming one included, `optimizer` takes with no planned backward before.

        0 if one ran since its last step.
        """
        before, unplanned = self._steps.get(optimizer, (0, 0))
        if before == self.backwards_run:
            return unplanned + 1
        self._steps[optimizer] = self.backwards_run, 0
        return 0

    def note_unplanned(self, optimizer: Optimizer, count: int) -> None:
        """Note the unplanned steps in a row, the coming one included."""
        self._steps[optimizer] = self.backwards_run, count

    def tell(self, message: str) -> None:
        """Raise UnplannedError, or warn once for each message."""
        if not self._warns:
            raise UnplannedError(message)
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=4)

    def _reason(self) -> str:
        """Return Dynamo's last message about code that it could not trace."""
        if dynamo_config.disable:
            return "torch.compile is switched off (TORCHDYNAMO_DISABLE)"
        said = [text for kind in SAID for text in counters[kind] - self._said_before[kind]]
        said.sort(key=lambda text: text.startswith(OWN_BACKWARD))  # of which others follow
        lines = [line.strip() for line in said[-1].splitlines() if line.strip()] if said else []
        if not lines:
            return "torch.compile skipped it"
        place = _SKIPPED.search(said[-1])
        at = f", in the function at {shown_path(place[1])}, line {place[2]}" if place else ""
        return f"torch.compile could not trace it ({'; '.join(lines[:2]).rstrip('.')}{at})"


def _cure(reason: str) -> str:
    return next(cure for said, cure in CURES.items() if re.search(said, reason))


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _computed(args: Any, kwargs: Any, result: Any) -> bool:
    """Return whether the result has a tensor that was not among the arguments."""
    given = {id(tensor) for tensor in _tensors(args, kwargs)}
    return any(id(tensor) not in given for tensor in _tensors(result))


def _saved_outside(args: Any, kwargs: Any, result: Any) -> Iterator[tuple[Node, list[Tensor]]]:
    """Yield the nodes of ops outside the planned graphs, with what they save besides parameters and what is given."""
    theirs = {t.untyped_storage().data_ptr() for t in _tensors(args, kwargs, result)}
    # Walk the autograd graph from the result back to the arguments.
    pending = [t.grad_fn for t in _tensors(result) if t.grad_fn is not None]
    seen: set[Node] = {t.grad_fn for t in _tensors(args, kwargs) if t.grad_fn is not None}  # what came before the call
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() != COMPILED:
            yield node, [t for t in _saved(node) if t.untyped_storage().data_ptr() not in theirs]
        pending.extend(next_node for next_node, _ in node.next_functions if next_node is not None)


@cache
def _names_of_saved(kind: object) -> list[str]:
    """Return the names of the attributes in which nodes of a `kind` save tensors."""
    return [name for name in dir(kind) if name.startswith(SAVED)]


def _saved(node: Node) -> list[Tensor]:
    """Return the tensors that `node` saves, without parameters and what has changed since."""
    saved: list[Any] = []
    kind: object = type(node)
    for name in (*_names_of_saved(kind), "saved_tensors"):
        with suppress(RuntimeError):  # changed in place, as weights are that move; if it is another, backward says so
            saved.append(getattr(node, name, ()))
    found = [t for t in tree_leaves(saved) if isinstance(t, Tensor)]
    return [t for t in found if not isinstance(t, nn.Parameter) and not isinstance(base_of(t), nn.Parameter)]

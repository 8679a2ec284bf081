"""Record the events of graphs, lanes and steps in a RunRecord.

Its cost is part of the time of a step, so it does little at each call. On CUDA it records events without waiting for
them. They are read between steps, once they have passed, and at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from overspill.core import Graph, TensorKind, Verb
from overspill.plans.plan import Plan
from overspill.pytorch.storages import key_of, storage_key
from overspill.runtime import accelerator
from overspill.runtime.tracker import LiveBytes

from .clock import Clock, HostClock
from .record import Label, Measured, RunRecord, StepFacts
from .rows import Comings, Marked

F = TypeVar("F")
MOST_ENTRIES = 500_000
"""Most ops, copies and memory changes in a record, some 150 MB; then recording ends."""
_STARTED = frozenset({Verb.OFFLOAD, Verb.PREFETCH, Verb.START, Verb.RUN_ON_HOST})
"""Verbs that only start an action: a copy or an update on the host, which have lanes, or a collective, which is
awaited."""


class Copying:
    """One copy of a lane, from begin to end."""

    __slots__ = ("_begun", "_label", "_recorder", "_verb")

    def __init__(self, recorder: RunRecorder, verb: Verb, label: Label | None) -> None:
        self._recorder = recorder
        self._verb = verb
        self._label = label
        self._begun: Any = None

    def begin(self, stream: Any = None) -> None:
        """Note that the copy begins, on `stream` if the lane is one."""
        self._begun = self._recorder.mark(stream)

    def end(self, stream: Any = None) -> None:
        """Note that the copy ends."""
        self._recorder.copied(self._verb, self._label, self._begun, self._recorder.mark(stream))


class Updating:
    """One update on the host, from begin to end, by the host's clock."""

    __slots__ = ("_begun", "_label", "_recorder")

    def __init__(self, recorder: RunRecorder, label: Label | None) -> None:
        self._recorder = recorder
        self._label = label
        self._begun = 0.0

    def begin(self, stream: Any = None) -> None:  # noqa: ARG002 - it has none
        """Note that the update begins."""
        self._begun = self._recorder.now()

    def end(self, stream: Any = None) -> None:  # noqa: ARG002
        """Note that the update ends."""
        if not self._recorder.is_over:
            self._recorder.record.updates.append(Measured(self._label, self._begun, self._recorder.now()))


class RunRecorder:
    """Writes a RunRecord.

    Recording ends after `most_steps` steps (None: all), or when it `is_over`; then `on_over` is called. Steps are
    marked `by_hand`, or otherwise by train steps and optimizers. With `snapshot`, PyTorch's own memory recorder is on
    meanwhile, on CUDA. `most_entries` bounds the record.
    """

    def __init__(
        self,
        most_steps: int | None = None,
        *,
        by_hand: bool = False,
        snapshot: bool = False,
        most_entries: int = MOST_ENTRIES,
    ) -> None:
        self.record = RunRecord()
        self.is_over = False
        self.on_over: Callable[[], None] = lambda: None
        self.plans_now: Callable[[], Sequence[Plan]] = tuple
        """Gives the current plans."""
        self.tracker: LiveBytes | None = None
        # The user's limits.
        self._begun = time.perf_counter()
        self._most_steps = most_steps
        self._by_hand = by_hand
        self._wants_snapshot = snapshot
        self._left = most_entries
        # The clock, raw rows, and the instruction that runs.
        self._clock: Clock | None = None
        self._history: accelerator.MemoryHistory | None = None
        self._marked = Marked()
        self._comings = Comings()
        self._current: Label | None = None
        self._kind: TensorKind | None = None
        self._since: Any = None
        self._issued_since = 0.0
        self._issued: list[Any] | None = None  # on a device: labels, and when the host began and ended
        self._computed = 0  # number of ops and waits given to compute
        self._places: list[int] = []
        """On a device, for each change twice that number, less one if none of them was running."""
        self._unnamed: dict[int, int] = {}  # rows of storages not yet known as a graph's tensor
        # Instrumented programs and plans seen, and the current step.
        self._forms: dict[int, tuple[Any, Any]] = {}
        self._graphs: dict[int, Graph] = {}
        self._known_plans: dict[int, Plan] = {}
        self._new_plans = False
        self._prepared_seconds = 0.0
        self._step_begun: Any = None
        self._step_ended: Any = None

    def now(self) -> float:
        """Return the seconds since the record began."""
        return time.perf_counter() - self._begun

    @property
    def is_started(self) -> bool:
        """Whether the device is known and the clock runs."""
        return self._clock is not None

    def start(self, device: torch.device, tracker: LiveBytes | None = None) -> None:
        """Start the clock for `device`.

        `tracker` already counts its storages. Without one, a new tracker counts the tensors that instructions make.
        Raises RequestError if a snapshot is wanted of an allocator whose memory PyTorch does not record.
        """
        self.record.on_device = device.type != "cpu"
        # On CUDA events tell the time, on the CPU the host's clock.
        if self.record.on_device:
            self._clock, self._issued = accelerator.DeviceClock(device, self.now), []
            self._history = accelerator.MemoryHistory(device) if self._wants_snapshot else None
        else:
            self._clock = HostClock(self.now)
        self.tracker = LiveBytes(device) if tracker is None else tracker
        self.tracker.watch = self.changed
        for storage, nbytes in self.tracker.there():
            self.changed(storage, nbytes)

    # -- steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """Mark one step by hand, as long as the context."""
        if not self.is_over:
            self._begin_step()
        yield
        if self._step_begun is not None:
            self._step_ended = self.mark()
            self._close_step()

    def begin_step(self, device: torch.device | None = None) -> None:
        """Note that a planned call is about to run on `device`.

        A step begins, unless one is running that no optimizer has ended.
        """
        if self.is_over or self._by_hand:
            return
        if self._step_ended is not None:
            self._close_step()
        if self.is_over or self._step_begun is not None:
            return
        if not self.is_started:
            if device is None:
                return
            self.start(device)
        self._begin_step()

    def optimizer_stepped(self) -> None:
        """End the current step, unless another optimizer steps before the next begins."""
        if self._step_begun is not None and not self._by_hand:
            self._step_ended = self.mark()

    def end_step(self) -> None:
        """End the current step."""
        self.optimizer_stepped()
        if self._step_ended is not None and not self._by_hand:
            self._close_step()

    def _begin_step(self) -> None:
        self._read_clock()
        self._note_plans()
        self._new_plans = False
        self._step_begun = self.mark()
        if self._history is not None:
            self._history.step(f"step {len(self.record.facts) + 1}", "START")

    def _close_step(self, *, is_whole: bool = True) -> None:
        self._note_plans()
        self._marked.add(self.record.steps, None, self._step_begun, self._step_ended)
        self.record.facts.append(StepFacts(self._new_plans, self._prepared_seconds, is_whole))
        self._prepared_seconds, self._step_begun, self._step_ended = 0.0, None, None
        if self._history is not None:
            self._history.step(f"step {len(self.record.facts)}", "END")
        self._read_clock()
        if self._most_steps is not None and len(self.record.facts) >= self._most_steps:
            self._end()

    def _note_plans(self) -> None:
        for plan in self.plans_now():
            if id(plan) not in self._known_plans:
                self._known_plans[id(plan)] = plan
                self._new_plans = True

    def _end(self) -> None:
        """Stop recording and release all objects that only served it."""
        if self.is_over:
            return
        self.is_over = True
        if self.tracker is not None:
            self.tracker.watch = None
        if self._history is not None:
            self.record.device_snapshot = self._history.taken()
        self.tracker = self._history = self._current = None
        self._forms.clear()
        self._unnamed.clear()
        self.on_over()

    def finish(self) -> None:
        """Finish the record.

        A running step counts as ended now, and all clocks are read.
        """
        if self._step_begun is not None:
            is_whole = self._step_ended is not None
            if not is_whole:
                self._step_ended = self.mark()
            self._close_step(is_whole=is_whole)
        # Read all marks, and turn the rows into the record.
        self._end()
        if self._clock is not None:
            self._clock.settle()
            self._marked.read(self._clock)
        self._marked.put()
        self.record.changes = self._comings.all()
        if self._issued is not None:
            issued = iter(self._issued)
            self.record.host = [Measured(*thing) for thing in zip(issued, issued, issued, strict=True)]
            self.record.time_changes(self._places)
        # Keep the plans that ran, and drop all else.
        self.record.plans = [plan for plan in self._known_plans.values() if id(plan.graph) in self._graphs]
        self._known_plans.clear()
        self._graphs.clear()
        self._places.clear()
        self._clock = None
        self.on_over, self.plans_now = lambda: None, tuple

    # -- what instrumented graphs and lanes call

    def mark(self, stream: Any = None) -> Any:
        """Return a mark after all work given to `stream`, or to compute if None."""
        return None if self._clock is None else self._clock.mark(stream)

    def form_of(self, plain: Any, make: Callable[[], F]) -> F:
        """Return the instrumented form of `plain`, made by `make` at the first call."""
        found = self._forms.get(id(plain))
        if found is None:
            begun = self.now()
            found = self._forms[id(plain)] = plain, make()
            self._prepared_seconds += self.now() - begun
        form: F = found[1]
        return form

    def given(self, graph: Graph, tensors: Sequence[int | None], values: Sequence[Any]) -> None:
        """Note that a graph is about to run on `values`, its `tensors`.

        A tensor is None for a handle or a value that is no tensor.
        """
        tracker = self.tracker
        if self.is_over or tracker is None:
            return
        self._graphs[id(graph)] = graph
        for value, tensor in zip(values, tensors, strict=True):
            if tensor is None or not isinstance(value, Tensor):
                continue
            # Name storages seen before; count new ones as this graph's input.
            storage = value.untyped_storage()
            known = tracker.knows(storage)
            if known and key_of(storage) not in self._unnamed:
                continue
            if storage.nbytes() != graph.tensors[tensor].nbytes:  # a part of it is given, as of a batch that was split
                self.there((value,), graph.tensors[tensor].kind)
            elif known:
                self._comings.name(self._unnamed.pop(key_of(storage)), Label(graph, None, tensor))
            else:
                self._current = Label(graph, None, tensor)
                tracker.add((value,))
                self._current = None

    def there(self, values: Sequence[Any], kind: TensorKind | None) -> None:
        """Count tensors on the device that are inputs of no graph."""
        if self.tracker is None or self.is_over:
            return
        self._kind = kind
        self.tracker.add(values)
        self._kind = None
        for value in values:
            if isinstance(value, Tensor) and (row := self._unnamed.get(storage_key(value))) is not None:
                self._comings.be(row, kind)

    def begin(self, label: Label) -> None:
        """Note that the instruction of `label` begins."""
        if self._left < 0:
            self._fill()
        if self.is_over or self._clock is None:
            return
        self._current = label
        if self._issued is not None:
            self._issued_since = self.now()
            if self._history is not None:
                self._history.annotate(label.text)
        if label.verb not in _STARTED:
            self._since = self.mark()

    def end(self, made: Any = None) -> None:
        """Note that the instruction that began last ends; `made` is its result."""
        label = self._current
        if label is None or self.is_over:
            return
        if label.verb not in _STARTED:
            self._marked.add(self.record.compute, label, self._since, self.mark())
            self._left -= 1
        if label.verb is not Verb.OFFLOAD and self.tracker is not None:
            self.tracker.add(made if isinstance(made, (tuple, list)) else (made,))
        # The host's own times, where the device runs asynchronously.
        self._computed += label.verb not in _STARTED
        self._current = None
        if self._issued is not None:
            self._issued += (label, self._issued_since, self.now())
            if self._history is not None:
                self._history.annotate("")

    def forget(self) -> None:
        """Forget the instruction that began last, because it failed."""
        self._current = None

    def copying(self, verb: Verb) -> Copying:
        """Return the Copying for a transfer that the current instruction starts."""
        return Copying(self, verb, self._current)

    def updating(self) -> Updating:
        """Return the Updating for an update on the host that the current instruction starts."""
        return Updating(self, self._current)

    def copied(self, verb: Verb, label: Label | None, begun: Any, ended: Any) -> None:
        """Note a copy that is done, or enqueued on its stream. The threads of lanes call it too."""
        if not self.is_over:
            self._marked.add(self.record.copies[verb], label, begun, ended)
            self._left -= 1

    def changed(self, storage: int, nbytes: int) -> None:
        """Note that a storage came to the device, or left it (`nbytes` negative)."""
        if self.is_over or not nbytes:
            return
        current = self._current
        step = len(self.record.facts) + (self._step_ended is not None)
        row = self._comings.add(self.now(), storage, nbytes, current, self._kind, step)
        if nbytes < 0:
            self._unnamed.pop(storage, None)
        elif current is None:
            self._unnamed[storage] = row
        # On a device, place it among compute's begins and ends.
        self._left -= 1
        if self._issued is not None:
            computes = current is not None and current.verb not in _STARTED
            self._places.append(2 * self._computed - (not computes))

    def _read_clock(self) -> None:
        """Read a device's marks between steps, for reuse."""
        if self._issued is not None and self._clock is not None:
            self._marked.read(self._clock)

    def _fill(self) -> None:
        """End the recording because the record is full."""
        self.record.is_full = True
        if self._step_begun is not None:
            self._step_ended = self.mark()
            self._close_step(is_whole=False)
        self._end()

"""The recorder: lowered graphs, lanes and train steps tell it what they do, and it writes that down in a RunRecord.

What it costs falls into the time of a step, so it does little at each call: on CUDA it records events, which nobody waits
for; what they say is read between steps, once they have come to pass, and at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from overspill.core import Graph, TensorKind, Verb
from overspill.core.errors import RequestError
from overspill.plans.plan import Plan
from overspill.runtime import accelerator
from overspill.runtime.live.allocator import serving
from overspill.runtime.tracker import LiveBytes

from .clock import Clock, HostClock
from .record import Label, Measured, RunRecord, StepFacts
from .rows import Comings, Marked

F = TypeVar("F")
MOST_ENTRIES = 500_000
"""So many ops, copies and changes of memory a record holds, some 150 MB; then it is full, and over."""
_STARTED = frozenset({Verb.OFFLOAD, Verb.PREFETCH})
"""What an instruction only starts: the copies are the lanes' to tell."""


class Copying:
    """One copy of a lane, which says when it begins and ends."""

    __slots__ = ("_begun", "_label", "_recorder", "_verb")

    def __init__(self, recorder: Recorder, verb: Verb, label: Label | None) -> None:
        self._recorder = recorder
        self._verb = verb
        self._label = label
        self._begun: Any = None

    def begin(self, stream: Any = None) -> None:
        """It begins, on `stream` where the lane is one."""
        self._begun = self._recorder.mark(stream)

    def end(self, stream: Any = None) -> None:
        """It has ended."""
        self._recorder.copied(self._verb, self._label, self._begun, self._recorder.mark(stream))


class Recorder:
    """Writes down in `record` what it is told, up to `most_steps` steps (None: all), until it `is_over`.

    Steps are marked `by_hand`, or else by train steps and optimizers. With `snapshot` PyTorch's own recorder of memory is on
    meanwhile, on CUDA. `most_entries` bounds what the record holds. `on_over` is called when no more is wanted.
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
        """The plans that are in force."""
        self.tracker: LiveBytes | None = None
        self._begun = time.perf_counter()
        self._most_steps = most_steps
        self._by_hand = by_hand
        self._wants_snapshot = snapshot
        self._left = most_entries
        self._clock: Clock | None = None
        self._history: accelerator.MemoryHistory | None = None
        self._marked = Marked()
        self._comings = Comings()
        self._current: Label | None = None
        self._kind: TensorKind | None = None
        self._since: Any = None
        self._issued_since = 0.0
        self._issued: list[Any] | None = None  # on a device: labels, and when the host began and ended
        self._computed = 0  # how many things compute has been given
        self._places: list[int] = []
        """On a device, for each change twice that number, and one less where none of them is under way."""
        self._unnamed: dict[int, int] = {}  # the places among the changes of storages that nobody knows yet
        self._forms: dict[int, tuple[Any, Any]] = {}
        self._graphs: dict[int, Graph] = {}
        self._known_plans: dict[int, Plan] = {}
        self._new_plans = False
        self._prepared_seconds = 0.0
        self._step_begun: Any = None
        self._step_ended: Any = None

    def now(self) -> float:
        """Seconds since the record began."""
        return time.perf_counter() - self._begun

    @property
    def is_started(self) -> bool:
        """Whether it is known on which device things run."""
        return self._clock is not None

    def start(self, device: torch.device, tracker: LiveBytes | None = None) -> None:
        """Things run on `device`. `tracker` counts its storages already; else one of ours counts what instructions make.

        Raises RequestError where a snapshot is wanted of an allocator whose memory PyTorch does not record.
        """
        self.record.on_device = device.type != "cpu"
        if self.record.on_device and self._wants_snapshot and serving() is not None:
            raise RequestError(
                "PyTorch records no memory of a live pool on CUDA: leave the placement out, or the snapshot"
            )
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
        """While this lasts the run is in its next step, for who marks steps by hand."""
        if not self.is_over:
            self._begin_step()
        yield
        if self._step_begun is not None:
            self._step_ended = self.mark()
            self._close_step()

    def begin_step(self, device: torch.device | None = None) -> None:
        """A planned call, on `device`, is about to run: a step begins, unless one is under way that no optimizer has ended."""
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
        """The step that is under way has ended, unless this is told again before the next one begins: several may step in it."""
        if self._step_begun is not None and not self._by_hand:
            self._step_ended = self.mark()

    def end_step(self) -> None:
        """The step that is under way has ended."""
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
        """Nothing more is wanted, and nothing that only serves to get it is held."""
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
        """No more is told. What is under way is taken for ended here, and all clocks are read."""
        if self._step_begun is not None:
            is_whole = self._step_ended is not None
            if not is_whole:
                self._step_ended = self.mark()
            self._close_step(is_whole=is_whole)
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
        self.record.plans = [plan for plan in self._known_plans.values() if id(plan.graph) in self._graphs]
        self._known_plans.clear()
        self._graphs.clear()
        self._places.clear()
        self._clock = None
        self.on_over, self.plans_now = lambda: None, tuple

    # -- what instrumented graphs and lanes call

    def mark(self, stream: Any = None) -> Any:
        """Behind all that `stream`, or else compute, has been given."""
        return None if self._clock is None else self._clock.mark(stream)

    def form_of(self, plain: Any, make: Callable[[], F]) -> F:
        """What tells in place of `plain`, as `make` made it when that was first asked for."""
        found = self._forms.get(id(plain))
        if found is None:
            begun = self.now()
            found = self._forms[id(plain)] = plain, make()
            self._prepared_seconds += self.now() - begun
        form: F = found[1]
        return form

    def given(self, graph: Graph, tensors: Sequence[int | None], values: Sequence[Any]) -> None:
        """A graph is about to run on `values`, each of which is one of its `tensors` (None: a handle, or no tensor)."""
        tracker = self.tracker
        if self.is_over or tracker is None:
            return
        self._graphs[id(graph)] = graph
        for value, tensor in zip(values, tensors, strict=True):
            if tensor is None or not isinstance(value, Tensor):
                continue
            storage = value.untyped_storage()
            known = tracker.knows(storage)
            if known and storage._cdata not in self._unnamed:
                continue
            if storage.nbytes() != graph.tensors[tensor].nbytes:  # a part of it is given, as of a batch that was split
                self.there((value,), graph.tensors[tensor].kind)
            elif known:
                self._comings.name(self._unnamed.pop(storage._cdata), Label(graph, None, tensor))
            else:
                self._current = Label(graph, None, tensor)
                tracker.add((value,))
                self._current = None

    def there(self, values: Sequence[Any], kind: TensorKind | None) -> None:
        """These are on the device beside what graphs are given."""
        if self.tracker is None or self.is_over:
            return
        self._kind = kind
        self.tracker.add(values)
        self._kind = None
        for value in values:
            if isinstance(value, Tensor) and (row := self._unnamed.get(value.untyped_storage()._cdata)) is not None:
                self._comings.be(row, kind)

    def begin(self, label: Label) -> None:
        """What `label` says begins."""
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
        """What began last ends, and has made `made`: a tensor or several, or anything else."""
        label = self._current
        if label is None or self.is_over:
            return
        if label.verb not in _STARTED:
            self._marked.add(self.record.compute, label, self._since, self.mark())
            self._left -= 1
        if label.verb is not Verb.OFFLOAD and self.tracker is not None:
            self.tracker.add(made if isinstance(made, (tuple, list)) else (made,))
        self._computed += label.verb not in _STARTED
        self._current = None
        if self._issued is not None:
            self._issued += (label, self._issued_since, self.now())
            if self._history is not None:
                self._history.annotate("")

    def forget(self) -> None:
        """What began last has failed."""
        self._current = None

    def copying(self, verb: Verb) -> Copying:
        """For a lane: the copy that is started now."""
        return Copying(self, verb, self._current)

    def copied(self, verb: Verb, label: Label | None, begun: Any, ended: Any) -> None:
        """A copy has been carried out, or given to its stream; called by lanes' threads too."""
        if not self.is_over:
            self._marked.add(self.record.copies[verb], label, begun, ended)
            self._left -= 1

    def changed(self, storage: int, nbytes: int) -> None:
        """A storage came to the device, or with `nbytes` below zero it went."""
        if self.is_over or not nbytes:
            return
        current = self._current
        step = len(self.record.facts) + (self._step_ended is not None)
        row = self._comings.add(self.now(), storage, nbytes, current, self._kind, step)
        if nbytes < 0:
            self._unnamed.pop(storage, None)
        elif current is None:
            self._unnamed[storage] = row
        self._left -= 1
        if self._issued is not None:
            computes = current is not None and current.verb not in _STARTED
            self._places.append(2 * self._computed - (not computes))

    def _read_clock(self) -> None:
        """Between steps a device's marks are read, and can be used again."""
        if self._issued is not None and self._clock is not None:
            self._marked.read(self._clock)

    def _fill(self) -> None:
        """There is more than a record may hold."""
        self.record.is_full = True
        if self._step_begun is not None:
            self._step_ended = self.mark()
            self._close_step(is_whole=False)
        self._end()

"""Allocations of a plan on a GPU: model, first steps, library workspaces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from overspill.capture.compiled.result_memory import scratch_in_pieces
from overspill.core import Graph, LayerType, Op, Phase, Places, Schedule, TensorKind, Verb
from overspill.costs.library_ops import CONVOLUTIONS, MATRIX_PRODUCTS, SLICE_BYTES
from overspill.plans.fit import there_before

from .events import ALLOCATE, EMPTY, FREE, Events

STEPS = 3
"""Steps simulated. The first makes the optimizer's state, which is then where feature maps had been; the second runs
around that, and the third around what the second leaves."""
THREADS = ("forward", "backward")
"""The threads that run ops; a whole step is run by the first."""
BACKWARDS = frozenset({"native_dropout"})
"""Ops that allocate the last of their results first (aten/src/ATen/native/cuda/Dropout.cu: the mask)."""


def events_of(
    graph: Graph,
    schedule: Schedule,
    handle_bytes: Iterable[int] = (),
    share: float = 1.0,
    steps: int = STEPS,
    groups: Iterable[tuple[int, ...]] = (),
    *,
    backwards: bool = False,
    places: Places | None = None,
    used: bool = False,
    model_on_host: bool = False,
    ends: list[int] | None = None,
) -> Events:
    """Return the allocations and frees of the first `steps` of `schedule`, in order.

    They begin with the model and its batch on an empty device, or with the `model_on_host`, from where the weights come
    that the schedule has on the device between steps. Handles of libraries are made at the first matrix
    product of a thread, of `handle_bytes` each, and stay; on a `used` device they exist before. Convolutions take a
    `share` of their workspaces. The updates of each of `groups` have their temporaries at once, except the first time,
    which makes the state. Ops allocate their results in order, except those in BACKWARDS; or all `backwards`, with
    their workspaces first. Tensors in `places` are in an arena, which is one block. `ends`
    gets the number of events up to the end of each step.
    """
    run = _Run(
        graph, schedule, tuple(handle_bytes), share, groups, places, backwards=backwards, model_on_host=model_on_host
    )
    if used:
        for thread in THREADS[: 1 if graph.whole_step else 2]:
            run.take(thread, run.handle_bytes)
    found = run.events(steps)
    if ends is not None:
        ends += run.ends
    return found


@dataclass(frozen=True)
class _Begin:
    """What is there as a step begins: blocks of live tensors, the state or not, and how many blocks and rows so far."""

    live: dict[int | str, list[int]]
    has_state: bool
    blocks: int
    rows: int

    def is_like(self, other: _Begin) -> bool:
        """Return whether the same is there, in other blocks."""
        sizes = ({key: len(blocks) for key, blocks in one.live.items()} for one in (self, other))
        return self.has_state == other.has_state and next(sizes) == next(sizes)


class _Run:
    """Events of a run so far, and the blocks of live tensors."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        handle_bytes: tuple[int, ...],
        share: float,
        groups: Iterable[tuple[int, ...]],
        places: Places | None,
        *,
        backwards: bool,
        model_on_host: bool,
    ) -> None:
        self.backwards = backwards
        self.model_on_host = model_on_host
        self.places = places
        self.position = -1  # before the first step
        self.graph = graph
        self.schedule = schedule
        self.handle_bytes = handle_bytes
        self.share = share
        self.groups = {op: group for group in groups for op in group}
        self.is_first = True
        self.has_state = False
        self.rows: list[tuple[int, int, int, int]] = []
        self.live: dict[int | str, list[int]] = {}
        self.blocks = 0
        self.ends: list[int] = []
        # Sizes of the parameters, of which gradients and state have blocks.
        trained = (t for t in graph.tensors if t.kind is TensorKind.PARAMETER and t.persistent)
        self.parameters = [t.nbytes for t in trained if t.nbytes]

    def events(self, steps: int) -> Events:
        """Return the events of the first `steps`."""
        for_calls = self.places is not None and not self.graph.whole_step
        if for_calls:
            self.take_arena()
        present = there_before(self.graph, model_on_host=self.model_on_host)
        for tensor in sorted(present, key=lambda t: t.kind is TensorKind.INPUT):  # the model is there before its batch
            self.take_tensor(tensor.id)
        for stored in self.schedule.stored:
            self.give(stored)
        if self.places is not None and not for_calls:  # that of a whole step comes once there is room for it
            for resident in self.places.between:
                self.give(resident)
            self.rows.append((EMPTY, self.blocks, 0, 0))
            self.blocks += 1
            self.take_arena()
        self.take_model()
        if self.graph.whole_step:  # which makes the state itself, and not before it knows where it is to be
            self.take_state()
        last = self.begin()
        for number in range(steps):
            self.is_first = number == 0
            begin = self.begin()
            if number > 1 and begin.is_like(last):  # the first is like no other
                self.repeat(last)
            else:
                self.step()
            self.ends.append(len(self.rows))
            last = begin
        return Events.from_rows(self.rows)

    def begin(self) -> _Begin:
        """Return what is there now."""
        return _Begin(dict(self.live), self.has_state, self.blocks, len(self.rows))

    def repeat(self, last: _Begin) -> None:
        """Add the events of the last step, which began like this one; the blocks that it made are made anew."""
        made = self.blocks - last.blocks
        # What was live then is now in these blocks.
        pairs = ((blocks, self.live[key]) for key, blocks in last.live.items())
        now = {then: block for one, other in pairs for then, block in zip(one, other, strict=True)}
        events = self.rows[last.rows :]
        self.rows += [(action, now.get(block, block + made), nbytes, 0) for action, block, nbytes, _ in events]
        self.live = {key: [now.get(block, block + made) for block in blocks] for key, blocks in self.live.items()}
        self.blocks += made

    def step(self) -> None:
        """Add the events of one step."""
        backward = False
        started: set[int] = set()  # collectives that run
        for position, instruction in enumerate(self.schedule.instructions):
            self.position, target = position, instruction.target
            if instruction.verb in (Verb.RUN, Verb.RECOMPUTE):
                op = self.graph.ops[target]
                runs = instruction.verb is Verb.RUN
                backward |= runs and op.phase is not Phase.FORWARD and not self.graph.whole_step
                thread = THREADS[backward]
                writes = op.writes if runs else op.recompute_writes
                # A recomputed tensor that is still there is made a second time.
                again = 0
                if not runs and target not in started:
                    again = sum(self.graph.tensors[t].nbytes for t in writes if t in self.live)
                started.discard(target)
                self.run(op, writes, op.workspace_of(instruction.algorithm) + again, thread)
            elif instruction.verb is Verb.START:
                started.add(target)
                for tensor in self.graph.ops[target].writes:
                    if tensor not in self.live:
                        self.take_tensor(tensor)
            elif instruction.verb is Verb.PREFETCH:
                self.take_tensor(target)
            elif instruction.verb is Verb.FREE:
                self.give(target)
        # The step's own tensors go at its end.
        for key in [key for key in self.live if isinstance(key, int) and not self.graph.tensors[key].persistent]:
            self.give(key)

    def run(self, op: Op, writes: Iterable[int], workspace_bytes: int, thread: str) -> None:
        """Add an op that writes these tensors, with its workspace."""
        if op.phase is Phase.UPDATE:
            self.take_state()
        share = self.share if op.name in CONVOLUTIONS else 1.0
        if op.workspaces and workspace_bytes == op.workspace_bytes:
            self.take_in_turn(writes, [int(share * nbytes) for nbytes in op.workspaces])
            self.take_handles(op, thread)
            return
        temporaries = self.temporaries(op, int(share * workspace_bytes))
        if self.places is not None:
            placed = (t for t in writes if (t, self.position) in self.places.offsets)
            temporaries += (scratch_in_pieces(self.graph, op, t) for t in placed)
        # Gathered updates have all their temporaries at the first of them.
        if op.id in self.groups and not self.is_first:
            group = self.groups[op.id]
            others = (self.graph.ops[other] for other in group) if op.id == group[0] else ()
            temporaries = [n for each in others for n in self.temporaries(each, each.workspace_bytes)]
        if self.backwards:
            self.take("workspace", temporaries)
        for tensor in reversed([*writes]) if self.backwards or op.name in BACKWARDS else writes:
            self.take_tensor(tensor)
        self.take_handles(op, thread)  # once there is what it is called for
        if not self.backwards:
            self.take("workspace", temporaries)
        self.give("workspace")

    def take_in_turn(self, writes: Iterable[int], sizes: list[int]) -> None:
        """Allocate each of these tensors with a workspace behind it, which is freed before the next."""
        pairs = [*zip_longest(writes, sizes)]
        for tensor, nbytes in reversed(pairs) if self.backwards else pairs:
            if tensor is not None:
                self.take_tensor(tensor)
            self.take("workspace", [nbytes or 0])
            self.give("workspace")

    def temporaries(self, op: Op, nbytes: int) -> list[int]:
        """Return the blocks of a workspace; an update has temporaries of the parameters' sizes."""
        if op.layer_type is not LayerType.UPDATE or op.phase is not Phase.UPDATE:
            return [nbytes]
        if not self.graph.whole_step:
            return _pieces(nbytes, self.parameters)
        return _pieces(
            nbytes, [min(SLICE_BYTES["cuda"], max((self.graph.tensors[t].nbytes for t in op.reads), default=nbytes))]
        )

    def take_handles(self, op: Op, thread: str) -> None:
        """Allocate library workspaces at a thread's first matrix product."""
        if op.name in MATRIX_PRODUCTS and thread not in self.live:
            self.take(thread, self.handle_bytes)

    def take_model(self) -> None:
        """Allocate what comes from the host for the first step, and stays between steps."""
        for tensor in there_before(self.graph):
            if tensor.id not in self.schedule.stored:
                self.take_tensor(tensor.id)

    def take_state(self) -> None:
        """Allocate the optimizer's state, the first time: for each parameter the tensors of its size."""
        if not self.has_state:
            self.has_state = True
            for tensor in self.graph.tensors:
                if tensor.kind is TensorKind.OPTIMIZER_STATE and tensor.id not in self.schedule.stored:
                    self.take_tensor(tensor.id)

    def take_arena(self) -> None:
        """Take the arena, with the tensors that are in it between steps."""
        assert self.places is not None
        self.take("arena", [self.places.arena_bytes])
        self.live.update((tensor, []) for tensor in self.places.between)

    def take_tensor(self, tensor: int) -> None:
        """Allocate a tensor unless it is live; one that stands for several has blocks of the parameters' sizes."""
        if tensor in self.live:
            return
        if self.places is not None and (tensor, self.position) in self.places.offsets:
            self.live[tensor] = []
            return
        it = self.graph.tensors[tensor]
        several = it.persistent and not it.movable and it.kind in (TensorKind.OPTIMIZER_STATE, TensorKind.GRADIENT)
        self.take(tensor, _pieces(it.nbytes, self.parameters, by_turns=True) if several else [it.nbytes])

    def take(self, key: int | str, sizes: Iterable[int]) -> None:
        """Allocate blocks of these sizes."""
        found = self.live[key] = []
        for nbytes in filter(None, sizes):
            self.rows.append((ALLOCATE, self.blocks, nbytes, 0))
            found.append(self.blocks)
            self.blocks += 1

    def give(self, key: int | str) -> None:
        """Free all blocks of `key`."""
        self.rows += [(FREE, block, 0, 0) for block in self.live.pop(key, ())]


def _pieces(nbytes: int, sizes: list[int], *, by_turns: bool = False) -> list[int]:
    """Split `nbytes` into blocks of `sizes`, repeated, and a rest; `by_turns`: all of one size first."""
    times = nbytes // sum(sizes) if sum(sizes) else 0
    found = [size for size in sizes for _ in range(times)] if by_turns else sizes * times
    return [*found, nbytes - sum(found)]

"""The plans of a train step, one for each kind of inputs.

A step is captured, planned and lowered when inputs of a new kind come.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from overspill.capture.compiled.chosen_rows import ChosenRows
from overspill.capture.compiled.guards import Guards
from overspill.capture.compiled.joint import storages
from overspill.capture.compiled.kernels import kernel_settings
from overspill.capture.compiled.micro_batches import side_by_side
from overspill.capture.compiled.whole_step import CapturedStep, OutsideGraph
from overspill.core import Graph, TensorKind, Verb
from overspill.core.errors import InfeasibleBudgetError, StoreError, UnsupportedError
from overspill.core.progress import shown_in_terminal
from overspill.costs import MeasuredTimes
from overspill.plans.account import Account
from overspill.plans.plan import Plan, smallest_budget
from overspill.pytorch.storages import storage_key
from overspill.pytorch.trees import tree_flatten
from overspill.runtime import batches
from overspill.runtime.arena import StepArena
from overspill.runtime.compiled.partitions import Partitioned
from overspill.runtime.cuts import Place
from overspill.runtime.driver import LoweredProgram
from overspill.runtime.hardware import account_of, device_named
from overspill.runtime.infeasible import infeasible_for
from overspill.runtime.lower import Stretch, lower
from overspill.runtime.options import Options
from overspill.runtime.parallel import Meeting, OneProcess, processes_of_collectives
from overspill.runtime.profile import OpTimer
from overspill.runtime.transfer.engine import TransferEngine
from overspill.runtime.transfer.host_memory import suit_heap
from overspill.runtime.transfer.ops import open_engine
from overspill.runtime.transfer.stores import store_bytes, whole_pages

from .beside import OneByOne, beside, step_of
from .borrowed import Borrowed
from .captures import FoundStep, StepCaptures
from .from_host import held_bytes
from .gathered import gathered
from .host_updates import tell_of_others
from .python_state import PythonState
from .residency import Residency, bring_for_others
from .results import Results
from .row_bounds import RowBounds
from .updates import update_together

TELLING = 8
"""Captures for one kind of inputs after which the user is warned why."""
MOST_ANSWERS = 16
"""Most plans for one kind of inputs that differ in the values that the model reads."""
MOST_KEPT = 32
"""Most plans kept for one kind of inputs, for earlier states of the model's Python."""
MOST_KINDS = 512
"""Most kinds of inputs with plans at a time; the oldest are dropped."""
LOSS_BYTES = 8
"""Bytes for a loss of any dtype."""


@dataclass(frozen=True)
class Compiled:
    """One planned and lowered graph of the step, for one kind of inputs, with or without the update.

    It is valid while `python` has not changed and `guards` hold for inputs and buffers.
    """

    plan: Plan
    number: int
    """The number by which all processes know its schedule."""
    stretch: Stretch
    program: LoweredProgram
    """Returns the loss, the other tensors of `results`, and the residents that `stretch` gives."""
    takes: tuple[str | int, ...]
    """Each captured input: a resident's name, or a position among the buffers and the caller's tensors."""
    names: dict[int, str]
    """The residents that may move, by tensor."""
    kept_in_store: frozenset[str]
    """Residents that are also in the store, unknown to the graph."""
    is_last: bool
    """Whether it has the update."""
    idle: tuple[str, ...]
    """Residents that this step does not use; those that have been made are also in the store."""
    changed: tuple[int, ...]
    """Positions of inputs that the program changes, buffers counted first."""
    between: dict[str, int]
    """Offsets in the arena, in bytes, of residents that stay there between steps."""
    results: Results
    python: PythonState
    """The model's Python values that the graph depends on."""
    guards: Guards
    """Values of inputs and buffers that the graph depends on."""
    outside: tuple[Tensor, ...]
    """Tensors read where they are. Another step's model may have them in its store."""
    partition: float | None
    """The `activation_memory_budget` of the partition; None with eager kernels."""
    on_host: tuple[str, ...]
    """The parameters that are updated on the host."""
    micro_batches: int
    """How many micro-batches it has beside one another, whose losses it returns."""
    rows: ChosenRows | None
    """The rows that values choose in it; None if they choose none."""

    def at(self, place: Place) -> frozenset[str]:
        """Return the residents that are at `place` when the program begins."""
        return frozenset(name for tensor, name in self.names.items() if self.stretch.before[tensor] is place)

    def borrowed(self, residency: Residency) -> Borrowed:
        """Return the residents that the program takes and gives back."""
        return Borrowed(self.stretch, self.names, residency)


class StepPlans:
    """The plans of one step, made from its `captures`."""

    def __init__(self, captures: StepCaptures) -> None:
        self.state = captures.state
        self.options = captures.options
        self.gradients = captures.gradients
        self.processes = captures.processes
        self._captures = captures
        self._compiled: dict[Any, list[Compiled]] = {}
        self.beside: Callable[[], int] = lambda: 0
        """Gives the bytes that the session's other models keep on the device."""
        self._beside_then = 0
        self._fixed_budget: int | None = None
        self.arena = StepArena()
        self.one_by_one = ""
        """Why micro-batches run one after another, as last planned; empty if they do not, or nothing is planned."""
        self.rows = RowBounds()
        self._told = False
        self._leader = self._number = 0
        self._timers: list[tuple[str, OpTimer]] = []

    @property
    def plans(self) -> list[Plan]:
        """The current plans, in the order they were made."""
        return [compiled.plan for found in self._compiled.values() for compiled in found]

    @property
    def partitions(self) -> list[float | None]:
        """The `activation_memory_budget` of each plan's partition; None with eager kernels."""
        return [compiled.partition for found in self._compiled.values() for compiled in found]

    def clear(self) -> None:
        """Drop all plans."""
        self._compiled.clear()

    def ask(self, options: Options) -> None:
        """Plan by other options from now on."""
        self.options = self._captures.options = options
        self._fixed_budget = None
        self.clear()

    def engine(self) -> TransferEngine:
        """Return the transfer engine of the step, opened if there is none yet."""
        if self.state.engine is None:
            asked = self.options
            self.state.engine, self.state.engine_number = open_engine(
                asked.store, self.state.where, asked.store_dir, asked.host_bytes, checksum=asked.checksum
            )
        return self.state.engine

    @property
    def measured_times(self) -> MeasuredTimes | None:
        """Measured op times so far, if the step profiles."""
        found = [timer.times(name) for name, timer in self._timers]
        seconds = {key: value for times in found for key, value in times.seconds.items()}
        return MeasuredTimes(found[0].device, seconds) if found else None

    def captures(self, inputs: tuple[Any, ...]) -> Partitioned[CapturedStep]:
        """Return the captures of a step on `inputs`; with several micro-batches, those of the last."""
        *_, part = batches.split(inputs, self.gradients.accumulate)
        return self._capture(part, self._outside_graph(part, inputs), last=True).steps

    def smallest_budget(self, inputs: tuple[Any, ...]) -> int:
        """Return the smallest feasible budget in bytes for a step on `inputs`."""
        *_, part = batches.split(inputs, self.gradients.accumulate)
        found = self._capture(part, self._outside_graph(part, inputs), last=True)
        return smallest_budget(self._planner(found.steps))

    def compile(self, inputs: tuple[Any, ...], whole: tuple[Any, ...], *, last: bool) -> Compiled:
        """Return the plan of `inputs`, a micro-batch of the inputs `whole` of the call.

        The `last` micro-batch includes the update.
        """
        self._drop_stale()
        # All processes run the plan of the one with the largest inputs.
        key = self._key(inputs, last=last)
        shapes = self.processes.digest(key)
        meeting, found = self._meet(key, inputs, shapes, last=last)
        if not meeting.alike:
            meeting, found = self._meet(key, inputs, meeting.shapes, last=last)
        if not meeting.number or found is None:
            with shown_in_terminal("planning the step"):
                outside = self._outside_graph(inputs, whole)
                if meeting.leaders:
                    found = self._followed(key, meeting, found, inputs, outside)
                elif last:
                    self._leader = meeting.leader
                    found = self._planned_for_rows(key, inputs, outside)
                else:
                    found = self._planned_before(self.compile(inputs, whole, last=True), inputs, outside)
                bring_for_others(found.outside)
            self._keep((key, meeting.shapes), found)
        self._check_apart(found.changed, inputs)
        return found

    def _drop_stale(self) -> None:
        """Drop plans made for other tensors, or for other models on the device."""
        if self.state.stale:
            self.clear()
            self.state.stale = False
        if (now := self.beside()) != self._beside_then:
            self.clear()
            self._beside_then, self._fixed_budget = now, None

    def compile_all(self, parts: Sequence[tuple[Any, ...]], whole: tuple[Any, ...]) -> Compiled | None:
        """Return the plan of all micro-batches `parts` of a call, layer by layer, or of their last round.

        None if they run one after another.
        """
        if len(parts) == 1 or self.processes.size > 1:
            return None
        self._drop_stale()
        key = self._key(parts[0], last=True)
        alone, together = (key, self.processes.digest(key)), (key, len(parts), "micro-batches")
        given = [[*self.state.buffers.values(), *batches.tensors(part)] for part in parts]
        found = self._known(together, given[0])
        if found is None:
            if self._known(alone, given[0]) is not None:  # by itself, as was decided when it was planned
                return None
            with shown_in_terminal("planning the step"):
                found = self._planned(parts[0], self._outside_graph(parts[0], whole), count=len(parts))
                bring_for_others(found.outside)
            self._keep(together if found.micro_batches > 1 else alone, found)
        others_differ = any(found.guards.difference(of) is not None for of in given[1:])
        return None if found.micro_batches == 1 or others_differ else found

    def compile_before(self, last: Compiled, inputs: tuple[Any, ...], whole: tuple[Any, ...]) -> Compiled:
        """Return the plan of a round of micro-batches, the first of which is `inputs`, before the `last` round."""
        key = self._key(inputs, last=False), last.micro_batches, "micro-batches"
        found = self._known(key, [*self.state.buffers.values(), *batches.tensors(inputs)])
        if found is None:
            with shown_in_terminal("planning the step"):
                found = self._planned_before(last, inputs, self._outside_graph(inputs, whole))
            self._keep(key, found)
        return found

    def _meet(self, key: Any, inputs: tuple[Any, ...], shapes: int, *, last: bool) -> tuple[Meeting, Compiled | None]:
        """Return what the processes know of one another, and the plan of `inputs` next to the largest of `shapes`."""
        tensors = batches.tensors(inputs)
        with self.processes.announcing():
            found = self._known((key, shapes), [*self.state.buffers.values(), *tensors])
        elements = sum(tensor.numel() for tensor in tensors)
        number = 0 if found is None else found.number
        alike = self._key(inputs, last=last, sizes=False)
        return self.processes.meet(alike, self.processes.digest(key), elements, number), found

    def _followed(
        self, key: Any, meeting: Meeting, found: Compiled | None, inputs: tuple[Any, ...], outside_graph: OutsideGraph
    ) -> Compiled:
        """Return the leader's plan, lowered for `inputs`; all processes do this together."""
        mine = None if found is None else (found.plan, found.kept_in_store, found.is_last, found.partition)
        plan, kept, is_last, partition = self.processes.shared(mine, meeting.leader)
        with self.processes.together():
            given = [*self.state.buffers.values(), *batches.tensors(inputs)]
            found = self._known((key, meeting.shapes), given, meeting.leaders)
            if found is None:
                if not is_last:
                    staying = sum(nbytes for name, nbytes in self._state_bytes().items() if name not in kept)
                    outside_graph = (*outside_graph, (TensorKind.OPTIMIZER_STATE, staying))
                steps = self._capture(inputs, outside_graph, last=is_last, partition=partition)
                fitting = self.processes.check_plan(plan, steps.steps.graph)
                found = self._lowered(steps, fitting, None if is_last else kept, meeting.leaders)
        return found

    def _check_apart(self, changed: tuple[int, ...], inputs: tuple[Any, ...]) -> None:
        """Raise UnsupportedError if an input that the step changes shares memory with another input or a buffer.

        A captured step treats each input as separate memory, and would read the old values.
        """
        if changed:
            own = len(self.state.buffers)
            given = [storage_key(t) for t in (*self.state.buffers.values(), *batches.tensors(inputs))]
            if shared := [i - own for i in changed if given.count(given[i]) > 1]:
                raise UnsupportedError(
                    f"the step changes its tensor {shared[0]} in place, which shares memory with another or with a "
                    "buffer; give it a clone()"
                )

    def _key(self, inputs: tuple[Any, ...], *, last: bool, sizes: bool = True) -> Any:
        """Return the key of a plan: all that it depends on except the model's Python and tensor values.

        Without `sizes`, the shapes of the inputs are left out.
        """
        leaves, spec = tree_flatten(inputs)
        kind = batches.kind if sizes else batches.kind_of_any_size
        return (
            spec, last, tuple(map(kind, leaves)), batches.repeats(leaves),
            tuple(p.requires_grad for p in self.state.parameters.values()),
            tuple(name for name in self.state.parameters if name not in self.state.residency),
            frozenset(self.state.holders.overlapping), _settings_of_torch(self.state.where.type),
        )  # fmt: skip

    def share_buffers(self, inputs: tuple[Any, ...]) -> None:
        """Broadcast the buffers of rank 0 before the model reads their values. Raises RequestError."""
        if self.processes.size > 1:
            self.processes.agree(self._key(inputs, last=False, sizes=False), known=True)
            self.processes.share_buffers(self.state.buffers.values())

    def _known(self, key: Any, given: Sequence[Tensor], number: int = 0) -> Compiled | None:
        """Return an earlier plan for these inputs that is still valid, or None; the one with a `number` if it is given.

        The model's Python must be unchanged, and the values in `given` must satisfy the guards of the plan. Raises
        UnsupportedError if too many plans differ only in such values.
        """
        known = self._compiled.get(key, [])
        places = []
        for compiled in known:
            fits = number in (0, compiled.number) and self.rows.fits(compiled.rows)
            if fits and not compiled.python.changed():
                bring_for_others(compiled.outside)
                if (place := compiled.guards.difference(given)) is None:
                    known.remove(compiled)
                    known.insert(0, compiled)  # asked first from now on
                    return compiled
                places.append(place)
        if len(places) < MOST_ANSWERS:
            return None
        raise UnsupportedError(
            f"the step asks for values{places[0]}, and has had {len(places)} different answers, each with a plan of "
            "its own, which takes as long to make as the first; let it ask for fewer, as torch.where and the like do, "
            "or draw none (layerdrop=0), or use overspill.compile"
        )

    def _keep(self, key: Any, found: Compiled) -> None:
        """Add a plan for the model as it is now; earlier plans stay."""
        known = self._compiled.setdefault(key, [])
        if not self._told and len(known) >= TELLING and (changed := known[-1].python.changed()):
            self._told = True
            warnings.warn(
                f"the step was captured {len(known) + 1} times for inputs of one kind, for {changed} changes "
                "between steps; each time takes as long as the first call: make it a tensor or an argument of the step",
                stacklevel=2,
            )
        # The newest first; the oldest go.
        known.insert(0, found)
        del known[MOST_KEPT:]
        if len(self._compiled) > MOST_KINDS:
            del self._compiled[next(iter(self._compiled))]

    def _outside_graph(self, inputs: tuple[Any, ...], whole: tuple[Any, ...]) -> OutsideGraph:
        """Return the bytes outside the graph that are on the device throughout, by kind.

        These are the other inputs of the call, its loss so far, optimizer state that does not move, and other models.
        """
        rest = batches.bytes_outside(whole, inputs)
        losses = 2 * LOSS_BYTES if self.gradients.accumulate > 1 else 0
        state = self.state.rest_bytes()
        return (TensorKind.INPUT, rest), (TensorKind.TEMPORARY, losses), (TensorKind.OPTIMIZER_STATE, state), (
            TensorKind.PARAMETER, self.beside()
        )  # fmt: skip

    def _planned_before(self, last: Compiled, inputs: tuple[Any, ...], outside: OutsideGraph) -> Compiled:
        """Return the plan of a micro-batch before the last one.

        The plan of the last one has some optimizer state on the device and some in the store. State on the device stays
        there if it fits, and otherwise goes to the store too.
        """
        state = self._state_bytes()
        stored = last.at(Place.STORE) & state.keys()
        staying = sum(nbytes for name, nbytes in state.items() if name not in stored)
        budget = last.plan.asked_bytes
        # By one partition all of them, as a loop with `torch.compile` has it.
        partition = self.options.partition if last.partition is None else last.partition
        # First with the state staying on the device, then with all of it in the store.
        try:
            around = (*outside, (TensorKind.OPTIMIZER_STATE, staying))
            return self._planned(inputs, around, stored, budget, partition, last.micro_batches)
        except InfeasibleBudgetError:
            if not staying:
                raise
        return self._planned(inputs, outside, frozenset(state), budget, partition, last.micro_batches)

    def _state_bytes(self) -> dict[str, int]:
        return {
            f"{name}.{path}": owned.spec(path, self.state.planned(name)).nbytes
            for name, owned in self.state.owned.items()
            for path in owned.leaves
        }

    def _instrument(self, program: LoweredProgram, plan: Plan) -> None:
        """Time each op of the lowered step, if the user profiles."""
        if self.options.profile:
            self._timers.append((plan.device.name, timer := OpTimer(plan.graph, self.state.where)))
            timer.instrument(program)

    def _planned_for_rows(self, key: Any, inputs: tuple[Any, ...], outside_graph: OutsideGraph) -> Compiled:
        """Return the plan of a step in which values may choose rows, where that is planned. Raises as `_planned`."""
        alone = self.processes.size == 1 and self.gradients.accumulate == 1 and self.options.backend == "eager"
        if not alone or self._account().has_arena or self.options.placement is not None:
            return self._planned(inputs, outside_graph)
        try:
            for rows in self.rows.tries(key):
                self._captures.rows = rows
                try:
                    return self._planned(inputs, outside_graph)
                except InfeasibleBudgetError as error:
                    refused = error
                    if not rows.bounds:
                        raise
            raise refused
        finally:
            self._captures.rows = None

    def ran(self, compiled: Compiled) -> None:
        """Note that a step has run by a plan; drop that if its rows now have closer bounds."""
        is_relative = self.options.limit.is_relative
        if compiled.rows is not None and self.rows.ran(compiled.rows, moves=compiled.plan.is_managed or is_relative):
            for known in self._compiled.values():
                known[:] = [of for of in known if of is not compiled]
            if not any(self._compiled.values()):
                self._fixed_budget = None  # it was a share of a step in which every expert has all rows

    def _planned(
        self,
        inputs: tuple[Any, ...],
        outside_graph: OutsideGraph,
        kept_in_store: frozenset[str] | None = None,
        budget: int | None = None,
        partition: float | None = None,
        count: int = 1,
    ) -> Compiled:
        """Capture, plan and lower one micro-batch.

        It is the last one, with the update, unless `kept_in_store` names the state that stays in the store meanwhile.
        `partition` is that of Options. With the update, all `count` micro-batches are lowered as one if that is faster,
        or a round of them; before, always.
        """
        # Capture, and work out the budget.
        may_grow = budget is None and self.options.limit.smallest
        is_relative = budget is None and self.options.limit.is_relative
        with self.processes.together():
            found = self._capture(inputs, outside_graph, last=kept_in_store is None, partition=partition)
            if self._must_agree(found):
                return self._planned(inputs, outside_graph, kept_in_store, budget, partition)
            if kept_in_store is not None and count > 1:
                found = self._together(found, count, (side_by_side(c, count, sums_stay=True) for c in found.steps))
            planned = self._planner(found.steps)
            if budget is None:
                budget = self._budget(found.steps.graph, planned)

        def agreed(nbytes: int) -> Plan:
            def make(n: int) -> Plan:
                return self._gathered(found.steps, planned(n))

            graph = found.steps.graph
            return self.processes.plan(graph, nbytes, make, leader=self._leader, own=is_relative)

        # Plan, and gather updates; all processes agree on one plan.
        with infeasible_for("training", tree_flatten(inputs)[0], whole_step=True):
            try:
                plan = agreed(budget)
            except InfeasibleBudgetError as error:
                if not may_grow:
                    raise
                self._fixed_budget = budget = error.floor_bytes
                plan = agreed(budget)
        made = self._all_at_once(found, plan, count) if kept_in_store is None else None
        if made is not None:
            return made
        plan = self._in_rounds(plan, last=kept_in_store is None)
        self._number += 1
        if is_relative and self.processes.size > 1:
            self._fixed_budget = max(self._fixed_budget or 0, plan.asked_bytes)  # of the largest step of all
        self.processes.check_schedule(plan)
        with self.processes.together():
            return self._lowered(found, plan, kept_in_store, self._number)

    def _in_rounds(self, plan: Plan, *, last: bool) -> Plan:
        """Return `plan` with the number of micro-batches that run one after another, if it is of the last."""
        count = self.gradients.accumulate
        return replace(plan, rounds=count, one_by_one=self.one_by_one) if last and count > 1 else plan

    def _all_at_once(self, found: FoundStep, plan: Plan, count: int) -> Compiled | None:
        """Return the plan of all micro-batches, or of their last round, if that is faster than `plan` of the last."""
        if count == 1:
            return None
        captured, inputs = found.steps.of(plan.graph), len(self._captures.inputs_of(found))
        try:
            made = beside(captured, plan, count, self.options, self._account(), inputs)
            steps = step_of(captured, made)
            together, number = self._together(found, made.micro_batches, steps), self._number + 1
            lowered = self._lowered(together, self._gathered(steps, made), None, number)
        except (OneByOne, StoreError) as why:  # each by itself needs less of the store
            self.one_by_one = str(why)
            return None
        self.one_by_one, self._number = "", number
        return lowered

    def _together(self, found: FoundStep, count: int, steps: Iterable[CapturedStep]) -> FoundStep:
        """Return the captured `steps` of `count` micro-batches, by what was `found` of one."""
        inputs = self._captures.inputs_of(found)
        others = (at + number * len(inputs) for number in range(1, count) for at in inputs)
        together = steps if isinstance(steps, Partitioned) else Partitioned(steps)
        return found._replace(steps=together, others=tuple(others))

    def _lowered(self, found: FoundStep, plan: Plan, kept_in_store: frozenset[str] | None, number: int) -> Compiled:
        """Return the captured step by a plan of its graph that all processes know as `number`."""
        # Reserve the store.
        plan.check_host()
        captured = found.steps.of(plan.graph)
        names = (*found.takes, *self._captures.state_of(captured), *found.others)
        if self.state.where.type == "cpu":
            suit_heap(plan.unmanaged_peak_bytes)
        store = self.engine().store
        idle = () if kept_in_store is not None else self._idle(names, plan)
        kept_bytes = sum(whole_pages(self.state.residency[n].spec.nbytes) for n in (*(kept_in_store or ()), *idle))
        if self.state.from_host:
            kept_bytes -= held_bytes(plan)
        elif plan.places is not None:  # to the arena they come by way of the store
            kept_bytes += sum(whole_pages(plan.graph.tensors[t].nbytes) for t in plan.places.between)
        store.reserve(store_bytes(plan) + kept_bytes, plan.tiers)
        # Lower the plan.
        engine = self.state.engine_number
        arena = self.arena.of(plan)
        (stretch,) = lower(captured, plan.schedule, engine, arena, plan.groups, update_together, plan.tiers)
        program = LoweredProgram(stretch.module)
        self._instrument(program, plan)
        # Match the graph's inputs with the residents by name.
        primals = captured.joint.primals
        name_of = {
            captured.tensor_of[storages(node)[0]]: str(name)
            for node, name in zip(primals, names, strict=True)
            if captured.moves(node)
        }
        outside = tuple(found.known.outside)
        on_host = tuple(str(names[at]) for at in captured.updated_by(plan.schedule.targets(Verb.RUN_ON_HOST)))
        if kept_in_store is None and self.options.updates_on_host:
            tell_of_others(on_host, [str(names[u.parameter]) for u in captured.updates])
        written = captured.joint.mutated_storages
        changed = (n for node, n in zip(primals, names, strict=True) if not written.isdisjoint(storages(node)))
        return Compiled(
            plan, number, stretch, program, names, name_of,
            kept_in_store or frozenset(),
            kept_in_store is None,
            idle,
            tuple(n for n in changed if isinstance(n, int) and n >= len(self.state.buffers)),
            {} if plan.places is None else {name_of[tensor]: at for tensor, at in plan.places.between.items()},
            found.results,
            found.python,
            found.known.settled(),
            outside,
            captured.partition,
            on_host,
            captured.micro_batches,
            found.known.rows if found.known.rows is not None and found.known.rows.bounds else None,
        )  # fmt: skip

    def _idle(self, names: Iterable[str | int], plan: Plan) -> tuple[str, ...]:
        """Return the state that this kind of step does not update, if it does not fit next to `plan`.

        Other kinds of steps have made this state. On a GPU it never counts as fitting.
        """
        idle = {n for name, owned in self.state.owned.items() for n in owned.residents()}.difference(names)
        room = plan.asked_bytes - plan.needed_bytes if self.state.where.type == "cpu" else 0
        return tuple(idle) if sum(self.state.residency[name].spec.nbytes for name in idle) > room else ()

    def _must_agree(self, found: FoundStep) -> bool:
        """Return whether the step has collectives though it was planned for this process alone.

        Its ranks then agree from now on. Raises UnsupportedError if their gradients would be clipped, because each rank
        may have only a part of them.
        """
        if self.processes.size > 1:
            return False
        others = processes_of_collectives(found.steps.of(found.steps.graph))
        if others.size > 1:
            if self.gradients.clip_norm is not None:
                raise UnsupportedError(
                    "clip_norm= of a step with collectives of its own: each rank would clip by the norm of the "
                    "gradients that it has, which may be parts; shard the model by fully_shard, or use clip_value"
                )
            self.join_processes(others)
        return others.size > 1

    def join_processes(self, processes: OneProcess) -> None:
        """Plan together with `processes` from now on."""
        self.clear()
        self._number = 0
        self.processes = self._captures.processes = processes

    def _capture(
        self, inputs: tuple[Any, ...], outside_graph: OutsideGraph, *, last: bool, partition: float | None = None
    ) -> FoundStep:
        external_tensors = self.state.external_tensors
        found = self._captures.capture(inputs, outside_graph, last=last, partition=partition)
        if self.state.external_tensors is not external_tensors:
            self.clear()  # the plans of before take other inputs
        return found

    def _gathered(self, steps: Partitioned[CapturedStep], plan: Plan) -> Plan:
        """Return `plan` with updates gathered into groups, unless each op is timed."""
        if self.options.profile:
            return plan
        return gathered(steps.of(plan.graph), plan, self._account().measured)

    def _planner(self, steps: Partitioned[CapturedStep]) -> Callable[[int], Plan]:
        """Return a function from bytes to the best plan of `steps`."""
        return steps.planner(self.options, self._account())

    def _budget(self, graph: Graph, planned: Callable[[int], Plan]) -> int:
        """Return the budget in bytes.

        A relative budget holds for all kinds of inputs. The smallest follows from the first step, a share from the
        largest step so far: with a larger one, plans that move tensors are made again.
        """
        limit, account = self.options.limit, self._account()
        if not limit.is_relative:
            return account.fixed(limit)
        before = self._fixed_budget or 0
        if before and limit.smallest:
            return before
        self._fixed_budget = found = max(before, account.bytes_of(limit, graph, planned))
        for known in self._compiled.values() if before < found else ():
            known[:] = [of for of in known if of.plan.asked_bytes >= found or not of.plan.is_managed]
        return found

    def _account(self) -> Account:
        where = self.state.where
        account = account_of(self.options, device_named(self.options.device, where), where)
        return replace(account, model_on_host=self.state.from_host)


def _settings_of_torch(device: str) -> tuple[Any, ...]:
    """Return PyTorch's global settings that decide which kernels and casts are captured."""
    return (
        torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(), *kernel_settings(),
    )  # fmt: skip

"""The plans of a step: one for each kind of inputs, captured, planned and lowered when they are first seen."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from overspill.capture.compiled.backward import Backward
from overspill.capture.compiled.compiling import told
from overspill.capture.compiled.graph import InputInfo
from overspill.capture.compiled.guards import Guards
from overspill.capture.compiled.joint import storage_bytes, storages
from overspill.capture.compiled.known_values import ChangesStranger, Held, KnownValues
from overspill.capture.compiled.whole_step import (
    CapturedStep,
    GradientOps,
    ParameterUpdate,
    StateInfo,
    capture_step,
)
from overspill.capture.programs.whole_step import capture_step_of_programs
from overspill.core import Graph, TensorKind
from overspill.core.errors import InfeasibleBudget, RequestError, UnsupportedError
from overspill.costs import MeasuredTimes
from overspill.plans.plan import Plan, smallest_budget
from overspill.runtime import batches
from overspill.runtime.compiled.partitions import Partitioned
from overspill.runtime.driver import LoweredProgram
from overspill.runtime.live.pools import check_live, live_steps
from overspill.runtime.live.steps import LiveSteps
from overspill.runtime.lower import copied, lower_step
from overspill.runtime.lower_groups import made_by
from overspill.runtime.options import (
    Options,
    budget_for,
    device_for,
    infeasible_for,
    measured_again,
    open_engine,
    plan_graph,
    store_bytes,
)
from overspill.runtime.parallel import OneProcess
from overspill.runtime.profile import OpTimer
from overspill.runtime.transfer.forks import ForkedLock
from overspill.runtime.transfer.host_memory import suit_heap
from overspill.runtime.transfer.stores import whole_pages

from .gate import without_collections
from .gathered import gathered
from .programs import Step, StepPrograms, after, step_programs
from .python_state import PythonState
from .residency import Resident, Spec, readable
from .results import Results, split_results
from .state import StepState
from .swapped import Strangers, Swapped
from .updates import NormClipping
from .watching import watched

Elsewhere = tuple[tuple[TensorKind, int], ...]
TELLING = 8
"""So often a step is captured for inputs of one kind before the user is told why."""
MOST_ANSWERS = 16
"""So many plans are made for inputs of one kind that give other answers to what the model asks of them."""
MOST_KEPT = 32
"""So many plans are kept for inputs of one kind, of what the model's Python was."""
MOST_KINDS = 512
"""So many kinds of inputs have plans at a time; those of the first are forgotten then."""
CAPTURES = ForkedLock()
"""One thread at a time captures: what it watches are classes of torch, which all threads share."""
MOST_TRIES = 4
"""So often a step is captured for tensors of other models that it is found to change."""
LOSS_BYTES = 8
"""Room for a loss, whatever its dtype."""


@dataclass(frozen=True)
class GradientOptions:
    """What a step does to its gradients: micro-batches to accumulate over, and how they are clipped."""

    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None

    def __post_init__(self) -> None:
        """Refuse what no step can do."""
        if self.accumulate < 1:
            raise RequestError(f"accumulate={self.accumulate} is not a positive number of micro-batches")
        for name, value in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if value is not None and not value > 0:
                raise RequestError(f"{name}={value} is not a positive number")


@dataclass(frozen=True)
class Compiled:
    """One planned graph of the step: for one kind of inputs, with or without the update.

    `takes` says what each input of `program` is: a resident's name, or a position among what is given at each step
    (buffers, tensors of the caller). Its results are the loss, the other tensors of `results`, and the residents
    `moving`; `stored` are those that the store has when it begins; so it has `kept_in_store`, which the graph does not know.
    Those `copied` are there and in the store; their handles are the last inputs. It is right while `python` has not changed,
    and for inputs and buffers of which `guards` sees no difference.
    """

    plan: Plan
    program: LoweredProgram
    takes: tuple[str | int, ...]
    moving: tuple[str, ...]
    stored: frozenset[str]
    kept_in_store: frozenset[str]
    copied: tuple[str, ...]
    results: Results
    python: PythonState
    guards: Guards
    partition: float | None


class Found(NamedTuple):
    """A step that was captured: with Inductor's kernels by each partition, the `usual` one first.

    `takes` says what the first inputs of each are; the rest follows from the updates that it has.
    """

    steps: Partitioned[CapturedStep]
    takes: tuple[str | int, ...]
    results: Results
    python: PythonState
    known: KnownValues


Capturing = tuple[CapturedStep, Callable[[Elsewhere], CapturedStep]]
"""A captured step, and how to capture it with other bytes elsewhere."""


class StepPlans:
    """The plans of one step; `add_up(sum, gradient)` accumulates gradients."""

    def __init__(
        self,
        state: StepState,
        options: Options,
        gradients: GradientOptions,
        clipping: NormClipping | None,
        processes: OneProcess,
        add_up: Callable[[Tensor, Tensor], None],
    ) -> None:
        self.state = state
        self.options = options
        self.gradients = gradients
        self.processes = processes
        self._clipping = clipping
        self._add_up = add_up
        self._compiled: dict[Any, list[Compiled]] = {}
        self.beside: Callable[[], int] = lambda: 0
        """Bytes that the other models of the session have on the device."""
        self._beside_then = 0
        self._fixed_budget: int | None = None
        self.steps: LiveSteps | None = None
        """What leads the live pool, if one serves these steps."""
        self._told = False
        self._timers: list[tuple[str, OpTimer]] = []

    @property
    def plans(self) -> list[Plan]:
        """The plans in force, in the order in which they were made."""
        return [compiled.plan for found in self._compiled.values() for compiled in found]

    @property
    def partitions(self) -> list[float | None]:
        """Of each plan with Inductor's kernels, the `activation_memory_budget` of the partition that was chosen."""
        return [compiled.partition for found in self._compiled.values() for compiled in found]

    def place_live(self, budget_bytes: int = 0) -> None:
        """Let a live pool serve the steps, if the placement asks for one; on the CPU it is made for a budget, by the first plan.

        Raises RequestError where there cannot be one.
        """
        options, where = self.options, self.state.where
        if self.steps is None and check_live(options.placement, options.backend, where):
            alone = self.processes.size == 1  # of several ranks one cannot begin a step again by itself
            self.steps = live_steps(str(options.placement), where, budget_bytes, restarts=alone)
            if where.type == "cpu":  # made in the middle of the first step
                self.steps.begin_step()

    def running(self) -> AbstractContextManager[None]:
        """While this lasts a planned step runs."""
        return nullcontext() if self.steps is None else self.steps.running()

    def clear(self) -> None:
        """Forget all plans."""
        self._compiled.clear()

    @property
    def measured_times(self) -> MeasuredTimes | None:
        """Op times of the run so far, if the step profiles."""
        found = [timer.times(name) for name, timer in self._timers]
        seconds = {key: value for times in found for key, value in times.seconds.items()}
        return MeasuredTimes(found[0].device, seconds) if found else None

    def graph(self, inputs: tuple[Any, ...]) -> Graph:
        """The Graph of a step on `inputs`; of several micro-batches, of the last."""
        *_, part = batches.split(inputs, self.gradients.accumulate)
        return self._capture(part, self._elsewhere(part, inputs), last=True).steps.graph

    def preview(self, inputs: tuple[Any, ...]) -> Plan:
        """The plan of a step on `inputs`, for which nothing is made ready; of several micro-batches, of the last."""
        *_, part = batches.split(inputs, self.gradients.accumulate)
        found = self._capture(part, self._elsewhere(part, inputs), last=True)
        planned = self._planner(found.steps)
        plan = planned(self._budget(found.steps.graph, planned))
        return self._gathered(found.steps.of(plan.graph), plan)

    def smallest_budget(self, inputs: tuple[Any, ...]) -> int:
        """The fewest bytes for which a step on `inputs` has a plan."""
        *_, part = batches.split(inputs, self.gradients.accumulate)
        found = self._capture(part, self._elsewhere(part, inputs), last=True)
        return smallest_budget(self._planner(found.steps))

    def compile(self, inputs: tuple[Any, ...], whole: tuple[Any, ...], *, last: bool) -> Compiled:
        """The plan for `inputs`, a micro-batch of the call's inputs `whole`; the `last` one's has the update."""
        if self.state.stale:
            self.clear()
            self.state.stale = False
        if (now := self.beside()) != self._beside_then:
            self.clear()
            self._beside_then, self._fixed_budget = now, None
        key = self._key(inputs, last=last)
        with self.processes.announcing():
            found = self._known(key, [*self.state.buffers.values(), *batches.tensors(inputs)])
        if not self.processes.agree(key, known=found is not None) or found is None:
            outside = self._elsewhere(inputs, whole)
            if last:
                found = self._planned(inputs, outside)
            else:
                found = self._planned_before(self.compile(inputs, whole, last=True), inputs, outside)
            self._keep(key, found)
        return found

    def _key(self, inputs: tuple[Any, ...], *, last: bool) -> Any:
        """What a plan depends on, but for the model's Python and for values."""
        leaves, spec = tree_flatten(inputs)
        return (
            spec, last, tuple(map(batches.kind, leaves)),
            tuple(p.requires_grad for p in self.state.parameters.values()), _settings_of_torch(self.state.where.type),
        )  # fmt: skip

    def share_buffers(self, inputs: tuple[Any, ...]) -> None:
        """Give the buffers of rank 0 to all ranks, before a model asks for their values. Raises RequestError."""
        if self.processes.size > 1:
            self.processes.agree(self._key(inputs, last=False), known=True)
            self.processes.share_buffers(self.state.buffers.values())

    def _known(self, key: Any, given: Sequence[Tensor]) -> Compiled | None:
        """The plan that was made for inputs of this kind, of the model as it is now, with the answers that `given` has.

        Raises UnsupportedError where there are too many, each for other answers.
        """
        known = self._compiled.get(key, [])
        places = []
        for compiled in known:
            if not compiled.python.changed():
                if (place := compiled.guards.difference(given)) is None:
                    known.remove(compiled)
                    known.insert(0, compiled)  # asked first from now on
                    return compiled
                places.append(place)
        if len(places) < MOST_ANSWERS:
            return None
        raise UnsupportedError(
            f"the step asks for values{places[0]}, and has had {len(places)} different answers, each with a plan of its own, which "
            "takes as long to make as the first; let it ask for fewer, as torch.where and the like do, or draw none (layerdrop=0), or use overspill.compile"
        )

    def _keep(self, key: Any, found: Compiled) -> None:
        """Remember the plan of a model as it is now, beside those of how it was before."""
        known = self._compiled.setdefault(key, [])
        if not self._told and len(known) >= TELLING and (changed := known[-1].python.changed()):
            self._told = True
            warnings.warn(
                f"the step was captured {len(known) + 1} times for inputs of one kind, for {changed} changes "
                "between steps; each time takes as long as the first call: make it a tensor or an argument of the step",
                stacklevel=2,
            )
        known.insert(0, found)
        del known[MOST_KEPT:]
        if len(self._compiled) > MOST_KINDS:
            del self._compiled[next(iter(self._compiled))]

    def _elsewhere(self, inputs: tuple[Any, ...], whole: tuple[Any, ...]) -> Elsewhere:
        """What is on the device all the while besides what a graph reads: the rest of a call's inputs, its loss so far."""
        rest = batches.bytes_outside(whole, inputs)
        losses = 2 * LOSS_BYTES if self.gradients.accumulate > 1 else 0
        state = sum(
            self.state.updates.rest_bytes(self.state.parameters[n], owned.group)
            for n, owned in self.state.owned.items()
        )
        return (TensorKind.INPUT, rest), (TensorKind.TEMPORARY, losses), (TensorKind.OPTIMIZER_STATE, state), (
            TensorKind.PARAMETER, self.beside()
        )  # fmt: skip

    def _planned_before(self, last: Compiled, inputs: tuple[Any, ...], outside: Elsewhere) -> Compiled:
        """The plan of a micro-batch before the last one, whose plan has some state on the device and some in the store.

        What it has on the device stays there meanwhile if there is room for it, and else goes to the store too.
        """
        state = [f"{name}.{key}" for name, owned in self.state.owned.items() for key in owned.shaped]
        stored = frozenset(name for name in state if name in last.stored)
        staying = sum(self.state.residency[name].spec.nbytes for name in state if name not in stored)
        budget = last.plan.asked_bytes
        # By one partition all of them, as a loop with `torch.compile` has it.
        partition = self.options.partition if last.partition is None else last.partition
        try:
            around = (*outside, (TensorKind.OPTIMIZER_STATE, staying))
            return self._planned(inputs, around, stored, budget, partition)
        except InfeasibleBudget:
            if not staying:
                raise
        return self._planned(inputs, outside, frozenset(state), budget, partition)

    def _instrument(self, program: LoweredProgram, plan: Plan) -> None:
        """Let the lowered step of `plan` tell how long each op takes, where the user wants to know."""
        if self.options.profile:
            self._timers.append((plan.device.name, timer := OpTimer(plan.graph, self.state.where)))
            timer.instrument(program)

    def _planned(
        self,
        inputs: tuple[Any, ...],
        elsewhere: Elsewhere,
        kept_in_store: frozenset[str] | None = None,
        budget: int | None = None,
        partition: float | None = None,
    ) -> Compiled:
        """The plan of one micro-batch, the last one if no set of state is `kept_in_store` in the store during it.

        `partition` is as that of the Options.
        """
        may_grow = budget is None and self.options.limit.smallest
        with self.processes.together():
            found = self._capture(inputs, elsewhere, last=kept_in_store is None, partition=partition)
            planned = self._planner(found.steps)
            if budget is None:
                budget = self._budget(found.steps.graph, planned)

        def agreed(nbytes: int) -> Plan:
            return self.processes.plan(found.steps.graph, nbytes, planned)

        with infeasible_for("training", tree_flatten(inputs)[0], whole_step=True):
            try:
                plan = agreed(budget)
            except InfeasibleBudget as error:
                if not may_grow:
                    raise
                self._fixed_budget = budget = error.floor_bytes
                plan = agreed(budget)
        captured = found.steps.of(plan.graph)
        names = (*found.takes, *self._state_of(captured))
        plan = self._gathered(captured, plan)
        if self.state.where.type == "cpu":
            suit_heap(plan.unmanaged_peak_bytes)
        with self.processes.together():
            if self.state.engine is None:
                self.state.engine, self.state.engine_number = open_engine(self.options, self.state.where)
            kept_bytes = sum(whole_pages(self.state.residency[name].spec.nbytes) for name in kept_in_store or ())
            self.state.engine.store.reserve(store_bytes(plan) + kept_bytes)
        self.place_live(budget)
        if self.steps is not None:
            self.steps.limit_for(plan, budget)
        made = made_by(captured, plan, self.steps)
        together = self.state.updates.together
        program = LoweredProgram(
            lower_step(captured, plan.schedule, self.state.engine_number, plan.groups, together, made)
        )
        self._instrument(program, plan)
        primals = captured.joint.primals
        tensor_of = {node: captured.tensor_of[storages(node)[0]] for node in primals}
        stored = frozenset(plan.schedule.stored)
        name_of = {tensor: str(name) for tensor, name in zip(tensor_of.values(), names, strict=True)}
        return Compiled(
            plan, program, names,
            tuple(str(name) for node, name in zip(primals, names, strict=True) if captured.moves(node)),
            frozenset(str(name) for node, name in zip(primals, names, strict=True) if tensor_of[node] in stored),
            kept_in_store or frozenset(),
            tuple(name_of[tensor] for tensor in copied(captured.graph, plan.schedule)),
            found.results,
            found.python,
            found.known.settled(),
            captured.partition,
        )  # fmt: skip

    def _gathered(self, captured: CapturedStep, plan: Plan) -> Plan:
        """`plan` with updates together, but where each op is timed by itself."""
        if self.options.profile:
            return plan
        return gathered(captured, plan, self.state.updates, partial(measured_again, self.options))

    def _planner(self, steps: Partitioned[CapturedStep]) -> Callable[[int], Plan]:
        """What gives the best plan of `steps` within some bytes."""
        device = device_for(self.options, self.state.where)
        return lambda nbytes: steps.best_plan(lambda step: plan_graph(self.options, step.graph, device, nbytes))

    def _budget(self, graph: Graph, planned: Callable[[int], Plan]) -> int:
        """The budget in bytes; one that follows from a step is fixed by the first, and holds for all kinds of inputs."""
        device = device_for(self.options, self.state.where)
        if not self.options.limit.is_relative:
            return budget_for(self.options, graph, device, self.state.where)
        if self._fixed_budget is None:
            self._fixed_budget = budget_for(self.options, graph, device, self.state.where, planned)
        return self._fixed_budget

    def _capture(
        self,
        inputs: tuple[Any, ...],
        elsewhere: Elsewhere,
        *,
        last: bool,
        partition: float | None = None,
        tries: int = 1,
    ) -> Found:
        leaves, spec = tree_flatten(inputs)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        names = [*self.state.parameters, *self.state.buffers]
        share, by_inductor = self.gradients.accumulate, self.options.backend == "inductor"
        results, swapped = Results(), Swapped(self.state)
        if by_inductor and (hooked := next(iter(self.state.module.gradient_hooks), "")):
            raise UnsupportedError(
                f"{readable(hooked)} has a gradient hook, which torch.compile calls beside its kernels, and a planned step with "
                'backend="inductor" does not call; use backend="eager"'
            )

        def function(*values: Tensor) -> tuple[Tensor, ...]:
            nonlocal results
            known.begin()
            filled = list(leaves)
            for position, value in zip(tensors, values[len(names) :], strict=True):
                filled[position] = value
            returned = swapped.call(dict(zip(names, values, strict=False)), tree_unflatten(filled, spec))
            loss, others, results = split_results(returned)
            if others and share > 1:
                raise UnsupportedError(
                    f"the loss function returns {len(others)} tensors besides its loss, of each of {share} micro-batches; "
                    "let it return the loss alone, or leave accumulate=1"
                )
            return (loss if share == 1 or by_inductor else loss / share), *others

        infos, values, takes, known = self._described([leaves[i] for i in tensors])
        ops = self._gradient_ops(values, last=last)

        def capture() -> tuple[Iterator[Capturing], PythonState]:
            if by_inductor:
                chosen = self.options.partition if partition is None else partition
                return self._capture_programs(function, infos, values, ops, elsewhere, chosen)
            return self._capture_ops(function, infos, values, ops, elsewhere)

        try:
            with CAPTURES.lock, without_collections(), closing(swapped):
                try:
                    made, python = capture()
                except Held:
                    swapped.follows_references = True
                    made, python = capture()
        except Strangers as found:
            if not found.tensors or tries == MOST_TRIES:  # nobody can tell which they are
                raise ChangesStranger from found
            with self.state.taking_in(found.tensors):
                again = self._capture(inputs, elsewhere, last=last, partition=partition, tries=tries + 1)
            self.clear()  # those of before take other inputs
            return again
        return Found(Partitioned(_with_others(made, elsewhere, swapped)), tuple(takes), results, python, known)

    def _state_of(self, captured: CapturedStep) -> list[str]:
        """What a captured step takes besides parameters, buffers and inputs: optimizer state, and sums of gradients."""
        names = [*self.state.parameters]
        found = [f"{names[u.parameter]}.{state.name}" for u in captured.updates for state in u.state]
        return found + (self._sum_residents(captured) if self.gradients.accumulate > 1 else [])

    def _capture_ops(
        self,
        function: Step,
        infos: Sequence[InputInfo],
        values: Sequence[FakeTensor],
        ops: GradientOps,
        elsewhere: Elsewhere,
    ) -> tuple[Iterator[Capturing], PythonState]:
        """The step `function` as aten ops, and the Python that it follows from."""

        def captured(step: Step, elsewhere: Elsewhere) -> CapturedStep:
            with told(compiles=False):
                return capture_step(step, self.state.module, infos, values, ops, elsewhere=elsewhere, named=readable)

        found, python = watched(
            lambda begin: captured(after(begin, function), elsewhere), lambda found: found.joint.module.code
        )
        return iter([(found, partial(captured, function))]), python

    def _capture_programs(
        self,
        function: Step,
        infos: Sequence[InputInfo],
        values: Sequence[FakeTensor],
        ops: GradientOps,
        elsewhere: Elsewhere,
        partition: float | None,
    ) -> tuple[Iterator[Capturing], PythonState]:
        """The same by Inductor's programs, by each partition; for several processes, which have to agree, by one."""
        if partition is None and self.processes.size > 1:
            partition = float(torch._functorch.config.activation_memory_budget)
        lasting = len(self.state.parameters) + len(self.state.buffers)
        backward = Backward([i.name for i in infos], inlined=True, several=self.gradients.accumulate > 1)
        made, python = step_programs(function, self.state.module, values, lasting, partition, backward)

        def captured(found: StepPrograms, elsewhere: Elsewhere) -> CapturedStep:
            share = self.gradients.accumulate
            step = capture_step_of_programs(found.programs, found.joint, infos, ops, share, elsewhere=elsewhere)
            return replace(step, partition=found.partition)

        return ((captured(found, elsewhere), partial(captured, found)) for found in made), python

    def _described(
        self, inputs: Sequence[Tensor]
    ) -> tuple[list[InputInfo], list[FakeTensor], list[str | int], KnownValues]:
        """Kind, fake value and source of parameters, buffers and inputs, in this order, and what is known of their values."""
        infos, takes = [], []
        values: list[Any] = []
        with KnownValues(draws=self.options.backend != "inductor") as known:
            for name, parameter in self.state.parameters.items():
                values.append(self.state.spec(name, parameter).empty().requires_grad_(self.state.trains(name)))
                infos.append(InputInfo(TensorKind.PARAMETER, readable(name), name in self.state.residency))
                takes.append(name)
            for position, (name, tensor) in enumerate(
                [*self.state.buffers.items(), *((f"input {i}", t) for i, t in enumerate(inputs))]
            ):
                values.append(Spec.of(tensor).empty())
                known.know(values[-1], tensor, position)
                kind = TensorKind.BUFFER if name in self.state.buffers else TensorKind.INPUT
                infos.append(InputInfo(kind, readable(name)))
                takes.append(position)
            known.own({readable(n): t for n, t in {**self.state.parameters, **self.state.buffers}.items()})
        return infos, values, takes, known

    def _gradient_ops(self, values: Sequence[FakeTensor], *, last: bool) -> GradientOps:
        updates = []
        for position, (name, parameter) in enumerate(self.state.parameters.items()):
            if last and self.state.trains(name):
                owned = self.state.owned[name]
                with values[position].fake_mode:
                    state = tuple(
                        StateInfo(key, self.state.residency[f"{name}.{key}"].spec.empty()) for key in owned.shaped
                    )
                workspace = self.state.updates.workspace_bytes(parameter, owned.group)
                elementwise = self.state.updates.is_elementwise(parameter)
                updates.append(ParameterUpdate(position, owned.run, state, workspace, elementwise))
        clipping = self._clipping if last else None
        return GradientOps(
            tuple(updates),
            accumulate=self._add_up if self.gradients.accumulate > 1 else None,
            reduce=self.processes.average if last else None,
            norm=None if clipping is None else clipping.norm,
            clip=None if clipping is None else clipping.factor,
        )

    def _sum_residents(self, captured: CapturedStep) -> list[str]:
        """The residents of accumulated gradients, one for each parameter that gets one."""
        nodes = captured.joint.primals
        names = list(self.state.parameters)
        found = []
        for position, name in enumerate(names):
            if nodes[position] in captured.joint.gradients:
                where = f"{name}.grad"
                found.append(where)
                if where not in self.state.residency:
                    spec = self.state.spec(name, self.state.parameters[name])
                    self.state.residency.residents[where] = Resident.blank(where, spec)
        self.state.sums = tuple(dict.fromkeys((*self.state.sums, *found)))
        return found


def _with_others(made: Iterator[Capturing], elsewhere: Elsewhere, swapped: Swapped) -> Iterator[CapturedStep]:
    """The captured steps, each made when it is asked for, with room for the tensors that the step before has returned."""
    while True:
        with CAPTURES.lock, without_collections(), closing(swapped):
            if (found := next(made, None)) is None:
                return
            captured, again = found
            if captured.others:  # the caller may still hold them
                kept = sum(sum(storage_bytes(node).values()) for node in captured.others)
                captured = again((*elsewhere, (TensorKind.TEMPORARY, kept)))
        yield captured


def _settings_of_torch(device: str) -> tuple[Any, ...]:
    """What torch itself is told, and which kernels and casts follow from when a step is captured."""
    return (
        torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.get_default_dtype(),
        torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(), torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip

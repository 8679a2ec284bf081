"""Capture a training step on fake tensors for one kind of inputs.

The graph consists of aten ops or of Inductor's programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from overspill.capture.compiled.backward import Backward
from overspill.capture.compiled.chosen_rows import ChosenRows
from overspill.capture.compiled.compiling import answering_is_compiling
from overspill.capture.compiled.gathers import GatheredGroup
from overspill.capture.compiled.graph import InputInfo
from overspill.capture.compiled.joint import storage_bytes
from overspill.capture.compiled.known_values import ChangesExternalTensor, KnownValues
from overspill.capture.compiled.value_graph import Held
from overspill.capture.compiled.whole_step import (
    CapturedStep,
    GradientOps,
    OutsideGraph,
    ParameterUpdate,
    StateInfo,
    TracedStep,
    trace_step,
)
from overspill.capture.programs.whole_step import capture_step_of_programs
from overspill.core import TensorKind
from overspill.core.errors import UnsupportedError
from overspill.core.garbage import without_collection
from overspill.job import GradientOptions
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.functorch import functorch_config
from overspill.pytorch.trees import tree_flatten, tree_unflatten
from overspill.runtime import batches
from overspill.runtime.compiled.partitions import Partitioned
from overspill.runtime.options import Options
from overspill.runtime.parallel import OneProcess
from overspill.runtime.sharding import gathered_group
from overspill.runtime.transfer.forks import ForkedLock

from .programs import Step, after, step_programs
from .python_state import PythonState
from .residency import Resident, Spec, readable
from .results import Results, split_results
from .state import StepState
from .swapped import ExternalTensors, Swapped
from .updates import NormClipping
from .watching import watched

if TYPE_CHECKING:  # Inductor takes seconds to import
    from overspill.runtime.compiled.inductor import PartitionPrograms

CAPTURES = ForkedLock()
"""One thread at a time captures, since it patches torch's classes, which all threads share."""
MOST_TRIES = 4
"""Most captures while a step is found to change tensors of other models."""


class FoundStep(NamedTuple):
    """A captured step."""

    steps: Partitioned[CapturedStep]
    """Captures: whole, then in pieces of rows; with Inductor's kernels by each partition, the usual one first."""
    takes: tuple[str | int, ...]
    """Sources of the first inputs: names of parameters, then positions of buffers and inputs. Updates give the rest."""
    results: Results
    python: PythonState
    known: KnownValues
    others: tuple[int, ...] = ()
    """Positions of the inputs of other micro-batches, as they follow one another, if they are in the step too."""


Capturing = tuple[CapturedStep, Callable[[OutsideGraph], CapturedStep]]
"""A captured step, and a function that captures it with other bytes outside the graph."""


class StepCaptures:
    """Captures one step. `add_up(sum, gradient)` accumulates gradients."""

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
        self.rows: ChosenRows | None = None
        """What values of parameters may choose in the next step that is captured; None: nothing."""
        self._clipping = clipping
        self._add_up = add_up

    def capture(
        self,
        inputs: tuple[Any, ...],
        outside_graph: OutsideGraph,
        *,
        last: bool,
        partition: float | None = None,
        tries: int = 1,
    ) -> FoundStep:
        """Return the captured step on `inputs`, one micro-batch.

        The `last` micro-batch includes the update. `outside_graph` are bytes outside the graph. `partition` is that of
        Options. A step may change tensors of other models: the state then takes these in and the capture is repeated.
        `tries` counts the captures. Raises UnsupportedError.
        """
        leaves, spec = tree_flatten(inputs)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        names = [*self.state.parameters, *self.state.buffers]
        share, by_inductor = self.gradients.accumulate, self.options.backend == "inductor"
        results, swapped = Results(), Swapped(self.state)
        if by_inductor and (hooked := next(iter(self.state.module.gradient_hooks), "")):
            raise UnsupportedError(
                f"{readable(hooked)} has a gradient hook, which torch.compile calls beside its kernels, and a planned "
                "step with "
                'backend="inductor" does not call; use backend="eager"'
            )

        # The step as a function of tensors: parameters, buffers, inputs.
        def function(*values: Tensor) -> tuple[Tensor, ...]:
            nonlocal results
            known.begin()
            filled = list(leaves)
            for position, value in zip(tensors, values[len(names) :], strict=True):
                filled[position] = value
            filled = [filled[first] for first in batches.repeats(leaves)]
            returned = swapped.call(dict(zip(names, values, strict=False)), *tree_unflatten(filled, spec))
            loss, others, results = split_results(returned)
            if others and share > 1:
                raise UnsupportedError(
                    f"the loss function returns {len(others)} tensors besides its loss, of each of {share} "
                    "micro-batches; let it return the loss alone, or leave accumulate=1"
                )
            return (loss if share == 1 or by_inductor else loss / share), *others

        # Capture it on fake values; once more if the model is held by other references.
        infos, values, takes, known = self._described([leaves[i] for i in tensors])
        ops = self._gradient_ops(values, last=last)

        def capture() -> tuple[Iterator[Capturing], PythonState]:
            if by_inductor:
                chosen = self.options.partition if partition is None else partition
                return self._capture_programs(function, infos, values, ops, outside_graph, chosen)
            return self._capture_ops(function, infos, values, ops, outside_graph)

        # Finalizers and callbacks of a garbage collection would see the model's fake parameters, or make some.
        try:
            with CAPTURES.lock, without_collection(), closing(swapped):
                try:
                    made, python = capture()
                except Held:
                    swapped.follows_references = True
                    made, python = capture()
        # It changes tensors of other models: take these in and capture again.
        except ExternalTensors as found:
            if not found.tensors or tries == MOST_TRIES:  # it is unknown which they are
                raise ChangesExternalTensor from found
            with self.state.taking_in(found.tensors):
                return self.capture(inputs, outside_graph, last=last, partition=partition, tries=tries + 1)
        return FoundStep(Partitioned(_with_others(made, outside_graph, swapped)), tuple(takes), results, python, known)

    def state_of(self, captured: CapturedStep) -> list[str]:
        """Return the names of the optimizer state and gradient sums among the inputs of a step."""
        names = [*self.state.parameters]
        found = [f"{names[u.parameter]}.{state.name}" for u in captured.updates for state in u.state]
        summed = self.gradients.accumulate > captured.micro_batches
        return found + (self._sum_residents(captured) if summed else [])

    def inputs_of(self, found: FoundStep) -> list[int]:
        """Return the positions of the inputs that a micro-batch has of its own, behind those of the buffers."""
        return [t for t in found.takes if isinstance(t, int) and t >= len(self.state.buffers)]

    def _capture_ops(
        self,
        function: Step,
        infos: Sequence[InputInfo],
        values: Sequence[FakeTensor],
        ops: GradientOps,
        outside_graph: OutsideGraph,
    ) -> tuple[Iterator[Capturing], PythonState]:
        """Capture `function` as aten ops, then in pieces of rows; return also the Python state that it read.

        Several processes do not use pieces, because they must agree.
        """

        def traced(step: Step) -> TracedStep:
            with answering_is_compiling(compiles=False):
                return trace_step(step, self.state.module, infos, values, ops, named=readable)

        found, python = watched(lambda begin: traced(after(begin, function)), lambda found: found.joint.module.code)
        mode = values[0].fake_mode
        chosen = isinstance(mode, KnownValues) and mode.rows is not None and bool(mode.rows.bounds)
        several = self.options.in_pieces and self.processes.size == 1 and not chosen
        ways = found.ways() if several else (found.captured,)
        return ((way(outside_graph), way) for way in ways), python

    def _capture_programs(
        self,
        function: Step,
        infos: Sequence[InputInfo],
        values: Sequence[FakeTensor],
        ops: GradientOps,
        outside_graph: OutsideGraph,
        partition: float | None,
    ) -> tuple[Iterator[Capturing], PythonState]:
        """Capture `function` as Inductor's programs, by each partition; return also the Python state that it read.

        Several processes use one partition, because they must agree.
        """
        if partition is None and self.processes.size > 1:
            partition = float(functorch_config.activation_memory_budget)
        lasting = len(self.state.parameters) + len(self.state.buffers)
        backward = Backward([i.name for i in infos], inlined=True, several=self.gradients.accumulate > 1)
        made, python, checks = step_programs(function, self.state.module, values, lasting, partition, backward)

        def captured(found: PartitionPrograms, outside_graph: OutsideGraph) -> CapturedStep:
            share = self.gradients.accumulate
            step = capture_step_of_programs(
                found.programs, found.joint, infos, ops, share, checks=checks, outside_graph=outside_graph
            )
            return replace(step, partition=found.partition)

        return ((captured(found, outside_graph), partial(captured, found)) for found in made), python

    def _described(
        self, inputs: Sequence[Tensor]
    ) -> tuple[list[InputInfo], list[FakeTensor], list[str | int], KnownValues]:
        """Return the kind, fake value and source of each input, and the known values.

        The order is parameters, buffers, inputs.
        """
        infos, takes = [], []
        values: list[Any] = []
        with KnownValues(eager=self.options.backend != "inductor", rows=self.rows) as known:
            # Parameters first, then buffers and inputs, whose values may be read.
            memory = self.state.overlapping()
            for name in self.state.parameters:
                value = memory[name] if name in memory else self.state.whole(name).empty()
                values.append(value.requires_grad_(self.state.trains(name)))
                infos.append(InputInfo(TensorKind.PARAMETER, readable(name), name in self.state.residency))
                takes.append(name)
            for position, (name, tensor) in enumerate(
                [*self.state.buffers.items(), *((f"input {i}", t) for i, t in enumerate(inputs))]
            ):
                values.append(memory[name] if name in memory else Spec.of(tensor).empty())
                known.know(values[-1], tensor, position)
                kind = TensorKind.BUFFER if name in self.state.buffers else TensorKind.INPUT
                infos.append(InputInfo(kind, readable(name)))
                takes.append(position)
            known.own({readable(n): t for n, t in {**self.state.parameters, **self.state.buffers}.items()})
        return infos, values, takes, known

    def _gradient_ops(self, values: Sequence[FakeTensor], *, last: bool) -> GradientOps:
        updates = []
        # One update per trained parameter, in the last micro-batch.
        calls = {
            of: of.call_for_all([self.state.like(n) for n, o in self.state.owned.items() if o.updates is of])
            for of in self.state.updates
        }
        for position, name in enumerate(self.state.parameters):
            if last and self.state.trains(name):
                owned = self.state.owned[name]
                planned = self.state.planned(name)
                with values[position].fake_mode:
                    state = tuple(StateInfo(path, owned.spec(path, planned).empty()) for path in owned.leaves)
                like, of = self.state.like(name), owned.updates
                workspace, elementwise = of.workspace_bytes(like, owned), of.is_elementwise(like)
                changes = not (of.groups or of.scales or of.clip_value is not None)
                moved = of.moved_bytes(like, owned)
                updates.append(
                    ParameterUpdate(position, owned.run, state, workspace, elementwise, changes, calls.get(of), moved)
                )
        # Averaging over processes and clipping come once, before the update.
        clipping = self._clipping if last else None
        return GradientOps(
            tuple(updates),
            accumulate=self._add_up if self.gradients.accumulate > 1 else None,
            reduce=self.processes.average if last else None,
            groups=self._groups(values),
            ranks=self.processes.size,
            norm=None if clipping is None else clipping.norm,
            clip=None if clipping is None else clipping.factor,
        )

    def _groups(self, values: Sequence[FakeTensor]) -> tuple[GatheredGroup, ...]:
        """Return the groups of parameters that `fully_shard` has made."""
        if self.state.sharding is None:
            return ()
        names = {name: position for position, name in enumerate(self.state.parameters)}
        with values[0].fake_mode:
            return tuple(
                gathered_group(group, names, lambda name: self.state.planned(name).empty())
                for group in self.state.sharding.groups
            )

    def _sum_residents(self, captured: CapturedStep) -> list[str]:
        """Return the names of the residents for accumulated gradients; create those that are missing."""
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


def _with_others(made: Iterator[Capturing], outside_graph: OutsideGraph, swapped: Swapped) -> Iterator[CapturedStep]:
    """Yield the captured steps on demand, with memory for the outputs of the previous step.

    The caller may still hold the tensors that the previous step returned.
    """
    while True:
        with CAPTURES.lock, without_collection(), closing(swapped):
            if (found := next(made, None)) is None:
                return
            captured, again = found
            if captured.others:  # the caller may still hold them
                kept = sum(sum(storage_bytes(node).values()) for node in captured.others)
                captured = again((*outside_graph, (TensorKind.TEMPORARY, kept)))
        yield captured

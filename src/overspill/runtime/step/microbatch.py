"""Run one micro-batch of a train step.

Move all tensors to where its plan begins, run it, and store the results. Casts of autocast are part of the captured
graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from overspill.core import TensorKind
from overspill.core.errors import UnsupportedError
from overspill.core.units import format_apart
from overspill.models.drawing import randomness
from overspill.pytorch.dispatch import DisableAutocast
from overspill.pytorch.trees import tree_flatten
from overspill.runtime import batches
from overspill.runtime.cuts import Place
from overspill.runtime.driver import ProgramRun
from overspill.runtime.recording.instrument import instrumented
from overspill.runtime.recording.recorder import RunRecorder
from overspill.runtime.sharding import local_of
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.transfer.engine import TransferEngine
from overspill.runtime.transfer.host_memory import give_back

from .call import StepCall
from .checks import step_post_hooks
from .host_updates import begin_updates
from .in_arena import settle
from .plans import LOSS_BYTES, Compiled, StepPlans
from .state import StepState


class MicrobatchRunner:
    """Carries out the plans of a step over its state."""

    def __init__(self, state: StepState, plans: StepPlans) -> None:
        self._state = state
        self._plans = plans

    def carry_on(self, call: StepCall, tracker: LiveBytes | None, recorder: RunRecorder | None) -> None:
        """Run the rest of the next micro-batch, as far as memory allows; notify `tracker` and `recorder`."""
        if call.run is None:
            self._begin(call, tracker, recorder)
        compiled, run = call.compiled, call.run
        # Run the instructions.
        assert compiled is not None
        assert run is not None
        if compiled.on_host and self._state.engine is not None:
            begin_updates(self._state.engine.updates, map(self._state.owned.__getitem__, compiled.on_host))
        told = None if recorder is None else instrumented(compiled.program, compiled.plan.graph, recorder)
        with torch.no_grad(), DisableAutocast(), tracker or nullcontext():
            loss, *results = run.go_on(self._state.gate.may_go_on, told)
        # Put the results where they belong: residents, then the loss and other outputs.
        count = compiled.stretch.own - 1
        others, results = results[:count], results[count:]
        compiled.borrowed(self._state.residency).give(results)
        losses = [loss]
        if compiled.micro_batches > 1:
            losses, others = [loss, *others], []
        for each in losses:  # in their order
            call.loss = each if call.loss is None else call.loss + each
        call.returned = compiled.results.filled(call.loss, others)
        others.clear()
        self._plans.ran(compiled)
        call.number, call.run, call.compiled = call.number + compiled.micro_batches, None, None

    def _begin(self, call: StepCall, tracker: LiveBytes | None, recorder: RunRecorder | None) -> None:
        """Move all tensors to where the plan of the next micro-batch begins."""
        part = call.parts[call.number]
        # Plan it, and move residents to or from the store.
        if call.number == 0:
            self._plans.share_buffers(part)
            call.last = self._plans.compile_all(call.parts, call.inputs)
        if call.last is None:
            compiled = self._plans.compile(part, call.inputs, last=call.number == len(call.parts) - 1)
        elif call.number + call.last.micro_batches == len(call.parts):
            compiled = call.last
        else:
            compiled = self._plans.compile_before(call.last, part, call.inputs)
        self._check_room_for_hooks(call, compiled)
        if call.number == 0 and self._state.sums:
            self._state.forget_sums(of_others_than=frozenset(compiled.takes))
        if self._state.engine is not None:
            self._state.engine.recorder = recorder
            self._move(compiled, self._state.engine)
        # Collect the program's arguments.
        tensors = [t for of in call.parts[call.number :][: compiled.micro_batches] for t in batches.tensors(of)]
        if self._plans.options.backend == "inductor":
            from overspill.runtime.compiled.inductor import align  # noqa: PLC0415 - seconds to import

            align(tensors, range(len(tensors)))
        given = [*self._state.buffers.values(), *tensors]
        args = [self._argument(compiled.takes[position], given) for position in compiled.stretch.plain]
        args += compiled.borrowed(self._state.residency).take(self._state.engine)
        if recorder is not None:
            recorder.given(compiled.plan.graph, compiled.program.held, args)
            recorder.there(tree_flatten(call.inputs)[0], TensorKind.INPUT)
        if tracker is not None:
            tracker.add([*args, *tree_flatten(call.inputs)[0], call.loss])
        if compiled.rows is not None:
            call.drawn = randomness()
        call.compiled, call.run = compiled, ProgramRun(compiled.program, args)

    def _argument(self, what: str | int, given: Sequence[Any]) -> Any:
        """Return an input of the program that does not move."""
        if isinstance(what, int):
            return given[what]
        residents = self._state.residency.residents
        return residents[what].here if what in residents else local_of(self._state.parameters[what]).data

    def _move(self, compiled: Compiled, engine: TransferEngine) -> None:
        if self._state.from_host:
            self._state.residency.hold(engine)
        idle = {name for name in compiled.idle if self._state.residency[name].here is not None}
        residency, apart = self._state.residency, self._state.holders.apart
        while apart:  # one at a time, for the memory that they are parts of is free when the last has left
            residency.send({apart.pop()} & residency.residents.keys(), engine)
        sent = residency.send(compiled.at(Place.STORE) | compiled.kept_in_store | idle, engine)
        self._make_space(compiled, engine)
        if sent and self._state.where.type == "cpu":
            give_back()  # a model may have been built where the heap keeps what it frees
        places = compiled.plan.places
        nbytes = 0 if places is None else places.arena_bytes
        both = compiled.at(Place.BOTH)
        settle(self._state.residency, self._plans.arena, nbytes, compiled.between, engine, self._state.where, both)
        compiled.borrowed(self._state.residency).bring(engine)

    def _make_space(self, compiled: Compiled, engine: TransferEngine) -> None:
        """Let state that only a later micro-batch uses go on to the disk, if host memory does not hold it too."""
        if (tiers := compiled.plan.tiers) is None:
            return
        kept = [self._state.residency[name] for name in compiled.kept_in_store]
        if tiers.host_peak_bytes + sum(resident.spec.nbytes for resident in kept) > tiers.host_budget_bytes:
            for handle in (resident.handle for resident in kept if resident.handle is not None):
                engine.to_disk(handle)

    def _check_room_for_hooks(self, call: StepCall, compiled: Compiled) -> None:
        """Raise UnsupportedError if step post-hooks need more than the budget.

        They read all weights and state, which must then be on the device.
        """
        if not any(map(step_post_hooks, self._state.optimizers)):
            return
        needed = self._state.whole_bytes() + batches.bytes_outside(call.inputs, ()) + LOSS_BYTES
        if needed > compiled.plan.budget_bytes:
            needs, budget = format_apart(needed, compiled.plan.budget_bytes)
            raise UnsupportedError(
                f"step post-hooks are there to see all weights and state, which take {needs} of a budget of {budget}; "
                "remove them, and do it behind step(...)"
            )

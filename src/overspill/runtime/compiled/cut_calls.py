"""Run the stretches of a step that is cut where the user's code runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from overspill.capture.compiled.cut_step import CapturedCutStep
from overspill.capture.compiled.joint import storages
from overspill.pytorch.dispatch import disable_current_modes
from overspill.runtime.driver import Form, LoweredProgram, ProgramRun
from overspill.runtime.recording.instrument import instrumented
from overspill.runtime.recording.recorder import RunRecorder
from overspill.runtime.step.parameter_state import ParameterState
from overspill.runtime.step.residency import Spec
from overspill.runtime.stretches import Place, Stretch

from .loop_state import LoopState, trace_what_is_away
from .stored_gradient import StoredGradient


class CutCalls:
    """Forward and backward of one planned graph, whose residents are in a LoopState."""

    def __init__(
        self, captured: CapturedCutStep, stretches: Sequence[Stretch], state: LoopState, names: dict[int, str]
    ) -> None:
        self._graph = captured.graph
        self._state = state
        self._stretches = stretches
        _STATES.add(state)
        self.programs = [LoweredProgram(stretch.module) for stretch in stretches]
        self._names = names
        """Of residents, by tensor."""
        specs = {
            captured.tensor_of[storages(made)[0]]: made.meta["val"] for made in captured.made.values()
        }
        self._gradients: list[Spec | None] = []
        for node in captured.joint.backward_outputs:
            value = specs.get(captured.tensor_of[storages(node)[0]]) if isinstance(node, fx.Node) else None
            device = captured.joint.device
            self._gradients.append(
                None if value is None else Spec(value.size(), value.stride(), value.dtype, device)
            )

    @property
    def fore(self) -> Stretch:
        """The stretch of forward."""
        return self._stretches[0]

    def forward(self, args: list[Any], recorder: RunRecorder | None) -> Sequence[Any]:
        """Return the results for the caller, and what backward needs."""
        self._state.gate.alone(self._state.look)
        trace_what_is_away()
        return self._run(0, args, recorder)

    def backward(self, args: list[Any], recorder: RunRecorder | None) -> Sequence[Any]:
        """Return the gradients; those that leave the device are in the store."""
        made = self._run(1, args, recorder)
        engine = self._state.engine
        assert engine is not None
        for position, (one, spec) in enumerate(zip(made, self._gradients, strict=True)):
            if spec is not None and _is_handle(one, spec):
                made[position] = StoredGradient(engine.view(one, spec.size, spec.stride, spec.dtype), spec, engine)
        return made

    def _run(self, number: int, args: list[Any], recorder: RunRecorder | None) -> list[Any]:
        return self._state.gate.alone(lambda: self._carry_out(number, args, recorder))

    def _carry_out(self, number: int, args: list[Any], recorder: RunRecorder | None) -> list[Any]:
        stretch, program, state = self._stretches[number], self.programs[number], self._state
        residents = state.residency.residents
        with disable_current_modes():
            self._settle(stretch)
        given = [args[position] for position in stretch.plain]
        args.clear()
        for tensor, place in stretch.takes:
            resident = residents[self._names[tensor]]
            if tensor in stretch.lent:
                given.append(resident.here)
            elif place is Place.DEVICE:
                given.append(resident.take())
            elif place is Place.STORE:
                given.append(resident.take_handle())
            else:
                given += [resident.take(), resident.take_handle()]
        if recorder is not None:
            recorder.given(self._graph, program.held, given)
        told = None if recorder is None else instrumented(program, self._graph, recorder)
        run = ProgramRun(program, given)
        del given
        try:
            results = list(run.go_on(state.gate.may_go_on, told))
        except BaseException:
            self._take_back(run, stretch)
            raise
        made, rest = results[: stretch.own], iter(results[stretch.own :])
        results.clear()
        for tensor, place in stretch.gives:
            resident = residents[self._names[tensor]]
            if place is not Place.STORE:
                resident.put(next(rest))
            if place is Place.STORE:
                resident.stored(next(rest))
            elif place is Place.BOTH:
                data, resident.handle = resident.take(), next(rest)
                resident.hidden = data
        return made

    def _settle(self, stretch: Stretch) -> None:
        """Move all residents to where the plan has them as the stretch begins."""
        residency, engine = self._state.residency, self._state.engine
        assert engine is not None
        places = {self._names[t]: place for t, place in stretch.before.items() if t in self._names}
        residency.send((name for name, place in places.items() if place is Place.STORE), engine)
        taken = [(self._names[t], place) for t, place in stretch.takes]
        residency.bring((name for name, place in taken if place is Place.DEVICE), engine)
        residency.copy([name for name, place in taken if place is Place.BOTH], engine)

    def _take_back(self, run: ProgramRun, stretch: Stretch) -> None:
        """Give residents back what a run that an error stopped has of them."""
        first, positions = len(stretch.plain), {}
        for tensor, place in stretch.takes:
            if tensor not in stretch.lent:
                positions[first] = self._names[tensor]
            first += 1 + (place is Place.BOTH)
        for position, (form, value) in run.give_up(positions, self._state.engine).items():
            resident = self._state.residency[positions[position]]
            if form is Form.HANDLE:
                resident.stored(value)
            else:
                resident.put(value)


def _is_handle(made: Tensor, spec: Spec) -> bool:
    return made.dtype is not spec.dtype or made.device != spec.device or made.size() != spec.size


# -- updates

def update(state: LoopState, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Update what `optimizer` has of a model, parameter by parameter; return these with their gradients."""
    updates = next((of for of in state.updates if of.optimizer is optimizer), None)
    if updates is None:
        return []
    state.look()
    if updates.at_once:
        state.synchronize()
        return []
    done = []
    engine = state.engine
    assert engine is not None
    for name, owned in state.owned.items():
        parameter = state.parameters[name]
        if owned.updates is not updates or parameter.grad is None:
            continue
        gradient, parameter.grad = parameter.grad, None
        done.append((parameter, gradient))
        with gradient.read() if isinstance(gradient, StoredGradient) else nullcontext(gradient) as lent:
            _update_one(state, owned, lent)
    updates.finish()
    state.arm()
    return done


def _update_one(state: LoopState, owned: ParameterState, gradient: Tensor) -> None:
    """Update one parameter; what was away goes back to the store."""
    engine, name = state.engine, owned.name
    assert engine is not None
    names = [n for n in (name, *owned.residents()) if n in state.residency]
    away = [n for n in names if state.residency[n].away]
    state.residency.bring(names, engine)
    data = state.residency[name].take() if name in state.residency else state.parameters[name].data
    given = [owned.resident(path).take() for path in owned.leaves]
    owned.run(data, gradient, None, *given)
    if name in state.residency:
        state.residency[name].put(data)
    for path, tensor in zip(owned.leaves, given, strict=True):
        owned.resident(path).put(tensor)
    del data, given
    state.guard()
    state.residency.send(away, engine)


def _step_begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what `optimizer` is asked to do, for the models whose state may be away; what is left it does itself."""
    states = [state for state in list(_STATES) if any(of.optimizer is optimizer for of in state.updates)]
    if not states:
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for state in states:
        kept = state.gate.alone(lambda state=state: update(state, optimizer))
        if kept:
            _STEPPING.setdefault(id(optimizer), []).extend(kept)
    return None if closure is None else ((optimizer, lambda: loss), {})


def _step_ends(optimizer: Optimizer, *_: Any) -> None:
    for parameter, gradient in _STEPPING.pop(id(optimizer), ()):
        parameter.grad = gradient


_STATES: weakref.WeakSet[LoopState] = weakref.WeakSet()
_STEPPING: dict[int, list[tuple[Tensor, Tensor]]] = {}
"""Gradients that are hidden from an optimizer whose step is under way, by its identity: they have been used."""
register_optimizer_step_pre_hook(_step_begins)
register_optimizer_step_post_hook(_step_ends)

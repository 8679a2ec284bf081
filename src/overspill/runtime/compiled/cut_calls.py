"""Run the stretches of a step that is cut where the user's code runs."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from overspill.capture.compiled.cut_step import CapturedCutStep
from overspill.capture.compiled.joint import storages
from overspill.core.errors import OverspillError, RequestError, UnsupportedError
from overspill.pytorch.dispatch import disable_current_modes
from overspill.runtime.cuts import Place
from overspill.runtime.driver import LoweredProgram, ProgramRun
from overspill.runtime.lower import Stretch, gradient_places
from overspill.runtime.optimizer_outside import Outside
from overspill.runtime.optimizer_step import is_own
from overspill.runtime.recording.instrument import instrumented
from overspill.runtime.recording.recorder import RunRecorder
from overspill.runtime.step.borrowed import Borrowed
from overspill.runtime.step.host_updates import tell_of_others
from overspill.runtime.step.parameter_state import ParameterState
from overspill.runtime.step.residency import Spec, is_dense, readable
from overspill.runtime.transfer.engine import TransferEngine

from .loop_optimizers import in_order
from .loop_state import LoopState, bring_for, states
from .stored_gradient import StoredGradient
from .traced_away import trace_what_is_away


class CutCalls:
    """The stretches of one planned graph: forward, backward and update. `state` has its residents.

    `residents` are their names by tensor, `owners` the names of parameters by their position among the inputs, and
    `on_host` those that the host updates, which are to be all if `on_host_alone`.
    """

    def __init__(
        self,
        captured: CapturedCutStep,
        stretches: Sequence[Stretch],
        state: LoopState,
        residents: dict[int, str],
        owners: dict[int, str],
        on_host: Iterable[int] = (),
        *,
        on_host_alone: bool = False,
    ) -> None:
        self._graph = captured.graph
        self._state_now = weakref.ref(state)
        self._stretches = stretches
        self._names = residents
        self._fixed = {name for name in owners.values() if name not in set(residents.values())}
        """Parameters of the graph that its plan has on the device."""
        self.programs = [LoweredProgram(stretch.module) for stretch in stretches]
        # Gradients: how autograd gets those that leave, and which parameters the update is of.
        device = captured.joint.device
        self._specs = {position: _spec(node.meta["val"], device) for position, node in captured.made.items()}
        by_node = {node: position for position, node in captured.made.items()}
        self._returned = [by_node.get(n) if isinstance(n, fx.Node) else None for n in captured.joint.backward_outputs]
        self._updated = {position: owners[position] for position in captured.read}
        self._gradients = gradient_places(captured, stretches[-1].before)
        """Where the planned update takes gradients, by the position of the parameter."""
        self._given = {
            position: residents[captured.tensor_of[storages(node)[0]]]
            for position, node in enumerate(captured.given) if captured.moves(node)
        }  # fmt: skip
        """Residents among the inputs of forward, by position."""
        self._owned = {name: state.owned[name] for name in self._updated.values()}
        """What the planned updates are of."""
        self._on_host = [owners[position] for position in on_host]
        """The parameters that the host updates."""
        if on_host_alone:
            tell_of_others(self._on_host, self._updated.values())

    @property
    def _state(self) -> LoopState:
        if (state := self._state_now()) is None or state.is_released:
            raise OverspillError("the session has been closed, or its parameters replaced, since this was planned")
        return state

    @property
    def fore(self) -> Stretch:
        """The stretch of forward."""
        return self._stretches[0]

    def forward(self, args: list[Any], recorder: RunRecorder | None) -> Sequence[Any]:
        """Return the results for the caller, and what backward needs."""
        state = self._state
        state.check_whole()
        if not state.in_force:
            state.enter()
        state.begin_graph()
        for position, name in self._given.items():  # which Dynamo has no guards on
            if name in state.residency and args[position] is not state.residency[name].tensor:
                raise OverspillError(f"{readable(name)} was replaced; compile the model again")
        trace_what_is_away()
        self._put_gradients_away()
        bring_for(args[position] for position in self._stretches[0].plain)
        state.kept |= self._fixed  # also while stretches of other graphs run
        state.is_between |= len(self._stretches) > 1
        return self._run(0, args, recorder)

    def backward(self, args: list[Any], recorder: RunRecorder | None) -> Sequence[Any]:
        """Return the gradients; those that leave the device are in the store."""
        self._put_gradients_away()  # of other graphs and calls
        made = self._run(1, args, recorder)
        state, engine = self._state, self._engine
        waiting = state.waiting()
        for number, position in enumerate(self._returned):
            if position is None:
                continue
            one, spec = made[number], self._specs[position]
            if _is_handle(one, spec):
                made[number] = StoredGradient(engine.view(one, spec.size, spec.stride, spec.dtype), spec, engine)
            elif waiting and self._updated.get(position, "") in state.residency and _owns_memory(one):
                made[number] = StoredGradient.of(one, engine)  # to which autograd may add the other call's
        if waiting:  # other backwards, and code of the user's before them: their plans have room for what is theirs
            own = [n for n in self._names.values() if n in state.residency and not state.stays(n)]
            state.gate.alone(lambda: state.residency.send(own, engine))
        if self not in state.latest:
            state.latest.append(self)
        state.has_gone_back()
        return made

    def updates(self, optimizer: Optimizer) -> bool:
        """Return whether the planned update is what a step of `optimizer` is to do now with its parameters."""
        state = self._state
        if len(self._stretches) < 3 or any(state.owned.get(name) is not owned for name, owned in self._owned.items()):
            return False  # the optimizer, its settings or its state are others than when this was planned
        if any(not owned.updates.is_of(optimizer) for owned in self._owned.values()):
            return False
        if any(self._names[tensor] not in state.residency for tensor in self._stretches[2].takes):
            return False  # somebody has a view of one by now
        return all(_is_there(state.parameters[name].grad) for name in self._updated.values())

    @property
    def updated(self) -> Collection[str]:
        """The names of the parameters that the planned update is of."""
        return self._updated.values()

    def update(self, recorder: RunRecorder | None) -> list[tuple[Tensor, Tensor]]:
        """Update the parameters of the graph; return them with what is left of their gradients."""
        self._put_gradients_away(besides=self.updated)
        args: list[Any] = []
        left = []
        try:
            for position, place in self._gradients.items():
                args += self._gradient(position, place)
                parameter = self._state.parameters[self._updated[position]]
                left.append((parameter, parameter.grad))
                parameter.grad = None
            fixed = [self._state.parameters[name] for name in self._updated.values() if name in self._fixed]
            bring_for(fixed)  # which the update of another graph may have sent away
            args += [parameter.data for parameter in fixed]
            if self._on_host:
                self._state.begin_updates(self._on_host)
            self._run(2, args, recorder)
            self._state.updates_begun(self._on_host)
        finally:
            for name in self._updated.values():
                self._state.owned[name].factors = ()
        for _, gradient in left:
            if isinstance(gradient, StoredGradient):
                self._state.leave(gradient)
        return left

    def _gradient(self, position: int, place: Place) -> list[Tensor]:
        """Return the gradient of a parameter as the update takes it, on the device or by its handle, or both.

        Its memory on the device is the update's. What is left for the loop is in the store, or nothing where the loop
        is known to drop gradients behind each step.
        """
        name, state = self._updated[position], self._state
        parameter = state.parameters[name]
        gradient = parameter.grad
        assert gradient is not None
        stored = isinstance(gradient, StoredGradient) and gradient.is_stored
        if place is Place.DEVICE and state.drops_gradients and not stored:
            data = gradient.take() if isinstance(gradient, StoredGradient) else gradient
            parameter.grad = StoredGradient.spent(Spec.of(data))
            return [data]
        data = gradient.take() if isinstance(gradient, StoredGradient) and not stored else gradient.detach()
        if not isinstance(data, StoredGradient):
            if place is Place.DEVICE and not _owns_memory(data):
                return [data]
            kept = _stored(data, self._engine)
            if _owns_memory(data):  # else it is a part of a bucket, and stays one
                parameter.grad = kept
            if place is not Place.STORE:
                return [data] if place is Place.DEVICE else [data, kept.lend()[0]]
        else:
            kept = gradient
        if place is Place.DEVICE:
            with kept.read() as value:
                return [value]
        handle, state.owned[name].factors = kept.lend()  # the update multiplies what it gets of either place
        self._engine.await_offload(handle)
        if place is Place.STORE:
            return [handle]
        return [self._engine.await_prefetch(self._engine.prefetch(handle)), handle]

    def _put_gradients_away(self, besides: Iterable[str] = ()) -> None:
        """Send gradients that are there to the store, but for those of this graph that may not leave."""
        stay = {name for position, name in self._updated.items() if position not in self._specs}.union(besides)
        for name, parameter in self._state.parameters.items():
            gradient = parameter.grad
            if name in stay or name not in self._state.residency:
                continue
            if gradient is not None and not isinstance(gradient, StoredGradient) and _owns_memory(gradient):
                parameter.grad = StoredGradient.of(gradient, self._engine)

    @property
    def _engine(self) -> TransferEngine:
        engine = self._state.engine
        assert engine is not None
        return engine

    def _run(self, number: int, args: list[Any], recorder: RunRecorder | None) -> list[Any]:
        return self._state.gate.alone(lambda: self._carry_out(number, args, recorder))

    def _carry_out(self, number: int, args: list[Any], recorder: RunRecorder | None) -> list[Any]:
        stretch, program, state = self._stretches[number], self.programs[number], self._state
        borrowed = Borrowed(stretch, self._names, state.residency, state.stays)
        # Residents to where the stretch begins; then they are the program's.
        with disable_current_modes():
            self._settle(stretch)
            borrowed.bring(self._engine)
        given = [args[position] for position in stretch.plain]
        args.clear()
        given += borrowed.take(self._engine)
        told = None
        if recorder is not None:
            recorder.given(self._graph, program.held, given)
            told = instrumented(program, self._graph, recorder)
        run = ProgramRun(program, given)
        del given
        try:
            results = list(run.go_on(state.gate.may_go_on, told))
        except BaseException:
            borrowed.take_back(run, state.engine)
            raise
        made, rest = results[: stretch.own], results[stretch.own :]
        results.clear()
        borrowed.give(rest)
        return made

    def _settle(self, stretch: Stretch) -> None:
        """Send all residents to the store that the plan has there as the stretch begins."""
        residency = self._state.residency
        if gone := [name for t in stretch.takes if (name := self._names[t]) not in residency]:
            raise OverspillError(f"{gone[0]} was replaced between forward and backward, or a view of it is kept now")
        places = {self._names[t]: place for t, place in stretch.before.items() if t in self._names}
        stay = {name for name, place in places.items() if place is not Place.STORE} | self._fixed
        away = [name for name in residency.residents if name not in stay and not self._state.stays(name)]
        residency.send(away, self._engine)


def _spec(value: Tensor, device: torch.device) -> Spec:
    return Spec(value.size(), value.stride(), value.dtype, device)


def _stored(gradient: Tensor, engine: TransferEngine) -> StoredGradient:
    """Return a copy of a gradient in the store."""
    return StoredGradient.of(gradient if _owns_memory(gradient) else gradient.clone(), engine)


def _is_there(gradient: Tensor | None) -> bool:
    return gradient is not None and not (isinstance(gradient, StoredGradient) and gradient.is_spent)


def _owns_memory(gradient: Tensor) -> bool:
    """Return whether a gradient is no view of larger memory, such as a bucket of DistributedDataParallel."""
    alone = type(gradient) is Tensor and gradient.nbytes == gradient.untyped_storage().nbytes()
    return alone and not gradient.requires_grad and is_dense(gradient)


def _is_handle(made: Tensor, spec: Spec) -> bool:
    return made.dtype is not spec.dtype or made.device != spec.device or made.size() != spec.size


# -- updates


def update(state: LoopState, optimizer: Optimizer) -> list[tuple[Tensor, Tensor]]:
    """Do a step of `optimizer` on the parameters of `state`; return these with their gradients, which it has used."""
    updates = next(of for of in state.updates if of.is_of(optimizer))
    state.check_whole()
    state.end_reads({name for name, owned in state.owned.items() if owned.updates is updates})
    state.look()
    if updates.at_once:
        state.synchronize()
        return []
    done = []
    state.is_torn = True
    rest = {n for n, owned in state.owned.items() if owned.updates is updates and state.parameters[n].grad is not None}
    try:
        for calls in state.latest:
            if rest.issuperset(calls.updated) and calls.updates(optimizer):
                done += calls.update(None)
                rest.difference_update(calls.updated)
        for name in [name for name in state.owned if name in rest]:
            parameter = state.parameters[name]
            gradient = parameter.grad
            assert gradient is not None
            done.append((parameter, gradient))
            if not _update_one_on_host(state, state.owned[name], gradient):
                with gradient.read() if isinstance(gradient, StoredGradient) else nullcontext(gradient) as lent:
                    _update_one(state, state.owned[name], lent)
            parameter.grad = None
            if isinstance(gradient, StoredGradient):
                state.leave(gradient)
            else:
                state.reads_unseen = True
    finally:
        updates.finish()
        state.arm()
    state.is_torn = False
    return done


def _update_one_on_host(state: LoopState, owned: ParameterState, gradient: Tensor) -> bool:
    """Start the update of one parameter on the host, if updates are to be there and it can; return whether it does."""
    engine, names = state.engine, [owned.name, *(f"{owned.name}.{path}" for path in owned.leaves)]
    assert engine is not None
    if not state.updates_on_host or not all(n in state.residency and not state.stays(n) for n in names):
        return False
    state.residency.send(names, engine)
    kept = gradient if isinstance(gradient, StoredGradient) and gradient.is_stored else _stored(gradient, engine)
    lent, owned.factors = kept.lend()
    written = [handle for name in names if (handle := state.residency[name].handle) is not None]

    def run(data: Tensor, *given: Tensor) -> None:
        *leaves, of = given
        owned.run(data, of, None, *leaves)

    state.begin_updates([owned.name])
    engine.update(readable(owned.name), run, [*written, lent], written)
    engine.end_step()
    state.updates_begun([owned.name])
    owned.factors = ()
    return True


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


def _takes_in(state: LoopState, optimizer: Optimizer) -> bool:
    """Return whether `state` has parameters of `optimizer`, which may be new to it."""
    if any(of.is_of(optimizer) for of in state.updates):
        return True
    if not state.owns_any(optimizer):
        return False
    try:
        state.add(optimizer)
    except (RequestError, UnsupportedError):
        state.gate.alone(state.synchronize)
        return False
    return True


def _states_with(optimizer: Optimizer) -> list[LoopState]:
    return [state for state in states() if state.in_force and _takes_in(state, optimizer)]


def _step_begins(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what `optimizer` is asked to do, for the models whose state may be away; what is left it does itself."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")  # the first is the optimizer
    loss = None
    states_ = _states_with(optimizer)
    # A plan of the first step is made in its closure, which all of torch.optim but LBFGS call before anything else.
    if closure is not None and (states_ or (is_own(optimizer) and not isinstance(optimizer, torch.optim.LBFGS))):
        with torch.enable_grad():
            loss = closure()
        states_ = _states_with(optimizer)
    elif not states_:
        return None
    used = [pair for state in states_ for pair in update(state, optimizer)]
    if used:  # the step that follows finds no gradients nor state of theirs, and is to leave no traces outside of it
        its_own = is_own(optimizer)
        hidden = {} if its_own else {p: optimizer.state.pop(p) for p, _ in used if p in optimizer.state}
        _STEPPING[id(optimizer)] = used, hidden, None if its_own else Outside(optimizer)
    return None if closure is None else ((optimizer, lambda: loss), {})


def _step_ends(optimizer: Optimizer, *_: Any) -> None:
    if (found := _STEPPING.pop(id(optimizer), None)) is None:
        return
    used, hidden, outside = found
    for parameter, gradient in used:
        parameter.grad = gradient
    if outside is not None:
        for parameter, _ in used:
            optimizer.state.pop(parameter, None)
        optimizer.state.update(hidden)
        in_order(optimizer)
        outside.restore()


_STEPPING: dict[int, tuple[list[tuple[Tensor, Tensor]], dict[Tensor, Any], Outside | None]] = {}
"""For an optimizer whose step is under way, by its identity: gradients that have been used and the state of their
parameters, which it does not see, and what it had outside of that."""


@cache
def watch_optimizers() -> None:
    """Do the steps of optimizers from now on, where they have parameters that may be away."""
    register_optimizer_step_pre_hook(_step_begins)
    register_optimizer_step_post_hook(_step_ends)

"""Captures of a compiled model's graphs in which parameters, gradients and optimizer state may move."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer

from overspill.capture.compiled.cut_step import Build, CapturedCutStep, capture_cut_step
from overspill.capture.compiled.graph import Captured, InputInfo, Surroundings
from overspill.capture.compiled.joint import JointGraph, input_of, storages
from overspill.capture.compiled.whole_step import GradientOps, ParameterUpdate, StateInfo
from overspill.core import TensorKind
from overspill.core.errors import OverspillError, RequestError, UnsupportedError
from overspill.core.units import format_apart, format_bytes
from overspill.pytorch.dispatch import disable_current_modes, no_python_dispatcher
from overspill.pytorch.dynamo import forget_guarded_objects, same_object
from overspill.pytorch.fake_tensors import FakeTensorMode
from overspill.runtime.options import PLANNED, Options
from overspill.runtime.step.away import GUARDS
from overspill.runtime.step.from_host import move_buffers
from overspill.runtime.step.inner_tensors import inner_tensors
from overspill.runtime.transfer.engine import TransferEngine, first_line

from .loop_optimizers import apart
from .loop_state import LoopState
from .sharded import Whole
from .traced_away import trace_what_is_away
from .weak_references import WeakReferences

_LOG = logging.getLogger("overspill")
MOVES_PARAMETERS = "auto"
"""The policy by which parameters move in a loop."""
Parameters = Mapping[int, weakref.ref[Tensor]]
"""Parameters, and tensors that they have, among the inputs of Dynamo's graph, by number."""


class LoopPlans:
    """Makes the LoopState of a session, and captures graphs around it."""

    def __init__(self, followed: WeakReferences, options: Options) -> None:
        self.state: LoopState | None = None
        self.may_move = str(options.policy).partition(":")[0] == MOVES_PARAMETERS
        """Whether parameters may leave the device: not where Dynamo's own guards on them are in force."""
        self.why_not = "" if self.may_move else f"policy {options.policy} plans for a loop with them there"
        """Why parameters stay on the device, if they do."""
        if self.may_move and options.placement == PLANNED:
            self.may_move, self.why_not = False, "placement='planned' has no addresses for them; leave it out"
        self.updates_on_host = options.updates_on_host
        """Whether each update is to be on the host: a plan with parameters on the device is none then."""
        self.from_host_to: torch.device | None = None
        """The device of models that begin in host memory."""
        self._told = False
        self._followed = followed
        self._signature: list[Any] = []
        self._places: weakref.WeakKeyDictionary[nn.Module, list[int]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # a search for plans on a card captures in several threads
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @contextmanager
    def staying(self) -> Iterator[None]:
        """Keep parameters on the device in plans that are made within the context."""
        before, self.may_move = self.may_move, False
        try:
            yield
        finally:
            self.may_move = before

    @property
    def is_in_force(self) -> bool:
        """Whether plans move parameters."""
        return self.state is not None and self.state.in_force

    def name(self, module: nn.Module) -> None:
        """Let parameters of `module` have their names there, and its state dicts what is away from the store."""
        if module in self._modules:
            return
        self._modules.add(module)
        module.register_state_dict_pre_hook(_Saving(self, begins=True))
        module.register_state_dict_post_hook(_Saving(self, begins=False))

    def begin_on_host(self, engine: TransferEngine, number: int) -> None:
        """Take the parameters of the models from host memory by the store of `engine`. Raises OverspillErrors."""
        state = self._state_of([])
        if state is None:
            raise UnsupportedError(f"device= moves a model from the CPU, and its parameters cannot: {self.why_not}")
        state.engine, state.engine_number = engine, number
        for module in self._modules:
            move_buffers(module, state.where)
        state.enter()
        state.gate.alone(state.look)
        state.begin_call()
        self._signature = _signature(state)

    def begin(self) -> bool:
        """Return whether parameters or optimizers are no longer as plans were made for, before a call of a model."""
        state = self.state
        if state is None or not state.in_force:
            return False
        before, now = self._signature, _signature(state)
        replaced = any(places != _places_of(module) for module, places in self._places.items())
        if replaced or [spec for spec, _ in before] != [spec for spec, _ in now]:
            self.close()  # others, or of another size or dtype: they get another state
            for module in self._modules if replaced else ():
                self._followed.follow(module.parameters())
            return True
        state.gate.alone(state.look)
        state.begin_call()
        self._signature = _signature(state)  # whoever has a view of a parameter now keeps it on the device
        changed = state.stale or before != self._signature
        state.stale = False
        return changed

    def tell_of_more_than(self, budget_bytes: int) -> None:
        """Log once if the loop's own code has left more than the budget on the device, before a call of a model."""
        state = self.state
        if self._told or state is None or not state.in_force or state.was_asked:
            return
        there = state.there()
        if (total := sum(there.values())) <= budget_bytes:
            return
        self._told = True
        kinds = Counter[str]()
        for name, nbytes in there.items():
            owner = next((n for n in state.parameters if name.startswith(f"{n}.")), name)
            kinds["weights" if owner == name else name.removeprefix(f"{owner}.")] += nbytes
        what = ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in kinds.most_common(4))
        taken, budget = format_apart(total, budget_bytes)
        _LOG.warning(
            "the loop's own code has left %s on the device (%s), more than the budget of %s: that holds for calls of "
            "the model and for optimizer.step() alone",
            taken,
            what,
            budget,
        )

    def captures(
        self,
        joint: JointGraph,
        inputs: Sequence[InputInfo],
        parameters: Parameters,
        around: Surroundings,
        plain: Callable[[], Iterable[Captured]],
        build: Build = capture_cut_step,
    ) -> Iterator[Captured]:
        """Yield the captures of `joint`: the `plain` ones, then that with all that may move, by `build`.

        Once parameters move, it is only the last, as for the session's other graphs.
        """
        in_force = self.is_in_force
        on_host = self.updates_on_host and bool(joint.backward_outputs) and bool(self._followed.stepping())
        if not (in_force or on_host):
            yield from plain()
        if (moving := self._captured(joint, inputs, parameters, around, build)) is not None:
            yield moving
        elif on_host:
            raise UnsupportedError(f'update="host" of a loop whose parameters cannot leave the device: {self.why_not}')
        elif in_force:
            yield from plain()

    def is_left_out(self, optimizer: Optimizer) -> bool:
        """Return whether plans were made before `optimizer` was there, which is to update on the host."""
        return self.updates_on_host and not self.is_in_force and self._followed.updated_by(optimizer)

    def _captured(
        self, joint: JointGraph, inputs: Sequence[InputInfo], parameters: Parameters, around: Surroundings, build: Build
    ) -> CapturedCutStep | None:
        """Return the graph with all that may move, or None if parameters have to stay."""
        here = [*_persistent(joint, parameters).values()]
        with self._lock:
            with disable_current_modes():
                state = self._state_of(here)
            return None if state is None else self._capture(state, joint, inputs, parameters, around, here, build)

    def _capture(
        self,
        state: LoopState,
        joint: JointGraph,
        inputs: Sequence[InputInfo],
        parameters: Parameters,
        around: Surroundings,
        here: Sequence[Tensor],
        build: Build,
    ) -> CapturedCutStep:
        joint = joint.copied()
        own = _persistent(joint, parameters)
        infos = [_info(node, inputs) for node in joint.primals]
        fixed = {k for n in joint.forward_outputs if hasattr(n, "meta") for k in storages(n)} | joint.mutated_storages
        ops: list[ParameterUpdate] = []
        mode = joint.fake_mode
        for position, node in enumerate(joint.primals):
            if (parameter := own.get(position)) is None:
                continue
            name = state.name_of(parameter)
            moves = name in state.residency and name not in state.pinned and fixed.isdisjoint(storages(node))
            moves &= all(len(joint.roots[key]) == 1 for key in storages(node))  # else another input has its memory
            infos[position] = replace(infos[position], movable=moves and node.meta["val"].is_contiguous())
            if joint.backward_outputs and state.trains(name):
                ops.append(_update(state, name, position, mode))
        with disable_current_modes():  # tensors that optimizers keep are real ones
            rest = state.rest_bytes()
        # What the user's code has read since the call began does not move before its backward, but in later steps.
        known = self._signature if state.in_force else []
        state.stale, self._signature = False, [*known, *_signature(state)[len(known) :]]
        for module in self._modules:
            self._places[module] = _places_of(module)
        return build(joint, infos, GradientOps(tuple(ops)), _without_residents(around, state, here, rest))

    def names(self, captured: CapturedCutStep, parameters: Parameters) -> tuple[dict[int, str], dict[int, str]]:
        """Return the names of the residents of a captured graph, by tensor, and of parameters, by position."""
        assert self.state is not None
        own = _persistent(captured.joint, parameters)
        residents: dict[int, str] = {}
        owners: dict[int, str] = {}
        for position, node in enumerate(captured.given):
            if (parameter := own.get(position)) is None:
                continue
            owners[position] = name = self.state.name_of(parameter)
            if captured.moves(node):
                residents[captured.tensor_of[storages(node)[0]]] = name
            if states := captured.states.get(position):
                for path, of in zip(self.state.owned[name].leaves, states, strict=True):
                    residents[captured.tensor_of[storages(of)[0]]] = f"{name}.{path}"
        return residents, owners

    def _state_of(self, here: Sequence[Tensor]) -> LoopState | None:
        """Return the state that knows all tensors `here`."""
        if not self.may_move:
            return None
        if self.state is not None and self.state.in_force and all(p in self.state for p in here):
            return self.state
        named = self._named(here)
        if self.state is not None and self.state.in_force:
            self.state.take_in(named, apart(self._followed.stepping()))
            self.state.wrap(self._followed.parameters)
            return self.state
        optimizers = apart(self._followed.stepping())
        try:
            if self.state is not None and self.state.is_of(named, optimizers):
                self.state.take_hold()  # plans that were found with it have its updates
            else:
                self.state = LoopState(named, optimizers, self.from_host_to)
                trace_what_is_away()
                self.state.updates_on_host = self.updates_on_host
        except (RequestError, UnsupportedError) as error:
            self.why_not, self.state = str(error), None
            return None
        if found := next((of for of in self.state.updates if of.at_once), None):
            self.why_not = f"{type(found.optimizer).__name__} updates all parameters in one call"
            self.state = None
        else:
            self.why_not = ""
            self.state.wrap(self._followed.parameters)
        return self.state

    def _named(self, here: Sequence[Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all parameters by name: those inside of subclasses that are frozen."""
        names = {id(p): n for module in self._modules for n, p in module.named_parameters()}
        own = {id(p): p for p in self._followed.parameters if isinstance(p, nn.Parameter)}
        found: dict[int, tuple[str, Tensor]] = {}
        for number, (key, parameter) in enumerate(own.items()):
            name = names.get(key, f"parameter {number}")
            whole = parameter.requires_grad or self.from_host_to is not None
            for path, tensor in {"": parameter}.items() if whole else inner_tensors(parameter).items():
                found[id(tensor)] = f"{name}.{path}" if path else name, tensor
        for tensor in here:
            found.setdefault(id(tensor), (f"parameter {len(found)}", tensor))
        named: dict[str, Tensor] = {}
        for number, (name, tensor) in enumerate(found.values()):
            named[name if name not in named else f"{name} ({number})"] = tensor  # of several models
        return named

    def buffers(self) -> Iterator[Tensor]:
        """Yield the buffers of the models."""
        return (buffer for module in self._modules for buffer in module.buffers())

    def park(self) -> int:
        """Move all that may move to the store, and return its bytes. Raises StoreError."""
        state = self.state
        if state is None or not state.in_force or state.engine is None:
            return 0
        engine = state.engine
        return state.gate.alone(lambda: state.park(engine), steps=True)

    def close(self) -> None:
        """Bring everything back. Raises StoreError."""
        if self.state is not None:
            self.state.gate.alone(self.state.synchronize)
            self.state.gradients_are_there()
            self.state.release()
            if self.state.from_host:
                for module in self._modules:
                    move_buffers(module, torch.device("cpu"))
            self.state = None

    def dropped(self, engine: TransferEngine) -> None:
        """Bring back what is in the store of `engine`, after the session is gone; say so if that fails."""
        if self.state is None or self.state.engine is not engine or self.state.gate.is_forked:
            return
        try:
            with disable_current_modes(), no_python_dispatcher():
                self.close()
        except (OverspillError, RuntimeError) as error:
            _LOG.warning(
                "a compiled model was dropped and could not bring everything back; what is lost reads as NaN: %s",
                first_line(error),
            )


class _Saving:
    """A hook of a module that begins or ends a state dict; its copies do nothing."""

    def __init__(self, loop: LoopPlans | None = None, *, begins: bool = False) -> None:
        self._loop = None if loop is None else weakref.ref(loop)
        self._begins = begins

    def __call__(self, *_: Any, **__: Any) -> None:
        loop = None if self._loop is None else self._loop()
        if loop is not None and loop.state is not None:
            loop.state.is_saving = self._begins and loop.state.in_force

    def __reduce__(self) -> Any:
        return _Saving, ()


def _places_of(module: nn.Module) -> list[int]:
    """Return what Dynamo's guards would ask of the places of parameters: which tensors they have now."""
    return [id(tensor) for p in module.parameters() for tensor in inner_tensors(p).values()]


def _signature(state: LoopState) -> list[Any]:
    """Return what Dynamo's guards would ask of parameters, and whether they may move."""
    return [
        ((p.shape, p.dtype, state.device_of(p)), (p.requires_grad, name in state.residency))
        for name, p in state.parameters.items()
    ]


def _without_residents(around: Surroundings, state: LoopState, here: Sequence[Tensor], rest_bytes: int) -> Surroundings:
    """Return the bytes around a graph that reads the parameters `here`, with all others in the store meanwhile."""
    inside = {id(p) for p in here}
    moves = state.residency.residents.keys() - state.pinned
    away = [p for name, p in state.parameters.items() if id(p) not in inside and name in moves]
    less = {
        TensorKind.PARAMETER: sum(p.nbytes for p in away),
        TensorKind.GRADIENT: sum(p.nbytes for p in away if p.requires_grad),
    }
    outside = tuple((kind, max(0, nbytes - less.get(kind, 0))) for kind, nbytes in around.outside_graph)
    return replace(around, optimizer_state_bytes=rest_bytes, update_bytes=0, outside_graph=outside)


def persistent(examples: Sequence[Any]) -> Parameters:
    """Return the parameters among `examples`, and the tensors that these have."""
    own = [e for e in examples if isinstance(e, nn.Parameter)]
    inside = {id(t) for p in own for t in inner_tensors(p).values()}.union(map(id, own))
    return {i: weakref.ref(e) for i, e in enumerate(examples) if id(e) in inside}


def _persistent(joint: JointGraph, parameters: Parameters) -> dict[int, Tensor]:
    """Return the tensors of parameters among the inputs of a joint graph, by position."""
    found = {}
    for position, node in enumerate(joint.primals):
        number, path = input_of(node)
        tensor = None if number is None or number not in parameters else parameters[number]()
        for name in path:
            tensor = getattr(tensor, name, None)
        if tensor is not None:
            found[position] = tensor
    return found


def _info(node: fx.Node, inputs: Sequence[InputInfo]) -> InputInfo:
    number, path = input_of(node)
    if number is None or number >= len(inputs):
        return InputInfo(TensorKind.INPUT, node.name)
    return replace(inputs[number], name=".".join((inputs[number].name, *path)))


def _update(state: LoopState, name: str, position: int, mode: FakeTensorMode) -> ParameterUpdate:
    owned, planned, like = state.owned[name], state.planned(name), state.like(name)
    with mode:
        leaves = tuple(StateInfo(path, owned.spec(path, planned).empty()) for path in owned.leaves)
    with disable_current_modes():
        workspace, elementwise = owned.updates.workspace_bytes(like, owned), owned.updates.is_elementwise(like)
        moved = owned.updates.moved_bytes(like, owned)
    return ParameterUpdate(position, owned.run, leaves, workspace, elementwise, not owned.updates.groups, None, moved)


def guards_without(loop: LoopPlans) -> Callable[[Sequence[Any]], list[bool]]:
    """Return a filter of Dynamo's guards that drops those on tensors which may be away.

    While it is away, a parameter is of another class, with other strides. `LoopPlans` notices changes itself.
    """
    known = weakref.ref(loop)

    def wanted(entries: Sequence[Any]) -> list[bool]:
        forget_guarded_objects(entries)
        state = None if (alive := known()) is None else alive.state
        own = set[int]() if state is None or not state.in_force else {*state.names, *state.wrapper_guards}

        def is_ours(value: Any) -> bool:
            return isinstance(value, Tensor) and (id(value) in own or isinstance(GUARDS.get(id(value)), Whole))

        return [e.guard_type == same_object.__name__ or not is_ours(e.value) for e in entries]

    return wanted

"""Tensors that outlive a call of a compiled model: parameters and optimizer state, which a budget may take away.

The user's loop reads and steps whenever it likes, on its own objects. Each tensor that is away has a guard of its own:
a use of its values brings back that one alone.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.core.errors import OverspillError
from overspill.models.step import StepLoss
from overspill.pytorch.dispatch import disable_current_modes, is_traceable_wrapper_subclass
from overspill.pytorch.modules import PARAMETERS
from overspill.pytorch.storages import tensor_uses
from overspill.pytorch.trees import tree_map_only
from overspill.runtime.ddp import reduced
from overspill.runtime.reachable import tensors_in
from overspill.runtime.step.away import GUARDS, Away, hide, show, watch
from overspill.runtime.step.checks import check_optimizer
from overspill.runtime.step.from_host import check_on_host, move_state
from overspill.runtime.step.gate import Reading
from overspill.runtime.step.host_updates import begin_updates
from overspill.runtime.step.inner_tensors import inner_tensors, parts_of, wrapped_again
from overspill.runtime.step.parameter_state import ParameterState
from overspill.runtime.step.residency import Guarded, Resident, Spec, bring_for_others
from overspill.runtime.step.state import StepState
from overspill.runtime.step.updates import OptimizerUpdates
from overspill.runtime.transfer.lanes import is_lane

from .loop_optimizers import LoopUpdates, have_in_common, in_order
from .pending_calls import PendingCalls
from .stored_gradient import StoredGradient

_TRIES = 2
"""In how many steps a graph of the user's code may have a parameter, before it is known not to go backward."""
_STATES: weakref.WeakSet[LoopState] = weakref.WeakSet()


class TensorGuard:
    """Brings one tensor back before its values are used."""

    def __init__(self, state: LoopState, name: str) -> None:
        self._state = state
        self._name = name

    def fetch(self, *, loops: bool = False) -> Reading | None:
        """Bring the tensor back for a use; with `loops`, return a Reading if the thread is not that of the calls."""
        state, name = self._state, self._name
        if name not in state.residency or not state.residency[name].away:
            return None

        def bring() -> None:
            state.bring([name])
            if state.is_between and torch.is_grad_enabled():
                state.in_use.add(name)  # only what is there can stay

        return state.gate.read(bring, loops=loops)

    def shown(self) -> Tensor | None:
        """Return the tensor on the store's memory while a state dict is made, or None."""
        state = self._state
        if not state.is_saving or self._name not in state.residency or state.engine is None:
            return None
        resident = self.resident()
        if resident.handle is None or resident.hidden is not None:
            return None
        engine, handle = state.engine, resident.handle
        return state.gate.alone(lambda: engine.shown(handle))

    def overwrite(self, source: Tensor) -> bool:
        """Give the tensor the values of `source`, in the store; return False where autograd is to know."""
        state = self._state
        if torch.is_grad_enabled() or self._name not in state.residency or state.engine is None:
            return False
        resident, engine = self.resident(), state.engine
        if not resident.away:
            return False

        def write() -> bool:
            with disable_current_modes():
                data = resident.spec.empty()
                data.copy_(source)
                resident.put(data)
                state.residency.send([self._name], engine)
            return True

        return state.gate.alone(write)

    @property
    def guards_one(self) -> bool:
        """Whether the tensor may move: not while somebody has a view of it."""
        return self._name in self._state.residency

    @property
    def may_leave(self) -> bool:
        """Whether plans may have the tensor in the store while the user's code runs."""
        state, name = self._state, self._name
        return state.in_force and name in state.residency and name not in state.pinned and not state.stays(name)

    def resident(self) -> Resident:
        """Return the resident of the tensor."""
        return self._state.residency[self._name]


class WrapperGuard:
    """Brings back all tensors inside of a tensor subclass before its values are used."""

    def __init__(self, wrapper: Tensor) -> None:
        self.wrapper = weakref.ref(wrapper)

    def fetch(self, *, loops: bool = False) -> list[Reading] | None:
        """Bring them back; with `loops`, return Readings if the thread is not that of the calls."""
        if (wrapper := self.wrapper()) is None:
            return None
        guards = [guard for t in inner_tensors(wrapper).values() if (guard := GUARDS.get(id(t))) is not None]
        found = [guard.fetch(loops=loops) for guard in guards]
        show(wrapper)
        return [reading for reading in found if reading is not None] or None

    def shown(self) -> Tensor | None:
        """Return the subclass around tensors on the store's memory while a state dict is made, or None."""
        wrapper = self.wrapper()
        return None if wrapper is None else _shown(wrapper)

    @property
    def is_away(self) -> bool:
        """Whether something that it wraps is away."""
        wrapper = self.wrapper()
        guards = [] if wrapper is None else [GUARDS.get(id(t)) for t in inner_tensors(wrapper).values()]
        return any(g.guards_one and g.resident().away for g in guards if isinstance(g, TensorGuard))

    def attach(self, state: LoopState) -> None:
        """Guard the subclass, and let it be hidden with what it wraps."""
        if (wrapper := self.wrapper()) is None:
            return
        watch(wrapper, self)
        for tensor in inner_tensors(wrapper).values():
            resident = state.residency.residents.get(state.names.get(id(tensor), ""))
            if resident is not None:
                resident.wrapper = self.wrapper
                if resident.away:
                    hide(wrapper)


def _shown(tensor: Tensor) -> Tensor | None:
    """Return what is inside of `tensor` as the store has it, while a state dict is made, and the rest as it is."""
    if not is_traceable_wrapper_subclass(tensor):
        guard = GUARDS.get(id(tensor))
        return guard.shown() if isinstance(guard, TensorGuard) else None
    parts = parts_of(tensor)
    shown = {name: _shown(part) for name, part in parts.items()}
    if not any(part is not None for part in shown.values()):
        return None
    return wrapped_again(tensor, {name: parts[name].detach() if of is None else of for name, of in shown.items()})


class StepCounts:
    """Guards the step counts that updates on the host change: a use waits for the updates."""

    def __init__(self, state: LoopState) -> None:
        self._state = weakref.ref(state)
        self._guarded: list[Tensor] = []

    def guard(self, counts: Iterable[Tensor]) -> None:
        """Guard these, until `show`."""
        for count in counts:
            watch(count, self)
            hide(count)
            self._guarded.append(count)

    def show(self) -> None:
        """Guard none any more."""
        while self._guarded:
            show(self._guarded.pop())

    def fetch(self, *, loops: bool = False) -> None:  # noqa: ARG002 - as of each guard
        """Wait for them, unless this is their thread. Raises the error of one that failed."""
        if (state := self._state()) is not None and not is_lane():
            state.gate.alone(state.end_updates)


class LoopState(StepState):
    """Parameters of a compiled model by name, and the state that optimizers have of them."""

    in_a_loop = True
    was_asked = False
    """Whether the user has asked for all of it on the device, until the next forward."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizers: Sequence[Optimizer],
        from_host_to: torch.device | None = None,
    ) -> None:
        """Create the state, of a model in host memory if it runs on the device `from_host_to`.

        Raises RequestError or UnsupportedError for what cannot leave the device.
        """
        held = nn.Module()
        self._held = held.__dict__[PARAMETERS]
        self._held.update(parameters)  # a name may have dots here
        for optimizer in optimizers:
            check_optimizer(optimizer)
            self.save_from_store(optimizer)
        self.updates: tuple[LoopUpdates, ...]
        updates = [LoopUpdates(o) for o in optimizers]
        super().__init__(StepLoss(held, None), updates, from_host_to=from_host_to, allow_untrained=True)
        self.in_force = self.updates_on_host = False
        """Whether a plan moves its tensors, and whether all updates that can are to be on the host."""
        self.drops_gradients: bool | None = None
        """Whether the loop has dropped all gradients whenever a forward began; None before any step."""
        self.reads_unseen = False
        """Whether an update has left gradients on the device, of which nobody sees who reads them."""
        self.is_saving = False
        """Whether a state dict is being made, to which the store gives what it has."""
        self.is_between = False
        """Whether a forward has run whose backward has not."""
        self._reads_end = True
        """Whether a backward or an update has run since the last call began."""
        self.in_use: set[str] = set()
        """Parameters that the user's code has read meanwhile, of which its own backward may need the values."""
        self.saved: set[str] = set()
        """Parameters that graphs of the user's code have saved for their backward before a forward."""
        self._noted: set[str] = set()
        self._reduced: set[str] = set()
        """Parameters whose gradients a DistributedDataParallel averages."""
        self._never_used: Counter[str] = Counter()
        """In how many steps such a graph did not go backward, by parameter."""
        self.kept: set[str] = set()
        """Parameters that graphs of this step have been planned with on the device."""
        self.pinned: set[str] = set()
        """Parameters that plans are to keep on the device, because the user's code reads them in a step."""
        self.pending = PendingCalls()
        """Those of the session."""
        self.is_torn = False
        """Whether an error has stopped an update, which some parameters have had and others have not."""
        self.left: list[StoredGradient] = []
        """Gradients that the last update has left in the store."""
        self.latest: list[Any] = []
        """The calls whose backwards have run in this step, which have plans of updates."""
        self.holders.tells = False  # the user has not asked for any of them to move
        self.tensor_guards: dict[str, TensorGuard] = {}
        self.counts = StepCounts(self)
        self.wrapper_guards: dict[int, WrapperGuard] = {}
        """Of tensor subclasses that wrap parameters, by the identity of the subclass."""
        self.take_hold()
        self.note_saved()
        _STATES.add(self)

    def __contains__(self, parameter: object) -> bool:
        return id(parameter) in self.names

    def is_of(self, parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]) -> bool:
        """Return whether it has been made of these, in which nothing has changed that plans depend on."""
        return (
            not self.stale
            and {id(p): f"model.{name}" for name, p in parameters.items()} == self.names
            and len(optimizers) == len(self.updates)
            and all(of.is_of(optimizer) for of, optimizer in zip(self.updates, optimizers, strict=True))
            and all(self.residency[n].spec == Spec.of(p) for n, p in self.parameters.items() if n in self.residency)
        )

    def save_from_store(self, optimizer: Optimizer) -> None:
        """Let state dicts of `optimizer` have what is away on the store's memory."""
        mine = weakref.ref(self)

        def of_store(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            state = mine()
            if state is None or not state.in_force:
                return state_dict
            state.is_saving = True
            try:
                found = tree_map_only(Away, lambda tensor: tensor.detach(), state_dict["state"])
            finally:
                state.is_saving = False
            return {**state_dict, "state": found}

        def loaded(_: Optimizer) -> None:
            if (state := mine()) is not None:
                state.is_torn = False
                if state.engine is not None:
                    state.engine.updates.has_failed = False

        optimizer.register_state_dict_post_hook(of_store)
        optimizer.register_load_state_dict_post_hook(loaded)

    def there(self) -> dict[str, int]:
        """Return the bytes of parameters, gradients and optimizer state that are on the device, by name."""
        residents = self.residency.residents
        found = {name: of.spec.nbytes for name, of in residents.items() if not (of.away or of.on_host)}
        for name, parameter in self.parameters.items():
            if name not in residents:
                found[name] = parameter.nbytes
            if (gradient := parameter.grad) is not None and not isinstance(gradient, StoredGradient):
                found[f"{name}.grad"] = gradient.nbytes
        for name, owned in self.owned.items():
            for path, value in owned.content.items():  # what the loop itself has put there
                if isinstance(value, Tensor) and path not in owned.leaves and not isinstance(value, Away):
                    found[f"{name}.{path}"] = value.nbytes
        return found

    def check_whole(self) -> None:
        """Raise OverspillError behind an update that an error has stopped."""
        if self.is_torn or (self.engine is not None and self.engine.updates.has_failed):
            raise OverspillError(
                "an error has stopped an optimizer's step: some parameters are updated, others are not; load the "
                "state dicts of model and optimizer from before it"
            )

    def add(self, optimizer: Optimizer) -> None:
        """Take in an optimizer that was made later, in place of those that had its parameters.

        Raises RequestError or UnsupportedError.
        """
        check_optimizer(optimizer)
        before = [of for of in self.updates if of.is_alive and have_in_common(of.optimizer, optimizer)]
        for name in [name for name, owned in self.owned.items() if owned.updates in before]:
            self._disown(name)
        updates = LoopUpdates(optimizer)
        updates.around = self.model_is_there
        if self.from_host:
            move_state([optimizer], self.where)
        self.updates = (*(of for of in self.updates if of not in before), updates)
        self.save_from_store(optimizer)
        self.stale = True

    def take_in(self, parameters: Mapping[str, Tensor], optimizers: Iterable[Optimizer]) -> None:
        """Take in more parameters and optimizers. Raises RequestError or UnsupportedError."""
        if self.from_host:
            check_on_host({n: p for n, p in parameters.items() if self.residency.is_on_host(p)}, is_sharded=False)
        for name, parameter in parameters.items():
            if id(parameter) not in self.names:
                free = name if f"model.{name}" not in self.parameters else f"{name} ({len(self.parameters)})"
                self._held[free] = self.parameters[f"model.{free}"] = parameter
                self.names[id(parameter)] = f"model.{free}"
        for optimizer in optimizers:
            if not any(of.is_of(optimizer) for of in self.updates):
                self.add(optimizer)
        self.gate.alone(self.look)

    def wrap(self, parameters: Iterable[Tensor]) -> None:
        """Guard those of `parameters` that wrap tensors of this state."""
        for parameter in parameters:
            if is_traceable_wrapper_subclass(parameter) and any(p in self for p in inner_tensors(parameter).values()):
                self.wrapper_guards.setdefault(id(parameter), WrapperGuard(parameter))

    def owns_any(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` has any of the parameters."""
        return any(id(p) in self.names for group in optimizer.param_groups for p in group["params"])

    def begin_call(self) -> None:
        """Let what was read for a backward that has run move again, before a model's own code reads anything."""
        if self._reads_end:
            self.end_reads()
            self._reads_end = False

    def begin(self) -> None:
        """Notice what the user has changed, before a forward."""
        self.was_asked = False
        if self.left and not self.reads_unseen and self.drops_gradients is not False:
            read = any(gradient.was_read for gradient in self.left)
            self.drops_gradients = not read and all(self.parameters[name].grad is None for name in self.owned)
        self.latest.clear()
        self.left.clear()
        self.reads_unseen = False
        self.saved |= self._noted
        self.look()

    def has_gone_back(self) -> None:
        """Note that the backward of the last forward has run."""
        self.is_between, self._reads_end = False, True

    def leave(self, gradient: StoredGradient) -> None:
        """Leave a gradient that an update has used to the loop, and look from now on whether it reads it."""
        gradient.forget_reads()
        self.left.append(gradient)

    def notice_saved(self) -> None:
        """Notice which parameters the user's code has saved before a graph of a step, before C++ has the graph's.

        A Function saves what it has read without gradients.
        """
        if self.in_force and not self.is_between:
            self.note_saved()
        elif self.in_force:
            there = [name for name, p in self.parameters.items() if name not in self.kept and not isinstance(p, Away)]
            self.in_use |= self._saved_of(there)

    def begin_graph(self) -> None:
        """Notice what the user has changed, before a forward."""
        self.gate.alone(self.look if self.is_between else self.begin)

    def hold(self, args: Iterable[Any]) -> None:
        """Keep parameters among `args` on the device until their update, for a program whose plan has them there."""
        self.begin_graph()
        self.kept.update(self.names[id(value)] for value in args if id(value) in self.names)
        self.is_between = True

    def note_saved(self) -> None:
        """Note, before a forward, what graphs of the user's code have saved: its memory is to stay until backward."""
        self._reduced = {name for p in reduced() if (name := self.names.get(id(p))) is not None}
        found = self._saved_of(n for n, p in self.parameters.items() if n not in self.kept and not isinstance(p, Away))
        self._noted = {name for name in found if self._never_used[name] < _TRIES}

    def _saved_of(self, names: Iterable[str]) -> set[str]:
        """Return those parameters of which a graph of autograd has a reference, besides the node of its gradient.

        DistributedDataParallel has 2 of each whose gradient it averages, and 3 once it has its buckets in order.
        """
        of_ddp = min((3, *(_references(self.parameters[name]) for name in self._reduced)))
        return {n for n in names if _references(self.parameters[n]) > (of_ddp if n in self._reduced else 0)}

    def end_reads(self, updated: Collection[str] = ()) -> None:
        """Let what the user's code has read in this step move again, until plans keep it on the device.

        Calls that wait for their backward keep what they have there, besides the parameters `updated` now.
        """
        still = self._saved_of(self.saved)
        self._never_used.update(still)
        if new := (self.in_use | (self.saved - still)) - self.pinned:
            self.pinned |= new
            self.stale = True
        self.in_use.clear()
        self.saved = set()
        self._reads_end = True
        self.kept &= self.waiting().difference(updated)

    def waiting(self) -> set[str]:
        """Return the parameters of calls that wait for their backward."""
        keys = {key for kind in self.pending.others(None) for key in kind.part[1:]}
        return {self.names[key] for key in keys if key in self.names}

    def stays(self, name: str) -> bool:
        """Return whether a parameter keeps its memory for now, whatever plans say."""
        return name in self.in_use or name in self.saved or name in self.kept

    def enter(self) -> None:
        """Take the parameters from other sessions that may have them away."""
        for other in states():
            if other is not self and other.in_force and not self.names.keys().isdisjoint(other.names):
                other.gate.alone(other.synchronize)
                other.in_force = False
        self.in_force = True

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter, as of the residents."""
        return self.names[id(parameter)]

    def _bring_for_us(self) -> None:
        """Bring back what another session has of our parameters."""
        for name, parameter in self.parameters.items():
            if isinstance(parameter, Away) and not (name in self.residency and self.residency[name].away):
                bring_for_others([parameter])

    def _forget_gone(self) -> None:
        """Forget the state of optimizers that the loop has dropped."""
        gone = [of for of in self.updates if not of.is_alive]
        if gone:
            for name in [name for name, owned in self.owned.items() if owned.updates in gone]:
                owned = self.owned.pop(name)
                for resident in owned.residents():
                    self.residency.residents.pop(resident, None)
            self.updates = tuple(of for of in self.updates if of.is_alive)
            self.stale = True

    def take_hold(self) -> None:
        """Adopt parameters and optimizer state."""
        self._bring_for_us()
        for of in self.updates:
            bring_for_others(t for t in tensors_in(dict(of.optimizer.state)).values() if isinstance(t, Away))
        self.adopt_optimizers()
        self.adopt_parameters()

    def look(self) -> None:
        """Notice what the user has changed since the last call."""
        self._bring_for_us()
        self._forget_gone()
        self.residency.take_over(self.residency.residents)
        self.adopt_optimizers()
        self.adopt_parameters()
        self.arm()
        if self.from_host and self.engine is not None:
            self.residency.hold(self.engine)

    def bring(self, names: Iterable[str]) -> None:
        """Bring these tensors to the device, where the user's loop computes with them. Raises StoreError."""
        self._bring(names, self.residency.bring)

    def device_of(self, parameter: Tensor) -> torch.device:
        """Return the device that a parameter is on while it is used."""
        return self.where if self.residency.is_on_host(parameter) else parameter.device

    def guard(self) -> None:
        """Give each resident a guard."""
        for outer in self.wrapper_guards.values():
            outer.attach(self)
        for name, resident in self.residency.residents.items():
            guard = self.tensor_guards.get(name)
            if guard is None:
                guard = self.tensor_guards[name] = TensorGuard(self, name)
            if GUARDS.get(id(resident.tensor)) is not guard:
                watch(resident.tensor, guard)
            if resident.away:
                hide(resident.tensor)

    def arm(self) -> None:
        """Give optimizers the state of parameters as it is now."""
        self.guard()
        for name, owned in self.owned.items():
            if owned.content and owned.updates.is_alive:
                owned.updates.optimizer.state[self.parameters[name]] = owned.content
        for of in self.updates:
            if of.is_alive:
                in_order(of.optimizer)

    def _drop_gradient(self, parameter: nn.Parameter) -> None:
        """Leave gradients to the user's loop."""

    def _guard_modules(self) -> None:
        """Leave the user's modules as they are."""

    def _check_trained(self, groups: Collection[int]) -> None:
        """Accept parameters of others: their optimizer updates them itself."""

    def _adopt_state(
        self,
        name: str,
        parameter: nn.Parameter,
        updates: OptimizerUpdates,
        group: dict[str, Any],
        state: dict[str, Any],
    ) -> None:
        """Adopt the state of a parameter, of which tensors may be away; these go back to the store."""
        owned: ParameterState | None = self.owned.get(name)
        residents = [] if owned is None else [n for n in owned.residents() if n in self.residency]
        away = [n for n in residents if self.residency[n].away and self.residency[n].handle is not None]
        if away:
            self.bring(away)
        super()._adopt_state(name, parameter, updates, group, state)
        if away and self.engine is not None:
            self.residency.send([n for n in away if n in self.residency], self.engine)

    def _is_known(self, state: dict[str, Any], name: str, owned: Any) -> bool:  # noqa: ARG002 - as it is called
        """Return whether `state` is the dictionary that an update left, with unchanged tensors."""
        if state is not owned.content:
            return False
        there = state if owned.leaves.keys() <= state.keys() else tensors_in(state)  # this is asked thrice a step
        return all(owned.resident(path).tensor is there[path] for path in owned.leaves if path in there)

    def _unguard_state(self, name: str, updates: OptimizerUpdates, guard: Guarded) -> None:
        """Leave the dictionary as it is."""

    def gradients_are_there(self) -> None:
        """Bring back the gradients that are in the store. Raises StoreError."""
        for parameter in self.parameters.values():
            if isinstance(gradient := parameter.grad, StoredGradient) and gradient.is_stored:
                parameter.grad = gradient.take()

    def begin_updates(self, names: Iterable[str]) -> None:
        """Let the host update these parameters, with the settings of now."""
        assert self.engine is not None
        begin_updates(self.engine.updates, map(self.owned.__getitem__, names))

    def updates_begun(self, names: Iterable[str]) -> None:
        """Guard the step counts of parameters that the host is updating."""
        for name in names:
            self.counts.guard(self.owned[name].others())

    def end_updates(self) -> None:
        """Wait for updates on the host. Raises the error of one that failed."""
        try:
            super().end_updates()
        finally:
            self.counts.show()

    def release(self) -> None:
        """Remove the guards, and forget what updates are of, for Dynamo keeps programs of them; nothing moves again."""
        self.end_updates()
        self.in_force = False
        for name in self.tensor_guards:
            if name in self.residency:
                GUARDS.pop(id(self.residency[name].tensor), None)
        for guard in self.wrapper_guards.values():
            show(guard.wrapper())
        self.tensor_guards.clear()
        self.wrapper_guards.clear()
        for owned in self.owned.values():
            vars(owned).clear()
        self.updates = ()  # they have this here
        _STATES.discard(self)

    @property
    def is_released(self) -> bool:
        """Whether nothing moves any more."""
        return self not in _STATES


def _references(parameter: Tensor) -> int:
    """Return how many references C++ holds to a parameter, besides its object's and its gradient node's."""
    return tensor_uses(parameter) - 1 - parameter.requires_grad


def states() -> list[LoopState]:
    """Return all that are alive."""
    return list(_STATES)


def bring_for(args: Iterable[Any]) -> None:
    """Bring back parameters among `args`, for a program whose plan has them on the device."""
    for value in args:
        if isinstance(value, Away) and (guard := GUARDS.get(id(value))) is not None:
            guard.fetch()

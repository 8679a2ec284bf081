"""Tensors that outlive a step: parameters, buffers and optimizer state.

Their places, and the guards on them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.core.errors import RequestError, UnsupportedError
from overspill.models.step import StepLoss
from overspill.pytorch.autograd import hooks_of
from overspill.pytorch.dispatch import disable_current_modes
from overspill.pytorch.distributed import whole_size, whole_stride
from overspill.pytorch.modules import PARAMETERS, buffers_of
from overspill.pytorch.storages import key_of, storage_key
from overspill.runtime.reachable import tensors_in
from overspill.runtime.sharding import local_of, sharding_of
from overspill.runtime.transfer.engine import TransferEngine

from .checks import (
    check_hooks,
    check_model,
    check_optimizer_settings,
    check_same_places,
    check_sharded,
    check_trained,
    check_unchanged,
)
from .from_host import check_on_host, move_buffers, move_state
from .gate import Gate
from .parameter_state import ParameterState
from .residency import Guarded, Residency, Resident, Spec, is_dense, readable
from .shared_memory import Holders, check_order
from .structure import Structure
from .updates import OptimizerUpdates


class StepState:
    """Tensors of model and optimizer that a step may leave in the store.

    - `external_tensors`: tensors of other models that a step changes in place, as their batch norms do in training.
    - `owned`: state of each parameter that an optimizer updates, by name.
    - `sums`: names of the residents in which gradients accumulate.
    - `stale`: whether a tensor differs from what plans were made for, so that they no longer fit.
    - `advice`: returns a message for reads of parameters during a step, or an empty string.

    All methods are called within `gate`, one thread at a time.
    """

    in_a_loop = False
    """Whether parameters of subclasses with memory of their own may be among them: `train_step` cannot trace these."""

    def __init__(
        self,
        module: StepLoss,
        updates: Sequence[OptimizerUpdates],
        *,
        from_host_to: torch.device | None = None,
        allow_untrained: bool = False,
    ) -> None:
        """Create the state, of a model in host memory if it steps on the device `from_host_to`.

        Raises RequestError or UnsupportedError for what cannot be part of a planned step.
        """
        self.gate = Gate()
        self.module = module
        self.updates = tuple(updates)
        for of in self.updates:
            of.around = self.model_is_there
        self.allow_untrained = allow_untrained
        self.sharding = sharding_of(module)
        """How `fully_shard` has sharded the model, or None. Of a sharded parameter, this rank's part moves."""
        self.parameters = dict(module.named_parameters())
        sharded = () if self.sharding is None else self.sharding.parameters
        check_model(module, self.parameters, sharded, in_a_loop=self.in_a_loop)
        if self.sharding is not None:
            for of in self.updates:
                check_sharded(of.optimizer, of.groups)
        if from_host_to is not None:
            check_on_host(self.parameters, is_sharded=self.sharding is not None)
            move_buffers(module, from_host_to)
            move_state((of.optimizer for of in self.updates), from_host_to)
        # Parameters and buffers, as they are now.
        self.structure = Structure(module)
        self.external_tensors: dict[str, Tensor] = {}
        self._buffer_specs = self._specs_of_buffers()
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.where = from_host_to or next(iter(self.parameters.values())).device
        # The optimizer's state, and where everything is.
        self.owned: dict[str, ParameterState] = {}
        self.sums: tuple[str, ...] = ()
        self.residency = Residency(from_host_to)
        self.holders = Holders()
        self.engine: TransferEngine | None = None
        self.engine_number = 0
        # Dictionaries that bring tensors back when they are read.
        self.guards: dict[nn.Module, Guarded] = {}
        self.state_guards: dict[str, Guarded] = {}
        self.stale = False
        self.advice: Callable[[], str] = str

    @property
    def from_host(self) -> bool:
        """Whether the model begins in host memory, and comes back there."""
        return self.residency.from_host_to is not None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers, in the order in which they step."""
        return [updates.optimizer for updates in self.updates]

    def take_hold(self) -> None:
        """Adopt parameters and optimizer state, and guard them from now on."""
        if self.sharding is not None:
            self.sharding.take()
            self.sharding.hold(lambda: self.gate.is_tracing, lambda: self.gate.alone(self.synchronize))
        self.adopt_optimizers()
        self.adopt_parameters()
        self._guard_modules()

    def _guard_modules(self) -> None:
        """Guard the parameters of each module that has parameters or buffers.

        A read of a buffer looks among the parameters first.
        """
        for module in self.module.modules():
            own = module.__dict__[PARAMETERS]
            if (own or buffers_of(module)) and self.guards.get(module) is not own:
                guard = Guarded(dict(dict.items(own)), self.gate)
                self.guards[module] = module.__dict__[PARAMETERS] = guard
        self.structure = Structure(self.module)

    def _look_again(self) -> None:
        """Check that all parameters are in place after a change of the module tree, and guard new modules."""
        now = Structure(self.module)
        check_same_places(self.structure.parameters, now.parameters)
        self._guard_modules()

    def check_model(self) -> None:
        """Notice changes to model and optimizer since the last step. Raises RequestError or UnsupportedError."""
        if not self.guards:
            raise RequestError("this step is closed; make another with train_step")
        # Settings and hooks, then modules, parameters and buffers.
        if self.sharding is not None:
            self.sharding.reshard()
        for optimizer in self.optimizers:
            check_optimizer_settings(optimizer, own_hooks=1)
        check_hooks(self.parameters, self.optimizers)
        hooks = {n: tuple(hooks_of(p).values()) for n, p in self.parameters.items() if hooks_of(p)}
        if hooks != self.module.gradient_hooks:
            self.module.gradient_hooks = hooks
        if not self.structure.holds():
            self._look_again()
        self.residency.take_over(self.residency.residents)
        if (specs := self._specs_of_buffers()) != self._buffer_specs:
            self._buffer_specs = specs
            self.stale = True

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers by name, and the `external_tensors`."""
        return {**self.structure.buffers, **self.external_tensors}

    @contextmanager
    def taking_in(self, external_tensors: Iterable[Tensor]) -> Iterator[None]:
        """Add `external_tensors` that steps change; drop them again if the block raises."""
        before = self.external_tensors
        self.external_tensors = before | {
            f"tensor {i} of another model": t for i, t in enumerate(external_tensors, len(before))
        }
        try:
            yield
        except BaseException:
            self.external_tensors = before
            raise
        finally:
            self._buffer_specs = self._specs_of_buffers()

    def _specs_of_buffers(self) -> dict[str, Spec]:
        return {name: Spec.of(buffer) for name, buffer in self.buffers.items()}

    def adopt_parameters(self) -> None:
        """Notice parameters that `load_state_dict` or the user has changed, and those whose memory others hold.

        The latter stay on the device. Raises RequestError and UnsupportedError.
        """
        if self.sharding is not None:
            self.sharding.take()
        sharded = () if self.sharding is None else self.sharding.parameters  # of which FSDP keeps nothing
        residents, there = self.residency.residents, {}
        for name, parameter in self.parameters.items():
            self._drop_gradient(parameter)
            tensor, known = local_of(parameter), residents.get(name)
            if known is None:
                known = self._adopt_parameter(name, tensor)
            if name not in sharded and (known is None or not (known.away or known.on_host)):
                there[name] = tensor
            if known is None:
                continue
            if not known.away and (now := self.residency.spec_of(tensor)) != known.spec:
                check_unchanged(name, now, known.spec, in_a_loop=self.in_a_loop)
                residents[name] = self.residency.resident_of(name, tensor)
                self.stale = True
            elif known.tensor is not tensor:  # FSDP has padded it anew
                self.residency.adopt(name, tensor)
        self.holders.look(residents, there, self.buffers)
        staying = self.holders.overlapping.union(self.holders.held)
        for name in staying & residents.keys():
            del residents[name]
        if overlapping := {n: p for n, p in self.parameters.items() if n in self.holders.overlapping}:
            check_order(overlapping, [group for optimizer in self.optimizers for group in optimizer.param_groups])

    def _drop_gradient(self, parameter: nn.Parameter) -> None:
        """Drop what is there before a step, which makes gradients of its own, as after zero_grad()."""
        parameter.grad = None

    def _adopt_parameter(self, name: str, tensor: Tensor) -> Resident | None:
        """Return the resident of a parameter that has none; None if its strides do not let it move."""
        if is_dense(tensor):
            return self.residency.adopt(name, tensor)
        if self.residency.is_on_host(tensor):
            tensor.data = tensor.data.to(self.where)
        return None

    def adopt_optimizers(self) -> None:
        """Notice new parameter groups, settings and state, at the start and before each step.

        Raises RequestError for a parameter with no optimizer, or more than one.
        """
        groups: dict[int, tuple[OptimizerUpdates, dict[str, Any]]] = {}
        for updates in self.updates:
            updates.look_again()
            for group in updates.optimizer.param_groups:
                for p in group["params"]:
                    if groups.setdefault(id(p), (updates, group))[0] is not updates:
                        raise RequestError(
                            f"two optimizers have {readable(self.names.get(id(p), 'a parameter'))}; leave it to one"
                        )
        self._check_trained(groups)
        # Adopt the state of each parameter whose settings or state have changed.
        settings = {id(g): updates.settings_of(g) for updates in self.updates for g in updates.optimizer.param_groups}
        for name, parameter in self.parameters.items():
            if id(parameter) not in groups:
                self._disown(name)
                continue
            if not parameter.requires_grad:
                continue
            # Nothing to do if settings and state dictionary are those we know.
            updates, group = groups[id(parameter)]
            state = updates.optimizer.state.get(parameter, {})
            owned = self.owned.get(name)
            if (
                owned is not None
                and owned.settings == settings[id(group)]
                and not (owned.outgrown or updates.outgrown)
                and (self._is_known(state, name, owned) if state else not owned.content)
            ):
                owned.group = group
                continue
            self._adopt_state(name, parameter, updates, group, state)
        for updates in self.updates:
            self.stale = self.stale or updates.outgrown
            updates.outgrown = False

    def _check_trained(self, groups: Collection[int]) -> None:
        check_trained(self.parameters, self.names, groups, allow_untrained=self.allow_untrained)

    def _is_known(self, state: dict[str, Any], name: str, owned: ParameterState) -> bool:
        """Return whether `state` is our guard with unchanged values."""
        guard = self.state_guards.get(name)
        return state is guard and guard is not None and (guard.holds(owned.shown) or not owned.shown)

    def _disown(self, name: str, but: Container[str] = ()) -> None:
        """Forget the state of a parameter that has left the optimizer, and bring it back for good.

        The residents `but` stay as they are.
        """
        if (owned := self.owned.pop(name, None)) is None:
            return
        self.end_updates()
        self.stale = True
        residents = [resident for resident in owned.residents() if resident not in but]
        self.bring(residents)
        for resident in residents:
            del self.residency.residents[resident]
        if (guard := self.state_guards.pop(name, None)) is not None:
            self._unguard_state(name, owned.updates, guard)

    def _unguard_state(self, name: str, updates: OptimizerUpdates, guard: Guarded) -> None:
        """Replace a guarded state dictionary by a plain one."""
        guard.disarm()
        if updates.optimizer.state.get(self.parameters[name]) is guard:
            updates.optimizer.state[self.parameters[name]] = dict(guard)

    def _adopt_state(
        self,
        name: str,
        parameter: nn.Parameter,
        updates: OptimizerUpdates,
        group: dict[str, Any],
        state: dict[str, Any],
    ) -> None:
        self.end_updates()
        # Find out which of its tensors move: those there are, and those that the optimizer is going to make.
        owned, residents = self.owned.get(name), self.residency.residents
        known = owned is not None and state is self.state_guards.get(name)
        content = {key: local_of(value) for key, value in dict.items(state)}
        fresh = ParameterState(updates, name, parameter, group, content, self.residency)
        self._check_own(name, updates, content)
        away = name in residents and residents[name].away
        like = self.like(name) if away or self.from_host else local_of(parameter)
        fresh.divide(like, owned if known else None)
        fits = owned is not None and owned.leaves == fresh.leaves and owned.settings == fresh.settings
        self.stale = self.stale or not fits
        # What no longer moves comes back for good.
        gone = (
            [] if owned is None else [resident for resident in owned.residents() if resident not in fresh.residents()]
        )
        if known:
            self.bring(gone)
        for resident in gone:
            del residents[resident]
        if owned is not None and fits:  # to which plans have references
            vars(owned).update(vars(fresh))
        else:
            self.owned[name] = fresh
        # Existing tensors are adopted as they are; others are blank until the optimizer makes them.
        found = tensors_in(content)
        for path in fresh.paths():
            where = f"{name}.{path}"
            if path in found:
                self.residency.adopt(where, found[path])
            elif not (known and where in residents):
                residents[where] = Resident.blank(where, fresh.spec(path, self.spec(name, parameter)))

    def end_updates(self) -> None:
        """Wait for updates on the host, which have the state as it was. Raises the error of one that failed."""
        if self.engine is not None:
            self.engine.updates.finish()

    def _check_own(self, name: str, updates: OptimizerUpdates, content: dict[str, Any]) -> None:
        """Raise UnsupportedError if another parameter's state shares a tensor with this one's."""
        if not (mine := {id(t) for t in tensors_in(content).values()}):
            return
        mine -= {id(t) for t in updates.kept_outside()}
        for other, owned in self.owned.items():
            if other != name and any(id(tensor) in mine for tensor in tensors_in(owned.content).values()):
                raise UnsupportedError(
                    f"{readable(name)} and {readable(other)} have one tensor in their optimizer states, which a "
                    "planned step would take apart; give each its own"
                )

    @contextmanager
    def model_is_there(self) -> Iterator[None]:
        """Let the thread of a step read the model within the context, if none of its parameters is away."""
        residents = self.residency.residents
        if any(residents[name].away for name in self.parameters if name in residents):
            yield
            return
        armed = [(guard, guard._bring) for guard in self.guards.values()]
        for guard, _ in armed:
            guard.arm(None)
        try:
            with self.gate.opened():
                yield
        finally:
            for guard, bring in armed:
                guard.arm(bring)

    def spec(self, name: str, parameter: Tensor) -> Spec:
        """Return the spec of `parameter` on the device."""
        known = self.residency.residents.get(name)
        return self.residency.spec_of(local_of(parameter)) if known is None else known.spec

    def planned(self, name: str) -> Spec:
        """Return the spec that plans use for a parameter; if sharded, that of the rank with most rows."""
        parameter = self.parameters[name]
        spec = self.spec(name, parameter)
        if self.sharding is None or name not in self.sharding.parameters:
            return spec
        size = self.sharding.parameters[name].padded_sharded_param_size
        return Spec(size, torch.empty(size, device="meta").stride(), spec.dtype, spec.device)

    def like(self, name: str) -> Tensor:
        """Return a tensor without memory that has the planned size of a parameter."""
        return self.planned(name).placeholder()

    def whole(self, name: str) -> Spec:
        """Return the spec of a parameter as forward reads it."""
        spec = self.spec(name, self.parameters[name])
        if self.sharding is None or name not in self.sharding.parameters:
            return spec
        of = self.sharding.parameters[name]
        return Spec(whole_size(of), whole_stride(of), of.param_dtype or of.orig_dtype, spec.device)

    def overlapping(self) -> dict[str, Tensor]:
        """Return weights and buffers that overlap one another, on shared fake memory.

        So an update of one waits for the reads of all.
        """
        memory: dict[int, Tensor] = {}
        found = {}
        for name in self.holders.overlapping:
            real = self.parameters[name] if name in self.parameters else self.buffers[name]
            storage = real.untyped_storage()
            if key_of(storage) not in memory:
                memory[key_of(storage)] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=real.device)
            found[name] = Spec.of(real).within(memory[key_of(storage)].untyped_storage(), real.storage_offset())
        return found

    def whole_bytes(self) -> int:
        """Return the bytes of parameters, buffers and optimizer state, all on the device."""
        moving = sum(of.spec.nbytes for name, of in self.residency.residents.items() if name not in self.sums)
        fixed = {
            storage_key(t): t.untyped_storage().nbytes()
            for t in (
                *(local_of(p) for n, p in self.parameters.items() if n not in self.residency),
                *self.buffers.values(),
            )
        }
        return moving + sum(fixed.values()) + self.rest_bytes()

    def rest_bytes(self) -> int:
        """Return the bytes that optimizers keep on the device and that do not move."""
        outside = sum(updates.outside_bytes() for updates in self.updates)
        return outside + sum(owned.rest_bytes(self.like(name)) for name, owned in self.owned.items())

    def present_bytes(self) -> int:
        """Return the bytes on the device now, sums of gradients included."""
        residents = self.residency.residents
        away = sum(of.spec.nbytes for name, of in residents.items() if of.here is None and name not in self.sums)
        return self.whole_bytes() - away + sum(residents[n].spec.nbytes for n in self.sums if not residents[n].away)

    def present(self) -> list[Tensor]:
        """Return the movable tensors and the other optimizer tensors that are on the device now."""
        found = [of.hidden if of.away else of.tensor for of in self.residency.residents.values() if of.here is not None]
        for owned in self.owned.values():
            found += owned.others()
        return found

    def renew(self, holds: Callable[[Tensor], bool] = lambda _: False) -> int:
        """Reallocate all movable tensors on the device, except those that an arena `holds`; return the bytes of all.

        A count of PyTorch's allocator must see the allocation and the release of each tensor.
        """
        present = self.present()
        for tensor in present:
            if not holds(tensor):
                tensor.data = tensor.data.clone()
        return sum(tensor.nbytes for tensor in present)

    def trains(self, name: str) -> bool:
        """Return whether an optimizer updates the parameter of that name."""
        return name in self.owned and self.parameters[name].requires_grad

    def release(self) -> None:
        """Remove the guards; model and optimizer get plain dictionaries."""
        for module, guard in self.guards.items():
            guard.disarm()
            if module.__dict__[PARAMETERS] is guard:
                module.__dict__[PARAMETERS] = dict(guard)
        for name, guard in self.state_guards.items():
            self._unguard_state(name, self.owned[name].updates, guard)
        self.guards.clear()
        self.state_guards.clear()
        if self.sharding is not None:
            self.sharding.let_go()

    def disown(self) -> None:
        """Remove the guards and drop model and optimizer, because no step follows."""
        self.release()
        self.owned.clear()
        self.external_tensors.clear()
        for updates in self.updates:  # which the plans' graphs still have
            del updates.optimizer, updates.around
        del self.module, self.structure, self.updates

    def forget_sums(self, of_others_than: Container[Any] = ()) -> None:
        """Drop the accumulated gradients.

        `of_others_than` names those to keep: another kind of step may have some that this one does not know.
        """
        for name in self.sums:
            if name not in of_others_than:
                self.residency[name].blanked()

    def arm(self) -> None:
        """Make the guards bring back all that is away now."""
        asks = bool(self.advice())
        for guard in self.guards.values():
            names = [self.names[id(p)] for p in dict.values(guard) if p is not None]
            guard.arm(self._bringer(names, asks=asks))
        # The optimizer gets a guarded dictionary for each parameter's state, which serves until it has another.
        for name, owned in self.owned.items():
            if owned.content:
                found = self.state_guards.get(name)
                if found is None or not owned.is_as_seen():
                    found = self._guard_state(name, owned)
                found.arm(self._bringer(owned.residents(), asks=asks))
                owned.updates.optimizer.state[self.parameters[name]] = found

    def _guard_state(self, name: str, owned: ParameterState) -> Guarded:
        content = {key: self._shown(name, v) if key in owned.leaves else v for key, v in owned.content.items()}
        owned.seen, owned.shown = tuple(owned.content.values()), tuple(content.values())
        guard = self.state_guards[name] = Guarded(content, self.gate)
        return guard

    def _shown(self, name: str, tensor: Tensor) -> Tensor:
        """Return the state of a parameter as the user's optimizer has it; a DTensor if sharded."""
        if self.sharding is None or name not in self.sharding.parameters:
            return tensor
        shown: Tensor = self.sharding.parameters[name].to_sharded_dtensor(tensor)
        return shown

    def _bringer(self, names: Sequence[str], *, asks: bool) -> Callable[[], None] | None:
        residents = self.residency.residents
        away = [name for name in names if name in residents and residents[name].away]
        return (lambda: self.bring(away)) if away or asks else None

    def bring(self, names: Iterable[str]) -> None:
        """Bring these tensors to where `synchronize` does. Raises RequestError while a step runs, and StoreError."""
        self._bring(names, self.residency.show if self.from_host else self.residency.bring)

    def _bring(self, names: Iterable[str], how: Callable[[list[str], TransferEngine], None]) -> None:
        if advice := self.advice():
            raise RequestError(f"parameters and state are neither the old nor the new ones: {advice}")
        names = list(names)
        with disable_current_modes():  # a finalizer may bring them while something else runs on fake tensors
            self.residency.take_over(names)
            if found := [name for name in names if self.residency[name].handle is not None]:
                assert self.engine is not None
                how(found, self.engine)

    def synchronize(self) -> None:
        """Bring all parameters and optimizer state back to the device; to host memory, if the model began there."""
        if self.from_host and self.engine is not None and not self.advice():
            residents = self.residency.residents.items()
            self.residency.send([n for n, of in residents if of.here is not None and n not in self.sums], self.engine)
        StepState.bring(self, [name for name in self.residency.away() if name not in self.sums])
        if self.sharding is not None:
            with self.gate.opened():
                self.sharding.give_back()

    def park(self, engine: TransferEngine) -> int:
        """Move all that is on the device and may move to the store, and return its bytes. Raises StoreError."""
        self.end_updates()
        here = {name: resident for name, resident in self.residency.residents.items() if resident.here is not None}
        try:
            self.residency.send(here, engine)
        finally:
            self.arm()
        return sum(resident.spec.nbytes for resident in here.values())

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """Trace the model with fake parameters within the context, bypassing the guards."""
        self.gate.is_tracing = True
        try:
            yield
        finally:
            self.gate.is_tracing = False

"""What outlives a step: the model's parameters and buffers, the optimizer's state, where they are, and who guards them.

Private to PyTorch (2.11 to 2.14): `torch.utils._python_dispatch._disable_current_modes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from overspill.core.errors import RequestError
from overspill.models.step import StepLoss
from overspill.runtime.transfer.engine import TransferEngine

from .checks import check_hooks, check_model, check_optimizer_settings, check_same_places, check_unchanged
from .gate import Gate
from .residency import Guarded, Residency, Resident, Spec
from .structure import Structure
from .updates import OptimizerUpdates, ParameterState, settings_of


class StepState:
    """The tensors of model and optimizer that a step may leave in the store.

    `strangers` are tensors of other models that a step changes in place, as their batch norms do in training. `owned` are the parameters that the optimizer updates, `sums` names the residents in which gradients add up. `stale`
    says that plans no longer fit, for a tensor is not what they were made for. `advice` is what to say to who reads
    parameters while a step is under way; an empty text where none is. Whatever is done to all this is done alone, as
    `gate` sees to.
    """

    def __init__(self, module: StepLoss, optimizer: Optimizer, updates: OptimizerUpdates) -> None:
        """Raises RequestError or UnsupportedError for what cannot be part of a planned step."""
        self.gate = Gate()
        self.module = module
        self.optimizer = optimizer
        self.updates = updates
        self.parameters = dict(module.named_parameters())
        check_model(module, self.parameters)
        self.structure = Structure(module)
        self.strangers: dict[str, Tensor] = {}
        self._buffer_specs = self._specs_of_buffers()
        self.names = {id(p): name for name, p in self.parameters.items()}
        self.where = next(iter(self.parameters.values())).device
        self.owned: dict[str, ParameterState] = {}
        self.sums: tuple[str, ...] = ()
        self.residency = Residency()
        self.engine: TransferEngine | None = None
        self.engine_number = 0
        self.guards: dict[nn.Module, Guarded] = {}
        self.state_guards: dict[str, Guarded] = {}
        self.stale = False
        self.advice: Callable[[], str] = str

    def take_hold(self) -> None:
        """Adopt what there is, and guard it from now on."""
        self.adopt_optimizer()
        self.adopt_parameters()
        self._guard_modules()

    def _guard_modules(self) -> None:
        """Guard the parameters of every module that has some, or has buffers, which are read behind them."""
        for module in self.module.modules():
            own = module.__dict__["_parameters"]
            if (own or module._buffers) and self.guards.get(module) is not own:
                guard = Guarded(dict(dict.items(own)), self.gate)
                self.guards[module] = module.__dict__["_parameters"] = guard
        self.structure = Structure(self.module)

    def _look_again(self) -> None:
        """The model's modules have changed: their parameters must be those that the step was made for, each in its place."""
        now = Structure(self.module)
        check_same_places(self.structure.parameters, now.parameters)
        self._guard_modules()

    def check_model(self) -> None:
        """Notice what has been done to the model behind our back. Raises RequestError or UnsupportedError."""
        if not self.guards:
            raise RequestError("this step is closed; make another with train_step")
        check_optimizer_settings(self.optimizer, own_hooks=1)
        check_hooks(self.parameters, self.optimizer)
        hooks = {n: tuple(p._backward_hooks.values()) for n, p in self.parameters.items() if p._backward_hooks}
        if hooks != self.module.gradient_hooks:
            self.module.gradient_hooks = hooks
        if not self.structure.holds():
            self._look_again()
        self.residency.check_untouched(self.residency.residents)
        if (specs := self._specs_of_buffers()) != self._buffer_specs:
            self._buffer_specs = specs
            self.stale = True

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers by name, and the strangers."""
        return {**self.structure.buffers, **self.strangers}

    @contextmanager
    def taking_in(self, strangers: Iterable[Tensor]) -> Iterator[None]:
        """From now on steps change these tensors too, unless there is an error while this lasts."""
        before = self.strangers
        self.strangers = before | {f"tensor {i} of another model": t for i, t in enumerate(strangers, len(before))}
        try:
            yield
        except BaseException:
            self.strangers = before
            raise
        finally:
            self._buffer_specs = self._specs_of_buffers()

    def _specs_of_buffers(self) -> dict[str, Spec]:
        return {name: Spec.of(buffer) for name, buffer in self.buffers.items()}

    def adopt_parameters(self) -> None:
        """Take notice of parameters that `load_state_dict` or their owner has changed."""
        shared = Counter(p.untyped_storage()._cdata for p in self.parameters.values())
        for name, parameter in self.parameters.items():
            parameter.grad = None  # a step makes its own, as behind zero_grad()
            known = self.residency.residents.get(name)
            if known is None and _owns_its_storage(parameter) and shared[parameter.untyped_storage()._cdata] == 1:
                self.residency.adopt(name, parameter)
            elif known is not None and not known.away and Spec.of(parameter) != known.spec:
                check_unchanged(name, parameter, known.spec)
                self.residency.residents[name] = Resident(name, parameter)
                self.stale = True

    def adopt_optimizer(self) -> None:
        """Take notice of new groups, settings and state: at the start, and after `load_state_dict`."""
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        if strangers := sum(1 for key in groups if key not in self.names):
            raise RequestError(
                f"the optimizer has {strangers} parameters that are not the model's or the loss's; "
                "make it from model.parameters() of this model"
            )
        for name, parameter in self.parameters.items():
            group = groups.get(id(parameter))
            if group is None:
                self._disown(name)
            if group is None or not parameter.requires_grad:
                continue
            state = self.optimizer.state.get(parameter, {})
            guard = self.state_guards.get(name)
            owned = self.owned.get(name)
            if (
                owned is not None
                and owned.settings == settings_of(group)
                and (state is guard or not (state or owned.order))
            ):
                owned.group = group
                continue
            self._adopt_state(name, parameter, group, state)

    def _disown(self, name: str) -> None:
        """The optimizer has let go of a parameter: what it kept for it, it has back, and nobody moves it any more."""
        if (owned := self.owned.pop(name, None)) is None:
            return
        self.stale = True
        residents = [f"{name}.{key}" for key in owned.shaped]
        self.bring(residents)
        for resident in residents:
            del self.residency.residents[resident]
        if (guard := self.state_guards.pop(name, None)) is not None:
            self._unguard_state(name, guard)

    def _unguard_state(self, name: str, guard: Guarded) -> None:
        """Give the optimizer a plain dictionary of what it keeps for a parameter."""
        guard.disarm()
        if self.optimizer.state.get(self.parameters[name]) is guard:
            self.optimizer.state[self.parameters[name]] = dict(guard)

    def _adopt_state(self, name: str, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        owned = self.owned.get(name)
        if owned is not None and owned.settings != settings_of(group):
            self.stale = True
            self._disown(name)
            state, owned = self.optimizer.state.get(parameter, {}), None
            self.updates.check_state(group, parameter, state)
        fresh = self.updates.state_of(parameter, group, state)
        if owned is None or owned.shaped != fresh.shaped:
            self.stale = True
            self.owned[name] = fresh
        else:
            owned.take_over(fresh)
        spec = self.spec(name, parameter)
        for key, dtype in fresh.shaped.items():
            where = f"{name}.{key}"
            if state:
                self.residency.adopt(where, state[key])
            else:
                self.residency.residents[where] = Resident.blank(where, spec.like(dtype))

    def spec(self, name: str, parameter: Tensor) -> Spec:
        """What `parameter` looks like when it is there."""
        return self.residency[name].spec if name in self.residency else Spec.of(parameter)

    def whole_bytes(self) -> int:
        """Bytes of parameters, buffers and optimizer state when all of them are on the device."""
        moving = sum(of.spec.nbytes for name, of in self.residency.residents.items() if name not in self.sums)
        fixed = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes()
            for t in (*(p for n, p in self.parameters.items() if n not in self.residency), *self.buffers.values())
        }
        rest = sum(self.updates.rest_bytes(self.parameters[n], owned.group) for n, owned in self.owned.items())
        return moving + sum(fixed.values()) + rest

    def present_bytes(self) -> int:
        """Bytes of parameters, buffers, optimizer state and sums of gradients that are on the device now."""
        residents = self.residency.residents
        away = sum(of.spec.nbytes for name, of in residents.items() if of.here is None and name not in self.sums)
        return self.whole_bytes() - away + sum(residents[n].spec.nbytes for n in self.sums if not residents[n].away)

    def present(self) -> list[Tensor]:
        """What may leave the device, and what an optimizer has besides, as far as it is there now."""
        found = [of.hidden if of.away else of.tensor for of in self.residency.residents.values() if of.here is not None]
        for owned in self.owned.values():
            found += [value for value in owned.rest.values() if isinstance(value, Tensor)]
        return found

    def renew(self) -> int:
        """Let all that is on the device and may leave it lie in memory that is handed out now; its bytes.

        Who counts what PyTorch's allocator hands out, and gets back, has to have seen both.
        """
        present = self.present()
        for tensor in present:
            tensor.data = tensor.data.clone()
        return sum(tensor.nbytes for tensor in present)

    def trains(self, name: str) -> bool:
        """Whether the optimizer updates the parameter of that name."""
        return name in self.owned and self.parameters[name].requires_grad

    def release(self) -> None:
        """Undo the guards; model and optimizer then have plain dictionaries, of what is there."""
        for module, guard in self.guards.items():
            guard.disarm()
            if module.__dict__["_parameters"] is guard:
                module.__dict__["_parameters"] = dict(guard)
        for name, guard in self.state_guards.items():
            self._unguard_state(name, guard)
        self.guards.clear()
        self.state_guards.clear()

    def disown(self) -> None:
        """Undo the guards and forget whose tensors these are: no step will follow, and who is gone needs none back."""
        self.release()
        self.owned.clear()
        self.strangers.clear()
        del (
            self.module,
            self.structure,
            self.optimizer,
            self.updates.optimizer,
        )  # the plans' graphs still have the updates

    def forget_sums(self) -> None:
        """What gradients have added up to so far counts no longer."""
        for name in self.sums:
            self.residency[name].blanked()

    def arm(self) -> None:
        """Let the guards bring back what is away from now on."""
        for guard in self.guards.values():
            names = [self.names[id(p)] for p in dict.values(guard) if p is not None]
            guard.arm(self._bringer(names))
        for name, owned in self.owned.items():
            if owned.order:
                content = {
                    key: self.residency[f"{name}.{key}"].tensor if key in owned.shaped else owned.rest[key]
                    for key in owned.order
                }
                guard = self.state_guards[name] = Guarded(content, self.gate)
                self.optimizer.state[self.parameters[name]] = guard
                guard.arm(self._bringer([f"{name}.{key}" for key in owned.shaped]))

    def _bringer(self, names: Sequence[str]) -> Callable[[], None] | None:
        away = [name for name in names if name in self.residency and self.residency[name].away]
        return (lambda: self.bring(away)) if away or self.advice() else None

    def bring(self, names: Iterable[str]) -> None:
        """Let these be on the device. Raises RequestError while a step is under way, and StoreError."""
        if advice := self.advice():
            raise RequestError(f"parameters and state are neither the old nor the new ones: {advice}")
        names = list(names)
        with _disable_current_modes():  # a finalizer may bring them while something else runs on fake tensors
            try:
                self.residency.check_untouched(names)
            finally:  # what is lost is lost, and told when the values that there were are back
                if found := [name for name in names if self.residency[name].handle is not None]:
                    assert self.engine is not None
                    self.residency.bring(found, self.engine)

    def synchronize(self) -> None:
        """Bring all parameters and optimizer state back to the device."""
        self.bring([name for name in self.residency.away() if name not in self.sums])

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """While the model is traced, its parameters are fake, and nothing but the model may see that."""
        self.gate.is_tracing = True
        try:
            yield
        finally:
            self.gate.is_tracing = False


def _owns_its_storage(tensor: Tensor) -> bool:
    """Whether `tensor` is dense and all that its storage holds."""
    if tensor.nbytes != tensor.untyped_storage().nbytes():
        return False
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # of dense ones it keeps the strides

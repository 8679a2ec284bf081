"""`overspill.train_step`: forward, loss, backward and update as one planned step under one budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from overspill.capture.compiled import InputInfo
from overspill.capture.joint import storages
from overspill.capture.whole_step import CapturedStep, GradientOps, ParameterUpdate, StateInfo, capture_step
from overspill.core import Device, Graph, TensorKind
from overspill.core.errors import InfeasibleBudget, RequestError, StoreError, UnsupportedError
from overspill.costs import MeasuredTimes
from overspill.policies.planning import Plan

from . import batches
from .engine import TransferEngine, make_engine
from .host_memory import economise
from .loss import StepLoss
from .lower import lower_step
from .ops import register_engine
from .parallel import OneProcess, processes_of
from .profile import OpTimer
from .residency import Guarded, Residency, Resident, Spec, readable
from .session import Options, budget_for, device_for, plan_graph, store_bytes
from .step_checks import check_hooks, check_inputs, check_model, check_optimizer, check_unchanged
from .step_run import Form, StepProgram, StepRun, held_interrupts
from .stores import make_store, whole_pages
from .tracker import LiveBytes
from .updates import NormClipping, OptimizerUpdates, ParameterState

Elsewhere = tuple[tuple[TensorKind, int], ...]
LOSS_BYTES = 8
"""Room for a loss, whatever its dtype."""
UNFINISHED = (
    "the step is unfinished and nothing is lost: when the cause is gone, call it again with the same inputs, "
    "or its resume(); its abandon() gives the step up"
)
LOST = "the step cannot be finished: {} was stopped half-way; call its abandon(), and load a checkpoint"


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
class _Compiled:
    """One planned graph of the step: for one kind of inputs, with or without the update.

    `takes` says what each input of `program` is: a resident's name, or a position among what is given at each step
    (buffers, tensors of the caller). `moving` are the residents in the order of its results behind the loss, and
    `stored` are those that the store has when it begins; so it has `parked`, which the graph does not know.
    """

    plan: Plan
    program: StepProgram
    takes: tuple[str | int, ...]
    moving: tuple[str, ...]
    stored: frozenset[str]
    parked: frozenset[str]


@dataclass
class _Call:
    """One call of the step: micro-batch `number` of `parts` is next, or under way as `run`; `loss` is of those before."""

    inputs: tuple[Any, ...]
    parts: list[tuple[Any, ...]]
    number: int = 0
    loss: Tensor | None = None
    compiled: _Compiled | None = None
    run: StepRun | None = None

    @property
    def is_done(self) -> bool:
        """Whether no micro-batch is left."""
        return self.number == len(self.parts)

    @property
    def advice(self) -> str:
        """What can be done about this call when an error has stopped it."""
        return LOST.format(self.run.lost) if self.run is not None and self.run.lost else UNFINISHED


class TrainStep:
    """`step(*inputs) -> loss`: one training step, planned when it is first called with inputs of these shapes.

    Between two calls the model's parameters and the optimizer's state may be in the store. Who reads them through the
    model or the optimizer (`state_dict()`, evaluation, `torch.save`) gets their current values: they are brought back.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        optimizer: Optimizer,
        options: Options,
        gradients: GradientOptions,
        processes: OneProcess | None = None,
    ) -> None:
        """Raises RequestError or UnsupportedError for what cannot be part of a planned step."""
        check_optimizer(optimizer)
        self.options = options
        self.gradients = gradients
        self.optimizer = optimizer
        self.processes = processes or OneProcess()
        self.tracker: LiveBytes | None = None
        self._step = StepLoss(model, loss_fn)
        self._parameters = dict(self._step.named_parameters())
        check_model(self._step, self._parameters)
        self._buffers = dict(self._step.named_buffers())
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._where = next(iter(self._parameters.values())).device
        self._clipping = None if gradients.clip_norm is None else NormClipping(gradients.clip_norm)
        self._updates = OptimizerUpdates(optimizer, clip_value=gradients.clip_value, scales=self._clipping is not None)
        self._owned: dict[str, ParameterState] = {}
        self._sums: tuple[str, ...] = ()
        self._compiled: dict[Any, _Compiled] = {}
        self._engine: TransferEngine | None = None
        self._engine_number = 0
        self._timers: list[tuple[str, OpTimer]] = []
        self._call: _Call | None = None
        self._residency = Residency()
        self.processes.begin_alike(self._parameters, self._buffers)
        self._guards: dict[nn.Module, Guarded] = {}
        self._state_guards: dict[str, Guarded] = {}
        self._adopt_optimizer()
        self._adopt_parameters()
        self._guards = self._guarded_parameters()
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: self.synchronize()),
            optimizer.register_state_dict_post_hook(_with_plain_state),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.synchronize()),
            optimizer.register_step_pre_hook(lambda *_: self.synchronize()),
        ]

    def __call__(self, *inputs: Any) -> Tensor:
        """One step on `inputs`; its loss, a scalar without gradient.

        With `accumulate=k` the inputs are split into k micro-batches along their first dimension, and the loss is
        their mean. Raises InfeasibleBudget, UnsupportedError, RequestError or StoreError. After an error that left the
        step unfinished, as it says, only the same inputs are taken, and the step is finished.
        """
        if self._call is not None:
            if not batches.same(self._call.inputs, inputs):
                raise RequestError(f"these are other inputs: {self._call.advice}")
            return self.resume()
        with self.processes.announcing():
            self._check_model()
            check_inputs(tree_flatten(inputs)[0], self._where)
            self._adopt_parameters()
            self._adopt_optimizer()
            call = _Call(inputs, list(batches.split(inputs, self.gradients.accumulate)))
        return self._go_on(call)

    def resume(self) -> Tensor:
        """Finish the step that an error stopped, from the instruction that failed; its loss, as if nothing had happened."""
        if self._call is None:
            raise RequestError("no step is unfinished; call the step with inputs")
        if self._call.run is not None and self._call.run.lost:
            raise RequestError(self._call.advice)
        if self._engine is not None:
            self._engine.settle()
        return self._go_on(self._call)

    def abandon(self) -> None:
        """Give up the step that an error stopped, if there is one.

        Model and optimizer are then as far as it got: what it had updated is updated. Load a checkpoint next.
        """
        call, self._call = self._call, None
        if call is None:
            return
        if call.run is not None and call.compiled is not None:
            takes = call.compiled.takes
            wanted = [i for i, name in enumerate(takes) if isinstance(name, str) and name in self._residency]
            for position, (form, value) in call.run.give_up(wanted, self._engine).items():
                resident = self._residency[str(takes[position])]
                if form is Form.HANDLE:
                    resident.stored(value)
                else:
                    resident.put(value)
        for name in self._sums:
            self._residency[name].blanked()
        self._arm()

    def _go_on(self, call: _Call) -> Tensor:
        self._call = call
        try:
            with held_interrupts() as may_go_on:
                while not call.is_done:
                    self._carry_on(call, may_go_on)
        except BaseException as error:
            self._stopped(call, error)
            raise
        finally:
            self._arm()
        self._call = None
        self.optimizer._opt_called = True  # else schedulers warn that it never stepped
        assert call.loss is not None
        return call.loss

    def _stopped(self, call: _Call, error: BaseException) -> None:
        """Keep the step as an unfinished one if it can go on, or has come too far to go back; else undo it."""
        run = call.run
        if call.is_done:  # interrupted, but first it was finished
            self._call = None
        elif (call.number or run) and (isinstance(error, (StoreError, KeyboardInterrupt)) or (run and run.changed)):
            what = self._moved(call)
            if isinstance(error, StoreError):
                raise StoreError(f"{what}{error}; {UNFINISHED}") from error
            error.add_note(f"overspill: {call.advice}")
        else:
            self.abandon()

    def _moved(self, call: _Call) -> str:
        """Which tensor the instruction at fault moves, as the beginning of a message."""
        if call.run is None or call.compiled is None:
            return ""
        position, name = call.run.where()
        if position is not None:
            name = readable(str(call.compiled.takes[position]))
        return f"{name}: " if name else ""

    # -- what a user may ask

    @property
    def plans(self) -> list[Plan]:
        """The plans in force, in the order in which they were made."""
        return [compiled.plan for compiled in self._compiled.values()]

    @property
    def peak_bytes(self) -> int:
        """The planned peak of the step."""
        return max((plan.peak_bytes for plan in self.plans), default=0)

    @property
    def is_unfinished(self) -> bool:
        """Whether an error has stopped a step that `resume` can finish, or `abandon` give up."""
        return self._call is not None

    @property
    def engine(self) -> TransferEngine | None:
        """The transfer engine, once a plan has needed one."""
        return self._engine

    @property
    def measured_times(self) -> MeasuredTimes | None:
        """Op times of the run so far, if the step profiles."""
        found = [timer.times(name) for name, timer in self._timers]
        seconds = {key: value for times in found for key, value in times.seconds.items()}
        return MeasuredTimes(found[0].device, seconds) if found else None

    def graph(self, *inputs: Any) -> Graph:
        """The Graph of a step on `inputs`, which like the model may be fake; of several micro-batches, of the last."""
        *_, part = batches.split(inputs, self.gradients.accumulate)
        return self._capture(part, self._elsewhere(part, inputs), last=True)[0].graph

    def synchronize(self) -> None:
        """Bring all parameters and optimizer state back to the device, where they stay until the next step."""
        self._bring([name for name in self._residency.away() if name not in self._sums])

    def close(self) -> None:
        """Bring all back, undo the guards, and give the store back; model and optimizer are then as without Overspill."""
        self.synchronize()
        for module, guard in self._guards.items():
            if module.__dict__["_parameters"] is guard:
                module.__dict__["_parameters"] = dict(guard)
        for name, guard in self._state_guards.items():
            if self.optimizer.state.get(self._parameters[name]) is guard:
                self.optimizer.state[self._parameters[name]] = dict(guard)
        for hook in self._hooks:
            hook.remove()
        self._guards.clear()
        self._state_guards.clear()
        self._compiled.clear()
        for name in self._sums:
            self._residency[name].blanked()
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    # -- tensors that outlive the step

    def _guarded_parameters(self) -> dict[nn.Module, Guarded]:
        """The modules with parameters of their own, whose dictionaries now bring back what is read."""
        guards = {}
        for module in self._step.modules():
            if module._parameters:
                guards[module] = module.__dict__["_parameters"] = Guarded(module._parameters)
        return guards

    def _check_model(self) -> None:
        """Notice what has been done to the model behind our back. Raises RequestError or UnsupportedError."""
        if not self._guards:
            raise RequestError("this step is closed; make another with train_step")
        check_optimizer(self.optimizer, own_hooks=1)
        check_hooks(self._parameters)
        for module, guard in self._guards.items():
            if module.__dict__["_parameters"] is not guard or any(
                p is not None and id(p) not in self._names for p in dict.values(guard)
            ):
                raise RequestError(
                    f"a parameter of {type(module).__name__} is not the one that the step was made for; "
                    "close() it, then make optimizer and train_step anew"
                )
        buffers = dict(self._step.named_buffers())
        if [(n, Spec.of(b)) for n, b in buffers.items()] != [(n, Spec.of(b)) for n, b in self._buffers.items()]:
            self._compiled.clear()
        self._buffers = buffers

    def _adopt_parameters(self) -> None:
        shared = Counter(p.untyped_storage()._cdata for p in self._parameters.values())
        for name, parameter in self._parameters.items():
            parameter.grad = None  # a step makes its own, as behind zero_grad()
            known = self._residency.residents.get(name)
            if known is None and _owns_its_storage(parameter) and shared[parameter.untyped_storage()._cdata] == 1:
                self._residency.adopt(name, parameter)
            elif known is not None and not known.away and Spec.of(parameter) != known.spec:
                check_unchanged(name, parameter, known.spec)
                self._residency.residents[name] = Resident(name, parameter)
                self._compiled.clear()

    def _adopt_optimizer(self) -> None:
        """Take notice of new groups, settings and state: at the start, and after `load_state_dict`."""
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        if strangers := sum(1 for key in groups if key not in self._names):
            raise RequestError(
                f"the optimizer has {strangers} parameters that are not the model's or the loss's; "
                "make it from model.parameters() of this model"
            )
        for name, parameter in self._parameters.items():
            group = groups.get(id(parameter))
            if group is None or not parameter.requires_grad:
                continue
            state = self.optimizer.state.get(parameter, {})
            guard = self._state_guards.get(name)
            if name in self._owned and state is guard:
                self._owned[name].group = group
                continue
            self._adopt_state(name, parameter, group, state)

    def _adopt_state(self, name: str, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> None:
        owned = self._owned.get(name)
        if owned is not None and not state and not owned.order:
            owned.group = group
            return
        fresh = self._updates.state_of(parameter, group, state)
        if owned is None or owned.shaped != fresh.shaped:
            self._compiled.clear()
            self._owned[name] = fresh
        else:
            owned.take_over(fresh)
        spec = self._spec(name, parameter)
        for key, dtype in fresh.shaped.items():
            where = f"{name}.{key}"
            if state:
                self._residency.adopt(where, state[key])
            else:
                self._residency.residents[where] = Resident.blank(where, spec.like(dtype))

    def _spec(self, name: str, parameter: Tensor) -> Spec:
        return self._residency[name].spec if name in self._residency else Spec.of(parameter)

    def _arm(self) -> None:
        """Let the guards bring back what is away from now on."""
        for guard in self._guards.values():
            names = [self._names[id(p)] for p in dict.values(guard) if p is not None]
            guard.arm(self._bringer(names))
        for name, owned in self._owned.items():
            if owned.order:
                content = {
                    key: self._residency[f"{name}.{key}"].tensor if key in owned.shaped else owned.rest[key]
                    for key in owned.order
                }
                guard = self._state_guards[name] = Guarded(content)
                self.optimizer.state[self._parameters[name]] = guard
                guard.arm(self._bringer([f"{name}.{key}" for key in owned.shaped]))

    def _bringer(self, names: Sequence[str]) -> Callable[[], None] | None:
        away = [name for name in names if name in self._residency and self._residency[name].away]
        return (lambda: self._bring(away)) if away else None

    def _bring(self, names: Iterable[str]) -> None:
        if self._call is not None and self._call.run is not None:
            raise RequestError(f"parameters and state are neither the old nor the new ones: {self._call.advice}")
        found = [name for name in names if self._residency[name].handle is not None]
        if found:
            assert self._engine is not None
            self._residency.bring(found, self._engine)

    # -- one graph of the step

    def _carry_on(self, call: _Call, may_go_on: Callable[[], None]) -> None:
        """Run what is left of the micro-batch that is next."""
        if call.run is None:
            self._begin(call)
        compiled, run = call.compiled, call.run
        assert compiled is not None
        assert run is not None
        with torch.no_grad(), self.tracker or nullcontext():
            loss, *results = run.go_on(may_go_on)
        for name, value in zip(compiled.moving, results, strict=True):
            if name in compiled.stored:
                self._residency[name].stored(value)
            else:
                self._residency[name].put(value)
        results.clear()  # should anything hold this frame, it holds no tensors
        call.loss = loss if call.loss is None else call.loss + loss
        call.number, call.run, call.compiled = call.number + 1, None, None

    def _begin(self, call: _Call) -> None:
        """Let everything be where the plan of the next micro-batch begins."""
        part = call.parts[call.number]
        compiled = self._compile(part, call.inputs, last=call.number == len(call.parts) - 1)
        if self._engine is not None:
            self._residency.send(compiled.stored | compiled.parked, self._engine)
            self._residency.bring((n for n in compiled.moving if n not in compiled.stored), self._engine)
        if call.number == 0:
            self.processes.share_buffers(self._buffers.values())
        given = [*self._buffers.values(), *(leaf for leaf in tree_flatten(part)[0] if isinstance(leaf, Tensor))]
        args = [self._taken(what, compiled) if isinstance(what, str) else given[what] for what in compiled.takes]
        if self.tracker is not None:
            self.tracker.add([*args, *tree_flatten(call.inputs)[0], call.loss])
        call.compiled, call.run = compiled, StepRun(compiled.program, args)

    def _taken(self, name: str, compiled: _Compiled) -> Tensor:
        """The tensor or handle of a resident, for the step to have alone."""
        if name not in self._residency:
            return self._parameters[name].data
        resident = self._residency[name]
        if name in compiled.stored:
            assert resident.handle is not None
            handle, resident.handle = resident.handle, None
            return handle
        return resident.take()

    def _compile(self, inputs: tuple[Any, ...], whole: tuple[Any, ...], *, last: bool) -> _Compiled:
        """The plan for `inputs`, a micro-batch of the call's inputs `whole`."""
        leaves, spec = tree_flatten(inputs)
        key = (
            spec, last, tuple(map(batches.kind, leaves)), tuple(m.training for m in self._step.modules()),
            tuple(p.requires_grad for p in self._parameters.values()), _autocast_state(self._where.type),
        )  # fmt: skip
        if not self.processes.agree(key, known=key in self._compiled):
            outside = self._elsewhere(inputs, whole)
            if last:
                self._compiled[key] = self._planned(inputs, outside)
            else:
                self._compiled[key] = self._planned_before(self._compile(inputs, whole, last=True), inputs, outside)
        return self._compiled[key]

    def _elsewhere(self, inputs: tuple[Any, ...], whole: tuple[Any, ...]) -> Elsewhere:
        """What is on the device all the while besides what a graph reads: the rest of a call's inputs, its loss so far."""
        rest = batches.bytes_outside(whole, inputs)
        losses = 2 * LOSS_BYTES if self.gradients.accumulate > 1 else 0
        state = sum(self._updates.rest_bytes(self._parameters[n], owned.group) for n, owned in self._owned.items())
        return (TensorKind.INPUT, rest), (TensorKind.TEMPORARY, losses), (TensorKind.OPTIMIZER_STATE, state)

    def _planned_before(self, last: _Compiled, inputs: tuple[Any, ...], outside: Elsewhere) -> _Compiled:
        """The plan of a micro-batch before the last one, whose plan has some state on the device and some in the store.

        What it has on the device stays there meanwhile if there is room for it, and else goes to the store too.
        """
        state = [f"{name}.{key}" for name, owned in self._owned.items() for key in owned.shaped]
        stored = frozenset(name for name in state if name in last.stored)
        staying = sum(self._residency[name].spec.nbytes for name in state if name not in stored)
        budget = last.plan.budget_bytes
        try:
            return self._planned(inputs, (*outside, (TensorKind.OPTIMIZER_STATE, staying)), stored, budget)
        except InfeasibleBudget:
            if not staying:
                raise
        return self._planned(inputs, outside, frozenset(state), budget)

    def _planned(
        self,
        inputs: tuple[Any, ...],
        elsewhere: Elsewhere,
        parked: frozenset[str] | None = None,
        budget: int | None = None,
    ) -> _Compiled:
        """The plan of one micro-batch, the last one if no set of state is `parked` in the store during it."""
        with self.processes.together():
            captured, names = self._capture(inputs, elsewhere, last=parked is None)
            device = device_for(self.options, self._where)
            if budget is None:
                budget = budget_for(self.options, captured.graph, device, self._where)
        plan = self.processes.plan(
            captured.graph, budget, lambda budget: plan_graph(self.options, captured.graph, device, budget)
        )
        if self._where.type == "cpu":
            economise(plan.unmanaged_peak_bytes)
        with self.processes.together():
            if self._engine is None:
                store = make_store(self.options.store, self._where, self.options.store_dir)
                self._engine = make_engine(store, self._where, checksum=self.options.checksum)
                self._engine_number = register_engine(self._engine)
            parked_bytes = sum(whole_pages(self._residency[name].spec.nbytes) for name in parked or ())
            self._engine.store.reserve(store_bytes(plan) + parked_bytes)
        module = lower_step(captured, plan.schedule, self._engine_number)
        if self.options.profile:
            self._timers.append((device.name, timer := OpTimer(captured.graph, self._where)))
            timer.instrument(module)
        primals = captured.joint.primals
        tensor_of = {node: captured.tensor_of[storages(node)[0]] for node in primals}
        stored = frozenset(plan.schedule.stored)
        return _Compiled(
            plan, StepProgram(module), tuple(names),
            tuple(str(name) for node, name in zip(primals, names, strict=True) if captured.moves(node)),
            frozenset(str(name) for node, name in zip(primals, names, strict=True) if tensor_of[node] in stored),
            parked or frozenset(),
        )  # fmt: skip

    def _capture(
        self, inputs: tuple[Any, ...], elsewhere: Elsewhere, *, last: bool
    ) -> tuple[CapturedStep, list[str | int]]:
        leaves, spec = tree_flatten(inputs)
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        names = [*self._parameters, *self._buffers]
        share = self.gradients.accumulate

        def function(*values: Tensor) -> Tensor:
            filled = list(leaves)
            for position, value in zip(tensors, values[len(names) :], strict=True):
                filled[position] = value
            state = dict(zip(names, values, strict=False))
            with self._unguarded():
                loss: Tensor = functional_call(self._step, state, tuple(tree_unflatten(filled, spec)))
            for name, value in zip(names, values, strict=False):
                if state[name] is not value:
                    raise UnsupportedError(
                        f"the model assigns {readable(name)} anew in its forward; change it in place, with copy_()"
                    )
            return loss if share == 1 else loss / share

        infos, values, takes = self._described([leaves[i] for i in tensors])
        ops = self._gradient_ops(values, last=last)
        captured = capture_step(function, self._step, infos, values, ops, elsewhere=elsewhere)
        takes += [f"{names[u.parameter]}.{state.name}" for u in captured.updates for state in u.state]
        if self.gradients.accumulate > 1:
            takes += self._sum_residents(captured)
        return captured, takes

    def _described(self, inputs: Sequence[Tensor]) -> tuple[list[InputInfo], list[FakeTensor], list[str | int]]:
        """Kind, fake value and source of parameters, buffers and inputs, in this order."""
        infos, takes = [], []
        values: list[Any] = []
        with FakeTensorMode(allow_non_fake_inputs=True):
            for name, parameter in self._parameters.items():
                values.append(self._spec(name, parameter).empty().requires_grad_(self._trains(name)))
                infos.append(InputInfo(TensorKind.PARAMETER, readable(name), name in self._residency))
                takes.append(name)
            for position, (name, tensor) in enumerate(
                [*self._buffers.items(), *((f"input {i}", t) for i, t in enumerate(inputs))]
            ):
                values.append(Spec.of(tensor).empty())
                kind = TensorKind.BUFFER if name in self._buffers else TensorKind.INPUT
                infos.append(InputInfo(kind, readable(name)))
                takes.append(position)
        return infos, values, takes

    def _gradient_ops(self, values: Sequence[FakeTensor], *, last: bool) -> GradientOps:
        updates = []
        for position, (name, parameter) in enumerate(self._parameters.items()):
            if last and self._trains(name):
                owned = self._owned[name]
                with values[position].fake_mode:
                    state = tuple(StateInfo(key, self._residency[f"{name}.{key}"].spec.empty()) for key in owned.shaped)
                workspace = self._updates.workspace_bytes(parameter, owned.group)
                updates.append(ParameterUpdate(position, owned.run, state, workspace))
        clipping = self._clipping if last else None
        return GradientOps(
            tuple(updates),
            accumulate=self._add_up if self.gradients.accumulate > 1 else None,
            reduce=self.processes.average if last else None,
            norm=None if clipping is None else clipping.norm,
            clip=None if clipping is None else clipping.factor,
        )

    def _trains(self, name: str) -> bool:
        return name in self._owned and self._parameters[name].requires_grad

    def _add_up(self, total: Tensor, gradient: Tensor) -> None:
        """Add a micro-batch's gradient to those before it; the first one's is what they start from."""
        if self._call is not None and self._call.number == 0:
            total.copy_(gradient)
        else:
            total.add_(gradient)

    def _sum_residents(self, captured: CapturedStep) -> list[str]:
        """The residents of accumulated gradients, one for each parameter that gets one."""
        nodes = captured.joint.primals
        names = list(self._parameters)
        found = []
        for position, name in enumerate(names):
            if nodes[position] in captured.joint.gradients:
                where = f"{name}.grad"
                found.append(where)
                if where not in self._residency:
                    spec = self._spec(name, self._parameters[name])
                    self._residency.residents[where] = Resident.blank(where, spec)
        self._sums = tuple(dict.fromkeys((*self._sums, *found)))
        return found

    @contextmanager
    def _unguarded(self) -> Iterator[None]:
        """While the model is traced, its parameters are fake and nothing need be brought back."""
        armed = {guard: guard.disarm() for guard in self._guards.values()}
        try:
            yield
        finally:
            for guard, bring in armed.items():
                guard.arm(bring)


def _owns_its_storage(tensor: Tensor) -> bool:
    """Whether `tensor` is dense and all that its storage holds."""
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return (
        whole and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )  # dense ones keep their strides


def _autocast_state(device: str) -> tuple[Any, ...]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _with_plain_state(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state as a snapshot that later steps do not take away."""
    state = {
        key: {name: v.detach() if isinstance(v, Tensor) else v for name, v in of.items()}
        if isinstance(of, dict)
        else of
        for key, of in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def train_step(
    model: nn.Module,
    loss_fn: Callable[..., Any] | None,
    optimizer: Optimizer,
    *,
    budget: str | float | None = None,
    policy: str = "auto",
    store: str | None = None,
    store_dir: str | Path | None = None,
    device: str | Device | None = None,
    accumulate: int = 1,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    times: MeasuredTimes | None = None,
    placement: str | None = None,
    process_group: torch.distributed.ProcessGroup | Literal[False] | None = None,
    checksum: bool = False,
) -> TrainStep:
    """A callable `step(*inputs) -> loss` that trains `model` within `budget` bytes of device memory.

    Forward, loss, backward and the optimizer's update are one plan: parameters, gradients and optimizer state move as
    feature maps do. The numbers are those of `loss.backward(); optimizer.step()`, to the last bit. `loss_fn` is a
    criterion of torch.nn, given the model's output and the last input, or a function of the model and all inputs; None
    for a model that returns its own loss. `accumulate` splits each call's inputs into that many micro-batches, whose
    mean loss is trained on; `clip_norm` and `clip_value` clip gradients as `torch.nn.utils` does. The ranks of
    `process_group`, None meaning all where torch.distributed is initialised, train together: each gives its own part
    of the batch, gets its own loss, and gradients are averaged; False trains alone. With `checksum` what comes back
    from the store is compared with what went there. The other arguments are those of
    `overspill.compile`.

    Raises RequestError and UnsupportedError for what cannot be right, and at the first call InfeasibleBudget with the
    smallest budget that works, or StoreError.
    """
    options = Options(
        budget, policy, store, store_dir, device=device, times=times, placement=placement, checksum=checksum
    )
    gradients = GradientOptions(accumulate, clip_norm, clip_value)
    return TrainStep(model, loss_fn, optimizer, options, gradients, processes_of(model, process_group))

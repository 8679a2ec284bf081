"""`overspill.train_step`: forward, loss, backward and update as one planned step under one budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call
from torch.fx.graph import _BoxedCodeGen
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from overspill.capture.compiled import InputInfo
from overspill.capture.joint import storages
from overspill.capture.whole_step import CapturedStep, GradientOps, ParameterUpdate, StateInfo, capture_step
from overspill.core import Device, Graph, TensorKind
from overspill.core.errors import RequestError
from overspill.costs import MeasuredTimes
from overspill.policies.planning import Plan

from .engine import TransferEngine, make_engine
from .host_memory import economise
from .loss import StepLoss
from .lower import lower_step
from .ops import register_engine
from .parallel import OneProcess, processes_of
from .profile import OpTimer
from .residency import Guarded, Residency, Resident, Spec
from .session import Options, budget_for, device_for, plan_graph, store_bytes
from .stores import make_store
from .tracker import LiveBytes
from .updates import NormClipping, OptimizerUpdates, ParameterState

STEP_COUNT_BYTES = 4
"""How many steps an optimizer made on a parameter, as Adam keeps it: one float32."""


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

    `takes` says what each input of `module` is: a resident's name, or a position among what is given at each step
    (buffers, tensors of the caller). `moving` are the residents in the order of its results behind the loss.
    """

    plan: Plan
    module: fx.GraphModule
    takes: tuple[str | int, ...]
    moving: tuple[str, ...]
    stored: frozenset[str]


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
        self.options = options
        self.gradients = gradients
        self.optimizer = optimizer
        self.processes = processes or OneProcess()
        self.tracker: LiveBytes | None = None
        self._step = StepLoss(model, loss_fn)
        self._parameters = dict(self._step.named_parameters())
        self._buffers = dict(self._step.named_buffers())
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._where = next((p.device for p in self._parameters.values()), torch.device("cpu"))
        self._clipping = None if gradients.clip_norm is None else NormClipping(gradients.clip_norm)
        self._updates = OptimizerUpdates(optimizer, clip_value=gradients.clip_value, scales=self._clipping is not None)
        self._owned: dict[str, ParameterState] = {}
        self._sums: tuple[str, ...] = ()
        self._first_batch = True
        self._compiled: dict[Any, _Compiled] = {}
        self._engine: TransferEngine | None = None
        self._engine_number = 0
        self._timers: list[tuple[str, OpTimer]] = []
        self._residency = Residency()
        self.processes.begin_alike(self._parameters, self._buffers)
        self._guards = self._guarded_parameters()
        self._state_guards: dict[str, Guarded] = {}
        self._adopt_parameters()
        self._adopt_optimizer()
        self._hooks = [
            optimizer.register_state_dict_pre_hook(lambda _: self.synchronize()),
            optimizer.register_state_dict_post_hook(_with_plain_state),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.synchronize()),
            optimizer.register_step_pre_hook(lambda *_: self.synchronize()),
        ]

    def __call__(self, *inputs: Any) -> Tensor:
        """One step on `inputs`; its loss, a scalar without gradient.

        With `accumulate=k` the inputs are split into k micro-batches along their first dimension, and the loss is
        their mean. Raises InfeasibleBudget, UnsupportedError, RequestError or StoreError.
        """
        with self.processes.announcing():
            self._adopt_parameters()
            self._adopt_optimizer()
            batches = [inputs] if self.gradients.accumulate == 1 else list(_split(inputs, self.gradients.accumulate))
        loss: Tensor | None = None
        try:
            for number, batch in enumerate(batches, start=1):
                self._first_batch = number == 1
                part = self._run(batch, last=number == len(batches))
                loss = part if loss is None else loss + part
        finally:
            self._arm()
        self.optimizer._opt_called = True  # else schedulers warn that it never stepped
        assert loss is not None
        return loss

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
        batches = [inputs] if self.gradients.accumulate == 1 else list(_split(inputs, self.gradients.accumulate))
        return self._capture(batches[-1], last=True)[0].graph

    def synchronize(self) -> None:
        """Bring all parameters and optimizer state back to the device, where they stay until the next step."""
        self._bring([name for name in self._residency.away() if name not in self._sums])

    def close(self) -> None:
        """Bring all back, undo the guards, and give the store back; model and optimizer are then as without Overspill."""
        self.synchronize()
        for module, guard in self._guards.items():
            module.__dict__["_parameters"] = dict(guard)
        for name, guard in self._state_guards.items():
            self.optimizer.state[self._parameters[name]] = dict(guard)
        for hook in self._hooks:
            hook.remove()
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

    def _adopt_parameters(self) -> None:
        shared = Counter(p.untyped_storage()._cdata for p in self._parameters.values())
        for name, parameter in self._parameters.items():
            known = self._residency.residents.get(name)
            if known is None and _owns_its_storage(parameter) and shared[parameter.untyped_storage()._cdata] == 1:
                self._residency.adopt(name, parameter)
            elif known is not None and not known.away and Spec.of(parameter) != known.spec:
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
        found = [name for name in names if self._residency[name].handle is not None]
        if found:
            assert self._engine is not None
            self._residency.bring(found, self._engine)

    # -- one graph of the step

    def _run(self, inputs: tuple[Any, ...], *, last: bool) -> Tensor:
        leaves, _ = tree_flatten(inputs)
        compiled = self._compile(inputs, last=last)
        if self._first_batch:
            self.processes.share_buffers(self._buffers.values())
        if self._engine is not None:
            self._residency.send(compiled.stored, self._engine)
            self._residency.bring((n for n in compiled.moving if n not in compiled.stored), self._engine)
        given = [*self._buffers.values(), *(leaf for leaf in leaves if isinstance(leaf, Tensor))]
        args = [self._taken(what, compiled) if isinstance(what, str) else given[what] for what in compiled.takes]
        del given, leaves
        with torch.no_grad(), self._watched(args):
            loss, *results = compiled.module.forward(args)
        for name, value in zip(compiled.moving, results, strict=True):
            resident = self._residency[name]
            if name in compiled.stored:
                resident.stored(value)
            else:
                resident.put(value)
        return loss

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

    def _watched(self, args: list[Any]) -> Any:
        if self.tracker is None:
            return nullcontext()
        self.tracker.add(args)
        return self.tracker

    def _compile(self, inputs: tuple[Any, ...], *, last: bool) -> _Compiled:
        leaves, spec = tree_flatten(inputs)
        key = (
            spec, last, tuple(_signature(leaf) for leaf in leaves), tuple(m.training for m in self._step.modules()),
            tuple(p.requires_grad for p in self._parameters.values()), _autocast_state(self._where.type),
        )  # fmt: skip
        if not self.processes.agree(key, known=key in self._compiled):
            self._compiled[key] = self._planned(inputs, last=last)
        return self._compiled[key]

    def _planned(self, inputs: tuple[Any, ...], *, last: bool) -> _Compiled:
        with self.processes.together():
            captured, names = self._capture(inputs, last=last)
            device = device_for(self.options, self._where)
            budget = budget_for(self.options, captured.graph, device, self._where)
        plan = self.processes.plan(
            captured.graph, budget, lambda budget: plan_graph(self.options, captured.graph, device, budget)
        )
        if self._where.type == "cpu":
            economise(plan.unmanaged_peak_bytes)
        with self.processes.together():
            if self._engine is None:
                self._engine = make_engine(
                    make_store(self.options.store, self._where, self.options.store_dir), self._where
                )
                self._engine_number = register_engine(self._engine)
            self._engine.store.reserve(store_bytes(plan))
        module = lower_step(captured, plan.schedule, self._engine_number)
        if self.options.profile:
            self._timers.append((device.name, timer := OpTimer(captured.graph, self._where)))
            timer.instrument(module)
        module.graph.set_codegen(_BoxedCodeGen())
        module.recompile()
        primals = captured.joint.primals
        tensor_of = {node: captured.tensor_of[storages(node)[0]] for node in primals}
        stored = frozenset(plan.schedule.stored)
        return _Compiled(
            plan, module, tuple(names),
            tuple(str(name) for node, name in zip(primals, names, strict=True) if captured.moves(node)),
            frozenset(str(name) for node, name in zip(primals, names, strict=True) if tensor_of[node] in stored),
        )  # fmt: skip

    def _capture(self, inputs: tuple[Any, ...], *, last: bool) -> tuple[CapturedStep, list[str | int]]:
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
            return loss if share == 1 else loss / share

        infos, values, takes = self._described([leaves[i] for i in tensors])
        ops = self._gradient_ops(values, last=last)
        elsewhere = self._elsewhere([leaves[i] for i in tensors])
        captured = capture_step(function, self._step, infos, values, ops, elsewhere=elsewhere)
        takes += [f"{names[u.parameter]}.{state.name}" for u in ops.updates for state in u.state]
        if self.gradients.accumulate > 1:
            takes += self._sum_residents(captured)
        return captured, takes

    def _elsewhere(self, inputs: Sequence[Tensor]) -> tuple[tuple[TensorKind, int], ...]:
        """Bytes on the device that no op touches: other micro-batches, and the number of steps kept for a parameter."""
        others = (self.gradients.accumulate - 1) * sum(Spec.of(tensor).nbytes for tensor in inputs if tensor.dim())
        counts = STEP_COUNT_BYTES * sum(1 for owned in self._owned.values() if owned.shaped)
        return (TensorKind.INPUT, others), (TensorKind.OPTIMIZER_STATE, counts)

    def _described(self, inputs: Sequence[Tensor]) -> tuple[list[InputInfo], list[FakeTensor], list[str | int]]:
        """Kind, fake value and source of parameters, buffers and inputs, in this order."""
        infos, takes = [], []
        values: list[Any] = []
        with FakeTensorMode(allow_non_fake_inputs=True):
            for name, parameter in self._parameters.items():
                values.append(self._spec(name, parameter).empty().requires_grad_(name in self._owned))
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
            if last and (owned := self._owned.get(name)) is not None:
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

    def _add_up(self, total: Tensor, gradient: Tensor) -> None:
        """Add a micro-batch's gradient to those before it; the first one's is what they start from."""
        if self._first_batch:
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


def readable(name: str) -> str:
    """A parameter's name as the user's model has it."""
    return name.removeprefix("model.")


def _owns_its_storage(tensor: Tensor) -> bool:
    """Whether `tensor` is dense and all that its storage holds."""
    whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
    return (
        whole and torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    )  # dense ones keep their strides


def _signature(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else repr(leaf)


def _autocast_state(device: str) -> tuple[Any, ...]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _split(inputs: tuple[Any, ...], count: int) -> Iterator[tuple[Any, ...]]:
    """`inputs` in `count` micro-batches: each tensor of at least one dimension is split along its first."""
    leaves, spec = tree_flatten(inputs)
    sizes = {leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    if len(sizes) != 1 or (size := sizes.pop()) % count:
        what = f"{size} samples" if len(sizes) == 0 else f"tensors of {sorted(sizes)} samples"
        raise RequestError(
            f"{what} cannot be split into {count} equal micro-batches; every input needs the same first dimension, a multiple of {count}"
        )
    parts = [leaf.chunk(count) if isinstance(leaf, Tensor) and leaf.dim() else [leaf] * count for leaf in leaves]
    for index in range(count):
        batch: tuple[Any, ...] = tree_unflatten([part[index] for part in parts], spec)
        yield batch


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
) -> TrainStep:
    """A callable `step(*inputs) -> loss` that trains `model` within `budget` bytes of device memory.

    Forward, loss, backward and the optimizer's update are one plan: parameters, gradients and optimizer state move as
    feature maps do. The numbers are those of `loss.backward(); optimizer.step()`, to the last bit. `loss_fn` is a
    criterion of torch.nn, given the model's output and the last input, or a function of the model and all inputs; None
    for a model that returns its own loss. `accumulate` splits each call's inputs into that many micro-batches, whose
    mean loss is trained on; `clip_norm` and `clip_value` clip gradients as `torch.nn.utils` does. The ranks of
    `process_group`, None meaning all where torch.distributed is initialised, train together: each gives its own part
    of the batch, gets its own loss, and gradients are averaged; False trains alone. The other arguments are those of
    `overspill.compile`.

    Raises RequestError and UnsupportedError for what cannot be right, and at the first call InfeasibleBudget with the
    smallest budget that works, or StoreError.
    """
    options = Options(budget, policy, store, store_dir, device=device, times=times, placement=placement)
    gradients = GradientOptions(accumulate, clip_norm, clip_value)
    return TrainStep(model, loss_fn, optimizer, options, gradients, processes_of(model, process_group))

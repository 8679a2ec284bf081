"""Compute claims: capture each model once, at one batch from which all others follow, and plan on demand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from overspill.core import Device, Graph, LayerType, Op, Phase, Tensor, TensorKind
from overspill.core.errors import InfeasibleBudgetError
from overspill.costs import op_seconds, with_algorithms
from overspill.devices import load_device
from overspill.policies import Policy, policy_named
from overspill.simulate import check, simulate

from .frameworks import as_layers
from .run import PaperPool, PolicyRun
from .workers import Workers

if TYPE_CHECKING:
    from overspill.models import BuiltModel

MIB = 1 << 20
IMAGES = 1 << 32
"""The batch at which steps are captured, larger than any size that does not grow with the batch. So the remainder of a
size is its constant part, and the quotient the part of each image."""
HALVINGS = 5
"""The number of bisections of the range of the largest budget: to a 32nd of the range between floor and device."""


@dataclass(frozen=True)
class LabSetting:
    """One training step of a paper: its network, batch, machine and software."""

    model: str
    batch: int
    device: str = "titan-x"
    image_size: int | None = None
    cudnn: int = 7
    layers: bool = True
    """Whether it runs as in the papers' frameworks; otherwise as in PyTorch."""
    features: bool = False
    """Whether the classifier is left out, so that its memory and time do not count."""
    whole_step: bool = False
    """Whether parameters, gradients and optimizer state may move too."""
    batch_norm: bool = True
    """False leaves batch norm out of the network."""
    tensor_cores: bool = False
    """Whether float32 uses them, at the rate of float16, as cuDNN may convert."""
    optimizer: str = "sgd"
    gradients: bool = True
    """False: each weight's gradient is applied and freed as soon as it is made."""
    shared_bandwidth: bool = False
    """Whether transfers take their bandwidth from ops, as if each op needed all of it (vDNN §V-B)."""
    conv_efficiency: float | None = None
    """The share of its FLOP/s that the device reaches in convolutions, if not that of its profile."""


class Lab:
    """Captured graphs and finished runs, cached.

    `say` is called with the name of each long task, and `workers` run the longest ones. `scale` is the factor on the
    paper's assumed constant.
    """

    def __init__(self, say: Callable[[str], None] = lambda _: None, workers: Workers | None = None) -> None:
        self._say = say
        self.workers = workers or Workers(say)
        self.scale = 1.0
        self._instead: Mapping[str, str] = {}
        self._graphs: dict[LabSetting, Graph] = {}
        self._runs: dict[tuple[LabSetting, str, int | None], PolicyRun] = {}
        self._floors: dict[tuple[LabSetting, str], int] = {}
        self._within: dict[tuple[LabSetting, str, PaperPool], tuple[PolicyRun, int]] = {}

    def instead_of(self, instead: Mapping[str, str]) -> Lab:
        """Return the same lab, with the same runs, but with replacements of some policies."""
        made = copy(self)
        made._instead, made._within = instead, {}
        return made

    def scaled(self, scale: float) -> Lab:
        """Return the same lab, where the paper's assumed constant is `scale` times as large."""
        made = copy(self)
        made.scale = scale
        return made

    def replaced(self, name: str) -> str:
        """Return the replacement of the mechanism `name`, or `name` itself without one."""
        kind, colon, _ = name.partition(":")
        if kind not in self._instead:
            return name
        least = colon and policy_named(name).memory_optimal
        return f"{self._instead[kind]}{':m' if least else ''}"

    def device(self, setting: LabSetting) -> Device:
        """Return the machine of `setting`."""
        device = load_device(setting.device)
        if setting.tensor_cores:
            rates = device.flops_per_second
            device = replace(device, flops_per_second={**rates, "float32": rates["float16"]})
        if setting.shared_bandwidth:
            share = device.offload_bytes_per_second / device.memory_bytes_per_second
            device = replace(device, transfer_compute_share=share)
        if setting.conv_efficiency is not None:
            device = replace(device, efficiency={**device.efficiency, LayerType.CONV: setting.conv_efficiency})
        return device

    def graph(self, setting: LabSetting) -> Graph:
        """Return the step as planned: in the framework's layers, with a choice of algorithms for each convolution."""
        if setting not in self._graphs:
            self._graphs[setting] = self._made(setting)
        return self._graphs[setting]

    def _made(self, setting: LabSetting) -> Graph:
        step = LabSetting(
            setting.model,
            IMAGES,
            image_size=setting.image_size,
            whole_step=setting.whole_step,
            batch_norm=setting.batch_norm,
            optimizer=setting.optimizer,
        )
        graph = at_batch(self.workers.made(f"capturing {setting.model}", _captured, step), setting.batch)
        # As the paper's framework runs it.
        if setting.layers:
            graph = as_layers(graph)
        if not setting.gradients:
            graph = with_gradients_applied(graph)
        graph = with_algorithms(graph, self.device(setting), cudnn=setting.cudnn)
        return feature_extraction(graph) if setting.features else graph

    def run(self, setting: LabSetting, policy: str | Policy, budget_bytes: int | None = None) -> PolicyRun:
        """Return the run of `policy`, within `budget_bytes` if it plans for budgets.

        The default is the device's free memory. Raises InfeasibleBudgetError if such a policy finds no schedule.
        """
        chosen = policy_named(self.replaced(str(policy)))
        budget = self.device(setting).usable_bytes if budget_bytes is None else budget_bytes
        # A policy that makes one schedule makes it for any budget.
        key = setting, str(chosen), budget if chosen.plans_for_budget else None
        if key not in self._runs:
            graph, device = self.graph(setting), self.device(setting)
            self._say(f"{setting.model} ({setting.batch}): {chosen}")
            schedule = chosen.plan(graph, device, budget if chosen.plans_for_budget else None)
            peak_bytes = check(graph, schedule).peak_bytes
            timeline = simulate(graph, schedule, device, op_seconds(graph, device))
            self._runs[key] = PolicyRun(graph, device, schedule, peak_bytes, timeline)
        return self._runs[key]

    def run_within(self, setting: LabSetting, policy: str | Policy, pool: PaperPool) -> tuple[PolicyRun, int]:
        """Return the run at the largest budget that fits `pool` on the device, and that budget.

        Smaller budgets are assumed to fit better, so the search bisects the range some times. Raises
        InfeasibleBudgetError if not even the least budget fits.
        """
        key = (setting, str(policy), pool)
        if self.replaced(str(policy)) != str(policy):  # without the mechanism, what it would do is not asked to fit
            return self.run(setting, policy), self.device(setting).usable_bytes
        if key not in self._within:
            self._within[key] = self._largest_within(setting, policy, pool)
        return self._within[key]

    def _largest_within(self, setting: LabSetting, policy: str | Policy, pool: PaperPool) -> tuple[PolicyRun, int]:
        usable = self.device(setting).usable_bytes
        if (run := self.run(setting, policy)).fits(pool):
            return run, usable
        # Halve the range between the least budget and all memory.
        low, high = self.floor_bytes(setting, policy), usable
        run = self.run(setting, policy, low)
        if not run.fits(pool):
            raise InfeasibleBudgetError(
                f"{pool.allocator} has no room for the step on the device, not even at the least budget",
                budget_bytes=usable,
                floor_bytes=run.reserved_bytes(pool),
                cause="fragmentation",
            )
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            tried = self.run(setting, policy, middle)
            if tried.fits(pool):
                low, run = middle, tried
            else:
                high = middle
        return run, low

    def floor_bytes(self, setting: LabSetting, policy: str | Policy) -> int:
        """Return the least budget for which `policy`, which plans for budgets, finds a schedule."""
        key = setting, self.replaced(str(policy))
        if key not in self._floors:
            try:
                self._floors[key] = self.run(setting, policy, 1).peak_bytes
            except InfeasibleBudgetError as error:
                self._floors[key] = error.floor_bytes
        return self._floors[key]


def network_wide_bytes(graph: Graph) -> int:
    """Return the bytes of vDNN's baseline, which reserves everything at once.

    The network's total need (MICRO'16, Fig. 2 and §IV-A) has weights, their gradients and all activations, two gradient
    maps of the largest size, and the largest workspace.
    """
    gradient_maps = [
        tensor.nbytes
        for tensor in graph.tensors
        if tensor.kind is TensorKind.TEMPORARY and _made_in(graph, tensor) is Phase.BACKWARD
    ]
    return (
        graph.persistent_bytes
        + sum(_held_bytes(graph, kind) for kind in (TensorKind.ACTIVATION, TensorKind.GRADIENT))
        + 2 * max(gradient_maps, default=0)
        + max((op.workspace_bytes for op in graph.ops), default=0)
    )


def with_gradients_applied(graph: Graph) -> Graph:
    """Return `graph` in which gradients of weights take no memory, since each is applied as soon as it is made."""
    gradients = (TensorKind.GRADIENT,)
    return replace(graph, tensors=tuple(replace(t, nbytes=0) if t.kind in gradients else t for t in graph.tensors))


def feature_extraction(graph: Graph) -> Graph:
    """Return `graph` in which the classifier takes no memory and no time.

    The classifier has the tensors that only ops after the last convolution or pooling use. vDNN manages the layers
    before (§III) and compares their times alone (§V-C).
    """
    spatial = (LayerType.CONV, LayerType.POOL)
    first = 1 + max((op.id for op in graph.ops if op.phase is Phase.FORWARD and op.layer_type in spatial), default=-1)
    # The classifier's layers, behind the last convolution or pooling.
    behind = {op.layer for op in graph.ops if op.phase is Phase.FORWARD and op.id >= first}

    def of_classifier(op: Op) -> bool:
        return op.layer in behind or op.phase is Phase.UPDATE

    mine = {
        t for op in graph.ops if not of_classifier(op) and op.name != "step.gradients" for t in op.reads + op.writes
    }
    tensors = tuple(t if t.id in mine else replace(t, nbytes=0) for t in graph.tensors)
    ops = tuple(
        replace(op, flops=0, moved_bytes=0, workspace_bytes=0, algorithms=()) if of_classifier(op) else op
        for op in graph.ops
    )
    return replace(graph, tensors=tensors, ops=ops)


def at_batch(graph: Graph, batch: int) -> Graph:
    """Return the step at `batch`, of `graph`, which was captured at IMAGES."""

    def size(captured: int) -> int:
        images, rest = divmod(captured, IMAGES)
        return rest + images * batch

    tensors = (replace(t, nbytes=size(t.nbytes), shape=tuple(map(size, t.shape))) for t in graph.tensors)
    ops = (
        replace(op, workspace_bytes=size(op.workspace_bytes), flops=size(op.flops), moved_bytes=size(op.moved_bytes))
        for op in graph.ops
    )
    return replace(graph, tensors=tuple(tensors), ops=tuple(ops))


def _held_bytes(graph: Graph, kind: TensorKind) -> int:
    return sum(t.nbytes for t in graph.tensors if t.kind is kind and not t.persistent)


def _made_in(graph: Graph, tensor: Tensor) -> Phase | None:
    maker = graph.producer.get(tensor.id)
    return None if maker is None else graph.ops[maker].phase


def _captured(setting: LabSetting) -> Graph:
    from overspill.job import Job  # noqa: PLC0415  # imports torch with what it runs
    from overspill.runtime.capture_job import step_graph  # noqa: PLC0415

    job = Job(lambda: _job(setting), setting.batch, setting.optimizer)
    return step_graph(job, whole_step=setting.whole_step)


def _job(setting: LabSetting) -> BuiltModel:
    from torch import nn  # noqa: PLC0415  # what only lists claims does without

    from overspill import models  # noqa: PLC0415

    job = models.load(setting.model, image_size=setting.image_size)
    if not setting.batch_norm:
        for module in list(job.module.modules()):
            for name, child in module.named_children():
                if isinstance(child, nn.BatchNorm2d):
                    setattr(module, name, nn.Identity())
    return job

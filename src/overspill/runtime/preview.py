"""What jobs would take and cost: their steps captured on fake tensors, planned, and nothing run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.capture.compiled.elsewhere import captured_for
from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.known_values import KnownValues
from overspill.capture.compiled.trace import trace
from overspill.capture.recording.graph import graph_of
from overspill.capture.sharding import Group, Sharding, sharded
from overspill.capture.virtual_gpu.torch_patches import fake_weights
from overspill.core import Device, Graph
from overspill.core.device import ELSEWHERE
from overspill.core.errors import InfeasibleBudget, RequestError, UnsupportedError
from overspill.core.garbage import without_collection
from overspill.costs import with_algorithms
from overspill.costs.releases import software_named
from overspill.estimation.api import Setting, of_recording
from overspill.estimation.api import of_job as estimate_of
from overspill.estimation.estimate import Estimate
from overspill.estimation.script import record_script
from overspill.job import Job, Parallel, Script
from overspill.job.prepare import attention_kernel, check_attention, prepare, prepared_batch, sharded_blocks
from overspill.models.drawing import drawing_from
from overspill.models.step import TrainingStep, under_autocast, whole_dtype
from overspill.plans.account import Account
from overspill.plans.comparison import Comparison, compare
from overspill.plans.fit import Fit
from overspill.plans.plan import Plan
from overspill.plans.sweep import Sweep, sweep
from overspill.policies import Policy
from overspill.pytorch.patching import patched

from . import batches
from .compiled.beside import HasGraph
from .compiled.partitions import Partitioned
from .hardware import account_of, allocator_config, device_named, elsewhere
from .infeasible import split_update
from .options import Options
from .step.train_step import TrainStep
from .step.updates import as_on
from .surroundings import surroundings_of_job

SEED = 0
CPU = torch.device("cpu")
ROOT = "root"
"""The group of parameters that are in no block."""


def preview(job: Job, options: Options) -> Plan:
    """The plan of a job, made on fake tensors: no memory, no run. For a CPU it is the plan that the run would make.

    For a GPU convolutions have the menu of algorithms that policies may choose from, as in `graph_for`, and a budget is that of
    its card, as in training there. With Inductor's
    kernels, whose programs are written and not compiled, library calls have no workspaces (`plan_unrun`).
    """
    with without_collection():  # of many small objects, none of which is garbage; it takes a tenth of the time
        return _preview(job, options)


def _preview(job: Job, options: Options) -> Plan:
    device, options = _device_of(options), _of_parallel(job, options)
    if job.parallel is None and options.whole_step and options.backend == "eager" and device.kind == "cpu":
        with _whole_step(job, options, device) as (step, batch, _):
            return step.preview(*batch)
    if options.backend == "eager":
        return _preview_eager(job, options)
    from .compiled.unrun import plan_unrun  # noqa: PLC0415 - Inductor takes seconds to import

    return _of_programs(job, _estimated(job, options, device), device, TrainStep.preview, plan_unrun)


def _of_parallel(job: Job, options: Options) -> Options:
    """`options`, in which a job on several GPUs is planned as a whole step. Raises RequestError for Inductor's kernels."""
    if job.parallel is None:
        return options
    if options.backend != "eager":
        raise RequestError(
            f"backend={options.backend}: a step with {job.parallel.kind} is planned with eager's kernels; leave one out",
            fields=["parallel"],
        )
    return replace(options, whole_step=True)


def _preview_eager(job: Job, options: Options) -> Plan:
    """The plan of a job with eager's kernels: of the step as it is, or in pieces of rows."""
    options, captures, account = _captured(job, options)
    try:
        return captures.planned(options, account)
    except InfeasibleBudget as error:
        by_calls = not options.whole_step and not isinstance(job.model, Script)
        raise error.told(split_update(error)) if by_calls else error from None


def planner_for(job: Job, options: Options) -> tuple[Options, Graph, Callable[[int], Plan]]:
    """`options` with what the job is estimated to take, its step's graph, and what plans it for a budget in bytes.

    The step is as `captured` has it; with eager's kernels plans are of that, or of the same in pieces of rows where that is faster.
    """
    options, captures, account = _captured(job, options)
    return options, captures.graph, captures.planner(options, account)


def compare_job(
    job: Job, options: Options, policies: Iterable[str | Policy], progress: Callable[[str], None] | None = None
) -> Comparison:
    """A row for each of `policies` on one step of a job within the budget. Raises RequestError."""
    options, captures, account = _captured(job, options)
    budget_bytes = account.bytes_of(options.limit, captures.graph, captures.planner(options, account))

    def account_for(policy: Policy) -> Account:
        return account_of(replace(options, policy=policy), account.device, CPU)

    rows = compare(
        captures.graph, account.device, policies, budget_bytes, options.times, progress, account_for,
        partial(_best, captures, options),
    )  # fmt: skip
    return Comparison(tuple(rows), account.device, budget_bytes)


def sweep_job(
    job: Job,
    options: Options,
    policies: Iterable[str | Policy],
    points: int,
    progress: Callable[[str], None] | None = None,
) -> Sweep:
    """What one step of a job costs by each of `policies` at so many budgets. Raises RequestError."""
    options, captures, account = _captured(job, options)
    best = partial(_best, captures, options)
    return sweep(captures.graph, account.device, policies, points, options.times, progress, account, best)


def _best(captures: Partitioned[HasGraph], options: Options, search_in: Callable[[Graph], Fit]) -> Plan:
    return captures.best_plan(lambda step: search_in(step.graph), options.times)


def captured(job: Job, options: Options) -> tuple[Options, Graph, Device]:
    """The Graph of one step of a job, the device to plan it for, and `options` with what it is estimated to take there.

    With Inductor's kernels the graph is that of the programs that stock torch.compile runs; of a script it is a recorded step.
    """
    options, captures, account = _captured(job, options)
    return options, captures.graph, account.device


def _captured(job: Job, options: Options) -> tuple[Options, Partitioned[Any], Account]:
    """`options` with what the job is estimated to take, the captures of its step, and what a budget counts."""
    device, options = _device_of(options), _of_parallel(job, options)
    if isinstance(job.model, Script):
        estimate = script_estimate(job.model, options, device)
        options = replace(options, estimated_bytes=estimate.total_bytes)
        captures: Partitioned[Any] = Partitioned([OneGraph(graph_of(estimate.recording, estimate.name))])
    elif options.backend != "eager":
        graph, device = graph_for(job, options)
        captures = Partitioned([OneGraph(graph)])
    else:
        captures = _captures_for(job, options, device)
    options = _estimated(job, options, device)
    return options, captures, account_of(options, device, CPU)


class OneGraph(NamedTuple):
    """A step of which nothing but the graph is needed."""

    graph: Graph


def _estimated(job: Job, options: Options, device: Device) -> Options:
    """`options` with what the job is estimated to take unmanaged, on a GPU that is not here, unless they say it.

    Where it cannot be estimated (a model that needs computed values), the captured graph says it.
    """
    if options.estimated_bytes is not None or device.index != ELSEWHERE:
        return options
    try:
        made = estimate_of(job, _setting(options), compiled=options.backend == "inductor")
    except (RequestError, UnsupportedError):
        return options
    return replace(options, estimated_bytes=(made.compiled or made).total_bytes)


def _setting(options: Options) -> Setting:
    """Where an estimate is to be for, so that it is of what `options` plan for."""
    return Setting(
        device_named(options.device, CPU), "pytorch", allocator_config(), options.software or software_named()
    )


def script_estimate(script: Script, options: Options, device: Device) -> Estimate:
    """The estimate of a script that is run for a few steps on a virtual GPU. Raises RequestError where it is not to be planned."""
    if device.index != ELSEWHERE:
        raise RequestError(f"script='{script.path}': is recorded on a GPU that is not there; name which, with gpu=")
    if options.whole_step or options.backend != "eager":
        other = "whole_step=" if options.whole_step else f"backend={options.backend}"
        raise RequestError(f"script='{script.path}': its recorded step is planned, without {other}; leave that out")
    setting = _setting(options)
    done = record_script(
        script.path, script.arguments, iterations=script.iterations, capability=setting.capability,
        memory_bytes=setting.device.memory_bytes, output_to_stderr=True, time_limit=script.time_limit,
        allow_writes=script.allow_writes, whole_steps=True, tell=script.tell,
    )  # fmt: skip
    for note in done.notes:
        script.tell(note)
    if not done.trains:
        raise RequestError(
            f"script='{script.path}': it only runs models, and a plan is of a training step; estimate it"
        )
    return of_recording(done.recording, done.name, setting)


def graph_for(job: Job, options: Options) -> tuple[Graph, Device]:
    """The Graph of one step of a model's job, and the device that any policy is to plan it for: that of `step_graph`, with menus on a GPU."""
    device, options = _device_of(options), _of_parallel(job, options)
    if options.backend == "eager":
        return _captures_for(job, options, device).graph, device
    from .compiled.unrun import graph_unrun  # noqa: PLC0415 - Inductor takes seconds to import

    return _of_programs(job, options, device, TrainStep.graph, graph_unrun), device


def _captures_for(job: Job, options: Options, device: Device) -> Partitioned[Captured]:
    """Captures of one step with eager's kernels as on `device`, with menus on a GPU; in pieces too, if `options` are."""

    def found() -> Iterator[Captured]:
        made = _captures(job, options.reserve, device, whole_step=options.whole_step)
        while True:
            with captured_for(device):
                if (step := next(made, None)) is None:
                    return
            yield replace(step, graph=with_algorithms(step.graph, device)) if device.kind == "cuda" else step
            if not options.in_pieces:
                return

    return Partitioned(found())


T = TypeVar("T")


def _of_programs(job: Job, options: Options, device: Device, of_step: Callable[..., T], unrun: Callable[..., T]) -> T:
    """What is made of the programs that Inductor writes for a step: `of_step` of a whole step, or `unrun` of model and loss."""
    from overspill.capture.programs.unrun import nothing_compiled  # noqa: PLC0415 - Inductor takes seconds to import

    if options.whole_step:
        with _whole_step(job, options, device) as (step, batch, _), nothing_compiled():
            return of_step(step, *batch)
    with _fakes(job, device) as (model, batch, optimizer):
        return unrun(model, next(batches.split(batch, job.accumulate)), optimizer, options, job)


@contextmanager
def _fakes(
    job: Job, device: Device | None, *, whole_step: bool = False
) -> Iterator[tuple[TrainingStep, Any, Optimizer]]:
    """Model with loss, batch and optimizer on fake tensors, to be planned for `device`. Raises RequestError."""
    job.check_planned(whole_step=whole_step)
    with KnownValues(), patched(fake_weights()), attention_kernel(job):
        model, (batch, *_) = prepared_step(job, device)
        optimizer = job.make_optimizer(model.parameters())
        if device is not None:
            for group in optimizer.param_groups:
                group.update(as_on(torch.device(device.kind), group))
        yield model, batch, optimizer


@contextmanager
def _whole_step(job: Job, options: Options, device: Device | None) -> Iterator[tuple[TrainStep, Any, nn.Module]]:
    """The whole step of a job, its batch and its module, on fake tensors, to be planned for `device`."""
    with _fakes(job, device, whole_step=True) as (model, batch, optimizer):
        pass  # what is made stays; the step makes a fake mode of its own
    with attention_kernel(job):
        yield TrainStep(model.model, model.loss, (optimizer,), options, job.gradients), batch, model.model


def _device_of(options: Options) -> Device:
    """The device to plan for, which need not be here."""
    return elsewhere(device_named(options.device, CPU), options.software)


def step_graph(job: Job, *, whole_step: bool = False) -> Graph:
    """The Graph of one step of a job as PyTorch runs it here, captured on fake tensors.

    Of several micro-batches it is that of the last, which has the update.
    """
    return next(_captures(job, None, None, whole_step=whole_step)).graph


def _captures(job: Job, reserve: str | float | None, device: Device | None, *, whole_step: bool) -> Iterator[Captured]:
    """Captures of one step: as PyTorch runs it, with the update as on `device` (None: as here), then in pieces of rows."""
    if whole_step:
        with _whole_step(_of_one_rank(job), Options(), device) as (step, batch, module):
            made: Iterator[Captured] = iter(step.captures(*batch))
            if job.parallel is not None:
                sharding = _sharding(job, job.parallel, module)
                made = (replace(found, graph=sharded(found.graph, sharding)) for found in made)
    else:
        with _fakes(job, device) as (model, batch, optimizer):
            around = partial(
                surroundings_of_job, job, parameters=model.parameters(), optimizer=optimizer, reserve=reserve
            )
            steps = Partitioned(trace(model, next(batches.split(batch, job.accumulate)), around))
        made = iter(steps)
    yield from made


def _of_one_rank(job: Job) -> Job:
    """The job as one rank of several computes it: in the dtype of gathered parameters, on whole ones."""
    if job.parallel is None:
        return job
    job.check_planned(whole_step=True)
    return replace(job, parallel=None, dtype=job.parallel.param_dtype or job.dtype)


def _sharding(job: Job, parallel: Parallel, module: nn.Module) -> Sharding:
    """The groups of parameters that `fully_shard` makes of the model's blocks, and of the rest."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    paths = {part: path for path, part in module.named_modules()}
    groups = []
    for block in sharded_blocks(module, parallel):
        own = tuple(names.pop(p) for p in block.parameters() if p in names)
        groups.append(Group(paths[block], own, parallel.reshard_after_forward))
    groups.append(Group(ROOT, tuple(names.values()), again=False))  # with which backward begins
    return Sharding(parallel.gpus, tuple(groups), (whole_dtype(job.dtype) or torch.float32).itemsize)


def prepared_step(
    job: Job, device: Device | None = None, steps: int = 1
) -> tuple[TrainingStep, list[tuple[Tensor, ...]]]:
    """The model with its loss as the job has it, and what a step reads; with a `device`, to be planned for it."""
    samples = (job.batch or 1) * job.accumulate
    with drawing_from(SEED):
        built = job.build()
        prepare(built.module, job)
        given = [prepared_batch(built.make_batch(samples), job) for _ in range(steps if built.varied else 1)]
    if job.dtype.startswith("amp"):
        built = replace(built, loss=partial(under_autocast, built.loss))
    step = TrainingStep(built)
    if device is not None and job.attention is not None:
        check_attention(job, device, lambda: step(*given[0]))
    return step, given

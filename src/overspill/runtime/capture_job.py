"""Capture one step of a job on fake tensors: with eager's kernels, or as Inductor's programs. Nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, islice
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.capture.compiled.absent_gpu import captured_for
from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.known_values import KnownValues
from overspill.capture.compiled.trace import captures, trace
from overspill.capture.programs.workspaces import nothing_measured
from overspill.capture.repetition import SHALLOW, with_blocks
from overspill.capture.sharding import Group, Sharding, sharded
from overspill.capture.virtual_gpu.torch_patches import fake_weights
from overspill.core import Device, Graph
from overspill.core.device import ABSENT
from overspill.core.errors import OverspillError, RequestError, is_out_of_memory
from overspill.core.forked import copied
from overspill.core.user_code import is_graph_break, model_raised
from overspill.costs import with_algorithms
from overspill.job import Job, Parallel
from overspill.job.prepare import (
    attention_kernel,
    check_attention,
    prepare,
    prepared_batch,
    sharded_blocks,
    stack_of_blocks,
)
from overspill.models.drawing import drawing_from
from overspill.models.step import TrainingStep, under_autocast, whole_dtype
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.patching import patched

from . import batches
from .compiled.loop_plans import LoopPlans, persistent
from .compiled.partitions import Partitioned
from .compiled.weak_references import WeakReferences
from .options import Options
from .step.train_step import TrainStep
from .step.updates import as_on
from .surroundings import surroundings_of_job

T = TypeVar("T")
SEED = 0
ROOT = "root"
"""The group of parameters that are in no block."""
DEEP = 16
"""A model with so many equal blocks is not captured with all of them for a GPU that is not here."""


Blocks: TypeAlias = nn.ModuleList | nn.Sequential
Shallow = Callable[[Blocks, Callable[[], Iterator[Captured]]], None]
"""A function of the blocks of a deep model and of what captures it then; it takes blocks away."""


class Fakes(NamedTuple):
    """A job's model with loss and its batch on fake tensors of one `mode`, to be planned for `device`."""

    job: Job
    device: Device | None
    mode: KnownValues
    model: TrainingStep
    batch: Any

    @contextmanager
    def entered(self) -> Iterator[Optimizer]:
        """Make more such tensors inside the block, which gets the optimizer."""
        with self.mode, patched(fake_weights()), attention_kernel(self.job):
            optimizer = self.job.make_optimizer(self.model.parameters())
            if self.device is not None:
                for group in optimizer.param_groups:
                    group.update(as_on(torch.device(self.device.kind), group))
            yield optimizer

    @property
    def deep_stack(self) -> Blocks | None:
        """The equal blocks of a deep model; None if it has others, or is the caller's own, which stays as it is."""
        if not all(isinstance(parameter, FakeTensor) for parameter in self.model.parameters()):
            return None
        stack = stack_of_blocks(self.model)
        return stack if stack is not None and len(stack) >= DEEP else None


def step_graph(job: Job, *, whole_step: bool = False) -> Graph:
    """Return the Graph of one step of a job as PyTorch runs it on this machine.

    With several micro-batches it is that of the last, which includes the update.
    """
    with nothing_measured():
        return next(_eager_captures(job, Options(whole_step=whole_step), None)).graph


def captures_of(job: Job, options: Options, device: Device, *, moves: bool) -> Partitioned[Captured]:
    """Return the captures of one step of a job for `device`, beginning with the one that PyTorch runs.

    With eager's kernels the others are in pieces of rows, if `options` allow them, and then, if it `moves`, with all of
    the memory of a step that is cut where the user's code runs. Ops of a GPU have the algorithms to choose from. With
    Inductor's there are no others. Graphs of a deep model for a GPU that is not here follow from those of fewer blocks
    (`capture/repetition.py`): these captures have a graph, and no program for it.
    """
    if options.backend != "eager":
        return with_programs(job, options, device, lambda captures: Partitioned([next(iter(captures))]))

    def found() -> Iterator[Captured]:
        may_repeat = device.kind == "cuda" and device.index == ABSENT
        made = (_repeated if may_repeat else _eager_captures)(job, options, device, moves=moves)
        while True:
            with captured_for(device), nothing_measured():
                if (step := next(made, None)) is None:
                    return
            yield replace(step, graph=with_algorithms(step.graph, device)) if device.kind == "cuda" else step
            if not options.in_pieces:
                return

    return Partitioned(found())


def with_programs(job: Job, options: Options, device: Device, use: Callable[[Partitioned[Any]], T]) -> T:
    """Return the result of `use` on the captures of a step as Inductor's programs.

    Each capture is written when `use` reads it. Library calls have no workspaces in them.
    """
    # Inductor takes seconds to import.
    from overspill.capture.programs.written_programs import nothing_compiled  # noqa: PLC0415

    from .compiled.program_captures import of_programs  # noqa: PLC0415

    if options.whole_step:
        fakes = _fakes(job, device, whole_step=True)
        with _whole_step(fakes, options) as step, nothing_compiled():
            return use(step.captures(*fakes.batch))
    fakes = _fakes(job, device)
    with fakes.entered() as optimizer:
        batch = next(batches.split(fakes.batch, job.accumulate))
        return of_programs(fakes.model, batch, optimizer, options, use, job)


def _repeated(job: Job, options: Options, device: Device, *, moves: bool) -> Iterator[Captured]:
    """Yield the captures of one step, those of a deep model with graphs that follow from models of fewer blocks.

    Where this process may be copied, each of these is captured in a copy.
    """
    least, *more = SHALLOW
    blocks = 0
    others: list[Iterator[Graph]] = []

    def fewer(number: int) -> Iterator[Graph]:
        made = _eager_captures(job, options, device, moves=moves, shallow=lambda stack, _: _keep(stack, number))
        return (captured.graph for captured in made)

    def in_copy(stack: Blocks, find: Callable[[], Iterator[Captured]], number: int) -> Iterator[Graph]:
        _keep(stack, number)
        return (captured.graph for captured in find())

    def begin(stack: Blocks, find: Callable[[], Iterator[Captured]]) -> None:
        nonlocal blocks
        blocks = len(stack)
        for number in more:
            work = partial(in_copy, stack, find, number)
            others.append(copies.enter_context(copied(work, partial(fewer, number))))
        _keep(stack, least)

    with ExitStack() as copies:
        first = _eager_captures(job, options, device, moves=moves, shallow=begin)
        for position in count():
            captured: Captured | None = None
            graph: Graph | None = None
            try:
                if (captured := next(first, None)) is None:
                    return
                shallow = [captured.graph, *map(next, others)]
                graph = with_blocks(shallow, blocks) if blocks else captured.graph
            except Exception:  # a model that does not run with fewer blocks
                if not blocks:
                    raise
            if captured is None or graph is None:
                yield from islice(_eager_captures(job, options, device, moves=moves), position, None)
                return
            yield replace(captured, graph=graph)


def _keep(stack: Blocks, number: int) -> None:
    del stack[number:]


def _eager_captures(
    job: Job, options: Options, device: Device | None, *, moves: bool = False, shallow: Shallow | None = None
) -> Iterator[Captured]:
    """Yield captures of one step: as PyTorch runs it, then in pieces of rows, then with all that `moves` in a loop.

    The update is that of `device`; None: of this machine.
    """
    fakes = _fakes(_of_one_rank(job) if options.whole_step else job, device, whole_step=options.whole_step)
    find = partial(_captures_of_fakes, job, options, fakes, moves=moves)
    try:
        if shallow is not None and (stack := fakes.deep_stack) is not None:
            shallow(stack, find)
        yield from find()
    except Exception as error:
        if not (isinstance(error, OverspillError) or is_graph_break(error) or is_out_of_memory(error)):
            _run_plainly(fakes)
        raise


def _run_plainly(fakes: Fakes) -> None:
    """Run forward without a capture, whose errors do not tell the layer. Raises RequestError if the model fails."""
    with fakes.entered():
        try:
            fakes.model(*next(batches.split(fakes.batch, fakes.job.accumulate)))
        except OverspillError:
            raise
        except Exception as error:
            raise RequestError(model_raised(error)) from error


def _captures_of_fakes(job: Job, options: Options, fakes: Fakes, *, moves: bool) -> Iterator[Captured]:
    """Return the captures of a step that was made; the first is made now."""
    if options.whole_step:
        with _whole_step(fakes, options) as step:
            made: Iterator[Captured] = iter(step.captures(*fakes.batch))
            if job.parallel is None:
                return made
            sharding = _sharding(job, job.parallel, fakes.model.model)
            return (replace(found, graph=sharded(found.graph, sharding)) for found in made)
    model = fakes.model
    with fakes.entered() as optimizer:
        traced = trace(model, next(batches.split(fakes.batch, job.accumulate)))
        around = surroundings_of_job(
            job, traced.joint, traced.parameters, parameters=model.parameters(), optimizer=optimizer,
            reserve=options.reserve,
        )  # fmt: skip
    loop = LoopPlans(WeakReferences(model.parameters(), [optimizer]), options)
    loop.may_move &= moves
    loop.name(model)
    plain = partial(captures, traced.joint, traced.inputs, around)
    return loop.captures(traced.joint, traced.inputs, persistent(traced.examples), around, plain)


def _fakes(job: Job, device: Device | None, *, whole_step: bool = False) -> Fakes:
    """Return the model with loss and a batch on fake tensors, to be planned for `device`. Raises RequestError."""
    job.check_planned(whole_step=whole_step)
    with KnownValues() as mode, patched(fake_weights()), attention_kernel(job):
        model, (batch, *_) = prepared_step(job, device)
    return Fakes(job, device, mode, model, batch)


@contextmanager
def _whole_step(fakes: Fakes, options: Options) -> Iterator[TrainStep]:
    """Yield the whole step of a job on fake tensors."""
    with fakes.entered() as optimizer:
        pass  # what is made stays; the step makes a fake mode of its own
    with attention_kernel(fakes.job):
        yield TrainStep(fakes.model.model, fakes.model.loss, (optimizer,), options, fakes.job.gradients)


def _of_one_rank(job: Job) -> Job:
    """Return the job as one of several ranks computes it: on whole parameters, in the dtype of gathered ones."""
    if job.parallel is None:
        return job
    job.check_planned(whole_step=True)
    return replace(job, parallel=None, dtype=job.parallel.param_dtype or job.dtype)


def _sharding(job: Job, parallel: Parallel, module: nn.Module) -> Sharding:
    """Return the groups of parameters that `fully_shard` makes of the model's blocks, and of the rest."""
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
    """Return the model with its loss as the job has it, and the batches of its steps.

    With a `device`, both are to be planned for it. With `steps`, a model with varied batches gets one for each.
    """
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

"""A job trained by one way in and by what that is compared with, and how the two differ, if they do."""

from __future__ import annotations

import itertools
import random
import sysconfig
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, TypeVar
from unittest.mock import patch

import numpy as np
import torch
import torch._dynamo
from jobs_by_field.job import Job
from jobs_by_field.ways import WAYS, Way
from torch import Tensor
from torch._inductor import compile_fx
from torch.utils._pytree import tree_leaves

from overspill.errors import InfeasibleBudgetError, OverspillError
from overspill.runtime.accelerator import repeatable_kernels

IDENTICAL, REFUSED, OTHER_BITS, UNPLANNED = "identical", "refused", "other bits", "no plan"
CRASH, PLAIN_FAILS, NOT_INSTALLED = "crash", "plain fails too", "not installed"
KINDS = (IDENTICAL, REFUSED, OTHER_BITS, UNPLANNED, CRASH, PLAIN_FAILS, NOT_INSTALLED)
SHARE = 0.7
"""The first budget, of what the step needs unmanaged; then what refusals name."""
MOST_TRIED = 8
GRADIENT = "gradient of "

T = TypeVar("T")
Numbers = list[dict[str, Tensor]]
"""After each step all that is compared, by name."""


@dataclass(frozen=True)
class Outcome:
    """How a job fared by one way: `kind` is one of `KINDS`, and `said` the line of a refusal, or what is wrong.

    `budget` is the last that was tried. A budget that a refusal named, and that was refused too, is one `named_in_vain`. By so many
    `over_bytes` the measured peak of a step is over the budget. `revision` is the commit of this repository.
    """

    job: str
    field: str
    about: str
    way: str
    kind: str
    said: str = ""
    error: str = ""
    budget: float = SHARE
    named_in_vain: int = 0
    plans: int = 0
    over_bytes: int = 0
    seconds: float = 0.0
    revision: str = ""

    @classmethod
    def of(cls, job: Job, way: str, kind: str, said: str = "") -> Self:
        """An outcome without a run."""
        return cls(job.name, job.field, job.about, way, kind, said)


@dataclass(frozen=True)
class Ran:
    """What a run gave."""

    numbers: Numbers
    plans: int
    partitions: list[list[float]]
    """By step, the `activation_memory_budget` of each graph's partition, in the order in which graphs were compiled."""
    over_bytes: int


def judge(job: Job, way: str, device: str = "cpu") -> Outcome:
    """Train `job` by `way` within 70 % of its memory, or within what the refusal of that names, and compare.

    On a GPU, where the job makes all that it makes, kernels repeat themselves as far as PyTorch has such.
    """
    begun = time.perf_counter()
    if device != "cpu":
        torch.set_default_device(device)
        repeatable_kernels()
    made = WAYS[way]
    found = Outcome.of(job, way, IDENTICAL)
    ran = None
    try:
        ran, budget, vain = named_budgets(lambda budget: run(job, made[1](budget)))
        found = replace(found, budget=budget, named_in_vain=vain)
    except Exception as error:  # noqa: BLE001 - what ends in any error is told
        traceback.print_exc()
        public = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == OverspillError.__module__]
        kind = REFUSED if public else CRASH
        found = replace(found, kind=kind, error=[*public, type(error).__name__][0], said=_line(error))
        _forget(error)
    try:
        expected = _reference(job, made[0], ran)
    except Exception as error:  # noqa: BLE001 - as above
        found = replace(found, kind=PLAIN_FAILS, error=type(error).__name__, said=_line(error))
    else:
        if ran is not None:
            compared = _compared(expected, ran, gradients=made[1](SHARE).gives_gradients)
            found = replace(found, plans=ran.plans, over_bytes=ran.over_bytes, **compared)
    return replace(found, seconds=time.perf_counter() - begun)


def named_budgets(train: Callable[[float], T]) -> tuple[T, float, int]:
    """What `train` makes of the first budget that it does not refuse, of 70 % and those that refusals name.

    And which one that is, and how many that were named were refused. Raises the last refusal where all are.
    """
    budget: float = SHARE
    for tried in range(MOST_TRIED):
        try:
            return train(budget), budget, max(0, tried - 1)
        except InfeasibleBudgetError as error:
            if error.floor_bytes <= budget or tried == MOST_TRIED - 1:
                raise
            budget = error.floor_bytes
            _forget(error)
    raise AssertionError


def _forget(error: BaseException) -> None:
    """Drop the frames and causes of `error`, which hold the model."""
    error.__cause__ = error.__context__ = error.__traceback__ = None


def _reference(job: Job, made: type[Way], ran: Ran | None) -> Numbers:
    """The numbers of plain PyTorch, or of stock torch.compile with the partitions that were chosen, step by step.

    A model that returns its own loss is planned anew behind its first step, and another partition may fit then.
    """
    # Without allow_rnn Dynamo would run recurrent layers by other kernels.
    with torch._dynamo.config.patch(allow_rnn=True):
        return run(job, made(), ran.partitions if ran is not None else []).numbers


def run(job: Job, way: Way, partitions: Sequence[list[float]] = ()) -> Ran:
    """Train by `way`, with torch.compile's partitions of each step as given, and note all numbers after each."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    torch._dynamo.reset()
    numbers, chosen = [], []
    try:
        with _partitioned() as begin:
            steps = job.trains(way)
            for of_step in itertools.chain(partitions, itertools.repeat(None)):
                if of_step is not None:
                    begin(of_step)
                if (value := next(steps, steps)) is steps:
                    break
                numbers.append(_numbers(way, value))
                chosen.append(way.partitions)
        return Ran(numbers, len(way.plans), chosen, way.over_bytes)
    finally:
        way.close()


@contextmanager
def _partitioned() -> Iterator[Callable[[list[float]], None]]:
    """Let torch.compile take the partitions last given, a graph after the other; where others are given, all is compiled anew."""
    given: list[float] = []
    compiled = 0
    plain = compile_fx.compile_fx

    def begin(partitions: list[float]) -> None:
        nonlocal compiled
        if partitions[: len(given)] != given:
            torch._dynamo.reset()
            compiled = 0
        given[:] = partitions

    def by_partition(*args: Any, **kwargs: Any) -> Any:
        nonlocal compiled
        memory = given[min(compiled, len(given) - 1)] if given else 1.0
        compiled += 1
        its_own = patch.object(compile_fx, "compile_fx", plain)  # it calls itself
        with its_own, torch._functorch.config.patch(activation_memory_budget=memory):
            return plain(*args, **kwargs)

    with patch.object(compile_fx, "compile_fx", by_partition):
        yield begin


def _numbers(way: Way, yielded: Any) -> dict[str, Tensor]:
    """All that is compared: what the job yielded, its models and optimizers, and the generator, copied."""
    found = {f"loss {i}": torch.as_tensor(leaf) for i, leaf in enumerate(tree_leaves(yielded))}
    for position, model in enumerate(way.models):
        own = dict([*model.named_parameters(), *model.named_buffers()])
        for name, tensor in own.items():
            found[f"{position}.{name}"] = tensor
            if tensor.grad is not None:
                found[f"{GRADIENT}{position}.{name}"] = tensor.grad
    for position, optimizer in enumerate(way.optimizers):
        found |= dict(_state(f"optimizer {position}", optimizer.state_dict()["state"]))
    found["generator"] = torch.get_rng_state()
    if torch.get_default_device().type == "cuda":
        found["generator of the device"] = torch.cuda.get_rng_state()
    return {name: (t.to_dense() if t.is_sparse else t).detach().to("cpu", copy=True) for name, t in found.items()}


def _state(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _state(f"{name}.{key}", part)
    elif isinstance(value, Tensor):
        yield name, value


def _compared(expected: Numbers, ran: Ran, *, gradients: bool) -> dict[str, Any]:
    """The fields `kind` and `said` of what a run gave, beside what it should have given."""
    if not ran.plans:
        return {"kind": UNPLANNED, "said": "it trained, and no plan was made"}
    if len(expected) != len(ran.numbers):
        return {"kind": OTHER_BITS, "said": f"{len(ran.numbers)} steps instead of {len(expected)}"}
    for step, (theirs, ours) in enumerate(zip(expected, ran.numbers, strict=True)):
        names = {n for n in theirs.keys() | ours.keys() if gradients or not n.startswith(GRADIENT)}
        differ = {name: _difference(theirs.get(name), ours.get(name)) for name in sorted(names)}
        differ = {name: how for name, how in differ.items() if how}
        if differ:
            shown = ", ".join(f"{name} {how}" for name, how in sorted(differ.items(), key=_worst)[:3])
            return {"kind": OTHER_BITS, "said": f"in step {step} {len(differ)} of {len(names)} tensors differ: {shown}"}
    return {"kind": IDENTICAL, "said": ""}


def _worst(item: tuple[str, str]) -> tuple[bool, float]:
    """Losses first, then what differs most."""
    name, how = item
    size = how.removeprefix("by ")
    return not name.startswith("loss"), -float(size) if size != how else float("-inf")


def _difference(theirs: Tensor | None, ours: Tensor | None) -> str:
    """How two tensors differ; empty where they do not."""
    if theirs is None or ours is None:
        return "is only there by plain PyTorch" if ours is None else "is not there by plain PyTorch"
    if (theirs.shape, theirs.dtype) != (ours.shape, ours.dtype):
        return f"is {ours.dtype} {tuple(ours.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
    if torch.equal(_bytes(theirs), _bytes(ours)):
        return ""
    if theirs.dtype == torch.uint8:
        return "is another"
    wider = torch.complex128 if theirs.is_complex() else torch.float64
    return f"by {float((theirs.to(wider) - ours.to(wider)).abs().max()):.1e}"


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _line(error: Exception) -> str:
    """What an error says, in one line, the same on every machine."""
    said = str(error).replace(f"{sysconfig.get_path('purelib')}/", "")
    return " ".join(said.split())[:600]


def row(outcome: Outcome) -> dict[str, Any]:
    """The outcome for a record, with what says something."""
    return {key: value for key, value in asdict(outcome).items() if value != ""}

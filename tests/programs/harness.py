"""Trains a program plainly and under a budget, and compares: every bit, and the measured peak with the budget.

A program is a generator, written as its user would write it, that builds its model, trains, and yields after each step what
is to be compared: tensors, and modules with their parameters, gradients and buffers. Its one argument is a `Memory`, by
which alone the runs differ: `memory.compile(model)` is the model itself, or `overspill.compile(model, budget=…)`.

Live bytes are counted by a dispatch mode around the whole program, so that the loss, the optimizer and what the program
holds itself are in the peak; it knows nothing of plans. What Inductor's kernels allocate no mode sees: there it is what
PyTorch's allocator gives and gets back, in the steps in which nothing is compiled.
"""

from __future__ import annotations

import gc
import hashlib
import sysconfig
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer

import overspill
from overspill.capture.programs.allocations import Allocations, allocations, peak_of
from overspill.core.errors import forgetful
from overspill.core.units import format_bytes
from overspill.errors import InfeasibleBudget, OverspillError
from overspill.plans.plan import Plan
from overspill.runtime.tracker import LiveBytes

COMPILE, TRAIN_STEP, INDUCTOR = "compile", "train_step", "inductor"
SHARE = 0.5
"""Where the budget is, between the smallest that works (0) and what plain training takes (1)."""
SCOUTED, MOST_TRIED = 3, 12
"""Steps of each trial with a small budget: not all is known after the first; and how many trials there are."""
IDENTICAL, REFUSED = "identical", "refused: "
GRADIENT = "gradient of "
TOLD = "may take more than the budget"
"""Of the warning that this step may exceed the budget, which is given while not all models of a session are known."""
Loss = Callable[..., Any]


class Memory:
    """What a program asks for where it may be planned; this one is plain PyTorch."""

    trains_by_step = False
    has_inductor = False

    def compile(self, model: Any, *, beside: Iterable[Tensor] = ()) -> Any:
        """The model to call; what the program itself keeps `beside` it all the time leaves so much less of a budget."""
        del beside
        return model

    def together(self, *models: nn.Module) -> tuple[Any, ...]:
        """Several models of one job, to call."""
        return models

    def step(self, model: nn.Module, loss: Loss, optimizer: Optimizer) -> Callable[..., Tensor]:
        """What takes one training step on a batch and returns its loss: `loss` is a function of the model and the batch."""
        called = self.compile(model)

        def step(*batch: Any) -> Tensor:
            optimizer.zero_grad()
            value = loss(called, *batch)
            value.backward()
            optimizer.step()
            return value.detach()

        return step

    @property
    def plans(self) -> list[Plan]:
        """The plans that were made."""
        return []

    def close(self) -> None:
        """Give the stores back."""


class Stock(Memory):
    """Plain `torch.compile`."""

    has_inductor = True

    def compile(self, model: Any, *, beside: Iterable[Tensor] = ()) -> Any:
        del beside
        return torch.compile(model, dynamic=False)

    def together(self, *models: nn.Module) -> tuple[Any, ...]:
        return tuple(map(self.compile, models))


class Budgeted(Memory):
    """The same under a budget, by `overspill.compile` or, where a program asks for a step, by `overspill.train_step`."""

    def __init__(self, budget: int, way: str) -> None:
        self.budget = budget
        self.beside_bytes = 0
        self.trains_by_step = way == TRAIN_STEP
        self.has_inductor = way == INDUCTOR
        # Its own partition, so that the bits are those of torch.compile as it is.
        self._kernels: dict[str, Any] = {"backend": "inductor", "partition": 1.0} if way == INDUCTOR else {}
        self._planned: list[Any] = []

    def compile(self, model: Any, *, beside: Iterable[Tensor] = ()) -> Any:
        self.beside_bytes = sum(t.nbytes for t in beside)
        made = overspill.compile(model, budget=max(1, self.budget - self.beside_bytes), **self._kernels)
        self._planned.append(made.overspill)
        return made

    def together(self, *models: nn.Module) -> tuple[Any, ...]:
        session = overspill.Session(budget=self.budget, **self._kernels)
        self._planned.append(session)
        return tuple(overspill.compile(model, session=session) for model in models)

    def step(self, model: nn.Module, loss: Loss, optimizer: Optimizer) -> Callable[..., Tensor]:
        if not self.trains_by_step:
            return super().step(model, loss, optimizer)
        made = overspill.train_step(model, loss, optimizer, budget=self.budget)
        self._planned.append(made)
        return made

    @property
    def plans(self) -> list[Plan]:
        return [plan for one in self._planned for plan in one.plans]

    def close(self) -> None:
        for one in self._planned:
            one.close()


Made = Generator[Any, None, None]


@dataclass(frozen=True)
class Program:
    """A program, what it is in a few words, the ways in which it can be planned, and a share for its budget."""

    name: str
    about: str
    make: Callable[[Memory], Made]
    ways: tuple[str, ...]
    share: float


PROGRAMS: dict[str, Program] = {}


def program(about: str, *ways: str, share: float = SHARE) -> Callable[[Callable[[Memory], Made]], Any]:
    """Registers a program under the name of its function."""

    def register(make: Callable[[Memory], Made]) -> Callable[[Memory], Made]:
        name = make.__name__.replace("_", "-")
        PROGRAMS[name] = Program(name, about, make, ways or (COMPILE,), share)
        return make

    return register


class WholeProgram(LiveBytes):
    """Counts live bytes around compiled calls too: Dynamo leaves this mode aside while it compiles, not while graphs run."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def add(self, values: Any) -> None:
        super().add(v for v in values if type(v) in (Tensor, nn.Parameter))  # tracing has others, without memory


@dataclass
class Ran:
    """One run: after each step digests of all that the program yielded, and the peak; and which steps were warned of."""

    numbers: list[dict[str, str]] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    told: list[bool] = field(default_factory=list)
    plans: list[Plan] = field(default_factory=list)

    @property
    def peak_bytes(self) -> int:
        """The largest peak of a step that was not warned of."""
        return max((peak for peak, told in zip(self.peaks, self.told, strict=True) if not told), default=0)


@dataclass(frozen=True)
class Outcome:
    """How a program fared by one way: `outcome` is `identical`, `refused: …`, or what is wrong."""

    name: str
    about: str
    way: str
    plain_peak_bytes: int
    budget_bytes: int
    peak_bytes: int
    plans: int
    outcome: str


def judge(chosen: Program, way: str) -> Outcome:
    """Train `chosen` plainly, and within a budget between the smallest that works and the plain peak."""
    if way == INDUCTOR:
        with torch._dynamo.config.patch(allow_rnn=True):  # else it would run recurrent layers by other kernels
            plain = run(chosen, Stock())
    else:
        plain = run(chosen, Memory())
    budget = peak = made = 0
    try:
        budget = _between(chosen, way, plain.peak_bytes)
        ran = run(chosen, Budgeted(budget, way))
        peak, made = ran.peak_bytes, len(ran.plans)
        outcome = _wrong(plain, ran, budget, gradients=way != TRAIN_STEP) or IDENTICAL
    except OverspillError as error:
        said = str(error).replace(f"{sysconfig.get_path('purelib')}/", "")  # the same on every machine
        outcome = f"{REFUSED}{said}" if "\n" not in said else f"an error of several lines: {said}"
    return Outcome(chosen.name, chosen.about, way, plain.peak_bytes, budget, peak, made, outcome)


def _between(chosen: Program, way: str, plain_peak_bytes: int) -> int:
    """A budget in bytes between the smallest that is not refused, found by what each refusal names, and the plain peak.

    Raises the last refusal where there is none.
    """
    floor, refusal = 1, None
    for _ in range(MOST_TRIED):
        memory = Budgeted(floor, way)
        try:
            run(chosen, memory, steps=SCOUTED)
        except InfeasibleBudget as error:
            # Its traceback would hold the batches of the refused run, and they would count beside those of the next.
            refusal = forgetful(error)
            floor = max(floor + 1, error.floor_bytes + memory.beside_bytes)
        else:
            break
        if floor >= plain_peak_bytes:
            raise refusal
    return floor + int(chosen.share * (plain_peak_bytes - floor))


def _wrong(plain: Ran, ran: Ran, budget_bytes: int, *, gradients: bool) -> str:
    """What is not as promised; empty where nothing is."""
    if len(plain.numbers) != len(ran.numbers):
        return f"different: {len(ran.numbers)} steps instead of {len(plain.numbers)}"
    for step, (expected, found) in enumerate(zip(plain.numbers, ran.numbers, strict=True)):
        names = sorted(n for n in expected.keys() | found.keys() if expected.get(n) != found.get(n))
        if not gradients:  # those of a planned step live inside it
            names = [name for name in names if not name.startswith(GRADIENT)]
        if names:
            return f"different in step {step}: {', '.join(names[:3])} ({len(names)} of {len(expected)})"
    if not ran.plans:
        return "no plan was made"
    if ran.peak_bytes > budget_bytes:
        return f"{format_bytes(ran.peak_bytes - budget_bytes)} over the budget"
    if all(plan.offloaded_bytes + plan.recomputed_ops == 0 for plan in ran.plans):
        return "nothing had to be moved or computed again"
    return ""


def run(chosen: Program, memory: Memory, steps: int | None = None) -> Ran:
    """Run the program, or its first `steps`, with all that it computes counted."""
    if memory.has_inductor and steps is None:
        with allocations() as found:
            ran = _run(chosen, memory, steps, found.part)
        ran.peaks = list(_peaks(found))[: len(ran.numbers)]  # the last part had no step
        return ran
    return _run(chosen, memory, steps, nullcontext)


def _run(chosen: Program, memory: Memory, steps: int | None, around: Callable[[], AbstractContextManager[None]]) -> Ran:
    ran, tracker = Ran(), WholeProgram(torch.device("cpu"))
    with _fresh(memory):
        made = chosen.make(memory)
        for _ in islice(iter(int, 1), steps):
            tracker.peak_bytes = tracker.live_bytes
            compiled = counters["stats"]["unique_graphs"]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with around(), nullcontext() if memory.has_inductor else tracker:
                    found = next(made, None)
            if found is None:
                break
            ran.peaks.append(tracker.peak_bytes)
            told = any(TOLD in str(warning.message) for warning in caught)
            ran.told.append(told or (memory.has_inductor and counters["stats"]["unique_graphs"] > compiled))
            ran.numbers.append(_digests(found if isinstance(found, tuple) else (found,)))
            del found
        ran.plans = memory.plans
        made.close()
    return ran


def _peaks(found: Allocations) -> Iterator[int]:
    """The peak of each step, from what the allocator did in it and before."""
    live = 0
    for before, changes in zip(found.between_parts, found.by_part, strict=False):
        live += sum(before)
        peak, after = peak_of(changes)
        yield live + peak
        live += after


@contextmanager
def _fresh(memory: Memory) -> Any:
    gc.collect()
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        yield
    finally:
        memory.close()
        torch._dynamo.reset()


def _digests(found: tuple[Any, ...]) -> dict[str, str]:
    """A digest of the bytes of each tensor, by its name."""
    named: dict[str, Tensor] = {}
    for position, value in enumerate(found):
        if isinstance(value, nn.Module):
            of_module = [*value.named_parameters(), *value.named_buffers()]
            own = {f"{position}.{name.removeprefix('_orig_mod.')}": tensor for name, tensor in of_module}
            named |= own | {GRADIENT + name: tensor.grad for name, tensor in own.items() if tensor.grad is not None}
        else:
            named[f"yielded {position}"] = torch.as_tensor(value)
    return {name: _digest(value.detach()) for name, value in named.items()}


def _digest(value: Tensor) -> str:
    shape_and_type = f"{tuple(value.shape)} {value.dtype} ".encode()
    return hashlib.sha256(shape_and_type + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()

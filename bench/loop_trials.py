"""A training loop run plainly and within a budget: what each leaves, the peak of its bytes, and whether all steps ran by plans."""

from __future__ import annotations

import gc
import hashlib
import itertools
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from loops_by_library import LOOPS
from loops_by_library.loop import INDUCTOR, Line, Trained
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from overspill.capture.programs.allocations import Allocations, allocations
from overspill.core.units import format_bytes
from overspill.errors import InfeasibleBudgetError, OverspillError

IDENTICAL, OTHER_BITS, UNPLANNED, OVER, REFUSED = "identical", "other bits", "no plan", "over budget", "refused"
CRASH, PLAIN_FAILS, NOT_INSTALLED = "crash", "plain fails too", "not installed"
KINDS = (IDENTICAL, OTHER_BITS, UNPLANNED, OVER, REFUSED, CRASH, PLAIN_FAILS, NOT_INSTALLED)


@dataclass(frozen=True)
class Ran:
    """What a run of a loop gave: all that is compared, and its bytes."""

    figures: list[str] = field(default_factory=list)
    """Losses, norms and other figures that the loop logged, as text."""
    tensors: dict[str, str] = field(default_factory=dict)
    """A digest of each weight, buffer and tensor of optimizer state, and of the settings of its groups."""
    weight_bytes: int = 0
    gradient_bytes: int = 0
    state_bytes: int = 0
    steps: int = 0
    """How often optimizers stepped."""
    unplanned_steps: int = 0
    """How many of these had no planned backward since the step before."""
    plans: int = 0
    budget_bytes: int = 0
    """The largest budget that a plan was made for."""
    first_peak_bytes: int = 0
    """The peak from the line to the end of the first update, while the budget is still learnt."""
    peak_bytes: int = 0
    """The peak of all that follows."""
    seconds: float = 0.0
    error: str = ""
    """Why there is nothing else here: the class of the error and its text."""
    traceback: str = ""
    floor_bytes: int = 0
    """The smallest budget that works, as a refusal says."""

    @property
    def owned_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state."""
        return self.weight_bytes + self.gradient_bytes + self.state_bytes


@dataclass(frozen=True)
class Outcome:
    """How a loop fared within a budget: `kind` is one of `KINDS`, and `said` what is wrong."""

    loop: str
    library: str
    about: str
    kind: str
    said: str = ""
    budget: str = ""
    """The budget that was asked for."""
    budget_bytes: int = 0
    owned_bytes: int = 0
    """Bytes of weights, gradients and optimizer state."""
    weight_bytes: int = 0
    state_bytes: int = 0
    plain_peak_bytes: int = 0
    first_peak_bytes: int = 0
    peak_bytes: int = 0
    """Measured peaks: plainly, and within the budget until and behind the first update."""
    steps: int = 0
    unplanned_steps: int = 0
    plans: int = 0
    plain_seconds: float = 0.0
    seconds: float = 0.0
    traceback: str = ""

    @property
    def below(self) -> bool:
        """Whether the budget is below the bytes of weights, gradients and optimizer state."""
        return 0 < self.budget_bytes < self.owned_bytes


def run(name: str, budget: str | int | None, measures: bool = True, backend: str = "eager") -> Ran:
    """Run a loop with the line for `budget`, or without it for None. Peaks are of PyTorch's allocator."""
    if measures and backend == INDUCTOR and budget is not None:
        # Plans count what library calls of Inductor's programs take, which cannot be learnt while peaks are recorded.
        run(name, budget, measures=False, backend=backend)
        torch._dynamo.reset()
        gc.collect()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    begun = time.perf_counter()
    ran = Ran()
    try:
        with _measured() if measures else nullcontext() as found, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mark = (lambda: None) if found is None else _mark_of(found)
            line = Line(budget, mark, backend)
            with _steps_counted(line, mark) as counted:
                trained = LOOPS[name].trains(line)
    except Exception as error:  # noqa: BLE001 - what ends in any error is told
        public = next((k.__name__ for k in type(error).__mro__ if k.__module__ == OverspillError.__module__), "")
        floor = error.floor_bytes if isinstance(error, InfeasibleBudgetError) else 0
        said = f"{public or type(error).__name__}: {error}"
        return replace(
            ran, error=said, traceback=traceback.format_exc(), floor_bytes=floor, seconds=time.perf_counter() - begun
        )
    seconds = time.perf_counter() - begun
    plans = [plan for session in line.sessions for plan in session.plans]
    if found is not None:
        beside = sum(tensor.nbytes for model in trained.others for tensor in model.state_dict().values())
        peaks = [peak - beside for peak in _peaks(found)]
        later = peaks[2:-1] if trained.ends else peaks[2:]
        ran = replace(ran, first_peak_bytes=max(peaks[1:2], default=0), peak_bytes=max(later, default=0))
    parameters = list({id(p): p for model in trained.models for p in model.parameters()}.values())
    state = {id(t): t for o in trained.optimizers for t in tree_leaves(list(o.state.values())) if isinstance(t, Tensor)}
    return replace(
        ran,
        figures=[repr(figure) for figure in trained.figures],
        weight_bytes=sum(p.nbytes for p in parameters),
        gradient_bytes=sum(p.nbytes for p in parameters if p.requires_grad),
        state_bytes=sum(t.nbytes for t in state.values()),
        tensors=dict(_digests(trained)),
        steps=len(counted),
        unplanned_steps=sum(not planned for planned in counted),
        plans=len(plans),
        budget_bytes=max((plan.budget_bytes for plan in plans), default=0),
        seconds=seconds,
    )


@contextmanager
def _measured() -> Iterator[Allocations]:
    with allocations() as found:
        yield found


def _mark_of(found: Allocations) -> Callable[[], None]:
    def mark() -> None:
        with found.part():
            pass

    return mark


def _peaks(found: Allocations) -> list[int]:
    """The peak of live bytes before the first mark, and behind each."""
    stretches: list[list[int]] = []
    for at_mark, before in zip(found.by_part, found.between_parts, strict=True):
        stretches.append(before + at_mark)
    stretches.append(found.changes[sum(map(len, stretches)) :])
    live, peaks = 0, []
    for stretch in stretches:
        after = list(itertools.accumulate(stretch, initial=live))
        peaks.append(max(after))
        live = after[-1]
    return peaks


@contextmanager
def _steps_counted(line: Line, mark: Callable[[], None]) -> Iterator[list[bool]]:
    """Note of each step of an optimizer whether a planned backward ran since the step before it."""
    planned: list[bool] = []
    before = 0
    last: list[Optimizer] = []

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        nonlocal before
        now = sum(session.watch_calls.backwards_run for session in line.sessions)
        # The second of two optimizers has the same backward.
        if any(optimizer is other for other in last) or now > before:
            last.clear()
        together = bool(last)
        last.append(optimizer)
        planned.append(now > before or together)
        before = now
        mark()

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield planned
    finally:
        hook.remove()


def _digests(trained: Trained) -> Iterator[tuple[str, str]]:
    for index, model in enumerate(trained.models):
        for name, value in model.state_dict().items():
            yield f"{index}.{name.replace('_orig_mod.', '')}", _digest(value)
    for index, optimizer in enumerate(trained.optimizers):
        found = optimizer.state_dict()
        yield from _leaves(f"optimizer {index}", found["state"])
        yield from _leaves(f"group {index}", found["param_groups"])
    if trained.folder is not None:
        written = Path(trained.folder.name)
        for path in written.rglob("*.safetensors"):
            yield from _leaves(f"file {path.relative_to(written)}", load_file(path))
        for path in written.rglob("optimizer.pt"):
            yield from _leaves(f"file {path.relative_to(written)}", torch.load(path))
        trained.folder.cleanup()


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(f"{name}.{key}", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _leaves(f"{name}.{index}", part)
    else:
        yield name, _digest(value)


def _digest(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    plain = value.detach().cpu().contiguous()
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{plain.dtype} {tuple(plain.shape)} {hashlib.sha256(data).hexdigest()[:16]}"


def judged(name: str, asked: str, plain: Ran | str, within: Ran | str) -> Outcome:
    """Compare both runs of a loop; a string is why there is none."""
    loop = LOOPS[name]
    found = Outcome(name, loop.library, loop.about, IDENTICAL, budget=asked)
    if isinstance(plain, str) or plain.error:
        said, where = (plain, "") if isinstance(plain, str) else (plain.error, plain.traceback)
        return replace(found, kind=PLAIN_FAILS, said=said, traceback=where)
    found = replace(
        found, owned_bytes=plain.owned_bytes, weight_bytes=plain.weight_bytes, state_bytes=plain.state_bytes,
        plain_peak_bytes=plain.peak_bytes, plain_seconds=plain.seconds,
    )  # fmt: skip
    if isinstance(within, str) or within.error:
        return replace(found, **_failed(within))
    found = replace(
        found, budget_bytes=within.budget_bytes, first_peak_bytes=within.first_peak_bytes, peak_bytes=within.peak_bytes,
        steps=within.steps, unplanned_steps=within.unplanned_steps, plans=within.plans, seconds=within.seconds,
    )  # fmt: skip
    over = within.peak_bytes - within.budget_bytes
    if differ := difference(plain, within):
        return replace(found, kind=OTHER_BITS, said=differ)
    if not within.plans or within.unplanned_steps:
        return replace(found, kind=UNPLANNED, said=f"{within.unplanned_steps} of {within.steps} steps without a plan")
    return replace(found, kind=OVER, said=f"{format_bytes(over)} over the budget") if over > 0 else found


def _failed(ran: Ran | str) -> dict[str, Any]:
    """The fields of a run that ended in an error."""
    if isinstance(ran, str):
        return {"kind": CRASH, "said": ran}
    public = any(kind.__name__ == ran.error.partition(":")[0] for kind in _public())
    told = {"said": _line(ran.error), "traceback": ran.traceback, "seconds": ran.seconds}
    return {"kind": REFUSED if public else CRASH, **told}


def difference(plain: Ran, within: Ran) -> str:
    """How two runs differ; empty if they do not."""
    said = []
    if plain.figures != within.figures:
        pairs = itertools.zip_longest(plain.figures, within.figures)
        at, one, other = next((i, one, other) for i, (one, other) in enumerate(pairs) if one != other)
        said.append(f"figure {at} is {other} instead of {one}")
    names = plain.tensors.keys() | within.tensors.keys()
    if differ := sorted(name for name in names if plain.tensors.get(name) != within.tensors.get(name)):
        said.append(f"{len(differ)} of {len(names)} values differ: {', '.join(differ[:3])}")
    return "; ".join(said)


def _public() -> Iterable[type]:
    kinds = [OverspillError]
    while kinds:
        kind = kinds.pop()
        yield kind
        kinds += kind.__subclasses__()


def _line(text: str) -> str:
    return " ".join(text.split())[:600]


def row(outcome: Outcome) -> dict[str, Any]:
    """The outcome for a record."""
    return {key: value for key, value in asdict(outcome).items() if value != ""}

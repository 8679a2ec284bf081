"""Topic 3: are losses, weights and buffers those of plain training, to the last bit? And does plain training repeat itself?"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpu.experiment import Figures, Setting
from overspill.core.errors import InfeasibleBudgetError, OverspillError
from overspill.job import Job
from overspill.models import load
from overspill.runtime.accelerator import repeatable_kernels
from overspill.runtime.options import Options
from overspill.runtime.reachable import same_bits
from overspill.runtime.training import Run, train, train_plain

from .jobs import SMALL_BATCH

STEPS = 3
BUDGET = "60%"


def eager(setting: Setting, model: str, batch: int, optimizer: str = "momentum") -> Figures:
    """Plain training, again, with PyTorch's own batch norm kernels; then managed with and without transfers, by both doors."""
    repeatable_kernels()
    managed, plain = _runs(setting, model, batch, optimizer)
    arms: dict[str, Callable[[], Run]] = {
        "plain again": lambda: plain(Options()),
        "plain, native batch norm": lambda: _with_native_batch_norm(plain),
        "compile": lambda: _within(BUDGET, lambda budget: managed(Options(budget))),
        "compile, nothing moved": lambda: managed(Options()),
        "train_step": lambda: _within(BUDGET, lambda budget: managed(Options(budget, whole_step=True))),
    }
    return _compared(setting, plain(Options()), arms)


def inductor(
    setting: Setting, model: str, batch: int, optimizer: str = "momentum", *, deterministic: bool = True
) -> Figures:
    """Stock torch.compile, again, and its programs within a budget: bits, and the peak beside the budget.

    On the CPU in one thread, for several add up an embedding's gradient in no fixed order.
    """
    if deterministic:
        repeatable_kernels()
    if not setting.is_cuda:
        torch.set_num_threads(1)
    managed, plain = _runs(setting, model, batch, optimizer)
    stock = Options(backend="inductor")

    def within(budget: str | None, placement: str | None = None, *, whole_step: bool = False) -> Run:
        def run(share: str | None) -> Run:
            options = Options(share, backend="inductor", partition=1, placement=placement, whole_step=whole_step)
            return managed(options)

        return _within(budget, run)

    arms: dict[str, Callable[[], Run]] = {
        "torch.compile again": lambda: plain(stock),
        "compile": lambda: within(BUDGET),
        "compile, nothing moved": lambda: within(None),
        "compile, planned addresses": lambda: within(BUDGET, "planned"),
        "train_step": lambda: within(BUDGET, whole_step=True),
    }
    return _compared(setting, plain(stock), arms)


def _runs(setting: Setting, model: str, batch: int, optimizer: str) -> list[Callable[[Options], Run]]:
    """What trains the job as options say, managed and plain."""
    job = Job(lambda: load(model, small=setting.small), SMALL_BATCH if setting.small else batch, optimizer)
    return [partial(run, job, steps=STEPS, device=setting.device) for run in (train, train_plain)]


def _within(budget: str | None, run: Callable[[str | None], Run]) -> Run:
    """A run within the budget, or where that is below the floor within the floor."""
    with suppress(InfeasibleBudgetError):
        return run(budget)
    return run("smallest")  # not while the error is handled, whose frames hold a model


def _compared(setting: Setting, plain: Run, arms: dict[str, Callable[[], Run]]) -> Figures:
    """Each arm beside plain training; the state of all of them is kept on the CPU."""
    _to_cpu(plain)
    found: Figures = {"plain_losses": plain.losses, "arms": {}}
    for name, arm in arms.items():
        gc.collect()
        if setting.is_cuda:
            torch.cuda.empty_cache()
        try:
            run = arm()
        except OverspillError as error:  # an arm that is refused keeps none of the others from being asked
            found["arms"][name] = {"refused": str(error)}
        else:
            _to_cpu(run)
            found["arms"][name] = _difference(run, plain)
        setting.note(**found)
    return found


def _difference(run: Run, plain: Run) -> Figures:
    differing = [name for name, value in run.state.items() if not same_bits(value, plain.state[name])]
    row: Figures = {"identical": run.identical_to(plain), "losses": run.losses, "differing_tensors": len(differing)}
    if differing:
        one, other = run.state[differing[0]], plain.state[differing[0]]
        row["first_differing"] = differing[0]
        row["its_largest_difference"] = (one.double() - other.double()).abs().max().item()
    if run.plan is not None:
        row |= {
            "budget_bytes": run.plan.asked_bytes,
            "planned_peak_bytes": run.planned_peak_bytes,
            "planned_allocated_bytes": run.plan.allocated_bytes,
            "planned_reserved_bytes": run.planned_reserved_bytes,
            "measured_peak_bytes": run.measured_peak_bytes,
            "reserved_peak_bytes": run.reserved_peak_bytes,
            "offloaded_bytes": run.offloaded_bytes,
        }
    return row


def _to_cpu(run: Run) -> None:
    run.state = {name: value.cpu() for name, value in run.state.items()}


def _with_native_batch_norm(plain: Callable[[Options], Run]) -> Run:
    with _native_batch_norm():
        return plain(Options())


@contextmanager
def _native_batch_norm() -> Iterator[None]:
    """Batch norm by PyTorch's own kernels where eager CUDA takes cuDNN's: another's bits, if plain training has them."""
    theirs = F.batch_norm

    def ours(
        x: Tensor, mean: Any, variance: Any, weight: Any = None, bias: Any = None,
        training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        return torch.native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps)[0]

    F.batch_norm = ours  # type: ignore[assignment]
    try:
        yield
    finally:
        F.batch_norm = theirs

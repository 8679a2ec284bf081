"""Advice on a job, with what Overspill's own plans make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from overspill.core.errors import InfeasibleBudget, OverspillError
from overspill.estimation.advice import Advice, Price, advice
from overspill.estimation.estimate import Estimate
from overspill.estimation.recipe import Recipe
from overspill.models import Job
from overspill.models.step import DTYPES
from overspill.plans.plan import Plan

from .options import Options, store_bytes
from .training import Training, preview

_COMPILE, _TRAIN_STEP = "overspill.compile(model, budget=…)", "overspill.train_step(…)"


def advise(
    estimate: Estimate,
    load: Callable[[], Job],
    progress: Callable[[str], None] | None = None,
    trial: Callable[[str], None] | None = None,
) -> Iterator[Advice]:
    """All that would help the job that `load` makes, whose estimate this is, each piece tried: the cheapest first.

    `progress` is told what is being done, and `trial` each change that is tried.
    """
    retrace = estimate.retrace
    planner = None
    if retrace is not None and _can_plan(retrace.recipe) and estimate.batch:
        planner = partial(
            _planned, load, retrace.recipe, estimate.batch, Options(device=estimate.device, software=estimate.software)
        )
    return advice(estimate, planner, progress, trial=trial)


def _can_plan(recipe: Recipe) -> bool:
    """Whether the step is one that can be planned here: plain, and by an optimizer with a name."""
    return isinstance(recipe.optimizer, str) and recipe.dtype in DTYPES and not recipe.ways()


def _planned(load: Callable[[], Job], recipe: Recipe, batch: int, options: Options) -> Advice | None:
    """The plan of the job within all of the device; where feature maps are not enough, with parameters and their update too.

    Where that is not enough either, what the smallest plan needs.
    """
    assert isinstance(recipe.optimizer, str)
    least = None
    for whole_step, what in ((False, _COMPILE), (True, _TRAIN_STEP)):
        training = Training(load, batch, recipe.optimizer, whole_step=whole_step, dtype=recipe.dtype)
        try:
            return _as_advice(preview(training, options), what)
        except InfeasibleBudget as error:
            found = Advice(what, "time; the same numbers", Price.TIME, error.floor_bytes, error.floor_bytes, fits=False)
            least = min(least or found, found, key=lambda advice: advice.minimum_capacity_bytes or 0)
        except OverspillError:  # a model that is no one graph
            return least
    return least


def _as_advice(plan: Plan, what: str) -> Advice:
    cost = f"{plan.slowdown:.2f} times the unmanaged step, simulated; the same numbers"
    needed = plan.device_bytes
    return Advice(
        what, cost, Price.TIME, needed, needed, fits=True, step_seconds=plan.step_seconds, slowdown=plan.slowdown,
        host_bytes=store_bytes(plan) or None,
    )  # fmt: skip

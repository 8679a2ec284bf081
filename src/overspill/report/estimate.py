"""An estimate in a terminal: the words of `Estimate.explain`, the verdict in colour."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_bytes
from overspill.estimation import Estimate
from overspill.estimation.text import bars, figures, lines, moment, under_compile
from overspill.plans.plan import Plan

_BAR = "█▏▎▍▌▋▊▉"


def estimate_report(
    estimate: Estimate, *, asked: bool, within: Plan | InfeasibleBudget | None = None
) -> RenderableType:
    """The answer; `asked` says whether the user named a GPU, so that there is a verdict to give.

    `within` is the plan of the compiled step within a budget, or why there is none.
    """
    besides = [] if within is None else [_within(within)]
    if not asked:
        return Group(*(_line(line) for line in [*_without_verdict(estimate), *besides]))
    verdict, *rest = lines(estimate, estimate.changes, estimate.compiled, *besides)
    return Group(Text(verdict, style="bold green" if estimate.fits() else "bold red"), *(_line(line) for line in rest))


def _within(plan: Plan | InfeasibleBudget) -> str:
    """Whether the compiled step goes into its budget, and what that costs."""
    budget = format_bytes(plan.budget_bytes)
    if isinstance(plan, InfeasibleBudget):
        return f"  within {budget} of tensors: infeasible, the floor is {format_bytes(plan.floor_bytes)} ({plan.cause})"
    return (
        f"  within {budget} of tensors: feasible at {format_bytes(plan.peak_bytes)} (unmanaged: "
        f"{format_bytes(plan.unmanaged_peak_bytes)}), simulated step {plan.slowdown:.2f} times the unmanaged one"
    )


def _without_verdict(estimate: Estimate) -> list[str]:
    batch = "" if estimate.batch is None else f", batch {estimate.batch},"
    on = f" (context as on {estimate.device.name}; --gpu NAME asks for another)"
    fitting = ", ".join(estimate.gpus) or "none that `overspill devices` lists"
    compiled = [] if estimate.compiled is None else [under_compile(estimate, estimate.compiled, asked=False)]
    return [
        f"{estimate.name}{batch} takes {format_bytes(estimate.total_bytes)}{on}",
        "",
        *bars(estimate),
        "",
        *moment(estimate),
        *figures(estimate),
        f"  fits on {fitting}",
        *compiled,
    ]


def _line(line: str) -> Text:
    text = Text(line)
    text.highlight_regex(f"[{_BAR}]+", "cyan")
    return text

"""An estimate as a JSON object, and in a terminal.

The words are those of `Estimate.explain`; the verdict is in colour.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_bytes
from overspill.estimation import Estimate
from overspill.estimation.figures import Figures
from overspill.estimation.text import bars, figures, lines, moment, trained, under_compile
from overspill.plans.plan import Plan

from .advice import advice_answer

_BAR = "█▏▎▍▌▋▊▉"


def estimate_answer(
    request: dict[str, Any], made: Estimate, *, gpu: str | None, within: Plan | InfeasibleBudget | None
) -> dict[str, Any]:
    """The JSON object of an estimate.

    What only a GPU can answer is null without one.
    """
    peak = made.peak
    asked = gpu is not None
    return request | {
        # The bytes, and whether they fit.
        "gpu": gpu,
        "allocator": made.allocator,
        **_bytes_of(made),
        "unsaid": [] if made.unspecified is None else list(made.unspecified.options),
        "capacity_bytes": made.device.memory_bytes if asked else None,
        "fits": made.fits() if asked else None,
        "minimum_capacity_bytes": made.minimum_capacity_bytes,
        "breakdown": made.breakdown,
        "by_layer": dict(list(made.by_layer.items())[:20]),
        # When the peak is, and its largest tensors.
        "peak": {
            "step": peak.iteration, "phase": peak.phase.value, "layer": peak.layer, "op": peak.op,
            "around": list(peak.ops), "source": peak.source or None,
        },
        "peak_tensors": [_tensor_answer(made, position) for position in peak.largest],
        # Other batches, GPUs and changes.
        "host_bytes": made.recording.host_bytes,
        "largest_batch": made.largest_batch if asked else None,
        "stages": [{"stage": stage + 1, "peak_requested_bytes": nbytes} for stage, nbytes in made.stages.items()],
        "fitting_gpus": list(made.gpus),
        "changes": [
            advice_answer(change) for change in (made.changes if asked else ())
        ],
        "compiled": None if made.compiled is None else _compiled_answer(made.compiled, within, asked=asked),
        "seconds": made.seconds,
    }  # fmt: skip


def _tensor_answer(made: Figures, position: int) -> dict[str, Any]:
    """The JSON object of an allocation at the peak."""
    recording = made.recording
    it = recording.allocations[position]
    op = recording.ops[it.op].name if 0 <= it.op < len(recording.ops) else None
    return {
        "name": it.name, "kind": it.kind.value, "layer": it.layer, "op": op, "shape": list(it.shape), "dtype": it.dtype,
        "size_bytes": int(made.demand.nbytes[position]), "source": recording.source(it.frame) or None,
    }  # fmt: skip


def _bytes_of(made: Figures) -> dict[str, int]:
    """The bytes that a job takes, for JSON, eager or compiled."""
    return {
        "peak_requested_bytes": made.peak_requested_bytes,
        "peak_allocated_bytes": made.peak_allocated_bytes,
        "peak_reserved_bytes": made.peak_reserved_bytes,
        "context_bytes": made.context_bytes,
        "total_bytes": made.total_bytes,
        "total_low_bytes": made.total.low,
        "total_high_bytes": made.total.high,
    }


def _compiled_answer(made: Figures, within: Plan | InfeasibleBudget | None, *, asked: bool) -> dict[str, Any]:
    """The JSON object of the job under torch.compile, also of its step within a budget."""
    return {
        "program": "cpu",
        **_bytes_of(made),
        "fits": made.fits() if asked else None,
        "minimum_capacity_bytes": made.minimum_capacity_bytes,
        "breakdown": made.breakdown,
        "within": None if within is None else _within_answer(within),
    }


def _within_answer(plan: Plan | InfeasibleBudget) -> dict[str, Any]:
    if isinstance(plan, InfeasibleBudget):
        return {
            "feasible": False, "budget_bytes": plan.budget_bytes, "floor_bytes": plan.floor_bytes, "cause": plan.cause,
            "peak_bytes": None, "unmanaged_peak_bytes": None, "step_seconds": None, "slowdown": None,
        }  # fmt: skip
    return {
        "feasible": True, "budget_bytes": plan.budget_bytes, "floor_bytes": None, "cause": None,
        "peak_bytes": plan.peak_bytes, "unmanaged_peak_bytes": plan.unmanaged_peak_bytes,
        "step_seconds": plan.step_seconds, "slowdown": plan.slowdown,
    }  # fmt: skip


def estimate_report(
    estimate: Estimate, *, asked: bool, within: Plan | InfeasibleBudget | None = None
) -> RenderableType:
    """An estimate for a reader.

    `asked` says whether the user named a GPU, so that there is a verdict to give. `within` is the plan of the compiled
    step within a budget, or why there is none.
    """
    besides = [] if within is None else [_within(within)]
    if not asked:
        return Group(*(_line(line) for line in [*_without_verdict(estimate), *besides]))
    verdict, *rest = lines(estimate, estimate.changes, estimate.compiled, *besides)
    return Group(Text(verdict, style="bold green" if estimate.fits() else "bold red"), *(_line(line) for line in rest))


def _within(plan: Plan | InfeasibleBudget) -> str:
    """Whether the compiled step fits its budget, and its cost."""
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
        *trained(estimate),
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

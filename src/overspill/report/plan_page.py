"""A plan as a page: whether it fits, the linked views of its step, and what its peak is made of."""

from __future__ import annotations

from overspill.core import Verb
from overspill.core.units import format_bytes, format_seconds
from overspill.plans.plan import Plan

from .listing import percent
from .page import Column, Page, Table, Unit, Verdict, step
from .page.sections import Figure
from .plan import peak_of, peaks_of_card, whole_step_notes

TENSORS_AT_PEAK = 20


def plan_page(plan: Plan, title: str, placer: str | None = None) -> Page:
    """The report of `plan`, its blocks where `placer` puts them (None: PyTorch's caching allocator)."""
    peak = peak_of(plan)
    kinds = Table(
        f"What the peak is made of, at {peak.at}",
        (Column("kind"), Column("bytes", Unit.BYTES, bar=True), Column("share", Unit.SHARE)),
        tuple(
            (kind.value.replace("_", " "), nbytes, nbytes / plan.peak_bytes) for kind, nbytes in peak.by_kind.items()
        ),
    )
    tensors = Table(
        "The largest tensors at the peak",
        (Column("tensor"), Column("kind"), Column("shape"), Column("bytes", Unit.BYTES, bar=True)),
        tuple((t.name, t.kind.value.replace("_", " "), "x".join(map(str, t.shape)), t.nbytes) for t in peak.largest),
    )
    figures = Table("All figures", (Column("figure"), Column("value")), tuple(_figures(plan)))
    notes = ("Times and memory are simulated, not measured.", *whole_step_notes(plan))
    return Page(title, _verdict(plan), (step(plan, placer), kinds, tensors, figures), notes)


def _verdict(plan: Plan) -> Verdict:
    share = percent(plan.peak_bytes, plan.unmanaged_peak_bytes)
    return Verdict(
        f"Fits in {format_bytes(plan.asked_bytes)}",
        good=True,
        figures=(
            Figure("planned peak", format_bytes(plan.peak_bytes), f"{percent(plan.peak_bytes, plan.asked_bytes)} of the budget"),
            Figure("unmanaged peak", format_bytes(plan.unmanaged_peak_bytes), f"the plan takes {share} of it"),
            Figure("simulated slowdown", f"{plan.slowdown:.3f}", f"{format_seconds(plan.step_seconds)}, {format_seconds(plan.in_core_seconds)} unmanaged"),
            Figure("offloaded each step", format_bytes(plan.offloaded_bytes), f"{plan.schedule.counts[Verb.OFFLOAD]} tensors"),
            Figure("recomputed each step", f"{plan.recomputed_ops} ops"),
        ),
    )  # fmt: skip


def _figures(plan: Plan) -> list[tuple[str, str]]:
    return [
        ("budget", format_bytes(plan.asked_bytes)),
        *((what, format_bytes(nbytes)) for what, nbytes in peaks_of_card(plan)),
        ("waiting for transfers", format_seconds(plan.timeline.exposed_transfer_seconds)),
        ("lower bound of the step", f"{format_seconds(plan.lower_bound_seconds)} (the plan takes {plan.gap:.1%} more)"),
        ("planning took", format_seconds(plan.plan_seconds)),
    ]

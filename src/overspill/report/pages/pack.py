"""A packing as a page: whether it fits, the address map, and how far it may be from the best."""

from __future__ import annotations

from overspill.core import Trace
from overspill.core.units import format_bytes, format_seconds
from overspill.placement.packing.base import Solution
from overspill.report.page import Column, Figure, Page, Section, Table, Unit, Verdict, addresses

MOST_BLOCKS = 30


def pack_page(solution: Solution, trace: Trace, title: str, capacity_bytes: int | None = None) -> Page:
    """The report of `solution`, which is of the blocks of `trace`."""
    sections: list[Section] = []
    if solution.layout is not None:
        sections.append(addresses(trace, solution.layout, "Addresses over time", capacity_bytes))
    largest = sorted(enumerate(trace.blocks), key=lambda entry: (-entry[1].nbytes, entry[0]))[:MOST_BLOCKS]
    offsets = None if solution.layout is None else solution.layout.offsets
    columns = (
        *(Column("block"), Column("bytes", Unit.BYTES, bar=True), Column("from", Unit.NUMBER)),
        *(Column("until before", Unit.NUMBER), Column("address", Unit.NUMBER)),
    )
    rows = tuple(
        (b.name or str(b.id), b.nbytes, b.start, b.end, None if offsets is None else offsets[i]) for i, b in largest
    )
    sections.append(Table("The largest blocks", columns, rows))
    notes = ("The bound is proven: no layout of these blocks has a smaller peak.",)
    return Page(title, pack_verdict(solution, capacity_bytes), tuple(sections), notes)


def pack_verdict(solution: Solution, capacity_bytes: int | None = None) -> Verdict:
    """What the layout takes, whether that is within the capacity, and what no layout is below."""
    layout, bound = solution.layout, Figure("no layout is below", format_bytes(solution.bound_bytes))
    took = Figure("searched", format_seconds(solution.seconds), solution.stopped)
    if layout is None:
        return Verdict("No layout was found", good=False, figures=(bound, took))
    gap = "optimal" if solution.optimal else f"at most {solution.gap:.2%} above the optimum"
    fits = None if capacity_bytes is None else layout.peak_bytes <= capacity_bytes
    of = "" if capacity_bytes is None else f" of the {format_bytes(capacity_bytes)}"
    text = f"{'Does not fit: takes' if fits is False else 'Takes'} {format_bytes(layout.peak_bytes)}{of}, {gap}"
    figures = (
        Figure("peak of the layout", format_bytes(layout.peak_bytes), f"by {layout.solver}"),
        Figure("most live bytes", format_bytes(layout.lower_bound_bytes)),
        bound,
        took,
    )
    return Verdict(text, fits if fits is not None or not solution.optimal else True, figures)

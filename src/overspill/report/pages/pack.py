"""A packing as a page: verdict, address map, distance from the optimum."""

from __future__ import annotations

from collections.abc import Iterable

from overspill.core import Block, Trace
from overspill.core.units import format_bytes, format_seconds
from overspill.placement.packing.base import Solution
from overspill.placement.packing.verdict import PackingVerdict as Judged
from overspill.placement.packing.verdict import verdict as judge
from overspill.report.page import Column, Figure, Page, Section, Table, Unit, Verdict, addresses
from overspill.report.tables import Cell

MOST_BLOCKS = 30
COLUMNS = (
    Column("block"),
    Column("bytes", Unit.BYTES, bar=True),
    Column("from", Unit.NUMBER),
    Column("until before", Unit.NUMBER),
)
FITS = Judged(fits=True, infeasible=False)


def pack_page(solution: Solution, trace: Trace, title: str, capacity_bytes: int | None = None) -> Page:
    """The report of a packing of the blocks of `trace`."""
    found = judge(trace, solution, capacity_bytes)
    sections: list[Section] = [_core(trace, found.infeasible_core, capacity_bytes)] if found.infeasible_core else []
    if solution.layout is not None:
        sections.append(addresses(trace, solution.layout, "Addresses over time", capacity_bytes))
    largest = _largest_first(trace, range(len(trace.blocks)))[:MOST_BLOCKS]
    offsets = None if solution.layout is None else solution.layout.offsets
    columns = (*COLUMNS, Column("address", Unit.NUMBER))
    blocks = trace.blocks
    rows = tuple((*_row(blocks[i]), None if offsets is None else offsets[i]) for i in largest)
    sections.append(Table("The largest blocks", columns, rows))
    notes = ("The bound is proven: no layout of these blocks has a smaller peak.",)
    return Page(title, pack_verdict(solution, capacity_bytes, found), tuple(sections), notes)


def _core(trace: Trace, core: tuple[int, ...], capacity_bytes: int | None) -> Table:
    """The smallest known set of blocks that exceeds the capacity."""
    blocks, order = trace.blocks, _largest_first(trace, core)
    needed = format_bytes(sum(blocks[i].nbytes for i in core))
    capacity = "" if capacity_bytes is None else f", of a capacity of {format_bytes(capacity_bytes)}"
    title = "What cannot lie together" if len(core) > 1 else "What is too much by itself"
    return Table(title, COLUMNS, tuple(_row(blocks[i]) for i in order), f"{needed} in all{capacity}.")


def _largest_first(trace: Trace, positions: Iterable[int]) -> list[int]:
    return sorted(positions, key=lambda i: (-trace.blocks[i].nbytes, i))


def _row(block: Block) -> tuple[Cell, ...]:
    return block.name or str(block.id), block.nbytes, block.start, block.end


def pack_verdict(solution: Solution, capacity_bytes: int | None = None, found: Judged = FITS) -> Verdict:
    """The layout's size, whether it fits, and the lower bound.

    `found` is what was judged.
    """
    layout, bound = solution.layout, Figure("no layout is below", format_bytes(solution.bound_bytes))
    took = Figure("searched", format_seconds(solution.seconds), solution.stopped)
    if layout is None:
        return Verdict("No layout was found", good=False, figures=(bound, took))
    gap = "optimal" if solution.optimal else f"at most {100 * solution.gap:.3g} % above the optimum"
    fits = None if capacity_bytes is None else found.fits
    of = "" if capacity_bytes is None else f" of the {format_bytes(capacity_bytes)}"
    text = f"{'Does not fit: takes' if fits is False else 'Takes'} {format_bytes(layout.peak_bytes)}{of}, {gap}{', and no layout fits' if found.infeasible else ''}"
    figures = (
        Figure("peak of the layout", format_bytes(layout.peak_bytes), f"by {layout.solver}"),
        Figure("most live bytes", format_bytes(layout.lower_bound_bytes)),
        bound,
        took,
    )
    return Verdict(text, fits if fits is not None or not solution.optimal else True, figures)

"""A packing as a page: verdict, address map, distance from the optimum."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from overspill.core import Block, Trace
from overspill.core.units import format_bytes, format_seconds
from overspill.placement.packing.base import Solution, Solver
from overspill.placement.packing.columns import ANYWHERE
from overspill.placement.packing.files import TraceFile
from overspill.placement.packing.verdict import PackingVerdict, space_peaks
from overspill.placement.packing.verdict import verdict as judge

from .page import Column, Figure, Page, Section, Table, Unit, Verdict
from .page.step import addresses
from .tables import Cell

KIND = {"csv": "CSV", "trace": "saved trace", "snapshot": "PyTorch memory snapshot"}
MOST_NAMED, MOST_BLOCKS = 12, 30
COLUMNS = (
    Column("block"),
    Column("bytes", Unit.BYTES, bar=True),
    Column("from", Unit.NUMBER),
    Column("until before", Unit.NUMBER),
)

FITS = PackingVerdict(fits=True, infeasible=False)


def pack_page(
    solution: Solution,
    blocks: Trace | TraceFile,
    title: str,
    capacity_bytes: int | None = None,
    solver: Solver | None = None,
    remarks: Iterable[str] = (),
    found: PackingVerdict | None = None,
) -> Page:
    """Return the page of a packing of `blocks`.

    Blocks of a file are created from its columns only for the views that need them.
    """
    columns = blocks.columns if isinstance(blocks, TraceFile) else blocks
    found = found or judge(columns, solution, capacity_bytes)
    layout = solution.layout

    def trace() -> Trace:
        return blocks.trace if isinstance(blocks, TraceFile) else blocks

    parts: list[Table | Callable[[], list[Section]]] = []
    if found.infeasible_core:
        parts.append(_core(trace(), found.infeasible_core, capacity_bytes))
    if layout is not None:
        parts.append(lambda: [addresses(trace(), layout, "Addresses over time", capacity_bytes)])
    # What a file and a solver are, and what each space takes.
    figures = [] if not isinstance(blocks, TraceFile) else [Figure("blocks", *_blocks(blocks))]
    if solver is not None:
        figures.append(Figure("solver", solver.name, solver.summary))
    spaces = {} if layout is None or len(columns.spaces) < 2 else space_peaks(columns, layout.offsets)
    if spaces:
        peaks = ", ".join(f"{space}: {format_bytes(peak)}" for space, peak in spaces.items())
        figures.append(Figure("peak by space", peaks))
    return Page(
        title,
        pack_verdict(solution, capacity_bytes, found, tuple(figures)),
        (*parts, lambda: [_largest(trace(), solution)]),
        ("The bound is proven: no layout of these blocks has a smaller peak.", *remarks),
    )


def pack_verdict(
    solution: Solution,
    capacity_bytes: int | None = None,
    found: PackingVerdict = FITS,
    figures: tuple[Figure, ...] = (),
) -> Verdict:
    """Return the layout's size, whether it fits, and the lower bound."""
    layout, bound = solution.layout, Figure("no layout is below", _exact(solution.bound_bytes))
    early = f"{solution.stopped}; this is the best found until then" if solution.stopped else ""
    figures = (*figures, bound, Figure("searched", format_seconds(solution.seconds), early))
    if layout is None:
        return Verdict("No layout was found", good=False, figures=figures)
    gap = "optimal" if solution.optimal else f"at most {100 * solution.gap:.3g} % above the optimum"
    fits = None if capacity_bytes is None else found.fits
    of = "" if capacity_bytes is None else f" of the {format_bytes(capacity_bytes)}"
    takes = f"{'Does not fit: takes' if fits is False else 'Takes'} {format_bytes(layout.peak_bytes)}{of}, {gap}"
    sizes = (
        Figure("peak of the layout", _exact(layout.peak_bytes), f"by {layout.solver}"),
        Figure("most live bytes", _exact(layout.lower_bound_bytes)),
    )
    good = fits if fits is not None or not solution.optimal else True
    return Verdict(f"{takes}{', and no layout fits' if found.infeasible else ''}", good, (*sizes, *figures))


def _largest(trace: Trace, solution: Solution) -> Table:
    """Return the largest blocks, and the address of each."""
    offsets = None if solution.layout is None else solution.layout.offsets
    rows = tuple(
        (*_row(trace.blocks[i]), None if offsets is None else offsets[i])
        for i in _largest_first(trace, range(len(trace.blocks)))[:MOST_BLOCKS]
    )
    return Table("The largest blocks", (*COLUMNS, Column("address", Unit.NUMBER)), rows)


def _core(trace: Trace, core: tuple[int, ...], capacity_bytes: int | None) -> Table:
    """Return the smallest known set of blocks that exceeds the capacity."""
    blocks, order = trace.blocks, _largest_first(trace, core)
    needed = format_bytes(sum(blocks[i].nbytes for i in core))
    capacity = "" if capacity_bytes is None else f", of a capacity of {format_bytes(capacity_bytes)}"
    title = "What cannot lie together" if len(core) > 1 else "What is too much by itself"
    return Table(title, COLUMNS, tuple(_row(blocks[i]) for i in order), f"{needed} in all{capacity}.")


def _largest_first(trace: Trace, positions: Iterable[int]) -> list[int]:
    return sorted(positions, key=lambda i: (-trace.blocks[i].nbytes, i))


def _row(block: Block) -> tuple[Cell, ...]:
    return block.name or str(block.id), block.nbytes, block.start, block.end


def refusal(read: TraceFile, solution: Solution, found: PackingVerdict, capacity_bytes: int | None) -> str:
    """Return in one line why no layout fits the capacity, and what would fit."""
    within = "" if capacity_bytes is None else f" within {_exact(capacity_bytes)}"
    layout = solution.layout
    best = ""
    if layout is not None and capacity_bytes is not None:
        needs = max(space_peaks(read.columns, layout.offsets).values())
        best = f"; the layout found takes {_exact(needs)}, and --capacity {needs} would do"
    if found.infeasible:
        why = f"no layout is smaller than {_exact(solution.bound_bytes)}"
        return (
            f"infeasible: no layout lies{within}: "
            f"{_core_text(read, found.infeasible_core) if found.infeasible_core else why}{best}"
        )
    longer = "; a longer --time-limit or another --solver may find one that does" if layout is not None else ""
    if layout is not None:
        return f"does not fit: no layout was found{within}{best}{longer}"
    return (
        f"no layout was found{within} in {format_seconds(solution.seconds)}; a longer --time-limit or another --solver "
        "may find one"
    )


def _core_text(read: TraceFile, core: tuple[int, ...]) -> str:
    """Return blocks that cannot fit together, and their bytes, the largest first."""
    blocks = read.trace.blocks
    largest = sorted(core, key=lambda position: (-blocks[position].nbytes, position))
    names = [f"{read.label(at)} ({format_bytes(blocks[at].nbytes)})" for at in largest[:MOST_NAMED]]
    if len(core) == 1:
        return f"block {names[0]} alone is too much"
    more = f" and {len(core) - MOST_NAMED} more" if len(core) > MOST_NAMED else ""
    total = format_bytes(sum(blocks[position].nbytes for position in core))
    return f"blocks {', '.join(names)}{more}, {total} in all, cannot lie together"


def _blocks(read: TraceFile) -> tuple[str, str]:
    """Return how many blocks there are, and which of them are special."""
    columns = read.columns
    special = (
        ("pinned", int((columns.pinned != ANYWHERE).sum())),
        ("with gaps", int((np.diff(columns.gap_first) > 0).sum())),
        ("aligned", int((columns.alignment > 1).sum())),
    )
    return f"{len(columns)}", ", ".join(
        (f"from a {KIND[read.kind]}", *(f"{number} {what}" for what, number in special if number))
    )


def _exact(nbytes: int) -> str:
    """Return `nbytes` for a reader, exact where rounding hides a difference."""
    return format_bytes(nbytes) if nbytes < 1 << 10 else f"{format_bytes(nbytes)} ({nbytes} bytes)"

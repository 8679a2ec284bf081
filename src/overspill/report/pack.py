"""A packing in a terminal: its size, the bound, and whether it fits."""

from __future__ import annotations

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from overspill.core.units import format_bytes, format_seconds
from overspill.placement.packing.base import Solution, Solver
from overspill.placement.packing.columns import ANYWHERE
from overspill.placement.packing.files import TraceFile
from overspill.placement.packing.verdict import PackingVerdict, space_peaks

from .listing import listing

KIND = {"csv": "CSV", "trace": "saved trace", "snapshot": "PyTorch memory snapshot"}
MOST_NAMED = 12


def pack_report(
    read: TraceFile,
    solver: Solver,
    solution: Solution,
    found: PackingVerdict,
    capacity_bytes: int | None,
    notes: tuple[str, ...] = (),
) -> RenderableType:
    """The table of a packing, and notes below it."""
    rows = [
        ("blocks", _blocks(read)),
        ("solver", f"{solver.name}: {solver.summary}"),
        ("peak of the layout", "none was found" if solution.layout is None else _exact(solution.layout.peak_bytes)),
        (
            "most live bytes",
            _exact(read.lower_bound_bytes if solution.layout is None else solution.layout.lower_bound_bytes),
        ),
        ("no layout is below", _exact(solution.bound_bytes)),
        ("gap", _gap(solution)),
    ]
    # Rows that apply to some packings only.
    if solution.layout is not None and len(read.columns.spaces) > 1:
        peaks = space_peaks(read.columns, solution.layout.offsets)
        rows.append(("peak by space", ", ".join(f"{space}: {format_bytes(peak)}" for space, peak in peaks.items())))
    if capacity_bytes is not None:
        rows.append(("capacity", f"{_exact(capacity_bytes)}: {_fits(found)}"))
    rows.append(("time", format_seconds(solution.seconds)))
    if solution.stopped:
        rows.append(("ended early", f"{solution.stopped}; this is the best found until then"))
    lines = [Text(note) for note in notes]
    return Group(listing(("packing", read.path.name), rows), *([Text(""), *lines] if lines else []))


def refusal(read: TraceFile, solution: Solution, found: PackingVerdict, capacity_bytes: int | None) -> str:
    """Why no layout fits the capacity, and what would, in one line."""
    within = "" if capacity_bytes is None else f" within {_exact(capacity_bytes)}"
    layout = solution.layout
    best = ""
    if layout is not None and capacity_bytes is not None:
        needs = max(space_peaks(read.columns, layout.offsets).values())
        best = f"; the layout found takes {_exact(needs)}, and --capacity {needs} would do"
    if found.infeasible:
        why = f"no layout is smaller than {_exact(solution.bound_bytes)}"
        return f"infeasible: no layout lies{within}: {_core_text(read, found.infeasible_core) if found.infeasible_core else why}{best}"
    longer = "; a longer --time-limit or another --solver may find one that does" if layout is not None else ""
    if layout is not None:
        return f"does not fit: no layout was found{within}{best}{longer}"
    return f"no layout was found{within} in {format_seconds(solution.seconds)}; a longer --time-limit or another --solver may find one"


def _core_text(read: TraceFile, core: tuple[int, ...]) -> str:
    """Blocks that cannot fit together, and their bytes, the largest first."""
    blocks = read.trace.blocks
    largest = sorted(core, key=lambda position: (-blocks[position].nbytes, position))
    names = [f"{read.label(at)} ({format_bytes(blocks[at].nbytes)})" for at in largest[:MOST_NAMED]]
    if len(core) == 1:
        return f"block {names[0]} alone is too much"
    more = f" and {len(core) - MOST_NAMED} more" if len(core) > MOST_NAMED else ""
    total = format_bytes(sum(blocks[position].nbytes for position in core))
    return f"blocks {', '.join(names)}{more}, {total} in all, cannot lie together"


def _blocks(read: TraceFile) -> str:
    columns = read.columns
    special = (
        ("pinned", int((columns.pinned != ANYWHERE).sum())),
        ("with gaps", int((np.diff(columns.gap_first) > 0).sum())),
        ("aligned", int((columns.alignment > 1).sum())),
    )
    parts = [f"{count} {what}" for what, count in special if count]
    what = f" ({', '.join(parts)})" if parts else ""
    return f"{len(columns)}{what}, from a {KIND[read.kind]}"


def _gap(solution: Solution) -> str:
    if solution.layout is None:
        return ""
    return (
        "none: the layout is optimal" if solution.optimal else f"at most {100 * solution.gap:.3g} % above the optimum"
    )


def _fits(found: PackingVerdict) -> str:
    if found.fits:
        return "fits"
    return "does not fit, and no layout does" if found.infeasible else "does not fit"


def _exact(nbytes: int) -> str:
    """`nbytes` for a reader, exact where rounding hides something."""
    return format_bytes(nbytes) if nbytes < 1 << 10 else f"{format_bytes(nbytes)} ({nbytes} bytes)"

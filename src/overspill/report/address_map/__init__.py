"""Draw a layout as an address map.

Every block is a rectangle, over the times and the addresses that it takes. Below it the live bytes. By matplotlib;
`report/page/` has the map in a page.
"""

from __future__ import annotations

from pathlib import Path

from overspill.core import Layout, Trace
from overspill.core.errors import RequestError
from overspill.core.units import format_bytes
from overspill.report.plot import check_plot

from .png import draw_png
from .rectangles import address_maps

MOST_LETTERS = 80


def draw_address_map(path: Path, trace: Trace, layout: Layout, name: str, capacity_bytes: int | None = None) -> None:
    """Draw `layout` to the file `path`.

    `name` is what the title calls the trace. Raises RequestError where the file's ending is not known, its library is
    missing, or it cannot be written.
    """
    check_plot(path)
    maps = address_maps(trace, layout)
    shown = name if len(name) <= MOST_LETTERS else f"{name[:MOST_LETTERS]}…"
    title = f"{shown}: {len(trace.blocks)} blocks in {format_bytes(layout.peak_bytes)}, {layout.solver}"
    try:
        draw_png(trace, maps, path, title, capacity_bytes)
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error.strerror or error}; name another file") from None

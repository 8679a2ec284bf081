"""The address map: rectangles where the blocks lie, lines at the bounds, for no blocks, a few and very many."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core import Block, Layout, Trace
from overspill.core.errors import RequestError
from overspill.report import plot as plotting
from overspill.report.address_map import draw_address_map
from overspill.report.address_map.page import MOST_HOVERED
from overspill.report.address_map.rectangles import address_maps, lines, powers_of_2, size_range

KIB, PNG = 1 << 10, b"\x89PNG\r\n\x1a\n"
TRACE = Trace(
    (
        Block(0, 0, 4, 4 * KIB, "conv<1>"),
        Block(1, 2, 9, 8 * KIB, gaps=((4, 6),)),
        Block(2, 4, 6, 8 * KIB, "$x_{$"),
        Block(3, 3, 3, 8 * KIB, "no time"),
        Block(4, 0, 9, 0, "no bytes"),
    )
)
LAYOUT = Layout("by hand", (8 * KIB, 0, 0, 0, 0), 12 * KIB, 12 * KIB)
SPACES = Trace((Block(0, 0, 4, 100), Block(1, 2, 6, 50, space=3)))
NOTHING = Trace(())


def stacked(count: int) -> tuple[Trace, Layout]:
    """Many blocks of many sizes on top of one another, and where they lie."""
    sizes = [512 * (1 + i % 97) for i in range(count)]
    ends = np.cumsum(sizes).tolist()
    trace = Trace(tuple(Block(i, i, i + 1 + i % 1000, size) for i, size in enumerate(sizes)))
    return trace, Layout("stacked", (0, *ends[:-1]), ends[-1], trace.lower_bound_bytes)


def traces_of(path: Path) -> list[dict[str, Any]]:
    """What is drawn in a page."""
    text = path.read_text(encoding="utf-8")
    found = json.JSONDecoder().raw_decode(text, re.search(r'Plotly\.newPlot\(\s*"[^"]+",\s*', text).end())[0]
    assert isinstance(found, list)
    return found


def test_every_time_between_gaps_is_a_rectangle_where_the_block_lies() -> None:
    (shown,) = address_maps(TRACE, LAYOUT)
    table = np.stack([shown.block, shown.start, shown.end, shown.low, shown.high], axis=1)
    assert table.tolist() == [[0, 0, 4, 8, 12], [1, 2, 4, 0, 8], [1, 6, 9, 0, 8], [2, 4, 6, 0, 8]]
    assert (shown.unit, shown.time_range, shown.bound) == ("KiB", (0.0, 9.0), 12.0)


def test_live_bytes_are_those_of_the_trace() -> None:
    (shown,) = address_maps(TRACE, LAYOUT)
    assert dict(zip(shown.times.tolist(), shown.live.tolist(), strict=True)) == {0: 4, 2: 12, 4: 8, 6: 8, 9: 0}


def test_lines_are_at_the_most_live_bytes_and_at_the_capacity() -> None:
    (shown,) = address_maps(TRACE, LAYOUT)
    assert [(at, text) for at, text, *_ in lines(shown, None)] == [(12.0, "most live bytes, 12.0 KiB")]
    assert next((at, text) for at, text, *_ in lines(shown, 16 * KIB)) == (16.0, "capacity, 16.0 KiB")
    assert 16 < shown.top(16 * KIB) < 17
    assert 12 < shown.top(None) == shown.top(1 << 40) < 13  # a capacity far above would leave a thin map


@given(st.floats(1, 1e15), st.floats(2, 1e9))
def test_colours_are_marked_at_a_few_powers_of_2(least: float, factor: float) -> None:
    marked = powers_of_2(least, least * factor)
    assert 1 <= len(marked) <= 9
    assert all(least <= size <= least * factor and math.log2(size).is_integer() for size in marked)


def test_colours_are_for_the_sizes_that_can_be_seen() -> None:
    trace = Trace((Block(0, 0, 1, 1), Block(1, 0, 100, 1 << 20), Block(2, 0, 100, 1 << 24)))
    assert size_range(address_maps(trace, Layout("s", (0, 1 << 20, 1 << 21), 0, 0))) == (1 << 20, 1 << 24)
    assert size_range(address_maps(NOTHING, Layout("s", (), 0, 0))) == (1.0, 2.0)


@pytest.mark.parametrize("capacity", [None, 10, 14 * KIB, 1 << 40])
@pytest.mark.parametrize("ending", [".png", ".HTML"])
def test_the_file_is_of_its_kind_whatever_the_capacity(tmp_path: Path, ending: str, capacity: int | None) -> None:
    path = tmp_path / f"map{ending}"
    draw_address_map(path, TRACE, LAYOUT, "a <trace> of $5_{" + "x" * 300, capacity)
    content = path.read_bytes()
    assert content.startswith(PNG) if ending == ".png" else b"<html" in content
    assert len(content) > 10_000


@pytest.mark.parametrize("ending", [".png", ".html"])
def test_no_blocks_and_several_spaces_are_drawn_too(tmp_path: Path, ending: str) -> None:
    for name, trace, offsets in (
        ("none", NOTHING, ()),
        ("spaces", SPACES, (0, 0)),
        ("flat", Trace(TRACE.blocks[3:]), (0, 0)),
    ):
        path = tmp_path / f"{name}{ending}"
        draw_address_map(path, trace, Layout("s", offsets, 0, 0), name)
        assert path.stat().st_size > 5000
    assert [shown.space for shown in address_maps(SPACES, Layout("s", (0, 0), 150, 150))] == [0, 3]


def test_a_rectangle_of_a_page_says_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "map.html"
    draw_address_map(path, TRACE, LAYOUT, "trace")
    (bars,) = (drawn for drawn in traces_of(path) if drawn["type"] == "bar")
    assert len(bars["customdata"]) == 4
    assert "<b>conv&lt;1&gt;</b><br>4.0 KiB (4096 bytes)<br>live from 0 to 4<br>offset 8192" in bars["customdata"]
    assert "<b>1</b><br>8.0 KiB (8192 bytes)<br>live from 2 to 4, 6 to 9<br>offset 0" in bars["customdata"]
    assert "<script src=" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("ending", [".png", ".html"])
def test_very_many_blocks_stay_one_file_that_can_be_shown(tmp_path: Path, ending: str) -> None:
    trace, layout = stacked(MOST_HOVERED + 3000)
    path = tmp_path / f"many{ending}"
    draw_address_map(path, trace, layout, "many")
    if ending == ".html":
        drawn = traces_of(path)
        assert len(drawn) < 20
        assert [len(d["customdata"]) for d in drawn if d["type"] == "bar"] == [MOST_HOVERED]
    assert path.stat().st_size < (1 << 20 if ending == ".png" else 8 << 20)


@pytest.mark.parametrize("ending", [".png", ".html"])
def test_a_file_that_cannot_be_drawn_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    with pytest.raises(RequestError, match="cannot write"):
        draw_address_map(tmp_path / "absent" / f"map{ending}", TRACE, LAYOUT, "trace")
    with pytest.raises(RequestError, match=r"must end in \.png or \.html"):
        draw_address_map(tmp_path / "map.pdf", TRACE, LAYOUT, "trace")
    monkeypatch.setattr(plotting, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match=r"pip install overspill\[plot\]"):
        draw_address_map(tmp_path / f"map{ending}", TRACE, LAYOUT, "trace")

"""The address map: rectangles where the blocks lie, lines at the bounds, for no blocks, a few and very many."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core import Block, Layout, Trace
from overspill.core.errors import RequestError
from overspill.report import plot as plotting
from overspill.report.address_map import draw_address_map
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
def test_the_file_is_a_picture_whatever_the_capacity(tmp_path: Path, capacity: int | None) -> None:
    path = tmp_path / "map.PNG"
    draw_address_map(path, TRACE, LAYOUT, "a <trace> of $5_{" + "x" * 300, capacity)
    content = path.read_bytes()
    assert content.startswith(PNG)
    assert len(content) > 10_000


def test_no_blocks_and_several_spaces_are_drawn_too(tmp_path: Path) -> None:
    for name, trace, offsets in (
        ("none", NOTHING, ()),
        ("spaces", SPACES, (0, 0)),
        ("flat", Trace(TRACE.blocks[3:]), (0, 0)),
    ):
        path = tmp_path / f"{name}.png"
        draw_address_map(path, trace, Layout("s", offsets, 0, 0), name)
        assert path.stat().st_size > 5000
    assert [shown.space for shown in address_maps(SPACES, Layout("s", (0, 0), 150, 150))] == [0, 3]


def test_very_many_blocks_stay_one_small_file(tmp_path: Path) -> None:
    trace, layout = stacked(8000)
    path = tmp_path / "many.png"
    draw_address_map(path, trace, layout, "many")
    assert path.stat().st_size < 1 << 20


def test_a_file_that_cannot_be_drawn_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="cannot write"):
        draw_address_map(tmp_path / "absent" / "map.png", TRACE, LAYOUT, "trace")
    with pytest.raises(RequestError, match=r"in \.png"):
        draw_address_map(tmp_path / "map.html", TRACE, LAYOUT, "trace")
    monkeypatch.setattr(plotting, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match=r"pip install overspill\[plot\]"):
        draw_address_map(tmp_path / "map.png", TRACE, LAYOUT, "trace")

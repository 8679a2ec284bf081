"""The native reader of plain CSV gives what the other one gives, and leaves it what is not plain or wrong."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.core import Layout
from overspill.placement.packing.columns import Columns
from overspill.placement.packing.files import read_trace, write_layout
from overspill.placement.packing.rows import Rows, plain_rows
from overspill.placement.packing.table import parse_table

HEADER = "id,lower,upper,size\n"


@st.composite
def tables(draw: st.DrawFn) -> str:
    """CSV with columns in any order, blanks, other line ends, and cells left out where they may be."""
    columns = ["id", draw(st.sampled_from(["lower", "Start "])), draw(st.sampled_from(["upper", "end"])), "size"]
    columns += draw(st.lists(st.sampled_from(["alignment", "offset", "space", "hint"]), unique=True))
    columns = draw(st.permutations(columns))
    lines = [",".join(columns)]
    for i in range(draw(st.integers(0, 6))):
        start = draw(st.integers(-3, 9))
        cells = {
            "id": draw(st.sampled_from([f"b{i}", f" b {i}", f"{i}"])),
            "size": str(draw(st.integers(0, 10**12))),
            "alignment": draw(st.sampled_from(["", "1", "4"])),
            "offset": draw(st.sampled_from(["", "-1"])),
            "space": draw(st.sampled_from(["", "0", "3"])),
            "hint": draw(st.sampled_from(["", "-1", "x"])),
            "lower": f"{start}",
            "Start ": f" +{start} " if start >= 0 else str(start),
            "upper": str(start + 3),
            "end": str(start + 3),
        }
        lines.append(",".join(cells[column] for column in columns))
        if draw(st.booleans()):
            lines.append("")
    return draw(st.sampled_from(["\n", "\r\n"])).join(lines) + draw(st.sampled_from(["", "\n"]))


@settings(max_examples=200, deadline=None)
@given(text=tables(), draw=st.randoms(use_true_random=False))
def test_it_reads_and_writes_what_the_other_reader_does(text: str, draw: random.Random) -> None:
    table, trace = parse_table(text, "x")
    found = plain_rows(text.encode(), "x")
    if found is None:  # only a header without an end of line is left to the other
        assert "\n" not in text
        return
    rows, columns = found
    assert rows.names == [block.name for block in trace.blocks]
    assert columns.trace(rows.names) == trace
    assert rows.without_effect == table.without_effect
    offsets = [draw.randrange(10**9) for _ in trace.blocks]
    assert rows.with_offsets(offsets).decode() == table.with_offsets(offsets).text


@pytest.mark.parametrize(
    "rows",
    [
        "a,0,4,x\n",
        "a,0,4,\n",
        "a,0,4\n",
        "a,0,4,1,2\n",
        ",0,4,1\n",
        "a,0,4,1\na,0,4,1\n",
        "a,5,4,1\n",
        "a,0,4,-1\n",
        "a,0,4,9999999999999999999\n",
        "a,0,4,400000000000000000\n" + "".join(f"b{i},0,4,900000000000000000\n" for i in range(9)),
        'a,0,4,"1"\n',
        "\u00e4,0,4,1\n",
        "a,0,4,1\rb,0,4,1\n",
        "a\x07,0,4,1\n",
        "a,0,4,1\0\n",
        "a,0,4,1\n ,,,\n",
    ],
)
def test_what_is_not_plain_or_wrong_is_left_to_the_other_reader(rows: str) -> None:
    assert plain_rows((HEADER + rows).encode(), "x") is None
    assert plain_rows((HEADER + "a,0,4,1\n").encode(), "x") is not None


def test_pins_that_clash_and_gaps_are_left_to_it_too() -> None:
    assert plain_rows(b"id,lower,upper,size,offset\na,0,4,8,0\nb,3,5,8,4\n", "x") is None
    assert plain_rows(b"id,lower,upper,size,offset\na,0,4,8,0\nb,3,5,8,8\n", "x") is not None
    assert plain_rows(b"id,lower,upper,size,gaps\na,0,4,8,1-2\n", "x") is None


def test_many_rows_are_read_and_written_at_once(tmp_path: Path) -> None:
    path, out = tmp_path / "many.csv", tmp_path / "out.csv"
    path.write_text(HEADER + "".join(f"b{i},{i},{i + 2},{512 * (1 + i % 7)}\n" for i in range(100_000)))
    read = read_trace(path)
    assert isinstance(read.table, Rows)
    assert isinstance(read.columns, Columns)
    assert read.label(99_999) == "b99999"
    write_layout(out, read, Layout("", tuple(np.arange(100_000).tolist()), 0, 0))
    assert out.read_text().splitlines()[-1] == f"b99999,99999,100001,{512 * (1 + 99_999 % 7)},99999"

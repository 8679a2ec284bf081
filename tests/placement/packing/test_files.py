"""What is packed is read from any of three kinds of file, what is wrong with it is one line, and layouts are written whole."""

from __future__ import annotations

import csv
import io
import os
import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placement.packing.first_fit import FirstFit

from overspill.core import Block, Layout, Trace
from overspill.core.errors import RequestError
from overspill.placement import ALLOCATE, FREE, TRY, Events
from overspill.placement.packing import files
from overspill.placement.packing.files import TraceFile, read_trace, write_layout
from overspill.placement.packing.table import BlockTable, parse_table
from overspill.placement.snapshot import snapshot_of

PLAIN = "id,lower,upper,size\na,0,4,100\nb,2,6,50\n"
MIB = 1 << 20


def write(tmp_path: Path, content: str | bytes, name: str = "blocks.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def refusal(path: Path, device: int | None = None) -> str:
    with pytest.raises(RequestError) as caught:
        read_trace(path, device)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Up to eight blocks with all that a block may have."""
    blocks = []
    for i in range(draw(st.integers(0, 8))):
        edges = sorted(draw(st.lists(st.integers(-5, 30), min_size=2, max_size=6)))
        gaps = tuple(zip(edges[1:-1:2], edges[2:-1:2], strict=False))
        alignment = draw(st.sampled_from([1, 1, 2, 16]))
        space = draw(st.sampled_from([0, 0, 3]))
        nbytes = draw(st.integers(0, 99))
        blocks.append(Block(i, edges[0], edges[-1], nbytes, alignment=alignment, gaps=gaps, space=space))
    return Trace(tuple(blocks))


def test_columns_may_come_in_any_order_and_others_are_ignored(tmp_path: Path) -> None:
    plain = read_trace(write(tmp_path, PLAIN))
    other = read_trace(write(tmp_path, "note,size, Upper,ID,lower\nx,100,4,a,0\n,50,6,b,2\n"))
    assert plain.trace == other.trace == Trace((Block(0, 0, 4, 100, "a"), Block(1, 2, 6, 50, "b")))
    assert (plain.kind, plain.label(1)) == ("csv", "b")


@pytest.mark.parametrize("start", ["lower", "start", "begin"])
@pytest.mark.parametrize("name", ["id", "buffer", "buffer_id"])
def test_a_column_named_end_is_inclusive_and_the_ends_of_gaps_with_it(tmp_path: Path, start: str, name: str) -> None:
    read = read_trace(write(tmp_path, f"{name},{start},end,size,gaps\na,0,9,8,3-4 6-6\n"))
    assert read.trace.blocks == (Block(0, 0, 10, 8, "a", gaps=((3, 5), (6, 7))),)
    half_open = read_trace(write(tmp_path, f"{name},{start},upper,size,gaps\na,0,10,8,3-5 6-7\n"))
    assert half_open.trace == read.trace


def test_the_optional_columns_are_read_and_may_be_empty(tmp_path: Path) -> None:
    text = "id,lower,upper,size,alignment,offset,gaps,space\na,-9,9,8,4,12,-5--3 0-1,2\nb,0,9,8,,-1,,\nc,0,9,8,,,,\n"
    a, b, c = read_trace(write(tmp_path, text)).trace.blocks
    assert a == Block(0, -9, 9, 8, "a", alignment=4, pinned=12, gaps=((-5, -3), (0, 1)), space=2)
    assert (b, c) == (Block(1, 0, 9, 8, "b"), Block(2, 0, 9, 8, "c"))


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("\n", "\n\n") + "\n \n",
        "\ufeff" + PLAIN,
        PLAIN.rstrip(),
        PLAIN.replace("a,0", '"a", 0'),
    ],
)
def test_line_ends_blank_lines_marks_and_quotes_do_not_matter(tmp_path: Path, text: str) -> None:
    assert read_trace(write(tmp_path, text, "no_suffix")).trace == read_trace(write(tmp_path, PLAIN)).trace


def test_a_header_alone_is_a_trace_without_blocks(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path, "id,lower,upper,size\n")).trace == Trace(())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty; what can be packed is a CSV of blocks (id,lower,upper,size), a saved Trace"),
        (" \n\n", "is empty"),
        ("id,lower,upper\na,0,1\n", "line 1: no column 'size'; a CSV of blocks begins with a line like"),
        ("hello\n", "line 1: no column 'id' and no column 'lower' and no column 'upper' and no column 'size'"),
        ("id;lower;upper;size\na;0;1;2\n", "line 1: no column 'id'"),
        ("id,lower,upper,end,size\na,0,1,0,2\n", "line 1: the columns 'upper' and 'end' mean the same; leave one out"),
        ("id,lower,upper,size\na,0,1\n", "line 2: 3 cells under the 4 columns of the first line"),
        ("id,lower,upper,size\na,0,1,2,3\n", "line 2: 5 cells"),
        (PLAIN + "c,0,1,many\n", "line 4: size is 'many', which is not a whole number like 1048576"),
        (PLAIN + "c,0,1,1.5\n", "line 4: size is '1.5'"),
        (PLAIN + "c,0,1,1_000\n", "line 4: size is '1_000'"),
        (PLAIN + "c,0,1,\n", "line 4: size is ''"),
        (PLAIN + "c,0,1,4KiB\n", "line 4: size is '4KiB'"),
        (PLAIN + "\n\nc,0,1,-2\n", "line 6: block 'c': size -2 is negative"),
        (PLAIN + "c,5,1,2\n", "line 4: block 'c': lives from 5 to 1; upper must not be below lower"),
        (PLAIN + "a,0,1,2\n", "line 4: the id 'a' is that of line 2 too; ids must differ"),
        (PLAIN + ",0,1,2\n", "line 4: the id is empty"),
        (PLAIN + "\x1b[1m,0,1,2\n", "line 4: the id '\\x1b[1m' cannot be printed"),
        (PLAIN + '"c,0,1,2\n', "line 4: unexpected end of data; cells are separated by commas"),
        (PLAIN + "c,0,1,9000000000000000000\n", "times, or sizes in all, reach 2**62"),
        (PLAIN + f"c,0,{1 << 62},1\n", "times, or sizes in all, reach 2**62"),
        (PLAIN + f"c,{-1 << 63},0,1\n", "times, or sizes in all, reach 2**62"),
        (f"id,lower,end,size\na,0,{(1 << 63) - 1},1\n", "times, or sizes in all, reach 2**62"),
        (f"id,lower,upper,size,gaps\na,0,{(1 << 63)},1,\n", "times, or sizes in all, reach 2**62"),
        (PLAIN + "".join(f"b{i},0,4,900000000000000000\n" for i in range(9)), "times, or sizes in all, reach 2**62"),
        (PLAIN + f"c,0,1,{'9' * 5000}\n", "line 4: size is '9999999999999999999999999999999999999999…'"),
        ("id,lower,upper,size,alignment\na,0,1,2,0\n", "line 2: block 'a': alignment 0 is below 1"),
        ("id,lower,upper,size,alignment,offset\na,0,1,2,8,4\n", "offset 4 is not a multiple of the alignment 8"),
        ("id,lower,upper,size,offset\na,0,1,2,-4\n", "offset -4 is not an address from 0; write -1 or nothing"),
        (
            "id,lower,upper,size,offset\na,0,5,9,0\n\nb,4,6,9,8\n",
            "blocks.csv, by line: pinned blocks 2 [0, 9) and 4 [8, 17) overlap; write -1 or nothing",
        ),
        (Trace((Block(3, 0, 5, 9, pinned=0), Block(7, 4, 6, 9, pinned=8))).to_json(), "pinned blocks 3 [0, 9) and 7"),
        ("id,lower,upper,size,gaps\na,0,9,2,3-5 2-4\n", "gaps '3-5 2-4' are not in order within 0 to 9"),
        ("id,lower,upper,size,gaps\na,0,9,2,3-12\n", "gaps '3-12' are not in order within 0 to 9"),
        ("id,lower,upper,size,gaps\na,0,9,2,3\n", "line 2: '3' in gaps is not a pair of times like 3-5"),
        ("id,lower,upper,size,gaps\na,0,9,2,3-5@0:1\n", "windows within gaps are not known here"),
        (b"id,lower,upper,size\n\xff,0,1,2\n", "line 2: this is not text"),
        (b"PK\x03\x04\0\0", "line 1: this is not text; what can be packed is"),
        ("[1, 2]", "this is not a saved Trace"),
        (b'{"blocks": [{"id": 7, "start": 0, "end": 1, "nbytes": 1, "name": "\xff"}]}', "this is not a saved Trace"),
        ('{"blocks": 3}', "this is not a saved Trace"),
        ('{"blocks": [{"id": 7, "start": 3, "end": 1, "nbytes": 1}]}', "block 7: lives from 3 to 1"),
        (Trace((Block(7, 0, 1, 1), Block(7, 0, 1, 1))).to_json(), "block 7 is there more than once"),
        (Trace((Block(0, 0, 1, 1 << 62),)).to_json(), "reach 2**62"),
        (pickle.dumps([1, 2]), "is a pickle but not a memory snapshot"),
        (pickle.dumps(Path("x")), "could run code"),
        (pickle.dumps({"segments": [], "device_traces": []}), "holds no events of device 0"),
    ],
)
def test_what_is_wrong_is_one_line_with_the_file_its_line_and_what_would_work(
    tmp_path: Path, content: str | bytes, said: str
) -> None:
    assert said in refusal(write(tmp_path, content))


def test_what_cannot_be_read_is_one_line_too(tmp_path: Path) -> None:
    absent = refusal(tmp_path / "absent.csv")
    assert "No such file or directory; " in absent
    assert "what can be packed is" in absent
    assert "Is a directory" in refusal(tmp_path)


def test_a_device_is_only_for_snapshots(tmp_path: Path) -> None:
    assert "only those have devices" in refusal(write(tmp_path, PLAIN), device=0)


@st.composite
def tables(draw: st.DrawFn) -> str:
    """CSV with columns in any order, blanks, quotes, other line ends, and cells left out where they may be."""
    columns = ["id", draw(st.sampled_from(["lower", "Start "])), draw(st.sampled_from(["upper", "end"])), "size"]
    columns += draw(st.lists(st.sampled_from(["alignment", "offset", "space", "hint"]), unique=True))
    columns = draw(st.permutations(columns))
    lines = [",".join(columns)]
    for i in range(draw(st.integers(0, 6))):
        start = draw(st.integers(-3, 9))
        cells = {
            "id": draw(st.sampled_from([f"b{i}", f" b {i}", f"{i}", f"\u00e4{i}", f'"{i}, ""b"""'])),
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
    return draw(st.sampled_from(["\n", "\r\n", "\r"])).join(lines) + draw(st.sampled_from(["", "\n"]))


@settings(max_examples=100, deadline=None)
@given(text=tables(), seed=st.integers(0, 9))
def test_columns_read_at_once_are_those_read_cell_by_cell_and_no_cell_is_lost(text: str, seed: int) -> None:
    table, columns = parse_table(text, "x")
    rows = [row for row in csv.reader(io.StringIO(text, newline="")) if any(row)]
    # A column of gaps is read cell by cell.
    again = io.StringIO()
    csv.writer(again).writerows([[*rows[0], "gaps"], *([*row, ""] for row in rows[1:])])
    slow, one_by_one = parse_table(again.getvalue(), "x")
    assert columns.trace(table.names) == one_by_one.trace(slow.names)
    # With offsets all other cells stay.
    draw = random.Random(seed)
    offsets = [str(draw.randrange(10**9)) for _ in table.names]
    written = list(csv.reader(io.StringIO(table.with_offsets([int(offset) for offset in offsets]), newline="")))
    at = rows[0].index("offset") if "offset" in rows[0] else len(rows[0])
    expected = [[*row[:at], value, *row[at + 1 :]] for row, value in zip(rows, ["offset", *offsets], strict=True)]
    assert written == expected


@given(traces())
@settings(max_examples=30)
def test_a_trace_as_table_means_the_same_blocks(trace: Trace) -> None:
    table = BlockTable.of(trace)
    again, columns = parse_table("\n".join([",".join(table.header), *table.lines]), "x")
    assert again == table
    blocks = columns.trace(table.names).blocks
    assert [b.pieces for b in blocks] == [b.pieces for b in trace.blocks]
    assert [(b.name, b.nbytes, b.alignment, b.space) for b in blocks] == [
        (str(b.id), b.nbytes, b.alignment, b.space) for b in trace.blocks
    ]


@given(traces())
@settings(max_examples=20)
def test_a_written_layout_read_again_is_pinned_where_it_was(
    tmp_path_factory: pytest.TempPathFactory, trace: Trace
) -> None:
    path = tmp_path_factory.mktemp("layout") / "trace.json"
    trace.save(path)
    read = read_trace(path)
    assert (read.kind, read.trace) == ("trace", trace)
    layout = FirstFit().solve(trace).layout
    assert layout is not None
    write_layout(path, read, layout)
    again = read_trace(path)
    assert tuple(block.pinned for block in again.trace.blocks) == layout.offsets
    assert FirstFit().solve(again.trace).layout == Layout(
        "portfolio", layout.offsets, layout.peak_bytes, layout.lower_bound_bytes
    )


def test_all_columns_of_a_csv_stay_and_the_offset_comes_last(tmp_path: Path) -> None:
    text = 'note,size,end,buffer,start\n"a, b",100, 3,x,0\n,50,5,y,2\n'
    read = read_trace(write(tmp_path, text))
    out = tmp_path / "out.csv"
    write_layout(out, read, Layout("s", (7, 0), 150, 150))
    with out.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["note", "size", "end", "buffer", "start", "offset"],
            ["a, b", "100", " 3", "x", "0", "7"],
            ["", "50", "5", "y", "2", "0"],
        ]


def test_an_offset_column_that_is_there_is_filled_in_its_place(tmp_path: Path) -> None:
    read = read_trace(write(tmp_path, "id,offset,lower,upper,size\na,5,0,1,1\nb,,0,1,5\n"))
    write_layout(tmp_path / "out.csv", read, Layout("s", (5, 0), 6, 6))
    assert (tmp_path / "out.csv").read_text() == "id,offset,lower,upper,size\na,5,0,1,1\nb,0,0,1,5\n"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = read_trace(write(tmp_path, PLAIN))
    out = write(tmp_path, "old", "out.csv")

    def full(self: Path, *_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.Path, "replace", full)
    with pytest.raises(RequestError, match=r"out\.csv: No space"):
        write_layout(out, read, Layout("s", (0, 100), 150, 150))
    assert out.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["blocks.csv", "out.csv"]


def test_a_link_is_written_through_and_a_device_is_not_replaced(tmp_path: Path) -> None:
    read = read_trace(write(tmp_path, PLAIN))
    layout = Layout("s", (0, 100), 150, 150)
    target, link = write(tmp_path, "old", "target"), tmp_path / "link"
    link.symlink_to(target)
    write_layout(link, read, layout)
    assert link.is_symlink()
    assert target.read_text().startswith("id,lower,upper,size,offset\n")
    write_layout("/dev/null", read, layout)
    assert Path("/dev/null").is_char_device()


EVENTS = Events.from_rows(
    [
        (ALLOCATE, 0, 3 * MIB, 0),
        (ALLOCATE, 1, 100, 0),
        (TRY, 9, 90 * MIB, 0),
        (FREE, 0, 0, 0),
        (FREE, 9, 0, 0),
        (ALLOCATE, 2, 30 * MIB, 1),
        (FREE, 1, 0, 0),
    ]
)


def snapshot(tmp_path: Path, *, first: int = 0) -> TraceFile:
    """A recording of EVENTS without its `first` events, as it is after them."""
    content = snapshot_of(EVENTS, capacity_bytes=64 * MIB)
    content["device_traces"][0] = content["device_traces"][0][first:]
    return read_trace(write(tmp_path, pickle.dumps(content), "any.csv"))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_snapshot_of_any_protocol_is_known_by_its_content(tmp_path: Path, protocol: int) -> None:
    path = write(tmp_path, pickle.dumps(snapshot_of(EVENTS), protocol), "any.csv")
    assert read_trace(path).kind == "snapshot"


def test_a_snapshots_blocks_live_from_event_to_event_and_what_ran_out_of_memory_is_left_out(tmp_path: Path) -> None:
    read = snapshot(tmp_path)
    blocks = {block.nbytes: block for block in read.trace.blocks}
    assert blocks.keys() == {3 * MIB, 512, 30 * MIB}
    assert blocks[3 * MIB].start < blocks[512].start < blocks[3 * MIB].end < blocks[30 * MIB].start < blocks[512].end
    assert blocks[30 * MIB].stream != blocks[512].stream
    assert {block.alignment for block in read.trace.blocks} == {512}
    assert read.label(0) == "0"
    last = max(block.end for block in read.trace.blocks)
    assert blocks[30 * MIB].end == last > blocks[512].end  # still live in the end


def test_what_was_live_before_the_recording_is_live_from_its_first_event(tmp_path: Path) -> None:
    whole = snapshot(tmp_path).trace
    actions = [entry["action"] for entry in snapshot_of(EVENTS, capacity_bytes=64 * MIB)["device_traces"][0]]
    for first in (actions.index("free_requested"), actions.index("free_completed")):
        late = snapshot(tmp_path, first=first).trace
        assert sorted(b.nbytes for b in late.blocks) == sorted(b.nbytes for b in whole.blocks)
        assert [b.start for b in late.blocks if b.nbytes < 30 * MIB] == [0, 0]
        assert all(b.end > b.start for b in late.blocks)
        assert late.lower_bound_bytes == whole.lower_bound_bytes


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read any file")
def test_a_file_that_may_not_be_read_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path, PLAIN)
    path.chmod(0)
    assert "Permission denied" in refusal(path)

"""Figures as a reader sees them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table
from tests.report.test_plan import shown
from tests.simulate.graphs import DEVICE

from overspill.core import Device
from overspill.report.devices import devices_table, profile_table
from overspill.report.listing import format_flops, listing, percent, recomputed, whole_columns


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (0, "0 FLOP"),
        (999, "999 FLOP"),
        (1500, "1.5 kFLOP"),
        (3.2e9, "3.2 GFLOP"),
        (7e12, "7 TFLOP"),
        (4e15, "4 PFLOP"),
        (9e18, "9e+03 PFLOP"),
    ],
)
def test_flops_have_three_digits_and_a_decimal_unit(flops: float, text: str) -> None:
    assert format_flops(flops) == text


def test_a_share_of_nothing_is_left_blank() -> None:
    assert percent(1, 0) == ""
    assert percent(45, 100) == "45.0 %"


def test_a_table_shows_every_cell_as_it_is() -> None:
    text = shown(listing(("name", "size"), [("a[0]", "1 B"), ("[b]", "22 B")], numbers=(1,)))
    assert [line.split() for line in text.splitlines()][2:] == [["a[0]", "1", "B"], ["[b]", "22", "B"]]


def test_devices_have_one_line_each() -> None:
    lines = shown(devices_table([DEVICE, DEVICE])).splitlines()
    assert sum(line.startswith("toy") for line in lines) == 2


def test_a_profile_shows_every_rate() -> None:
    device = Device(
        "cpu", "cpu", 1 << 30, {"float32": 2e9, "float64": 1e9}, 3e9, 4e9, 5e9, 6e-6, 7e-6, True, 0, 0.25, {"conv": 0.5}
    )
    text = shown(profile_table(device, "written somewhere"))
    for figure in (
        "1.0 GiB",
        "2 GFLOP/s",
        "1 GFLOP/s",
        "3 GB/s",
        "4 GB/s",
        "5 GB/s",
        "6 µs",
        "7 µs",
        "25 %",
        "0.50",
        "yes",
        "written somewhere",
    ):
        assert figure in text


def at(width: int, table: Table) -> list[str]:
    """The lines of `table` where there are so many letters."""
    text = io.StringIO()
    Console(width=width, file=text).print(table)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    assert all(len(line) <= width for line in lines)
    return lines


TEXTS = (("change", "needs", "cost"), [("the first of two", "1.0 GiB", "words " * 12), ("the second", "2.0 GiB", "")])
FIGURES = (("policy", "step", "average", "offloaded"), [("auto", "250.4 ms", "385.1 MiB", "2.3 GiB")])


@pytest.mark.parametrize("width", [120, 60, 46, 40])
def test_a_table_with_texts_is_whole_at_any_width(width: int) -> None:
    columns, rows = TEXTS
    words = " ".join(at(width, listing(columns, rows, numbers=(1,)))).split()
    assert words.count("words") == 12
    assert {"1.0", "2.0", "first", "second"} <= set(words)


@pytest.mark.parametrize("width", range(60, 130, 7))
def test_no_word_is_cut_where_the_first_column_wraps_too(width: int) -> None:
    rows = [
        ("batches of half as much, accumulating gradients over 2 of them", "9.6 GiB", "the same gradients; many small ones take longer"),
        ("A_NAME_OF_MANY_LETTERS=that_stays:whole", "11.6 GiB", "1.02 times the unmanaged step, simulated; the same numbers"),
    ]  # fmt: skip
    table = listing(("change", "needs", "cost"), rows, numbers=(1,))
    table.columns[0].no_wrap = False
    shown = set(" ".join(at(width, table)).split())
    assert shown >= {word for row in rows for cell in row for word in cell.split()}


def test_long_texts_go_below_their_rows_where_there_is_no_room_beside() -> None:
    columns, rows = TEXTS
    assert at(40, listing(columns, rows, numbers=(1,)))[:4] == [
        "change               needs",
        "────────────────────────────"[:26],
        "the first of two   1.0 GiB",
        "    cost: words words words words words",
    ]


@pytest.mark.parametrize("width", [80, 38, 24])
def test_columns_that_have_no_room_follow_in_a_table_of_their_own(width: int) -> None:
    columns, rows = FIGURES
    lines = at(width, whole_columns(columns, rows, numbers=(1, 2, 3)))
    assert all(any(cell in line for line in lines) for cell in (*columns, *rows[0]))
    heads = [line for line in lines if line.startswith("policy")]
    assert len(heads) == {80: 1, 38: 1, 24: 3}[width]


def test_a_table_can_be_shown_narrow_and_then_wide() -> None:
    columns, rows = TEXTS
    table = listing(columns, rows, numbers=(1,))
    at(40, table)
    assert at(120, table) == at(120, listing(columns, rows, numbers=(1,)))


def test_what_is_done_again_is_told_in_flops_or_in_ops_that_count_none() -> None:
    assert recomputed(0, 0) == ""
    assert recomputed(3.2e9, 4) == "3.2 GFLOP"
    assert recomputed(0, 1) == "1 op"
    assert recomputed(0, 68) == "68 ops"

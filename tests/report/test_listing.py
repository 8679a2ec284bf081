"""Figures as a reader sees them."""

from __future__ import annotations

import pytest
from tests.report.test_plan import shown
from tests.simulate.graphs import DEVICE

from overspill.core import Device
from overspill.report.devices import devices_table, profile_table
from overspill.report.listing import format_flops, listing, percent


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

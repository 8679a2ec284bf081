"""The CUDA context: the device's own figure where it loads lazily, the table's where it cannot, ordered bounds always."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.core.errors import RequestError
from overspill.costs import Interval, context_bytes, kernel_image_bytes
from overspill.costs.context import _table
from overspill.devices import device_names, load_device

MIB = 1 << 20
NOTHING = Interval(0, 0, 0)
every_device = pytest.mark.parametrize("name", device_names())


@every_device
def test_with_lazy_loading_it_is_the_devices_own_figure(name: str) -> None:
    device = load_device(name)
    own = Interval(device.context_low_bytes, device.context_bytes, device.context_high_bytes)
    for cuda in ("11.7", "12.4", "13.0"):
        assert context_bytes(device, cuda) == own


@every_device
def test_loading_all_kernels_at_once_never_takes_less(name: str) -> None:
    device = load_device(name)
    lazy, eager = context_bytes(device), context_bytes(device, lazy=False)
    assert lazy.low <= eager.low
    assert lazy.central <= eager.central
    assert lazy.high <= eager.high


def test_a_cpu_has_none() -> None:
    assert context_bytes(load_device("cpu")) == kernel_image_bytes(load_device("cpu")) == NOTHING


def test_a_device_without_bounds_has_one_figure() -> None:
    device = replace(load_device("rtx3060"), context_low_bytes=0, context_high_bytes=0)
    assert context_bytes(device) == Interval(device.context_bytes, device.context_bytes, device.context_bytes)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    ("name", "cuda", "mib"),
    [
        ("rtx3090", "11.1", 1486),
        ("rtx2080ti", "10.2", 877),
        ("titan-v", "10.1", 1008),
        ("p40", "9.2", 353),
        ("rtx2080ti", "11.3", 1486),  # measured with another release only
        ("k80", "10.1", 800),
    ],
)
def test_before_lazy_loading_a_measurement_of_the_release_counts(name: str, cuda: str, mib: int, lazy: bool) -> None:
    found = context_bytes(load_device(name), cuda, lazy=lazy)
    assert found.central == mib * MIB
    assert found.low < found.central <= found.high


def test_eager_loading_on_a_new_release_adds_the_kernels_that_lazy_loading_leaves_out() -> None:
    device = load_device("rtx3090")
    added = context_bytes(device, lazy=False).central - context_bytes(device).central
    assert kernel_image_bytes(device).high < added == 666_632_192 - 287_047_680  # pytorch PR 86509


def test_kernels_are_counted_once() -> None:
    device = load_device("rtx3060")
    assert kernel_image_bytes(device, lazy=False) == NOTHING
    assert kernel_image_bytes(device, "11.3") == NOTHING
    assert kernel_image_bytes(device).central > 0


@pytest.mark.parametrize("cuda", ["", "twelve", "12"])
def test_a_release_that_is_none_is_refused(cuda: str) -> None:
    with pytest.raises(RequestError, match="CUDA release"):
        context_bytes(load_device("rtx3060"), cuda)


def test_the_table_is_sourced_and_speaks_of_devices_that_exist() -> None:
    table = _table()
    rows = [*table["eager"], *table["measured"], table["kernels"], table["cudnn_kernels"]]
    assert all(row["source"].strip() for row in rows)
    assert {row["device"] for row in table["measured"]} <= set(device_names())
    limits = [tuple(map(int, row["below"].split("."))) for row in table["eager"]]
    assert limits == sorted(limits)
    assert table["eager"][-1]["below"] == table["lazy_since"]


def test_an_estimate_must_rise() -> None:
    with pytest.raises(ValueError, match="do not rise"):
        Interval(2, 1, 3)
    with pytest.raises(ValueError, match="do not rise"):
        Interval(-1, 1, 3)
    assert Interval(1, 2, 3) + Interval(1, 1, 1).times(2) == Interval(3, 4, 5)

"""Calibration gives a Device that can be loaded again, with figures that a machine can have, and leaves nothing behind."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from overspill.core.errors import RequestError, StoreError
from overspill.devices import calibrated_path, load_device, this_cpu
from overspill.runtime import calibrate as calibration
from overspill.runtime.calibrate import calibrate


@pytest.fixture(autouse=True)
def small_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same measurements on little data: what they find is not what is tested."""
    small = {
        "PRODUCT_SIZES": (32, 64), "COPY_BYTES": 1 << 16, "BLOCK_BYTES": 1 << 16, "BLOCKS": 3, "PAGE_TRIPS": 5, "SMALL_OPS": 50,
        "COMPUTE_SECONDS": 0.01,
    }  # fmt: skip
    for name, value in small.items():
        monkeypatch.setattr(calibration, name, value)


def test_the_profile_is_a_device_that_plans_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = calibrate()
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path))
    device.save(calibrated_path())
    assert this_cpu() == device
    assert load_device(calibrated_path()) == device


def test_every_figure_is_one_that_a_machine_can_have(tmp_path: Path) -> None:
    device = calibrate(tmp_path)
    assert (device.name, device.kind, device.context_bytes) == ("cpu", "cpu", 0)
    assert device.flops_per_second.keys() == {"float32", "float64", "bfloat16", "float16"}
    assert device.efficiency.keys() == {"conv", "linear", "attention"}
    rates = (
        *device.flops_per_second.values(),
        *device.efficiency.values(),
        device.memory_bytes_per_second,
        device.offload_bytes_per_second,
        device.prefetch_bytes_per_second,
        device.transfer_latency_seconds,
        device.op_overhead_seconds,
        device.transfer_host_seconds,
        device.host_update_bytes_per_second,
        device.host_update_call_seconds or 0.0,
    )
    assert all(math.isfinite(rate) and rate > 0 for rate in rates)
    assert 0 <= device.transfer_compute_share <= 1
    assert all(
        "overspill calibrate on " in device.sources[name] for name in ("flops_per_second", "offload_bytes_per_second")
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_progress_is_told_as_it_is_made() -> None:
    told: list[str] = []
    calibrate(progress=told.append)
    assert len(told) == 6
    assert all(line.startswith("measuring") for line in told)


def test_a_store_directory_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="store directory"):
        calibrate(tmp_path / "absent")


def test_a_disk_that_fails_is_reported_and_left_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("os.pwrite", broken)
    with pytest.raises(StoreError, match="Input/output error"):
        calibrate(tmp_path)
    assert not list(tmp_path.iterdir())

"""Bytes of a CUDA context outside the allocator, and of kernels that it loads."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

from overspill.core import Device
from overspill.core.errors import RequestError

from .interval import NOTHING, Interval

_MIB = 1 << 20
OTHERS = 0.02
"""The share of a GPU's memory that a budget leaves to other programs, as a display, and to the loop's own tensors."""


def context_bytes(device: Device, cuda_version: str = "12.4", *, lazy: bool = True) -> Interval:
    """Return the bytes that the driver takes on `device` before the first tensor.

    PyTorch is built for `cuda_version`. With lazy loading it is the device's own figure. Without it, or with a release
    that cannot load lazily, all kernels are included.
    """
    if device.kind != "cuda":
        return NOTHING
    table, release = _table(), _release(cuda_version)
    # With lazy loading, the device's own figure.
    bare = Interval(
        device.context_low_bytes or device.context_bytes,
        device.context_bytes,
        device.context_high_bytes or device.context_bytes,
    )
    if release >= _release(table["lazy_since"]):
        return bare if lazy else bare + _all_kernels()
    # Older releases load all kernels: a measured figure, or that of the era.
    era = next(row for row in table["eager"] if release < _release(row["below"]))
    central = next(
        (
            row["mib"]
            for row in table["measured"]
            if row["device"] == device.name and _release(row["cuda"])[0] == release[0]
        ),
        era["central_mib"],
    )
    return _mib(min(era["low_mib"], central), central, max(era["high_mib"], central))


def kernel_image_bytes(
    device: Device, cuda_version: str = "12.4", *, lazy: bool = True, cudnn: bool = False
) -> Interval:
    """Return the bytes of kernels that a job loads while it runs, on top of `context_bytes`.

    They include what cuBLAS takes outside the allocator. `cudnn` means that the job convolves or runs recurrent layers:
    some of cuDNN's kernels are then among them.
    """
    table = _table()
    if device.kind != "cuda" or not lazy or _release(cuda_version) < _release(table["lazy_since"]):
        return NOTHING
    loaded = NOTHING
    for name in ("kernels", "cudnn_kernels") if cudnn else ("kernels",):
        loaded += _mib(*(table[name][f"{bound}_mib"] for bound in ("low", "central", "high")))
    handles = table["cublas_handles"]
    if device.compute_capability == handles["capability"] and _release(cuda_version) >= _release(handles["since"]):
        loaded += _mib(handles["mib"], handles["mib"], handles["mib"])
    return loaded


def budget_bytes(device: Device, outside: Interval) -> int:
    """Return the budget for a job on a GPU that is not here, in whole MiB, where the user names none.

    It is the GPU's memory, without what others take, or what the bytes `outside` of the allocator may take more.
    """
    spare = max(outside.high - outside.central, int(OTHERS * device.memory_bytes))
    return max(device.memory_bytes - spare, device.memory_bytes // 2) // _MIB * _MIB


def _all_kernels() -> Interval:
    """Return the bytes that loading every kernel at once adds.

    The lower bound is what it added on the one GPU where both were measured. Later builds hold more kernels: up to
    three times as many is assumed.
    """
    measured = _table()["kernels"]["all_mib"]
    return _mib(measured, measured, 3 * measured)


def _mib(low: int, central: int, high: int) -> Interval:
    return Interval(low * _MIB, central * _MIB, high * _MIB)


def _release(version: str) -> tuple[int, int]:
    """Return `12.4` or `12.4.1` as (12, 4)."""
    match = re.match(r"(\d+)\.(\d+)", version, re.ASCII)
    if match is None:
        raise RequestError(f"{version!r} is not a CUDA release; write it as 12.4")
    return int(match.group(1)), int(match.group(2))


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("context.toml").read_text(encoding="utf-8"))

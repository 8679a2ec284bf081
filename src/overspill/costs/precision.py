"""A device's FLOP/s by dtype; float32 may run as TF32."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from overspill.core import Device, LayerType

from .capability import capability_of

TENSOR_CORES = "tfloat32"
"""The name of a device's rate for float32 on tensor cores."""


def peak_flops_per_second(device: Device, dtype: str, layer_type: LayerType) -> float:
    """Return the peak FLOP/s of `device` for a dtype and layer type.

    A dtype without a rate of its own counts as float32.
    """
    rates = device.flops_per_second
    single = rates["float32"]
    if dtype == "float32" and device.kind == "cuda" and _rounds(layer_type):
        return rates.get(TENSOR_CORES, single)
    return rates.get(dtype) or single


def emulates(device: Device, dtypes: Iterable[str]) -> bool:
    """Return whether `device` has no units for one of these dtypes: bfloat16 before compute capability 8.0."""
    known = device.kind == "cuda" and device.compute_capability
    return bool(known) and "bfloat16" in dtypes and capability_of(device.compute_capability) < (8, 0)


def _rounds(layer_type: LayerType) -> bool:
    """Return whether PyTorch lets tensor cores round float32 in this layer type.

    By default it does in cuDNN's convolutions, and not in matrix products. The settings are
    `torch.backends.cudnn.allow_tf32` and `torch.get_float32_matmul_precision()`. PyTorch 2.9 and later have both under
    new names, which can be read however they were set. If PyTorch is not loaded, its defaults hold.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return layer_type is LayerType.CONV
    setting = torch.backends.cudnn.conv if layer_type is LayerType.CONV else torch.backends.cuda.matmul
    return bool(setting.fp32_precision == "tf32")

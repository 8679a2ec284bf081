"""The rate at which a device computes ops of a dtype: float32 may be tfloat32 on tensor cores, as PyTorch is told."""

from __future__ import annotations

import sys

from overspill.core import Device, LayerType

TENSOR_CORES = "tfloat32"
"""The rate of a device that has tensor cores for float32."""


def peak_flops_per_second(device: Device, dtype: str, layer_type: LayerType) -> float:
    """FLOP/s that `device` computes ops of a layer at, at best; a dtype that it is not known for counts as float32."""
    rates = device.flops_per_second
    single = rates["float32"]
    if dtype == "float32" and device.kind == "cuda" and _rounds(layer_type):
        return rates.get(TENSOR_CORES, single)
    return rates.get(dtype) or single


def _rounds(layer_type: LayerType) -> bool:
    """Whether PyTorch lets tensor cores round float32: by default cuDNN's convolutions, and not matrix products.

    That is `torch.backends.cudnn.allow_tf32` and `torch.get_float32_matmul_precision()`, as PyTorch 2.9 and later have them
    both under new names, which can be read however they were set. PyTorch that is not loaded has its defaults.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return layer_type is LayerType.CONV
    setting = torch.backends.cudnn.conv if layer_type is LayerType.CONV else torch.backends.cuda.matmul
    return bool(setting.fp32_precision == "tf32")

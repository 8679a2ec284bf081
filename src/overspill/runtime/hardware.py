"""The Device of a torch device: this CPU as calibrated, or the data file of the GPU that is there."""

from __future__ import annotations

from dataclasses import replace

import torch

from overspill.core import Device
from overspill.core.errors import RequestError
from overspill.devices import load_device, this_cpu

from . import accelerator
from .live.allocator import serving

UNKNOWN_GPU = "a100-40gb"
"""Whose rates stand in for those of a GPU that has no data file; its memory is asked of the driver."""


def device_noun(device: torch.device) -> Device:
    """What the planner knows of `device`."""
    if device.type == "cpu":
        return this_cpu()
    if device.type != "cuda":
        raise RequestError(f"Overspill trains on cpu and cuda devices, not on {device.type}")
    name, total = accelerator.name_and_bytes(device)
    try:
        known = load_device(name)
    except RequestError:
        known = replace(load_device(UNKNOWN_GPU), name=name)
    return replace(known, memory_bytes=total)


def usable_bytes(device: torch.device) -> int:
    """Bytes that tensors may take on `device`: physical memory on the CPU, what the driver leaves on CUDA."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        ours = serving()
        held = torch.cuda.memory_reserved(device) if ours is None else ours.statistics().reserved_bytes
        return int(free) + held
    return device_noun(device).memory_bytes

"""The Device for a torch device, and the account of a budget on it.

The Device of this CPU is as calibrated; that of a GPU is from its data file.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from overspill.core import Device
from overspill.core.device import ABSENT
from overspill.core.errors import RequestError, UnsupportedError
from overspill.costs import Interval, context_bytes, kernel_image_bytes
from overspill.costs.library_ops import handle_bytes
from overspill.costs.releases import software_named
from overspill.costs.scratch import Software
from overspill.devices import load_device, this_cpu
from overspill.devices.disks import DISKS, USUAL
from overspill.devices.loader import measured_update_rate
from overspill.placement.allocators.caching_config import CachingConfig, text_of_environment
from overspill.placement.allocators.planned import LIVE
from overspill.placement.arena import ArenaAccount
from overspill.placement.card import Card, PoolAccount
from overspill.placement.packing import DEFAULT
from overspill.plans.account import Account
from overspill.policies import policy_named

from . import accelerator, allocator
from .options import OWN, PLANNED, PYTORCH, Options
from .transfer.tiers import directories_of

UNKNOWN_GPU = "a100-40gb"
"""The GPU whose rates replace those of a GPU without a data file. The driver reports the memory."""
_CONTEXTS: dict[int, int] = {}


def device_noun(device: torch.device) -> Device:
    """Return the Device with the planner's figures for `device`. Raises RequestError for other kinds of devices."""
    if device.type == "cpu":
        return this_cpu()
    if device.type != "cuda":
        raise RequestError(f"Overspill trains on cpu and cuda devices, not on {device.type}")
    name, total = accelerator.name_and_bytes(device)
    try:
        known = load_device(name)
    except RequestError:
        known = replace(load_device(UNKNOWN_GPU), name=name)
    # Memory, capability and context are this GPU's own, and the host that it is on.
    index = torch.cuda.current_device() if device.index is None else device.index
    major, minor = torch.cuda.get_device_capability(index)
    return replace(
        known,
        memory_bytes=total,
        compute_capability=f"{major}.{minor}",
        index=index,
        context_bytes=_context_bytes(index, known),
        context_low_bytes=0,
        context_high_bytes=0,
        host_update_bytes_per_second=measured_update_rate() or known.host_update_bytes_per_second,
        unified_memory=bool(torch.cuda.get_device_properties(index).is_integrated),
    )


def usable_bytes(device: torch.device) -> int:
    """Return the bytes that tensors may take on `device`.

    These are the physical memory on the CPU, and the bytes that the driver leaves on CUDA.
    """
    if device.type == "cuda":
        return accelerator.memory_info(device)[0] + held_bytes(device)
    return device_noun(device).memory_bytes


def held_bytes(device: torch.device) -> int:
    """Return the bytes that this process has reserved on a CUDA device."""
    return accelerator.reserved_bytes(device)


def as_absent(device: Device, software: Software | None = None) -> Device:
    """Return a device as a job would find it on its own machine.

    For a GPU, budgets are those of the GPU's memory, and kernels count in its context. It runs with `software`; None:
    that of this machine.
    """
    if device.kind != "cuda" or device.index is not None:
        return device
    software = software or software_named()
    context = context_bytes(device, software.cuda_version) + _to_come(software, device)
    return replace(device, index=ABSENT, context_bytes=context.central, context_low_bytes=0, context_high_bytes=0)


def card_bytes(device: Device) -> int:
    """Return the most bytes of this GPU that a job can have.

    These are the bytes that the driver leaves, those of this process, and the context.
    """
    if device.index == ABSENT:
        return device.memory_bytes
    where = torch.device("cuda", device.index)
    return usable_bytes(where) - _to_come(software_named(), device).central + device.context_bytes


def device_named(asked: str | Device | None, where: torch.device) -> Device:
    """Return the device to plan for: the requested one, or the one that tensors are on."""
    if isinstance(asked, Device):
        return asked
    return load_device(asked) if asked is not None else device_noun(where)


def gpu_named(asked: str | torch.device | Device | None, model: nn.Module) -> torch.device | None:
    """Return the GPU that `asked` names as torch does, or None if it is a device to plan for, or `model` is there.

    Raises RequestError where PyTorch has no such GPU.
    """
    if not _is_of_torch(asked):
        return None
    where = torch.device(str(asked))
    if where.type != "cuda":
        return None
    count = torch.cuda.device_count()
    if (where.index or 0) >= count:
        raise RequestError(f"device={str(where)!r}: PyTorch has {count} GPUs here; leave it out to train on the CPU")
    where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
    return None if all(parameter.device == where for parameter in model.parameters()) else where


def planned_for(asked: str | torch.device | Device | None) -> str | Device | None:
    """Return the device to plan for; None if `asked` names where tensors are, or are to be."""
    return None if _is_of_torch(asked) else cast(str | Device | None, asked)


def _is_of_torch(asked: str | torch.device | Device | None) -> bool:
    return isinstance(asked, torch.device) or (isinstance(asked, str) and bool(re.fullmatch(r"cuda(:\d+)?", asked)))


def account_of(
    options: Options,
    device: Device,
    where: torch.device,
    software: Software | None = None,
    estimated_bytes: int | None = None,
) -> Account:
    """Return the account of a budget of `options` on `device`, for tensors on `where`. Raises UnsupportedError.

    On CUDA it counts the memory of the GPU. With the allocator of a paper it does so for a GPU that this machine does
    not have. Otherwise an allocator or solver counts the bytes that it takes. Without one, live bytes count. What
    `overspill.allocator` takes counts where that is in force, and for a GPU that is not here, where it costs less time.
    """
    device = with_disk(device, options)
    placer, asked = options.placer, options.placement
    own, is_here = policy_named(options.policy).placement, device.index not in (None, ABSENT)
    if is_here and asked == OWN and own == LIVE:  # a job that runs has the allocator that is in force
        placer = asked = None
    of_paper = placer is not None and asked not in (PLANNED, PYTORCH)
    if device.index is None or (of_paper and is_here):
        available = None if options.device is not None else usable_bytes(where)
        if asked == PLANNED:
            return ArenaAccount(device, available_bytes=available)
        if placer is None:
            return Account(device, available_bytes=available)
        return PoolAccount(device, placer, available_bytes=available)
    card = replace(card_of(device, software), available_bytes=card_bytes(device), estimated_bytes=estimated_bytes)
    if of_paper:
        return card.in_allocator if placer == LIVE else replace(card, pool=placer)
    if is_here and (found := allocator.in_force()) is not None:
        card = card.in_allocator if found == LIVE else replace(card, pool=found)
        return replace(card, solver=DEFAULT) if asked == PLANNED and found == LIVE else card
    card = replace(card, solver=None if asked == PYTORCH else DEFAULT, always=asked == PLANNED)
    return replace(card, may_be_live=asked is None and own == LIVE and not is_here)


def with_disk(device: Device, options: Options) -> Device:
    """Return `device` with the host memory and the disk of the store, if that has both."""
    if options.host_bytes is None:
        return device
    if device.index == ABSENT and options.host_budget is None:
        raise RequestError(
            f"store={options.store!r} for {device.name}, which is not here: say how much host memory the store may "
            'take in its machine, as host_budget="48GiB"'
        )
    read, write = device.disk_read_bytes_per_second, device.disk_write_bytes_per_second
    if options.disk_rates is not None:
        read, write = options.disk_rates
    elif not read or not write:
        usual = DISKS[USUAL]
        read, write = usual.read_bytes_per_second, usual.write_bytes_per_second
    drives = len(directories_of(options.store_dir))
    disk = replace(
        device,
        host_bytes=options.host_bytes,
        disk_read_bytes_per_second=read * drives,
        disk_write_bytes_per_second=write * drives,
    )
    if device.kind != "cpu":
        return disk
    # A CPU's store is a file in its figures; a copy in memory reads and writes it.
    copied = device.memory_bytes_per_second / 2
    return replace(disk, offload_bytes_per_second=copied, prefetch_bytes_per_second=copied)


def card_of(device: Device, software: Software | None = None) -> Card:
    """Return the GPU as a Card.

    `software`: None for that of this machine. Raises UnsupportedError if the memory of PyTorch's allocator is unknown.
    """
    software = software or software_named()
    handles = handle_bytes(device.compute_capability, software)
    return Card(device, handles, allocator_config(), is_measured=device.index not in (None, ABSENT))


def allocator_config() -> CachingConfig:
    """Return this process's settings of PyTorch's CUDA allocator, from its environment.

    Raises UnsupportedError for an allocator other than PyTorch's own, and RequestError for settings that it does not
    know.
    """
    text = text_of_environment()
    if "cudaMallocAsync" in text:
        raise UnsupportedError(
            "a budget on CUDA follows the rules of PyTorch's native allocator, and this process has "
            "backend:cudaMallocAsync; take it out of PYTORCH_CUDA_ALLOC_CONF"
        )
    return CachingConfig.parse(text)


def _context_bytes(index: int, known: Device) -> int:
    """Return the context bytes on a CUDA device, with kernels still to be loaded.

    The present context is used if it can be separated from other processes. It is measured once, for the first plan:
    later it includes some of these kernels.
    """
    if index not in _CONTEXTS:
        software = software_named()
        where = torch.device("cuda", index)
        free, total = accelerator.memory_info(where)
        beside = total - free - held_bytes(where)
        usual = context_bytes(known, software.cuda_version)
        bare = beside if beside <= usual.high else usual.central
        _CONTEXTS[index] = bare + _to_come(software, known).central
    return _CONTEXTS[index]


def _to_come(software: Software, device: Device) -> Interval:
    """Return the bytes of kernels that a job loads while it runs, those of cuDNN included."""
    return kernel_image_bytes(device, software.cuda_version, cudnn=True)

"""The stores by name."""

from __future__ import annotations

import torch

from overspill.core.errors import RequestError
from overspill.core.registry import Registry

from .disk_store import DiskStore
from .host_store import HostStore
from .pinned_store import PinnedStore
from .pinned_tiers import PinnedDiskStore
from .stores import Store
from .tiers import Directories, HostDiskStore, TieredStore, directories_of

_OWN = (DiskStore, HostStore, HostDiskStore, PinnedStore, PinnedDiskStore)
STORES: Registry[type[Store]] = Registry("store", "stores", {store.name: store for store in _OWN})
_USUAL = {"cpu": DiskStore.name, "cuda": PinnedStore.name}


def has_tiers(name: str | None) -> bool:
    """Return whether the store called `name` has a disk below host memory."""
    return name is not None and issubclass(STORES.named(name), TieredStore)


def store_for(name: str | None, device_type: str) -> type[Store]:
    """Return the store called `name`, or the default one, for tensors on such a device. Raises RequestError."""
    chosen = STORES.named(name or _USUAL[device_type])
    if chosen.device_type != device_type:
        others = " or ".join(f"--store {n}" for n, store in STORES.items() if store.device_type == device_type)
        serves, here = (("CPU", "CUDA"), ("CUDA", "CPU"))[device_type == "cpu"]
        raise RequestError(
            f"the {chosen.name} store is for tensors on a {serves} device, and here is a {here} device; use {others}"
        )
    return chosen


def make_store(
    name: str | None, device: torch.device, directory: Directories = None, host_bytes: int | None = None
) -> Store:
    """Return the store called `name`, or the default one for `device`.

    The default is disk on the CPU, pinned memory on CUDA. `host_bytes` are for a store with a disk below host memory.
    Raises RequestError for a store that does not exist or does not fit the device.
    """
    chosen = store_for(name, device.type)
    if directory is not None and not chosen.takes_directory:
        raise RequestError(f"--store-dir is for the disk store, not for {chosen.name!r}; leave it out")
    if issubclass(chosen, TieredStore):
        return chosen(directory, host_bytes)
    one, *more = directories_of(directory)
    if more:
        raise RequestError(f"the {chosen.name} store has one directory; {HostDiskStore.name!r} takes several")
    return chosen(one) if chosen.takes_directory else chosen()  # type: ignore[call-arg]

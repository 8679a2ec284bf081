"""Give a device to another program for a while: tensors wait in host memory, and come back where they were."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from overspill.core.errors import StoreError
from overspill.core.units import format_bytes
from overspill.pytorch.storages import key_of, storage_key

from .accelerator import empty_cache


class Parked:
    """Tensors whose memory is in host memory meanwhile, where they can be read.

    Those that share memory do so there, and again when they are back.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        """Create it without any; those of a CPU, whose memory is to be free, wait in a nameless file in `folder`."""
        self._folder = folder
        self._groups: list[tuple[torch.UntypedStorage, torch.device, list[weakref.ref[Tensor]]]] = []

    def send(self, tensors: Iterable[Tensor], device: torch.device) -> int:
        """Move those of `tensors` that are on `device` to host memory; return their bytes.

        Raises StoreError if there is no room; what has not moved is on the device.
        """
        known = {key_of(there) for there, *_ in self._groups}
        found: dict[int, dict[int, Tensor]] = {}
        for tensor in tensors:
            if tensor.device == device and tensor.untyped_storage().nbytes() and storage_key(tensor) not in known:
                found.setdefault(storage_key(tensor), {})[id(tensor)] = tensor
        sent = 0
        for group in found.values():
            here = next(iter(group.values())).untyped_storage()
            there = self._host_memory(here.nbytes(), device)
            there.copy_(here)
            sent += here.nbytes()
            for tensor in group.values():
                tensor.data = _on(there, tensor)
            self._groups.append((there, device, [*map(weakref.ref, group.values())]))
        empty_cache(device)
        return sent

    def bring(self) -> None:
        """Bring them back to their devices; tensors that have got other data meanwhile keep it."""
        while self._groups:
            there, device, group = self._groups[-1]
            waiting = [t for ref in group if (t := ref()) is not None and storage_key(t) == key_of(there)]
            if waiting:
                here = torch.UntypedStorage(there.nbytes(), device=device)
                here.copy_(there)
                for tensor in waiting:
                    tensor.data = _on(here, tensor)
            self._groups.pop()

    def __bool__(self) -> bool:
        return bool(self._groups)

    def _host_memory(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        try:
            if device.type == "cuda":
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
            with tempfile.TemporaryFile(dir=self._folder) as file:
                file.truncate(nbytes)
                return torch.UntypedStorage.from_file(f"/proc/self/fd/{file.fileno()}", True, nbytes)
        except (OSError, RuntimeError) as error:
            raise StoreError(f"no room to park {format_bytes(nbytes)}: {error}") from error


def _on(storage: torch.UntypedStorage, tensor: Tensor) -> Tensor:
    """Return a tensor of the form of `tensor` on `storage`."""
    made = torch.empty(0, dtype=tensor.dtype, device=storage.device)
    return made.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())

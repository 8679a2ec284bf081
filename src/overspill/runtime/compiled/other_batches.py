"""Device tensors outside the graph: targets, batches of other calls.

They belong to the user's program and appear in no graph. They are found among all tensors that Python knows, by a first
dimension equal to the batch size, that of the model's inputs or outputs. The search runs when a plan is made and no
call is pending.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.pytorch.fake_tensors import is_functional
from overspill.pytorch.functorch import is_wrapped
from overspill.pytorch.storages import key_of, storage_key


class OtherBatches:
    """Storages of batches that were on the device when a graph was last planned."""

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def look(self, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Find batches now on the device, given the model's `inputs` and `outputs`."""
        ours = [tensor for tensor in inputs if _has_bytes(tensor)]
        if not ours:
            return
        first = {int(t.shape[0]) for t in (*ours, *outputs) if t.dim()}
        self._seen.clear()
        for tensor in [*ours, *(t for t in _data(ours[0].device) if t.dim() and t.shape[0] in first)]:
            storage = tensor.untyped_storage()
            self._seen[key_of(storage)] = weakref.ref(storage, partial(self._gone, key_of(storage)))

    def _gone(self, key: int, ref: weakref.ref[torch.UntypedStorage]) -> None:
        if self._seen.get(key) is ref:
            del self._seen[key]

    def sizes(self, besides: Iterable[Tensor]) -> list[int]:
        """Return the bytes of each batch that is still alive, without those in `besides`."""
        known = {storage_key(t) for t in besides}
        alive = ((key, ref()) for key, ref in self._seen.copy().items())  # any may be dropped at any moment
        return [storage.nbytes() for key, storage in alive if storage is not None and key not in known]

    def __contains__(self, tensor: Tensor) -> bool:
        """Return whether the last `look` found the tensor."""
        return storage_key(tensor) in self._seen


def _data(device: torch.device) -> list[Tensor]:
    """Return plain tensors on `device`: no parameters, gradients, optimizer state or op results.

    Results of ops are not autograd leaves.
    """
    found, owned = [], set()
    gc.collect()  # unreachable tensors must not be planned for
    # Sort all live objects into tensors and what owns them.
    for thing in gc.get_objects():
        kind = type(thing)
        if kind is Tensor and thing.is_leaf and not thing.requires_grad and thing.device == device:
            if _has_bytes(thing):
                found.append(thing)
        elif issubclass(kind, nn.Parameter) and thing.is_leaf and thing.grad is not None:
            owned.add(id(thing.grad))
        elif issubclass(kind, Optimizer):
            # Past the guards of a train step, which would bring back what it has in its store.
            owned.update(id(v) for state in thing.state.values() if isinstance(state, dict) for v in dict.values(state))
    return [t for t in found if id(t) not in owned]


def _has_bytes(tensor: Tensor) -> bool:
    """Return whether the tensor has its own storage; tensors of traces and vmap only wrap others."""
    return not (is_functional(tensor) or is_wrapped(tensor))

"""Other holders of the memory of a weight: another tensor, NumPy, another process.

Tensors that Python has follow the weight to the store and back (`Alias`). With other holders the weight stays on the
device, because they would keep its old values and its bytes. Memory that PyTorch did not allocate, or that NumPy uses,
has unknown holders. An exception is a file mapped for this process alone, as checkpoints are.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from overspill.core.errors import RequestError, UnsupportedError
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.storages import has_storage, key_of, storage_key, tensor_uses, uses_of_key
from overspill.runtime.transfer.host_memory import mapped_file

from .away import Away
from .gate import GRACE_SECONDS
from .residency import Alias, Resident, is_guarded, readable

TRIES = 5
"""Looks at weights that begin to be held, before they count as such: another thread may just read them."""
_PLAIN = Tensor, nn.Parameter


class Holders:
    """How weights share memory, by name, when last examined.

    - `held`: held by others than this model; each with its storage and the number of other holders.
    - `overlapping`: overlap one another, or a buffer.
    - `apart`: parts of larger memory, which is free when all of them have left it.
    - `in_arena`: returns whether a tensor is in an arena of Overspill.
    """

    def __init__(self) -> None:
        self.held: dict[str, tuple[int, int]] = {}
        self.overlapping: set[str] = set()
        self.apart: set[str] = set()
        self.in_arena: Callable[[Tensor], bool] = lambda _: False
        self.tells = True
        """Whether to warn of held weights, once."""
        self._foreign: dict[tuple[int, int], bool] = {}

    def look(
        self, residents: Mapping[str, Resident], weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        """Examine these weights, which are on the device, and give `residents` their aliases; warn of held ones once.

        Raises RequestError for a newly held weight in the arena, because the step reuses that memory.
        """
        before = self.held
        for _ in range(TRIES):
            self._look(self.held, residents, weights, buffers)
            if not (new := [name for name in self.held if name not in before]):
                return
            time.sleep(GRACE_SECONDS)
        others = "is held by others too (NumPy, share_memory(), a graph of autograd, a larger tensor)"
        if inside := next((name for name in new if self.in_arena(weights[name])), ""):
            self.held = before
            raise RequestError(
                f"the memory of {readable(inside)} {others}, and the step makes another use of it; let it go first"
            )
        if self.tells:
            self.tells = False
            warnings.warn(
                f"the memory of {len(new)} weights (the first is {readable(new[0])}) {others}; while it is, they stay "
                "on the device and count in the budget",
                stacklevel=2,
            )

    def _look(
        self,
        searched: Mapping[str, tuple[int, int]],
        residents: Mapping[str, Resident],
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
    ) -> None:
        groups: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in (*weights.items(), *buffers.items()):
            if not isinstance(tensor, FakeTensor) and tensor.numel() and has_storage(tensor):
                groups[storage_key(tensor)][name] = tensor
        self.held, self.overlapping, self.apart, unknown = {}, set(), set(), {}
        for key, tensors in groups.items():
            if not (names := [name for name in tensors if name in weights]):
                continue
            first, known = weights[names[0]], residents.get(names[0])
            storage = first.untyped_storage()
            holders = uses_of_key(key) - 1 - len(names)  # one is `storage`
            holders -= 0 if known is None else known.count_aliases()
            if len(tensors) > 1 and _overlap(tensors.values()):
                self.overlapping.update(tensors)
            elif holders or len(names) < len(tensors) or self._is_foreign(storage, first):
                self.held |= dict.fromkeys(names, (key, holders))
                may_follow = first.nbytes == storage.nbytes() and (storage.resizable() or not first.is_cpu)
                if holders and may_follow and searched.get(names[0]) != (key, holders):  # else a search was in vain
                    unknown[key] = names[0]
            elif first.nbytes != storage.nbytes():
                self.apart.update(names)
        for name in self._follow(unknown, weights, residents) if unknown else ():
            del self.held[name]

    def _is_foreign(self, storage: UntypedStorage, tensor: Tensor) -> bool:
        if storage.device.type != "cpu":
            return False  # all say that they are shared
        if storage.resizable():
            return storage.is_shared()
        at = key_of(storage), storage.data_ptr()
        if at not in self._foreign:
            self._foreign[at] = not (self.in_arena(tensor) or mapped_file(at[1]) is not None)
        return storage.is_shared() or self._foreign[at]

    def _follow(
        self, unknown: Mapping[int, str], weights: Mapping[str, Tensor], residents: Mapping[str, Resident]
    ) -> list[str]:
        """Make all holders of these storages follow their weights.

        Returns the names of weights without other holders.
        """
        names = {key: name for key, name in unknown.items() if name in residents}
        known = {id(weights[name]) for name in names.values()}
        known |= {id(alias.tensor()) for name in names.values() for alias in residents[name].aliases}
        found = defaultdict(list)
        for tensor in gc.get_objects():
            if type(tensor) in _PLAIN and tensor.layout is torch.strided and has_storage(tensor):
                name = names.get(storage_key(tensor))
                if name is None or id(tensor) in known or is_guarded(tensor) or tensor.grad_fn is not None:
                    continue
                if tensor_uses(tensor) == 1:  # else C++ has it too
                    found[name].append(tensor)
        followed = [name for name, tensors in found.items() if len(tensors) == self.held[name][1]]
        for name in followed:
            residents[name].aliases += map(Alias, found[name])
        return followed


def check_inputs_apart(inputs: Iterable[Any], weights: Iterable[Tensor]) -> None:
    """Raise UnsupportedError for an input that shares memory with a weight.

    The step might change the weight before it reads the input.
    """
    keys = {storage_key(weight) for weight in weights if not isinstance(weight, (Away, FakeTensor))}
    for number, leaf in enumerate(inputs):
        if isinstance(leaf, Away) or (type(leaf) in _PLAIN and storage_key(leaf) in keys):
            raise UnsupportedError(f"input {number} shares memory with a weight of the model; give the step a clone()")


def check_order(weights: Mapping[str, Tensor], groups: Iterable[dict[str, Any]]) -> None:
    """Raise UnsupportedError if an optimizer does not update overlapping `weights` one by one, in this order.

    `groups` are the parameter groups of the optimizers.
    """
    names = {id(weight): name for name, weight in weights.items()}
    found = [(names[id(p)], p, group) for group in groups for p in group["params"] if id(p) in names]
    order = [name for name, *_ in found]
    together = any(group.get("foreach") or (p.is_cuda and not group.get("fused")) for _, p, group in found)
    if len(order) > 1 and (together or order != [name for name in weights if name in order]):
        raise UnsupportedError(
            f"{readable(order[0])} and {readable(order[1])} are two parameters over the same memory, and the "
            "optimizer updates them at once (foreach) or not in the model's order; make one parameter of them, as by "
            "decoder.weight = encoder.weight"
        )


def _overlap(tensors: Iterable[Tensor]) -> bool:
    """Return whether any two of these tensors, of one storage, overlap."""
    spans = []
    for tensor in tensors:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        begin = tensor.storage_offset() * tensor.itemsize
        spans.append((begin, begin + (last + 1) * tensor.itemsize))
    return any(one[1] > other[0] for one, other in pairwise(sorted(spans)))

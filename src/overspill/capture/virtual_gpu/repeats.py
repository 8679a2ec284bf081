"""Skip repeated evaluation, whose memory use is recorded already.

A script may evaluate its model a hundred times before its first step. A call without gradients is repeated if model,
inputs and bytes on the device are as in some earlier calls: it has their peak too, so its outputs are made without
running anything. A loop over a data loader in which only such calls happen ends early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.data
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from overspill.capture.recording.recorder import Recorder
from overspill.core import Phase

from .patching import patched

_REPEATS = 4  # calls that are run before one is not: the allocator's cache is as it will be after two
_BATCHES = 8  # calls in a row that were not run, after which a data loader has no more
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class _Output:
    """A tensor of an output: its place in one of the output's storages."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Outputs:
    """Results of a call: tensors and plain values, and bytes of the tensors' storages."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    nbytes: tuple[int, ...]

    @classmethod
    def of(cls, returned: Any) -> _Outputs | None:
        """The outputs in `returned`; None if any is neither tensor nor plain value."""
        found, spec = tree_flatten(returned)
        storages: dict[int, tuple[int, int]] = {}
        leaves: list[Any] = []
        # Plain values as they are; tensors by their place in a storage.
        for leaf in found:
            if not isinstance(leaf, FakeTensor):
                if not isinstance(leaf, _PLAIN):
                    return None
                leaves.append(leaf)
                continue
            if leaf.layout is not torch.strided or leaf.constant is not None or leaf.requires_grad or not leaf.is_cuda:
                return None
            storage = leaf.untyped_storage()
            index, _ = storages.setdefault(storage._cdata, (len(storages), storage.nbytes()))
            leaves.append(_Output(index, tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype))
        return cls(tuple(leaves), spec, tuple(nbytes for _, nbytes in storages.values()))

    def made(self) -> Any:
        """The outputs, made anew."""
        # Storages first, then the tensors on them.
        storages = [torch.empty(nbytes, dtype=torch.uint8, device="cuda") for nbytes in self.nbytes]
        leaves = [
            storages[leaf.storage].view(leaf.dtype).as_strided(leaf.shape, leaf.stride, leaf.offset)
            if isinstance(leaf, _Output)
            else leaf
            for leaf in self.leaves
        ]
        return tree_unflatten(leaves, self.spec)


class Repeats:
    """Skips repeated calls inside `cutting()`; `skipped` counts calls of models that were not run."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._inside = False
        self._seen: dict[Any, _Outputs] = {}
        self._times: Counter[Any] = Counter()
        self._with_gradients = 0
        self._numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self.skipped = 0

    def cutting(self) -> AbstractContextManager[None]:
        """Skip repetition inside the block, within a VirtualGpu."""
        loader = torch.utils.data.DataLoader
        return patched([(nn.Module, "__call__", self._call()), (loader, "__iter__", self._iterate(loader.__iter__))])

    def _call(self) -> Callable[..., Any]:
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(module, *args, **kwargs)
            # Only the outermost module is looked at; calls that train are run.
            self._inside = True
            try:
                if torch.is_grad_enabled():
                    self._with_gradients += 1
                    return original(module, *args, **kwargs)
                return self._without_gradients(original, module, args, kwargs)
            finally:
                self._inside = False

        return call

    def _without_gradients(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = self._key(module, args, kwargs)
        if key is None:
            return original(module, *args, **kwargs)
        seen = self._seen.get(key)
        if seen is not None and self._times[key] >= _REPEATS:
            self.skipped += 1
            with patched([(module, "forward", lambda *_, **__: seen.made())]):
                return original(module, *args, **kwargs)
        before = self._recorder.live_bytes
        returned = original(module, *args, **kwargs)
        outputs = _Outputs.of(returned)
        # If it left anything else on the device, a cache or a list, it may do so each time.
        left = self._recorder.live_bytes - before
        if outputs is None or not 0 <= left - sum(outputs.nbytes) <= _casts(module):
            self._seen.pop(key, None)
        elif seen == outputs:
            self._times[key] += 1
        else:
            self._seen[key], self._times[key] = outputs, 1
        return returned

    def _key(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A key of everything that decides a call's memory use; None if that is not known."""
        if self._recorder.phase is not Phase.FORWARD or _is_observed(module):
            return None
        # Shapes of tensors, and plain values.
        leaves, spec = tree_flatten((args, kwargs))
        given: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                # No element lies by the stride of a dimension of one: that of a window on a text that grows.
                stride = [step for step, size in zip(leaf.stride(), leaf.shape, strict=True) if size != 1]
                given.append((leaf.shape, *stride, leaf.dtype, leaf.device))
            elif isinstance(leaf, _PLAIN):
                given.append((type(leaf), leaf))
            else:
                return None
        modes = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_inference_mode_enabled())
        number = self._numbers.setdefault(module, len(self._numbers))
        return number, module.training, self._recorder.block_bytes, modes, tuple(given), spec

    def _iterate(self, iterate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """`DataLoader.__iter__` that ends once the loop over it only repeats itself."""

        def batches(loader: Any) -> Iterator[Any]:
            skipped, with_gradients = self.skipped, self._with_gradients
            # Of a stream that a script takes as endless, by `next`, an end would be an error there.
            ends = not isinstance(loader.dataset, torch.utils.data.IterableDataset)
            for batch in iterate(loader):
                if ends and self.skipped - skipped >= _BATCHES and self._with_gradients == with_gradients:
                    return
                yield batch

        return batches


def _casts(module: nn.Module) -> int:
    """Bytes of weights that autocast may keep until it ends; 0 outside it."""
    if not (torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled()):
        return 0
    itemsize = torch.get_autocast_dtype("cuda").itemsize
    return sum(itemsize * parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _is_observed(module: nn.Module) -> bool:
    """Whether the script has hooks inside `module`, or it has no weights and is not worth skipping."""
    if any(part._forward_hooks or part._forward_pre_hooks for part in module.modules()):
        return True
    return next(module.parameters(), None) is None

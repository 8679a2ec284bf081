"""Skip repeated evaluation and micro-steps, whose memory use is recorded already.

A script may evaluate its model a hundred times before its first step. A call without gradients is a repetition if
model, inputs and bytes on the device are as in some earlier calls. It has their peak too, so its outputs are made
without running anything. A loop over a data loader in which only such calls happen ends early.

A script that accumulates gradients may do so forty times before a step. A call with gradients is a repetition if the
same holds for the calls before it, since the last step of an optimizer. Its backward then finds the gradients present.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils.data
from torch import Tensor, distributed, nn

from overspill.capture.recording.recorder import Recorder
from overspill.core import Phase
from overspill.pytorch.autograd import accumulate_hooks_of, hooks_of
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.modules import has_hooks
from overspill.pytorch.patching import patched
from overspill.pytorch.storages import key_of
from overspill.pytorch.trees import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from .gpu import optimizer_hooks

_REPEATS = 4  # calls that are run before one is not: the allocator's cache is as it will be after two
_MICRO_STEPS = 2  # the same of calls with gradients, each of which has a backward too
_BATCHES = 8  # calls in a row that were not run, after which a data loader has no more
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class _Output:
    """A tensor of an output: its place in one of the output's storages."""

    storage: int
    trained: bool
    """Whether it has gradients; it is then the whole storage."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Outputs:
    """Results of a call: tensors and plain values."""

    leaves: tuple[Any, ...]
    spec: TreeSpec
    nbytes: tuple[int, ...]
    """Bytes of the tensors' storages."""

    @classmethod
    def of(cls, returned: Any) -> _Outputs | None:
        """Return the outputs in `returned`, or None if any is neither a tensor of the device nor a plain value."""
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
            storage, trained = leaf.untyped_storage(), leaf.requires_grad
            if leaf.layout is not torch.strided or leaf.constant is not None or not leaf.is_cuda:
                return None
            if trained and (leaf.is_leaf or storage.nbytes() != leaf.nbytes or key_of(storage) in storages):
                return None
            index, _ = storages.setdefault(key_of(storage), (len(storages), storage.nbytes()))
            leaves.append(_Output(index, trained, tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype))
        return cls(tuple(leaves), spec, tuple(nbytes for _, nbytes in storages.values()))

    def made(self, weights: Sequence[nn.Parameter] = ()) -> Any:
        """Return the outputs, made again.

        Those of a call with gradients follow from `weights`, which have gradients.
        """
        # Storages first, then the tensors on them.
        trained = [leaf for leaf in self.leaves if isinstance(leaf, _Output) and leaf.trained]
        again = iter(_Again.apply(trained, weights, weights[0]) if trained else ())
        own = {leaf.storage for leaf in trained}
        storages = [
            None if n in own else torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            for n, nbytes in enumerate(self.nbytes)
        ]

        def made(leaf: Any) -> Any:
            storage = storages[leaf.storage] if isinstance(leaf, _Output) else None
            if storage is None:
                return next(again) if isinstance(leaf, _Output) else leaf
            return storage.view(leaf.dtype).as_strided(leaf.shape, leaf.stride, leaf.offset)

        return tree_unflatten([made(leaf) for leaf in self.leaves], self.spec)


class _Again(torch.autograd.Function):
    """Outputs of a call that is not run again, whose backward leaves gradients as they were before the call."""

    @staticmethod
    def forward(ctx: Any, outputs: list[_Output], weights: Sequence[nn.Parameter], _: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of `outputs`."""
        ctx.weights = weights
        ctx.set_materialize_grads(False)
        return tuple(torch.empty_strided(one.shape, one.stride, dtype=one.dtype, device="cuda") for one in outputs)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, ...]:
        """Return no gradients; give weights whose gradients the script has removed since the call new ones."""
        for weight in ctx.weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return None, None, None


class Repeats:
    """Skips repeated calls inside `cutting()`; `skipped` counts calls of models that were not run.

    With `whole_steps`, calls with gradients are run.
    """

    def __init__(self, recorder: Recorder, *, whole_steps: bool = False) -> None:
        self._recorder, self._whole_steps = recorder, whole_steps
        self._inside = False
        self._seen: dict[Any, _Outputs] = {}
        self._times: Counter[Any] = Counter()
        self._with_gradients = 0
        self._row: tuple[Any, _Outputs | None] = None, None  # the key and the outputs of the last calls with gradients,
        self._in_a_row = 0  # and how many these are
        self._numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self.skipped = 0

    @contextmanager
    def cutting(self) -> Iterator[None]:
        """Skip repetition inside the block, within a VirtualGpu."""
        loader = torch.utils.data.DataLoader
        hook = optimizer_hooks.register_optimizer_step_pre_hook(lambda *_: self._end_row())
        try:
            with patched([(nn.Module, "__call__", self._call()), (loader, "__iter__", self._iterate(loader.__iter__))]):
                yield
        finally:
            hook.remove()

    def _end_row(self) -> None:
        self._row, self._in_a_row = (None, None), 0

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
                    return self._in_training(original, module, args, kwargs)
                return self._without_gradients(original, module, args, kwargs)
            finally:
                self._inside = False

        return call

    def _in_training(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = None if self._whole_steps else self._key(module, args, kwargs)
        if key is None:
            return original(module, *args, **kwargs)
        last, outputs = self._row
        if key != last:
            outputs, self._in_a_row = None, 0
        elif outputs is not None and self._in_a_row >= _MICRO_STEPS and _is_closed(module):
            self.skipped += 1
            weights = [parameter for parameter in module.parameters() if parameter.grad is not None]
            with patched([(module, "forward", lambda *_, **__: outputs.made(weights))]):
                return original(module, *args, **kwargs)
        returned = original(module, *args, **kwargs)
        found = _Outputs.of(returned)
        self._in_a_row = self._in_a_row + 1 if found == outputs else 1
        self._row = key, found
        return returned

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
        """Return a key of everything that decides a call's memory use, or None if that is not known."""
        if self._recorder.phase is not Phase.FORWARD or _is_observed(module):
            return None
        # Shapes of tensors, and plain values.
        leaves, spec = tree_flatten((args, kwargs))
        given: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if leaf.requires_grad:  # so what made it goes backward too
                    return None
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
        """Wrap `DataLoader.__iter__` to end once the loop over it only repeats itself."""

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
    """Return the bytes of weights that autocast may keep until it ends; 0 outside it."""
    if not (torch.is_autocast_enabled("cuda") and torch.is_autocast_cache_enabled()):
        return 0
    itemsize = torch.get_autocast_dtype("cuda").itemsize
    return sum(itemsize * parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _is_observed(module: nn.Module) -> bool:
    """Return whether the script has hooks inside `module`, or it has no weights and is not worth skipping."""
    if any(has_hooks(part) for part in module.modules()):
        return True
    return next(module.parameters(), None) is None


def _is_closed(module: nn.Module) -> bool:
    """Return whether a call with gradients leaves those of its weights, and nothing else that goes backward."""
    weights = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if distributed.is_initialized() or all(weight.grad is None for weight in weights):
        return False
    if any(hooks_of(weight) or accumulate_hooks_of(weight) for weight in weights):
        return False
    kept = (value for part in module.modules() for value in tree_leaves(vars(part)))
    return not any(isinstance(value, Tensor) and value.grad_fn is not None for value in kept)

"""A fast FakeTensorMode, to trace a training step in a fraction of a second.

torch's FakeTensorMode computes the shapes of every op in Python. A training step repeats the same ops: each block of a
ResNet, each iteration of a loop. A look into torch's own cache costs more than all of Overspill's recorder.
`FastFakeMode` caches results under a leaner key, for plain cases only; everything else goes to torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from overspill.capture.higher_order import fake_rule
from overspill.pytorch.dispatch import HigherOrderOperator, has_kernel, no_dispatch
from overspill.pytorch.fake_tensors import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from overspill.pytorch.schemas import written_arguments
from overspill.pytorch.storages import as_subclass, raise_on_access, storage_key

from .retarget import COMPOSITES, FAKES, composed
from .shapes import SHAPES, contiguous_stride

_CPU = torch.device("cpu")
_META = torch.device("meta")
aten = torch.ops.aten
_DEVICE_OF = torch.ops.prim.device.default
# Values that a cache key holds unchanged, with their type, since 1 == 1.0 == True.
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_RESHAPES = {aten.view.default, aten._unsafe_view.default}
_KEEP_OUT = {torch.Tag.inplace_view, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Uncacheable(Exception):
    pass


@dataclass(frozen=True)
class _Fresh:
    """An output with a new storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _FakeView:
    """An output that is a view of argument tensor number `source`."""

    source: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _Same:
    """An output that is argument tensor number `source` itself, updated in place."""

    source: int


_Output = _Fresh | _FakeView | _Same | float | None  # a number itself, as the lengths that attention returns
# Results by op and arguments, for all modes of this process: another batch size repeats many of them.
_MEMORY: dict[tuple[Any, ...], Any] = {}
_MOST_REMEMBERED = 1 << 18
_LITTLE = 1 << 28  # bytes that an op may really read to find its shapes


def _remember(key: tuple[Any, ...], answer: Any) -> Any:
    if len(_MEMORY) >= _MOST_REMEMBERED:
        _MEMORY.clear()
    _MEMORY[key] = answer
    return answer


def tensors_in(values: Any, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """Append the tensors in `values`, possibly nested, to `found`; return it."""
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            tensors_in(value, found)
    return found


def written_tensors(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the argument tensors that `func` writes in place."""
    return tensors_in(written_arguments(func, args, kwargs), [])


@cache
def _composition(func: Any) -> Callable[..., Any] | None:
    """Return a function that composes `func` of other ops, or None if a GPU has an op for it."""
    if func in FAKES:
        return None
    if func in COMPOSITES:
        return COMPOSITES[func]
    composite = has_kernel(func.name(), "CompositeImplicitAutograd")
    return partial(composed, func) if composite else None


class FastFakeMode(FakeTensorMode):
    """FakeTensorMode with a lean cache; `observe` sees each op that the program runs.

    `observe(func, args, kwargs, compute)` must return the op's result, which `compute(args, kwargs)` makes if it is
    fake. It does not see ops inside the fake implementation of another op: on the device they do not happen.
    `computing` is true during them. Nor does it see ops on real tensors for which `is_of_host(func, args, kwargs)` is
    true, such as those of data loading.
    """

    def __init__(
        self, observe: Callable[..., Any] | None = None, is_of_host: Callable[..., bool] = lambda *_: False
    ) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False
        self._observe, self._is_of_host = observe, is_of_host
        self._pattern: dict[str, Any] | None = (
            None  # the attributes of a fake tensor of this mode that is nothing special
        )
        self.computing = False
        self._reads_little = True

    def can_run_unsafe_fallback(self, func: Any) -> bool:
        """Return whether torch may run `func` on zeros, as the only way to find shapes."""
        return self._reads_little and super().can_run_unsafe_fallback(func)

    @property
    def avoid_device_init(self) -> bool:
        """True: no device is ever touched, even if this machine has one."""
        return True

    @property
    def supports_higher_order_operators(self) -> bool:
        """True: ops that call functions run them here, and their inner ops are ops of the program."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # wrapping every dispatch for Dynamo's sake would cost as much as the dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the fake result of `func`. Raises FakeTensorMode's errors for ops without one."""
        if func is _DEVICE_OF:
            return _META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
        kwargs = kwargs or {}
        for kind in types:
            if kind is not FakeTensor and hasattr(kind, "__tensor_flatten__"):
                return NotImplemented  # a DTensor's own dispatch runs the op on what it wraps
        if isinstance(func, HigherOrderOperator):
            rule = fake_rule(func)
            return rule(self, *args, **kwargs) if rule else super().__torch_dispatch__(func, types, args, kwargs)
        # Inner ops are not observed.
        if self.computing or self._observe is None:
            return self._fake(func, types, args, kwargs)
        if not types and self._is_of_host(func, args, kwargs):
            return func(*args, **kwargs)
        return self._observed(self._observe, func, types, args, kwargs)

    def _observed(self, observe: Callable[..., Any], func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an op of the program; a composite one is taken apart first."""
        composition = _composition(func)
        if composition is not None:  # comes this far only in inference mode, where autograd does not take it first
            with self:
                return composition(*args, **kwargs)
        self.computing = True
        try:
            return observe(func, args, kwargs, lambda a, k: self._fake(func, types, a, k))
        finally:
            self.computing = False

    def _fake(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        tensors: list[FakeTensor] = []
        if func is aten._to_copy.default and not isinstance(args[0], FakeTensor):  # a batch on its way to the device
            args = (self.like(args[0]),)
        try:
            key = (func, _keys(args, tensors), tuple((name, _key(kwargs[name], tensors)) for name in sorted(kwargs)))
            if func.is_view or func in _RESHAPES:  # of others, where a tensor lies in its storage decides nothing
                key = (*key, *_places(tensors))
            known = _MEMORY.get(key, ...)
            if known is ... and (foretold := _foretold(func, args, kwargs)) is not None:
                known = _remember(key, foretold)
        except _Uncacheable:
            return super().__torch_dispatch__(func, types, args, kwargs)
        # Not in the cache: ask torch, and keep the answer.
        if known is ...:
            self._reads_little = sum(tensor.numel() * tensor.element_size() for tensor in tensors) < _LITTLE
            result = super().__torch_dispatch__(func, types, args, kwargs)
            _remember(key, _describe(func, result, tensors))
            return result
        if known is _Uncacheable or torch.is_inference_mode_enabled():  # whose views torch makes in its own way
            return super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(known, tuple):
            made = [self._make(output, tensors) for output in known[1]]
            return known[0](made)
        return self._make(known, tensors)

    def _make(self, output: _Output, tensors: Sequence[FakeTensor]) -> FakeTensor | float | None:
        if output is None or isinstance(output, (int, float)):
            return output
        if isinstance(output, _Same):
            return tensors[output.source]
        if isinstance(output, _Fresh):
            meta = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device=_META)
        else:
            meta = torch.empty(0, dtype=output.dtype, device=_META)
            with in_kernel_invocation_manager(self):
                storage = tensors[output.source].untyped_storage()
                meta.set_(storage, output.offset, output.shape, output.stride)
        return self.wrap(meta)

    def like(self, data: torch.Tensor) -> torch.Tensor:
        """Return a fake host tensor like the real `data`."""
        plain = type(data) is torch.Tensor and data.layout is torch.strided and data.device == _CPU
        if not plain or data.is_conj() or data.is_neg() or data.untyped_storage().nbytes() != data.nbytes:
            return self.from_tensor(data, static_shapes=True)
        with no_dispatch():
            return self.wrap(torch.empty_strided(data.shape, data.stride(), dtype=data.dtype, device=_META))

    def wrap(self, meta: torch.Tensor) -> FakeTensor:
        """Make `FakeTensor(self, meta, cpu)` in a fifth of the time."""
        if self._pattern is None:
            made = FakeTensor(self, meta, _CPU)
            self._pattern = dict(made.__dict__)
            return made
        made = as_subclass(FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=_CPU)
        raise_on_access(made)
        made.__dict__.update(self._pattern)
        return made


def _keys(values: Any, tensors: list[FakeTensor]) -> tuple[Any, ...]:
    return tuple([_key(value, tensors) for value in values])


def _key(value: Any, tensors: list[FakeTensor]) -> Any:
    """Return the cache key of one argument; append fake tensors to `tensors`."""
    if isinstance(value, FakeTensor):
        if value.constant is not None or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            raise _Uncacheable
        if value.fake_device is not _CPU and value.fake_device != _CPU:  # on the device `meta`
            raise _Uncacheable
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return _keys(value, tensors)
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if type(value) is torch.Tensor and value.dim() == 0 and value.device == _CPU:  # a number, as in `x[i] = number`
        return (torch.Tensor, value.dtype)
    raise _Uncacheable


def _places(tensors: Sequence[FakeTensor]) -> list[int]:
    """Return the offset of each tensor in its storage.

    Raises _Uncacheable without tensors: a view of a number of the host is in none of these storages.
    """
    if not tensors:
        raise _Uncacheable
    return [tensor.storage_offset() for tensor in tensors]


def _foretold(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the cache entry of an op whose output shapes need no torch, or None for others."""
    if func in _RESHAPES:
        return _reshaped(*args)
    if func is aten.select.int:
        return _selected(*args)
    shapes = SHAPES[func](*args, **kwargs) if func in SHAPES else None
    if shapes is None:
        return None
    made = [None if shape is None else _Fresh(shape, contiguous_stride(shape), torch.float32) for shape in shapes]
    return made[0] if len(made) == 1 else (tuple, tuple(made))


def _selected(x: FakeTensor, dim: int, index: int) -> _FakeView | None:
    """Return one row of a tensor, or None where torch has to raise an error."""
    if not (-x.dim() <= dim < x.dim() and -x.shape[dim] <= index < x.shape[dim]):
        return None
    dim, index = dim % x.dim(), index % x.shape[dim]
    shape, stride = x.shape, x.stride()
    offset = x.storage_offset() + index * stride[dim]
    return _FakeView(0, (*shape[:dim], *shape[dim + 1 :]), (*stride[:dim], *stride[dim + 1 :]), offset, x.dtype)


def _reshaped(x: FakeTensor, size: Sequence[int]) -> _FakeView | None:
    """Return the view of a contiguous tensor in another shape, or None if torch has to decide or raise an error."""
    count, known = x.numel(), math.prod(n for n in size if n != -1)
    if count == 0 or known <= 0 or x.stride() != contiguous_stride(x.shape):
        return None
    shape = tuple(count // known if n == -1 else n for n in size)
    if size.count(-1) > 1 or min(shape, default=1) < 1 or math.prod(shape) != count:
        return None
    return _FakeView(0, shape, contiguous_stride(shape), x.storage_offset(), x.dtype)


def _describe(func: Any, result: Any, tensors: Sequence[FakeTensor]) -> Any:
    """Return the cache entry for `result`; `_Uncacheable` if it must be computed each time."""
    if not _KEEP_OUT.isdisjoint(func.tags) or func.namespace not in {"aten", "prims"}:
        return _Uncacheable
    # Which argument has each storage; the first one counts.
    sources = {storage_key(tensor): i for i, tensor in reversed(list(enumerate(tensors)))}
    several = isinstance(result, (list, tuple))
    made: list[_Output] = []
    for output in result if several else (result,):
        described = _describe_one(output, tensors, sources)
        if described is _Uncacheable:
            return _Uncacheable
        made.append(described)
        if isinstance(described, _Fresh):  # a second output on the same storage is no view of an argument
            sources[storage_key(output)] = -1
    if any(isinstance(output, _FakeView) for output in made) and not (func.is_view or func in _RESHAPES):
        return _Uncacheable  # its place in the storage is not in the key
    if not several:
        return made[0]
    return (type(result) if type(result) in {list, tuple} else tuple, tuple(made))


def _describe_one(output: Any, tensors: Sequence[FakeTensor], sources: dict[int, int]) -> Any:
    if output is None or type(output) in {int, float}:
        return output
    if not isinstance(output, FakeTensor) or output.constant is not None or output.layout is not torch.strided:
        return _Uncacheable
    for i, tensor in enumerate(tensors):
        if output is tensor:
            return _Same(i)
    if output.fake_device != _CPU or output.is_conj() or output.is_neg() or output.is_sparse:
        return _Uncacheable
    source = sources.get(storage_key(output))
    shape, stride = tuple(output.shape), output.stride()
    if source is None:
        return _Fresh(shape, stride, output.dtype) if output.storage_offset() == 0 else _Uncacheable
    return _FakeView(source, shape, stride, output.storage_offset(), output.dtype) if source >= 0 else _Uncacheable

"""A gradient whose bytes are in the store, as the value of `.grad` between backward and the optimizer's step.

An op that uses it brings it back for as long as the op runs. If the op changes it, its new bytes go to the store. Ops
on lists (clipping, GradScaler, foreach optimizers) run on one gradient after another while the next one arrives, so
about two of them are on the device at once. A product with a number waits for the next use.

What reaches the memory without an op brings it back for good: a view, `data_ptr()`, `numpy()`, DLPack.

Limits:
- An op that takes several gradients but is no list op, as `torch.stack`, brings all of them at once.
- `torch.compile(optimizer.step)` breaks its graph at each gradient, and rounds as its parts do.
- Collectives of `torch.distributed` bring it back for good.
- `other.data = gradient` gives `other` no memory, since PyTorch lets nobody know: take the gradient first.
- In a list with a tensor that is not dense, PyTorch computes norms on CUDA by another kernel than here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from overspill.core.errors import OverspillError
from overspill.pytorch.dispatch import DisableTorchDispatch, DisableTorchFunctionSubclass, schema_of
from overspill.pytorch.fake_tensors import is_description
from overspill.pytorch.optimizers import foreach_types
from overspill.pytorch.schemas import argument, arguments, written_arguments
from overspill.pytorch.storages import has_storage, storage_key, wrapper_of
from overspill.pytorch.trees import tree_leaves, tree_map, tree_map_only
from overspill.runtime.step.residency import Spec, is_dense
from overspill.runtime.transfer.engine import TransferEngine

from .gradient_content import Content, Factor, GradientTransfers

aten = torch.ops.aten

_PRODUCTS = {
    aten.mul_.Tensor: "other",
    aten.mul_.Scalar: "other",
    aten._foreach_mul_.Tensor: "other",
    aten._foreach_mul_.Scalar: "scalar",
}
"""Products in place, and the names of their factors."""
_OVERWRITING = {
    aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor, aten.copy_.default, aten._foreach_zero_.default,
    aten._foreach_copy_.default,
}  # fmt: skip
"""Ops that write all of their first argument without reading it."""
_WITHOUT_VALUES = {
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.rand_like, aten.randn_like,
    aten.randint_like, aten.new_empty, aten.new_empty_strided, aten.new_zeros, aten.new_ones, aten.new_full,
}  # fmt: skip
"""Ops that need only the shape, dtype and device of their first argument."""
_REACH_MEMORY = {
    *(Tensor.data_ptr, Tensor.const_data_ptr, Tensor.untyped_storage, Tensor.storage, Tensor.storage_type),
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.__cuda_array_interface__.__get__),
    *(Tensor.share_memory_, Tensor.apply_, Tensor.map_, Tensor.map2_),
}
"""What reaches the memory without an op, and may keep it."""
_READ = {Tensor.tolist, Tensor.is_shared}
"""What reads the memory without an op, and has done with it when it returns."""
_SET_DATA = Tensor.data.__set__


class StoredGradient(Tensor):
    """A gradient in the store that any op can use."""

    _content: Content
    """Its bytes, shared with what `detach` makes of it."""

    def __new__(
        cls, handle: Tensor | None, spec: Spec, engine: TransferEngine, *, added_to: StoredGradient | None = None
    ) -> Self:
        """Return the gradient that `engine` has in its store as `handle`.

        With `added_to`, it has no handle: the program has added it to that gradient already. When autograd adds it
        there, nothing happens. Any other use raises OverspillError.
        """
        if (handle is None) == (added_to is None):
            raise ValueError("a gradient has a handle, or another gradient to which it has been added")
        content = Content(spec, engine)
        content.handle = handle
        content.added_to = None if added_to is None else added_to._content
        return cls._over(content)

    @classmethod
    def of(cls, tensor: Tensor, engine: TransferEngine) -> Self:
        """Send `tensor` to the store; its memory is free once nobody else holds it.

        Raises ValueError if it is not a plain dense tensor that owns its whole storage, as a view of a bucket of
        DistributedDataParallel is not. Raises StoreError.
        """
        if type(tensor) is not Tensor or tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            raise ValueError("only plain dense tensors can be stored as gradients")
        if tensor.requires_grad:
            raise ValueError("a gradient through which a backward may go cannot be stored")
        if tensor.storage_offset() or tensor.untyped_storage().nbytes() != tensor.nbytes or not is_dense(tensor):
            raise ValueError("a gradient within the memory of another tensor cannot be stored")
        handle = engine.offload(tensor)
        engine.await_offload(handle, tensor)
        return cls(handle, Spec.of(tensor), engine)

    @classmethod
    def spent(cls, spec: Spec) -> Self:
        """Return what is left of a gradient whose memory an update has used: only zeros can be written to it."""
        return cls._over(Content(spec, None))

    @property
    def is_spent(self) -> bool:
        """Whether an update has used it up."""
        return self._content.handle is None and self._content.real is None

    @classmethod
    def _over(cls, content: Content) -> Self:
        spec = content.spec
        face: Self = wrapper_of(cls, spec.size, spec.stride, spec.dtype, spec.device)
        face._content = content
        return face

    @property
    def is_stored(self) -> bool:
        """Whether only the store has its bytes."""
        return self._content.handle is not None

    @property
    def was_read(self) -> bool:
        """Whether anyone has brought its bytes since `forget_reads`."""
        return self._content.was_read

    def forget_reads(self) -> None:
        """Forget who has read it."""
        self._content.was_read = False

    def take(self) -> Tensor:
        """Bring the gradient back for good and return it as a plain tensor, whose memory this object shares.

        Raises StoreError, and OverspillError if it was given up.
        """
        real = self._content.take()
        self._show(real)
        return real

    def read(self) -> AbstractContextManager[Tensor]:
        """Give its values to a reader for the time of the block. Raises StoreError, and OverspillError if empty."""
        return self._content.read()

    def lend(self) -> tuple[Tensor, tuple[Factor, ...]]:
        """Return its handle, which stays its own, and by what its bytes have to be multiplied."""
        content = self._content
        content.check()
        if content.handle is None:
            raise OverspillError("this gradient is on the device; call take() instead of lend()")
        return content.handle, content.factors

    def give_up(self) -> tuple[Tensor, tuple[Factor, ...]]:
        """Return its handle, and by what its bytes have to be multiplied; it is empty from then on.

        Multiply by one factor after another, in their order, for the same bits. Raises OverspillError if it is not
        stored.
        """
        return self._content.give_up()

    def _show(self, real: Tensor) -> None:
        """Share the memory of `real`, for code below PyTorch's dispatcher."""
        with DisableTorchFunctionSubclass(), DisableTorchDispatch():
            if storage_key(self) != storage_key(real):
                _SET_DATA(self, real)

    def _become(self, real: Tensor) -> None:
        """Be another tensor from now on; other objects over the same content keep theirs."""
        self._content = Content(Spec.of(real), None)
        self._content.stay(real)
        with DisableTorchFunctionSubclass(), DisableTorchDispatch():
            _SET_DATA(self, real)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Give its memory to what needs it; all else goes on to ops, whose results are plain tensors."""
        del types
        kwargs = kwargs or {}
        if function in _READ:
            with args[0]._content.read() as value:
                return function(value, *args[1:], **kwargs)
        if function == _SET_DATA and isinstance(args[0], cls):
            target, value = args
            if not isinstance(value, cls):
                target._become(value.detach())
            elif value._content is not target._content:  # as it is in `model.to(device)` on that device
                target._become(value.take().detach())
            return None
        if function == _SET_DATA or (function in _REACH_MEMORY and not is_description()):
            args = tree_map_only(StoredGradient, StoredGradient.take, args)
        with DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run an op."""
        del types
        kwargs = kwargs or {}
        first = args[0] if args else None
        if op is aten.add_.Tensor and isinstance(args[1], cls) and args[1]._content.added_to is not None:
            return _added_already(*args, **kwargs)
        if (found := _without_transfers(op, args, kwargs)) is not None:
            return found
        if isinstance(first, cls) and torch.Tag.inplace_view in getattr(op, "tags", ()):
            own = first.take().detach()  # its shape is that of this object alone
            op(own, *args[1:], **kwargs)
            first._become(own)
            return first
        transfers = GradientTransfers()
        try:
            if _takes_lists(op):
                return _one_by_one(op, arguments(op, args, kwargs), transfers)
            if op in _PRODUCTS and _multiplied_later(op, first, args[1]):
                return first
            return _run(op, args, kwargs, transfers)
        finally:
            transfers.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy it as a plain tensor on the device."""
        if id(self) not in memo:
            with self._content.read() as value, torch.no_grad():
                memo[id(self)] = value.clone().requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as a plain tensor."""
        with self._content.read() as value:
            return value.__reduce_ex__(protocol)

    def __format__(self, spec: str) -> str:
        """Format it as a plain tensor."""
        with self._content.read() as value:
            return format(value, spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        """Print it as a plain tensor."""
        with self._content.read() as value:
            return value.__repr__(tensor_contents=tensor_contents)


for _types in foreach_types():  # clipping takes foreach kernels on a GPU, with other bits, for these types alone
    _types.append(StoredGradient)


def _without_transfers(op: Any, args: Any, kwargs: dict[str, Any]) -> StoredGradient | None:
    """Return a result that is in the store as well, over the same bytes or a sum; None for other ops."""
    if op is aten.add.Tensor and _are_alike(*args) and not kwargs:
        return _sum(*args)
    return _sharing(op, args[0]) if args and isinstance(args[0], StoredGradient) else None


def _sharing(op: Any, gradient: StoredGradient) -> StoredGradient | None:
    """Return the result of an op that only makes another object over the same bytes, or None for other ops."""
    if op is aten.detach_.default:
        return gradient
    if op is aten.detach.default or op is aten.alias.default:
        content = gradient._content
        content.check()
        other = gradient._over(content)
        if content.real is not None:
            other._show(content.real)
        return other
    return None


def _are_alike(one: Any, other: Any) -> bool:
    """Return whether two tensors are gradients of one parameter, as autograd adds them up, and one is in the store."""
    both = isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype is other.dtype
    alike = both and (one.size(), one.stride(), one.device) == (other.size(), other.stride(), other.device)
    return alike and any(isinstance(of, StoredGradient) and of.is_stored for of in (one, other))


def _sum(one: Tensor, other: Tensor) -> StoredGradient:
    """Return the sum of two gradients, in the store as they are."""
    engine = next(e for of in (one, other) if isinstance(of, StoredGradient) and (e := of._content.engine) is not None)
    with ExitStack() as held:
        values = [held.enter_context(of.read()) if isinstance(of, StoredGradient) else of for of in (one, other)]
        if isinstance(one, StoredGradient) and one.is_stored:
            total = values[0].add_(values[1])  # a copy of our own
        else:
            total = values[0] + values[1]
    values.clear()
    return StoredGradient.of(total, engine)


def _added_already(target: Tensor, gradient: StoredGradient, *, alpha: Any = 1) -> Tensor:
    """Return `target`, to which the program has added `gradient`; it cannot be added again."""
    content = gradient._content
    if not isinstance(target, StoredGradient) or target._content is not content.added_to or alpha != 1:
        content.check()
    content.added_to = None
    return target


def _multiplied_later(op: Any, gradient: Any, factor: Any) -> bool:
    """Let a product in place wait, if it is one for sure that `mul_` can compute then with the same bits."""
    if not isinstance(gradient, StoredGradient) or not gradient.dtype.is_floating_point:
        return False
    if type(factor) is Tensor:
        here = factor.device in (gradient.device, torch.device("cpu"))
        return here and not factor.dim() and not factor.is_complex() and gradient._content.multiply(factor)
    # Of half precision, a kernel for lists rounds a number in another way than `mul_`.
    exact = op is not aten._foreach_mul_.Scalar or gradient.dtype in (torch.float32, torch.float64)
    return exact and isinstance(factor, int | float) and gradient._content.multiply(factor)


@cache
def _takes_lists(op: Any) -> bool:
    """Return whether an op does the same with each tensor of its lists."""
    schema = schema_of(op)
    if schema is None:
        return False
    name = schema.name.partition("::")[2]
    return name.startswith("_foreach_") or (name.startswith(("_fused_", "_amp_foreach_")) and name.endswith("_"))


def _one_by_one(op: Any, given: dict[str, Any], transfers: GradientTransfers) -> Any:
    """Run an op on lists: on the plain tensors first, then on one stored gradient after another."""
    lists = [
        value for value in given.values() if isinstance(value, list | tuple) and isinstance((*value, 0)[0], Tensor)
    ]
    count = len(lists[0])
    alone = [i for i in range(count) if any(_is_away(values[i]) for values in lists if len(values) == count)]
    plain = [i for i in range(count) if i not in set(alone)]
    if (factor := _PRODUCTS.get(op)) is not None:
        alone = [i for i in alone if not _multiplied_later(op, given["self"][i], given[factor])]
    parts = [part for part in (plain, *([i] for i in alone)) if part]
    results: dict[int, Any] = {}
    for part, following in zip(parts, [*parts[1:], []], strict=False):
        result = _run(op, (), _arguments_of(part, given, count), transfers, _arguments_of(following, given, count))
        if schema_of(op).returns:
            results |= zip(part, result, strict=True)
    return [results[i] for i in range(count)] if schema_of(op).returns else None


def _is_away(value: Any) -> bool:
    return isinstance(value, StoredGradient) and value._content.real is None


def _arguments_of(part: list[int], given: dict[str, Any], count: int) -> dict[str, Any]:
    """Return the arguments of a list op for the tensors with these numbers."""

    def cut(name: str, value: Any) -> Any:
        if name == "scalars" and isinstance(value, Tensor):  # one for each tensor of the lists
            return value[part]
        return [value[i] for i in part] if isinstance(value, list | tuple) and len(value) == count else value

    return {name: cut(name, value) for name, value in given.items()}


def _contents(values: Any) -> dict[Content, list[StoredGradient]]:
    """Return the contents among `values` with the objects over each, in an order that all threads share."""
    found: dict[Content, list[StoredGradient]] = {}
    for leaf in tree_leaves(values):
        if isinstance(leaf, StoredGradient):
            found.setdefault(leaf._content, []).append(leaf)
    return dict(sorted(found.items(), key=lambda item: id(item[0])))


def _run(op: Any, args: Any, kwargs: dict[str, Any], transfers: GradientTransfers, following: Any = ()) -> Any:
    """Run an op on the gradients themselves while those among `following` arrive."""
    faces = _contents((args, kwargs))
    written = _contents(written_arguments(op, args, kwargs))
    unread = _unread(op, args, kwargs, faces)
    transfers.settle()
    with ExitStack() as locks:
        for content in faces:
            locks.enter_context(content.lock)
            content.check()
        brought = [content for content in faces if content.real is None]
        transfers.start(content for content in brought if content is not unread)
        data = {content: content.real for content in faces} | {
            content: content.spec.empty() if content is unread else transfers.arrive(content) for content in brought
        }
        if op not in _OVERWRITING:
            transfers.start(content for content in _contents(following) if content not in faces)
        args, kwargs = tree_map_only(StoredGradient, lambda gradient: data[gradient._content], (args, kwargs))
        try:
            result = op(*args, **kwargs)
        except BaseException:
            for content in brought:
                if content in written and content is not unread:  # it may be changed in part, as a plain one
                    content.stay(data[content])
            raise
        return _after(op, result, faces, {content: data[content] for content in brought}, written, transfers)


def _after(
    op: Any,
    result: Any,
    faces: dict[Content, list[StoredGradient]],
    brought: dict[Content, Tensor],
    written: dict[Content, list[StoredGradient]],
    transfers: GradientTransfers,
) -> Any:
    """Send back what an op has changed of `brought`; return its result with the gradients' objects in it."""
    same = {id(brought.get(content, content.real)): objects[0] for content, objects in faces.items()}
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and id(leaf) not in same]
    reached = {storage_key(leaf) for leaf in results if has_storage(leaf)}
    for content, data in brought.items():
        if storage_key(data) in reached or _may_keep(op):
            content.stay(data)  # it may be written through the view
        elif content in written:
            transfers.leave(content, data)
    for content, objects in faces.items():
        for face in objects if content.real is not None else ():
            face._show(content.real)
    return tree_map(lambda leaf: same.get(id(leaf), leaf), result)


@cache
def _may_keep(op: Any) -> bool:
    """Return whether an op may write to a tensor later, as collectives do, or without saying so."""
    schema = schema_of(op)
    return schema is None or schema.name.startswith("c10d::")


def _unread(op: Any, args: Any, kwargs: dict[str, Any], faces: dict[Content, list[StoredGradient]]) -> Content | None:
    """Return the content whose values a call of an op does not read, or None."""
    if op not in _OVERWRITING and getattr(op, "overloadpacket", None) not in _WITHOUT_VALUES:
        return None
    leaf, *more = tree_leaves(argument(op, args, kwargs, "self"))
    alone = not more and isinstance(leaf, StoredGradient) and len(faces[leaf._content]) == 1
    return leaf._content if alone else None

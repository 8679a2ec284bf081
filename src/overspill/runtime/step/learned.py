"""Learn the memory of an optimizer's updates, and whether they mix parameters, on fake tensors of the real sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.core.errors import OverspillError, UnsupportedError
from overspill.pytorch.dispatch import disable_current_modes
from overspill.pytorch.fake_tensors import FakeTensorMode
from overspill.pytorch.schemas import written_arguments
from overspill.pytorch.storages import key_of, storage_key
from overspill.pytorch.trees import tree_leaves
from overspill.runtime.optimizer_outside import FEW, Outside
from overspill.runtime.optimizer_step import StepBytes, copied, lent, temporary_bytes
from overspill.runtime.reachable import tensors_in

from .residency import Spec
from .trials import quietly

LEAST_MOVED_BYTES = 1024
"""Bytes of a tensor of the state from which on it is moved; smaller ones stay, unless they are of the parameter's
shape."""
_ITEM = torch.ops.aten._local_scalar_dense.default
_BY_ROW = frozenset(
    getattr(torch.ops.aten, name).default for name in ("detach", "_to_copy", "clone", "bmm", "baddbmm")
) | {torch.ops.aten.unbind.int, torch.ops.aten.select.int}
"""Ops other than pointwise ones that work row by row."""


_IN_8_BITS = "bitsandbytes.optimizer_update_8bit_blockwise.default"
"""An update of bitsandbytes, whose kernel on the CPU is written in Python: it restores the state in float32.

Its schema says that it writes to its tables of levels, which all parameters have and which it only reads. (bitsandbytes
0.50.2, _ops.py, backends/cpu/ops.py and csrc/kernels.cu)
"""
_TABLES = slice(12, 14)
_BYTES_AN_ELEMENT = {"adam": 20, "lamb": 20, "lion": 20, "ademamix": 38}
"""Scratch of the update on the CPU in float32, by its first argument; of others at most 12. (measured)"""


Leaves = dict[str, tuple[torch.dtype, Spec | None]]
"""Tensors of a parameter's state that move, by path, with dtype and spec; None for the parameter's own."""


@dataclass(frozen=True)
class Needs:
    """Memory that updates of one parameter take, in bytes."""

    leaves: Leaves
    """Tensors of its state that move."""
    rest_bytes: int
    """Bytes of other tensors of its state, which stay on the device."""
    first_bytes: int
    """Temporaries of the first update, which makes the state."""
    later_bytes: int
    """Most temporaries of a later update."""
    moved_bytes: int = 0
    """What a later update reads and writes; 0: nobody knows."""


@dataclass(frozen=True)
class Learned:
    """Memory that one call for several parameters takes."""

    each: list[Needs]
    """Needs of each parameter."""
    first_bytes: int
    """Temporaries of the first call."""
    later_bytes: int
    """Most temporaries of a later call."""
    outside_bytes: int
    """Bytes that the optimizer keeps outside of the parameters' state."""
    draws: bool = False
    """Whether the call uses random numbers."""
    coupled: bool = False
    """Whether the call combines values of several parameters."""
    moved_bytes: int = 0
    """What a later call reads and writes; 0: nobody knows."""


def learned(
    optimizer: Optimizer, parameters: Sequence[tuple[int, Tensor]], steps: int, gradient: Callable[[Tensor], Tensor]
) -> Learned | None:
    """Return the memory that `steps` of `optimizer` take for `parameters`, learned on fake tensors of their sizes.

    Each parameter comes with the number of its group. `gradient` turns a gradient into the one that the update gets.
    Returns None if the optimizer cannot step on fake tensors.
    """
    fakes: list[Tensor] = []
    try:
        outside, mode = Outside(optimizer), FakeTensorMode(allow_non_fake_inputs=True)
        with disable_current_modes():  # an op on real tensors alone is real in this mode too
            if outside.unknown or any(tensor.numel() > FEW for tensor in outside.tensors):
                optimizer = copied(optimizer, mode)
        with quietly(optimizer), mode:
            for _, like in parameters:
                strides = like.stride() if all(like.stride()) else None  # a placeholder has none of its own
                made = torch.empty(like.shape, dtype=like.dtype, device=_there(like))
                fake = made if strides is None else made.as_strided(like.shape, strides)
                fakes.append(fake.requires_grad_())
                if isinstance(like, nn.Parameter):
                    vars(fake).update({k: v for k, v in vars(like).items() if k not in vars(fake)})
            return _learned(optimizer, [number for number, _ in parameters], fakes, steps, gradient)
    except OverspillError:
        raise
    except Exception:  # noqa: BLE001 - any class of optimizer may refuse fake tensors; it is tried on tiny ones then
        return None


def _there(like: Tensor) -> torch.device:
    return like.device if like.device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")


def _learned(
    optimizer: Optimizer,
    groups: Sequence[int],
    fakes: Sequence[Tensor],
    steps: int,
    gradient: Callable[[Tensor], Tensor],
) -> Learned:
    lists: dict[int, list[Tensor]] = {}
    for number, fake in zip(groups, fakes, strict=True):
        lists.setdefault(number, []).append(fake)
    peaks: list[int] = []
    draws = coupled = False
    moved = 0
    leaves: list[Leaves] = [{} for _ in fakes]
    rests = [0] * len(fakes)
    with lent(optimizer, lists):
        for _ in range(steps):
            places = [_by_storage(optimizer.state.get(fake, {})) for fake in fakes]
            for fake in fakes:
                fake.grad = gradient(torch.empty_like(fake))
            tracker = _OnFakes(fakes[0].device, _by_parameter(optimizer, fakes))
            peak = temporary_bytes(optimizer, tracker)
            moved = tracker.moved_bytes
            draws = draws or tracker.draws
            coupled = coupled or tracker.coupled
            shared = {storage_key(t) for t in Outside(optimizer).tensors}
            _check_apart(optimizer, fakes, shared)
            for number, fake in enumerate(fakes):
                found = tensors_in(optimizer.state.get(fake, {}))
                moving = {path: t for path, t in found.items() if moves(t, fake, shared)}
                leaves[number] |= {path: (t.dtype, Spec.of(t)) for path, t in moving.items()}
                rest = {storage_key(t): t.untyped_storage().nbytes() for p, t in found.items() if p not in moving}
                # What is made anew at each step is there twice until the step ends.
                again = sum(nbytes for key, nbytes in rest.items() if places[number] and key not in places[number])
                rests[number] = max(rests[number], sum(rest.values()) + again)
                # What now lies where another tensor of the state was is copied to go where it is planned.
                peak += sum(t.nbytes for path, t in moving.items() if places[number].get(storage_key(t), path) != path)
            peaks.append(peak)
    first, later = peaks[0], max(peaks[1:], default=0)
    each = [Needs(of, rest, first, later, moved) for of, rest in zip(leaves, rests, strict=True)]
    return Learned(each, first, later, Outside(optimizer).nbytes, draws, coupled, moved)


def _by_parameter(optimizer: Optimizer, fakes: Sequence[Tensor]) -> dict[int, int]:
    """Return the storages of parameters, gradients and state, with a bit for each parameter.

    A tensor that the optimizer keeps for all, as a table of levels, is of none until a step writes to it.
    """
    shared = {storage_key(t) for t in Outside(optimizer).tensors}
    found: dict[int, int] = {}
    for number, fake in enumerate(fakes):
        for tensor in (fake, fake.grad, *tensors_in(optimizer.state.get(fake, {})).values()):
            if storage_key(tensor) not in shared:
                found[storage_key(tensor)] = 1 << number
    return found


def _taken_inside(kind: str, parameter: Tensor) -> int:
    """Return the bytes that an update in 8 bits takes inside of its op."""
    if parameter.device.type != "cpu":
        return 0
    of_copy = 0 if parameter.dtype is torch.float32 else 4
    return parameter.numel() * (_BYTES_AN_ELEMENT.get(kind, 12) + of_copy) + LEAST_MOVED_BYTES


def _check_apart(optimizer: Optimizer, fakes: Sequence[Tensor], shared: set[int]) -> None:
    """Raise UnsupportedError if parameters share state, or a weight is part of its own state."""
    name, owners = type(optimizer).__name__, {storage_key(fake): -1 for fake in fakes}
    for number, fake in enumerate(fakes):
        for path, tensor in tensors_in(optimizer.state.get(fake, {})).items():
            key = storage_key(tensor)
            large = tensor.shape == fake.shape or tensor.nbytes >= LEAST_MOVED_BYTES
            if large and key not in shared and owners.setdefault(key, number) != number:
                what = "a weight itself" if owners[key] < 0 else "one tensor for several parameters"
                raise UnsupportedError(
                    f"{name} keeps {what} in its state ({path!r}), which a planned step would take apart; keep a "
                    "copy, or use overspill.compile, which leaves the optimizer as it is"
                )


def moves(tensor: Tensor, parameter: Tensor, shared: set[int]) -> bool:
    """Return whether a tensor of the state may be moved.

    It must be on the device of the parameter, dense, alone in its storage, and large or of the same shape as the
    parameter.
    """
    storage = tensor.untyped_storage()
    if tensor.device != parameter.device or tensor.nbytes != storage.nbytes() or key_of(storage) in shared:
        return False
    if type(tensor) not in (Tensor, nn.Parameter, type(parameter)):
        return False
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return dense and (tensor.shape == parameter.shape or tensor.nbytes >= LEAST_MOVED_BYTES)


def _by_storage(state: Any) -> dict[int, str]:
    return {storage_key(tensor): path for path, tensor in tensors_in(state).items()}


class Watching(StepBytes):
    """Counts bytes, and notes whether random numbers are used."""

    draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        return super().__torch_dispatch__(func, types, args, kwargs)


class _OnFakes(Watching):
    """Counts the bytes of fake tensors, and tracks the parameters that values come from.

    A number read from a fake tensor is 1. `coupled` is set by an op on values of several parameters, except one for
    each (`_foreach_`).
    """

    def __init__(self, device: torch.device, owners: dict[int, int]) -> None:
        super().__init__(device)
        self._owners: dict[int, int | tuple[int, ...]] = {**owners}
        self.coupled = False

    def _owner(self, tensor: Tensor) -> int | tuple[int, ...]:
        """Return the parameters that a tensor comes from; if it stacks single ones, the parameter of each row."""
        owners = self._owners.get(storage_key(tensor), 0)
        if isinstance(owners, int) or tensor.numel() == tensor.untyped_storage().nbytes() // tensor.itemsize:
            return owners
        row = tensor.untyped_storage().nbytes() // tensor.itemsize // len(owners)
        first, last = tensor.storage_offset() // row, (tensor.storage_offset() + max(tensor.numel(), 1) - 1) // row
        return owners[first] if first == last else reduce(or_, owners)

    def _follow(self, func: Any, given: Any, made: Any) -> None:
        if not any(isinstance(tensor, Tensor) for tensor in tree_leaves(made)):  # it asks for a device or a size
            return
        owners = [self._owner(tensor) for tensor in tree_leaves(given) if isinstance(tensor, Tensor)]
        rows = [of for of in owners if isinstance(of, tuple)]
        whole = reduce(or_, (of for of in owners if isinstance(of, int)), 0)
        found: int | tuple[int, ...]
        if func is torch.ops.aten.stack.default and len(owners) > 1 and not rows:
            found = tuple(of for of in owners if isinstance(of, int))
        elif (
            rows
            and not whole
            and len(set(map(len, rows))) == 1
            and (torch.Tag.pointwise in func.tags or func in _BY_ROW)
        ):
            found = tuple(reduce(or_, of) for of in zip(*rows, strict=True))
        else:
            found = reduce(or_, (one for of in rows for one in of), whole)
        each = found if isinstance(found, tuple) else (found,)
        self.coupled = self.coupled or any(of & (of - 1) for of in each)
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):  # where nothing is owned too: memory is used again
                self._owners[storage_key(tensor)] = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ITEM:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.equal.default:
            return True
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = (*args, *(kwargs or {}).values())
        changed = written_arguments(func, args, kwargs or {})
        if str(func) == _IN_8_BITS:
            changed = [a for a in changed if all(a is not table for table in args[_TABLES])]
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + _taken_inside(args[0], args[2]))
        if "_foreach_" in func.__name__ or "_fused_" in func.__name__:
            lists = [a for a in given if isinstance(a, list) and a and isinstance(a[0], Tensor)]
            made = [a for a in (result, *changed) if isinstance(a, list)]
            for number in range(max(map(len, lists), default=0)):
                self._follow(func, [a[number : number + 1] for a in lists], [a[number : number + 1] for a in made])
        else:
            self._follow(func, given, (result, changed))
        return result

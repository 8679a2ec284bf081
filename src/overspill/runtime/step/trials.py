"""Learn how an optimizer steps: on tiny parameters, whether it can be called for one parameter at a time; on fake ones
of the real sizes, what it takes.

An optimizer from outside torch.optim may do anything. So one step on all tiny parameters is compared with steps on each
of them, bit by bit, some steps before training, and again before each step of training, with the settings and counters
that the user's optimizer has then.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from overspill.core.errors import OverspillError, UnsupportedError
from overspill.runtime.optimizer_step import (
    FEW,
    MANY,
    Changes,
    Outside,
    copied,
    lent,
    own_step,
    same,
    temporary_bytes,
    tensors_in,
)
from overspill.runtime.tracker import LiveBytes

from .residency import Spec

AHEAD = 12
"""Steps that are tried before the first: more than any warm-up of temporaries that is known (RAdam's sixth)."""
TINY = {1: (24,), 2: (8, 6), 3: (6, 5, 4), 4: (6, 5, 3, 3), 5: (5, 4, 3, 3, 2)}
"""Shapes of tiny parameters by number of dimensions."""
DRAWS = "draws random numbers"
COUPLED = "updates a parameter by what other parameters are"
LEAST_MOVED_BYTES = 1024
"""Bytes of a tensor of the state from which on it is moved; smaller ones stay, unless they are of the parameter's shape."""
_ITEM = torch.ops.aten._local_scalar_dense.default
_BY_ROW = frozenset(
    getattr(torch.ops.aten, name).default for name in ("detach", "_to_copy", "clone", "bmm", "baddbmm")
) | {torch.ops.aten.unbind.int, torch.ops.aten.select.int}
"""Ops that work row by row, besides pointwise ones."""


@dataclass
class _Tiny:
    """A tiny parameter of a group, with its state after the steps so far."""

    group: int
    like: nn.Parameter
    parameter: nn.Parameter
    state: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0


class Trials:
    """Trials of one optimizer, in step with its training."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.why_together = ""
        """Why all parameters are updated in one call; empty where each can be by itself."""
        self.draws = False
        self._changed: list[tuple[dict[str, Any], set[str]]] = []
        self.outgrown = False
        """Whether a step took more than those before."""
        self.steps = 0
        self.measurable = True
        """Whether its temporaries can be counted, which what is compiled in it may not bear."""
        self._known: tuple[int, ...] = ()
        self._apart: list[_Tiny] = []
        self._together: list[_Tiny] = []

    def found_to_couple(self) -> None:
        """Note that it brings values of several parameters together, of the real sizes if not of tiny ones."""
        self.why_together = COUPLED

    def found_to_draw(self) -> None:
        """Note that it draws random numbers, for parameters of the real sizes if not for tiny ones."""
        self.draws, self.why_together = True, DRAWS

    def changed_keys(self, group: dict[str, Any]) -> set[str]:
        """The keys of `group` that steps change."""
        return next((keys for known, keys in self._changed if known is group), set())

    def look_again(self) -> bool:
        """Try the next step; whether it began anew, since the optimizer has other groups or parameters than before."""
        if anew := self._known != (known := _identity(self.optimizer)):
            self._known = known
            self._begin()
        if not self.why_together:
            with quietly(self.optimizer):
                self._step()
        self.steps += 1
        return anew

    def _begin(self) -> None:
        outside = Outside(self.optimizer)
        if outside.unknown or any(tensor.numel() > MANY for tensor in outside.tensors):
            self.why_together, self._changed = f"keeps a {outside.unknown or 'large Tensor'}", []
            return
        for self.measurable in (True, False):
            self.why_together, self.draws, self._failed = "", False, False
            self._changed = [(group, set()) for group in self.optimizer.param_groups]
            self._make_tiny()
            with quietly(self.optimizer):
                for _ in range(AHEAD):
                    if not self.why_together:
                        self._step(goes_on=True)
            if not self._failed:
                break
        # From here on they are as far as training is, not ahead of it.
        self._make_tiny(keep_peaks=True)
        self.outgrown = False

    def _make_tiny(self, *, keep_peaks: bool = False) -> None:
        peaks = [tiny.peak_bytes for tiny in self._apart] if keep_peaks else []
        self._drawn = torch.Generator().manual_seed(0)
        made = [
            (number, p) for number, group in enumerate(self.optimizer.param_groups) for p in _examples(group["params"])
        ]
        self._apart, self._together = ([_Tiny(n, p, _tiny(p, i)) for i, (n, p) in enumerate(made)] for _ in range(2))
        for tiny, peak in zip(self._apart, peaks, strict=False):
            tiny.peak_bytes = peak

    def _step(self, *, goes_on: bool = False) -> None:
        """One step on all and on each; with `goes_on` the next trial begins where it ends."""
        gradients = [self._gradient(tiny) for tiny in self._apart]
        before, drawn, changes = Outside(self.optimizer), _random_states(), Changes()
        agree = True
        try:
            for tiny, gradient in zip(self._apart, gradients, strict=True):
                self._call([tiny], [gradient])
                agree = changes.join(now := before.changes()) and agree
                before.restore()
                if now.keeps_much():
                    self.why_together = "keeps tensors outside of the parameters' state"
            self._call(self._together, gradients)
            together = before.changes()
        except Exception as error:  # noqa: BLE001 - any class of optimizer may refuse tiny parameters in any way
            self._failed = True
            self.why_together = f"could not be tried on tiny parameters ({type(error).__name__}: {error})"
            return
        for group, keys in self._changed:
            keys.update(before.keys_of(group, together))
        if not same(_random_states(), drawn):
            self.found_to_draw()
        elif not (agree and together.same_as(changes) and all(map(_alike, self._apart, self._together))):
            self.why_together = COUPLED
        if not goes_on:
            before.restore()

    def _gradient(self, tiny: _Tiny) -> Tensor:
        """A random gradient, of another size each time: what a threshold is for must happen."""
        size = 10 ** float(torch.randn((), generator=self._drawn).mul(2).clamp(-6, 6))
        return torch.randn(tiny.parameter.shape, generator=self._drawn).mul(size).to(tiny.parameter.dtype)

    def _call(self, lot: Sequence[_Tiny], gradients: Sequence[Tensor]) -> None:
        lists: dict[int, list[Tensor]] = {}
        for tiny, gradient in zip(lot, gradients, strict=True):
            tiny.parameter.grad = gradient.clone()
            lists.setdefault(tiny.group, []).append(tiny.parameter)
            if tiny.state:
                self.optimizer.state[tiny.parameter] = tiny.state
        try:
            with lent(self.optimizer, lists):
                peak = 0
                if self.measurable:
                    peak = temporary_bytes(self.optimizer)
                else:
                    own_step(self.optimizer)
        finally:
            for tiny in lot:
                made = not tiny.state
                tiny.state = self.optimizer.state.pop(tiny.parameter, {})
                if made:
                    _take_counters(tiny.state, self.optimizer.state.get(tiny.like, {}))
        if len(lot) == 1:
            self.outgrown = self.outgrown or peak > lot[0].peak_bytes
            lot[0].peak_bytes = max(lot[0].peak_bytes, peak)


@contextmanager
def quietly(optimizer: Optimizer) -> Iterator[None]:
    """Context that leaves optimizer and random generators as they are."""
    outside, drawn = Outside(optimizer), random.getstate()
    by_numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        with _disable_current_modes(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            yield
    finally:
        outside.restore_states()
        outside.restore()
        random.setstate(drawn)
        if by_numpy is not None:
            sys.modules["numpy"].random.set_state(by_numpy)


def _identity(optimizer: Optimizer) -> tuple[int, ...]:
    """What an optimizer is made of; `load_state_dict` makes new groups."""
    return tuple(i for group in optimizer.param_groups for i in (id(group), *map(id, group["params"])))


def _examples(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Of a group's parameters one of each kind, and two where there are two."""
    trained = [p for p in parameters if p.requires_grad] or [*parameters]
    kinds: dict[Any, nn.Parameter] = {}
    for parameter in trained:
        kinds.setdefault((parameter.dim(), parameter.dtype), parameter)
    others = [p for p in trained if all(p is not known for known in kinds.values())]
    return [*kinds.values(), *others[:1]]


def _tiny(like: nn.Parameter, number: int) -> nn.Parameter:
    shape = TINY.get(like.dim(), (2,) * like.dim())
    values = torch.randn(shape, generator=torch.Generator().manual_seed(number), device="cpu").to(like.dtype)
    made = nn.Parameter(values)
    vars(made).update(vars(like))  # what users or libraries have noted at it
    return made


def _take_counters(state: dict[str, Any], known: dict[str, Any]) -> None:
    """Set the numbers in a tiny parameter's new `state` to what the real one has, of a checkpoint."""
    for key, value in state.items():
        if type(value) in (int, float) and type(dict.get(known, key)) is type(value):
            state[key] = dict.get(known, key)
        elif (
            isinstance(value, Tensor)
            and not value.dim()
            and isinstance(of := dict.get(known, key), Tensor)
            and not of.dim()
        ):
            value.copy_(of)


def _alike(one: _Tiny, other: _Tiny) -> bool:
    return same(one.parameter.data, other.parameter.data) and same(one.state, other.state)


def _random_states() -> list[Any]:
    numpy = sys.modules.get("numpy")
    of_numpy = () if numpy is None else numpy.random.get_state()
    return [
        torch.get_rng_state(),
        random.getstate(),
        *(getattr(part, "tolist", lambda part=part: part)() for part in of_numpy),
    ]


# -- what it takes, at the real sizes


Leaves = dict[str, tuple[torch.dtype, Spec | None]]
"""Tensors of a parameter's state that move, by path, with dtype and spec; None for the parameter's own."""


@dataclass(frozen=True)
class Needs:
    """What updates of one parameter take, in bytes.

    `leaves` are the tensors of its state that move. `rest_bytes` are those of other tensors of its state, which stay on the device. `first_bytes` and `later_bytes` are
    temporaries: of the first update, which makes the state, and the most of a later one.
    """

    leaves: Leaves
    rest_bytes: int
    first_bytes: int
    later_bytes: int


@dataclass(frozen=True)
class Learned:
    """What one call for several parameters takes: each one's needs, and bytes that it keeps outside of their state.

    `first_bytes` and `later_bytes` are the temporaries of the call; `draws`: it asks for random numbers;
    `coupled`: it brings values of several parameters together.
    """

    each: list[Needs]
    first_bytes: int
    later_bytes: int
    outside_bytes: int
    draws: bool = False
    coupled: bool = False


def learned(
    optimizer: Optimizer, parameters: Sequence[tuple[int, Tensor]], steps: int, gradient: Callable[[Tensor], Tensor]
) -> Learned | None:
    """What `steps` of `optimizer` take for `parameters`, each with its group's number, on fake tensors of their sizes.

    None where it does not step on such. `gradient` makes of a gradient what the update gets.
    """
    fakes: list[Tensor] = []
    try:
        outside, mode = Outside(optimizer), FakeTensorMode(allow_non_fake_inputs=True)
        with _disable_current_modes():  # an op on real tensors alone is real in this mode too
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
    except Exception:  # noqa: BLE001 - any class of optimizer may refuse fake tensors in any way; it is tried on tiny ones then
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
    leaves: list[Leaves] = [{} for _ in fakes]
    rests = [0] * len(fakes)
    with lent(optimizer, lists):
        for _ in range(steps):
            places = [_by_storage(optimizer.state.get(fake, {})) for fake in fakes]
            for fake in fakes:
                fake.grad = gradient(torch.empty_like(fake))
            tracker = _OnFakes(fakes[0].device, _by_parameter(optimizer, fakes))
            peak = temporary_bytes(optimizer, tracker)
            draws = draws or tracker.draws
            coupled = coupled or tracker.coupled
            shared = {t.untyped_storage()._cdata for t in Outside(optimizer).tensors}
            _check_apart(optimizer, fakes, shared)
            for number, fake in enumerate(fakes):
                found = tensors_in(optimizer.state.get(fake, {}))
                moving = {path: t for path, t in found.items() if moves(t, fake, shared)}
                leaves[number] |= {path: (t.dtype, Spec.of(t)) for path, t in moving.items()}
                rest = {
                    t.untyped_storage()._cdata: t.untyped_storage().nbytes()
                    for p, t in found.items()
                    if p not in moving
                }
                # What is made anew at each step is there twice until the step ends.
                anew = sum(nbytes for key, nbytes in rest.items() if places[number] and key not in places[number])
                rests[number] = max(rests[number], sum(rest.values()) + anew)
                # What now lies where another tensor of the state was is copied to go where it is planned.
                peak += sum(
                    t.nbytes
                    for path, t in moving.items()
                    if places[number].get(t.untyped_storage()._cdata, path) != path
                )
            peaks.append(peak)
    outside = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in Outside(optimizer).tensors}
    first, later = peaks[0], max(peaks[1:], default=0)
    each = [Needs(of, rest, first, later) for of, rest in zip(leaves, rests, strict=True)]
    return Learned(each, first, later, sum(outside.values()), draws, coupled)


def _by_parameter(optimizer: Optimizer, fakes: Sequence[Tensor]) -> dict[int, int]:
    """The storages of parameters, gradients and state, with a bit for each parameter."""
    found: dict[int, int] = {}
    for number, fake in enumerate(fakes):
        for tensor in (fake, fake.grad, *tensors_in(optimizer.state.get(fake, {})).values()):
            found[tensor.untyped_storage()._cdata] = 1 << number
    return found


def _check_apart(optimizer: Optimizer, fakes: Sequence[Tensor], shared: set[int]) -> None:
    """Raise UnsupportedError where parameters have state in common, or a weight is part of its own state."""
    name, owners = type(optimizer).__name__, {fake.untyped_storage()._cdata: -1 for fake in fakes}
    for number, fake in enumerate(fakes):
        for path, tensor in tensors_in(optimizer.state.get(fake, {})).items():
            key = tensor.untyped_storage()._cdata
            large = tensor.shape == fake.shape or tensor.nbytes >= LEAST_MOVED_BYTES
            if large and key not in shared and owners.setdefault(key, number) != number:
                what = "a weight itself" if owners[key] < 0 else "one tensor for several parameters"
                raise UnsupportedError(
                    f"{name} keeps {what} in its state ({path!r}), which a planned step would take apart; keep a copy, or use "
                    "overspill.compile, which leaves the optimizer as it is"
                )


def moves(tensor: Tensor, parameter: Tensor, shared: set[int]) -> bool:
    """Whether a tensor of the state may be moved.

    It is on the parameter's device, dense, alone in its storage, and large, or of the parameter's shape.
    """
    storage = tensor.untyped_storage()
    if tensor.device != parameter.device or tensor.nbytes != storage.nbytes() or storage._cdata in shared:
        return False
    if type(tensor) not in (Tensor, nn.Parameter, type(parameter)):
        return False
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return dense and (tensor.shape == parameter.shape or tensor.nbytes >= LEAST_MOVED_BYTES)


def _by_storage(state: Any) -> dict[int, str]:
    return {tensor.untyped_storage()._cdata: path for path, tensor in tensors_in(state).items()}


class Watching(LiveBytes):
    """Counts bytes, and notes whether random numbers are drawn."""

    draws = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        return super().__torch_dispatch__(func, types, args, kwargs)


class _OnFakes(Watching):
    """Counts fake tensors' bytes, and follows which parameters values come from; a number that is asked of one is 1.

    `coupled`: an op had values of several parameters, other than one for each of them (`_foreach_`).
    """

    def __init__(self, device: torch.device, owners: dict[int, int]) -> None:
        super().__init__(device)
        self._owners: dict[int, int | tuple[int, ...]] = {**owners}
        self.coupled = False

    def _owner(self, tensor: Tensor) -> int | tuple[int, ...]:
        """The parameters that a tensor comes from; of one stacked of single ones', those of each row."""
        owners = self._owners.get(tensor.untyped_storage()._cdata, 0)
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
                self._owners[tensor.untyped_storage()._cdata] = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ITEM:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.equal.default:
            return True
        result = super().__torch_dispatch__(func, types, args, kwargs)
        given = (*args, *(kwargs or {}).values())
        changed = [
            a for a, of in zip(args, func._schema.arguments, strict=False) if of.alias_info and of.alias_info.is_write
        ]
        if "_foreach_" in func.__name__ or "_fused_" in func.__name__:
            lists = [a for a in given if isinstance(a, list) and a and isinstance(a[0], Tensor)]
            made = [a for a in (result, *changed) if isinstance(a, list)]
            for number in range(max(map(len, lists), default=0)):
                self._follow(func, [a[number : number + 1] for a in lists], [a[number : number + 1] for a in made])
        else:
            self._follow(func, given, (result, changed))
        return result

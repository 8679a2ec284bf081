"""Learn by steps on tiny parameters whether an optimizer can be called for one parameter at a time.

An optimizer from outside torch.optim may do anything. So one step on all tiny parameters is compared bit by bit with
steps on each of them. Some trials come before training, and one before each step of training, with the present settings
and counters of the user's optimizer.

Known limit: results for tiny parameters are assumed to hold for the real ones.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.capture.compiled.compiling import as_eager
from overspill.pytorch.dispatch import disable_current_modes
from overspill.runtime.optimizer_outside import MANY, Changes, Outside
from overspill.runtime.optimizer_step import lent, own_step, temporary_bytes
from overspill.runtime.reachable import same

AHEAD = 12
"""Steps that are tried before the first: more than any warm-up of temporaries that is known (RAdam's sixth)."""
TINY = {1: (24,), 2: (8, 6), 3: (6, 5, 4), 4: (6, 5, 3, 3), 5: (5, 4, 3, 3, 2)}
"""Shapes of tiny parameters by number of dimensions."""
DRAWS = "draws random numbers"
COUPLED = "updates a parameter by what other parameters are"


@dataclass
class _Tiny:
    """A tiny parameter of a group, with its state after the steps so far."""

    group: int
    """Number of the group in the optimizer."""
    like: nn.Parameter
    """The real parameter."""
    parameter: nn.Parameter
    state: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int = 0
    """Most temporary bytes of a step on it alone."""


class Trials:
    """Trials of one optimizer, in step with its training."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.why_together = ""
        """Why all parameters are updated in one call; empty where each can be by itself."""
        self.draws = False
        self._changed: list[tuple[dict[str, Any], set[str]]] = []
        self.outgrown = False
        """Whether a step took more memory than those before."""
        self.steps = 0
        self.measurable = True
        """Whether its temporaries can be counted, which compiled code in it may not allow."""
        self._known: tuple[int, ...] = ()
        self._apart: list[_Tiny] = []
        self._together: list[_Tiny] = []
        self._known_states: dict[Any, Any] = {}
        """State of the real parameters, which trials do not see."""

    def found_to_couple(self) -> None:
        """Note that the optimizer combines values of several parameters, at least for the real sizes."""
        self.why_together = COUPLED

    def found_to_draw(self) -> None:
        """Note that the optimizer uses random numbers, at least for parameters of the real sizes."""
        self.draws, self.why_together = True, DRAWS

    def changed_keys(self, group: dict[str, Any]) -> set[str]:
        """Return the keys of `group` that steps change."""
        return next((keys for known, keys in self._changed if known is group), set())

    def look_again(self) -> bool:
        """Try the next step; return whether trials began again.

        They begin again if the optimizer has other groups or parameters than before.
        """
        if again := self._known != (known := _identity(self.optimizer)):
            self._known = known
            self._begin()
        if not self.why_together:
            with quietly(self.optimizer) as self._known_states:
                self._step()
        self.steps += 1
        return again

    def _begin(self) -> None:
        outside = Outside(self.optimizer)
        if outside.unknown or any(tensor.numel() > MANY for tensor in outside.tensors):
            self.why_together, self._changed = f"keeps a {outside.unknown or 'large Tensor'}", []
            return
        for self.measurable in (True, False):
            self.why_together, self.draws, self._failed = "", False, False
            self._changed = [(group, set()) for group in self.optimizer.param_groups]
            self._make_tiny()
            with quietly(self.optimizer) as self._known_states:
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
        """Step once on all and on each; with `goes_on` the next trial begins where it ends."""
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
        """Return a random gradient, of another magnitude each time, so that thresholds are crossed."""
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
                    _take_counters(tiny.state, self._known_states.get(tiny.like, {}))
        if len(lot) == 1:
            self.outgrown = self.outgrown or peak > lot[0].peak_bytes
            lot[0].peak_bytes = max(lot[0].peak_bytes, peak)


@contextmanager
def quietly(optimizer: Optimizer) -> Iterator[dict[Any, Any]]:
    """Restore optimizer and random generators at the end of the context; yield the state that it hides meanwhile."""
    outside, drawn = Outside(optimizer), random.getstate()
    by_numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        with as_eager(), disable_current_modes(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
            yield outside.hide_states()
    finally:
        outside.restore_states()
        outside.restore()
        random.setstate(drawn)
        if by_numpy is not None:
            sys.modules["numpy"].random.set_state(by_numpy)


def _identity(optimizer: Optimizer) -> tuple[int, ...]:
    """Return the ids of the groups and parameters of an optimizer; `load_state_dict` makes new groups."""
    return tuple(i for group in optimizer.param_groups for i in (id(group), *map(id, group["params"])))


def _examples(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return one parameter of each kind in a group, and one more if several exist."""
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
    """Set the numbers in a tiny parameter's new `state` to those of the real one, as from a checkpoint."""
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

"""Bytes of an optimizer's state and temporaries, from steps on tiny parameters."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Collection, Container, Hashable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from overspill.core.units import format_bytes
from overspill.models.eight_bit import Blockwise8bit
from overspill.pytorch.dispatch import disable_current_modes
from overspill.pytorch.distributed import largest_shard

from .optimizer_outside import Outside
from .optimizer_step import StepBytes, is_own, own_step, temporary_bytes, tried
from .reachable import tensors_in

_SCALAR_BYTES = 256
"""Bytes for step counts and other scalars, which do not grow with the parameters."""
_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
"""Sizes of the tiny parameter's dimensions: distinct, so that a state tensor's sizes tell which dimensions they
follow."""


_Found = TypeVar("_Found")
_MEASURED: dict[Hashable, Any] = {}
"""Trials of torch.optim's optimizers in this process."""
_MOST_MEASURED = 512
PROBE_STEPS = 7
"""Steps tried on tiny parameters; RAdam takes more from its sixth on."""
LBFGS_VECTORS = 5, 11
"""Vectors as long as all parameters that LBFGS holds during an evaluation of the model, without and with a line search.
Its history is not included."""
LBFGS_TEMPORARIES = 4
"""Further vectors between two evaluations."""


@dataclass(frozen=True)
class OptimizerNeeds:
    """Memory that an optimizer needs."""

    state_bytes: int
    """Bytes of its state."""
    update_bytes: int
    """Bytes of its temporaries during a step."""
    moved_bytes: int = 0
    """What a step reads and writes; 0: nobody knows."""

    def __add__(self, other: OptimizerNeeds) -> OptimizerNeeds:
        """Return the needs of two optimizers that step one after the other."""
        return OptimizerNeeds(
            self.state_bytes + other.state_bytes,
            max(self.update_bytes, other.update_bytes),
            self.moved_bytes + other.moved_bytes,
        )


def find_optimizers(parameters: Collection[Tensor]) -> list[Optimizer]:
    """Return the optimizers alive in this process that update any of `parameters`.

    For a wrapper of a library, return the optimizer inside.
    """
    wanted = {id(p) for p in parameters}
    alive = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    found = [o for o in alive if any(id(p) in wanted for group in o.param_groups for p in group["params"])]
    return list({id(o): o for o in map(unwrapped, found)}.values())


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside a wrapper that shows its state as its own.

    The wrappers of accelerate and Lightning do so. A wrapper that also has its own state is returned itself.
    """
    inside = (v for v in vars(optimizer).values() if isinstance(v, Optimizer) and v is not optimizer)
    same = next((o for o in inside if o.state is optimizer.state), None)
    return optimizer if same is None else unwrapped(same)


def optimizer_needs(optimizers: Iterable[Optimizer], trained: Container[int] = ()) -> OptimizerNeeds:
    """Return the bytes that all `optimizers` need together.

    Frozen parameters keep their state if they have some, or if their id is in `trained`.
    """
    total = OptimizerNeeds(0, 0)
    with disable_current_modes():  # plans are made in AOTAutograd's fake mode, where foreach optimizers refuse to step
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                total += _group_needs(optimizer, group, trained)
    return total


def measured_once(
    optimizer: Optimizer, group: dict[str, Any], like: Tensor, what: Hashable, measure: Callable[[], _Found]
) -> _Found:
    """Return the result of `measure`, a trial of `what` on tiny parameters as `like` with the settings of `group`.

    Optimizers of one class of torch.optim share it if all their settings are equal. The value of the learning rate,
    which may change at every step, decides on no memory there. Another class may look at anything: it is tried each
    time.
    """
    settings = tuple((key, value) for key, value in group.items() if key not in ("params", "lr", "initial_lr"))
    if not is_own(optimizer) or not _is_plain((settings, group.get("lr"))) or Outside(optimizer).unknown:
        return measure()
    defaults = torch.get_default_dtype(), torch.get_default_device()
    key = (type(optimizer), settings, like.dtype, like.device, defaults, what)
    found: _Found | None = _MEASURED.get(key)
    if found is None:
        if len(_MEASURED) >= _MOST_MEASURED:
            _MEASURED.clear()
        found = _MEASURED[key] = measure()
    return found


def _is_plain(value: Any) -> bool:
    """Return whether `value` consists of numbers and text, which equal ones can stand in for."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _group_needs(optimizer: Optimizer, group: dict[str, Any], trained: Container[int]) -> OptimizerNeeds:
    kept = [p for p in group["params"] if p.requires_grad or id(p) in trained or optimizer.state.get(p)]
    parameters = [*map(largest_shard, kept)]
    if not parameters:
        return OptimizerNeeds(0, 0)
    sizes = [p.nbytes for p, of in zip(parameters, kept, strict=True) if of.requires_grad]
    # LBFGS by formula, others by a trial step.
    if isinstance(optimizer, torch.optim.LBFGS):  # whose state is that of its first parameter, for all
        vectors = 2 * group["history_size"] + LBFGS_VECTORS[group["line_search_fn"] is not None]
        return OptimizerNeeds(vectors * sum(sizes) + _SCALAR_BYTES, LBFGS_TEMPORARIES * sum(sizes))
    if isinstance(optimizer, Blockwise8bit):  # the state of a tiny parameter is another
        return OptimizerNeeds(sum(map(optimizer.state_bytes, parameters)) + 8 * _SCALAR_BYTES, _SCALAR_BYTES)
    try:
        state = _state_bytes(optimizer, group, parameters)
        update, moved = _update(optimizer, group, parameters[0], sizes) if sizes else (0, 0)
    except Exception as error:  # noqa: BLE001 - any class of optimizer may refuse tiny parameters in any way
        # An optimizer that refuses tiny parameters: take the state there is, or assume twice the parameters.
        has = [v for p in kept for v in tensors_in(optimizer.state.get(p, {})).values()]
        state = sum(v.nbytes for v in has) or 2 * sum(p.nbytes for p in parameters)
        update, moved = sum(sizes), 0
        warnings.warn(
            f"{type(optimizer).__name__} could not be tried on tiny parameters ({error}); "
            f"planning with {format_bytes(state)} of state and temporaries as large as the parameters",
            stacklevel=2,
        )
    return OptimizerNeeds(state, update + _SCALAR_BYTES, moved)


def _state_bytes(optimizer: Optimizer, group: dict[str, Any], parameters: list[Tensor]) -> int:
    """Return the state bytes of all `parameters`, from one step on a tiny parameter per kind."""
    total = 0
    probes: dict[tuple[int, torch.dtype], list[tuple[tuple[int, ...], int]]] = {}
    for parameter in parameters:
        kind = (parameter.dim(), parameter.dtype)
        if kind not in probes:
            if parameter.dim() > len(_PRIMES):
                raise ValueError(f"a parameter of {parameter.dim()} dimensions")
            probes[kind] = _probe_state(optimizer, group, _probe(_PRIMES[: parameter.dim()], parameter))
        total += sum(scaled(shape, _PRIMES, parameter.shape) * itemsize for shape, itemsize in probes[kind])
    return total


def _probe_state(optimizer: Optimizer, group: dict[str, Any], probe: Tensor) -> list[tuple[tuple[int, ...], int]]:
    """Return shape and item size of each state tensor after a step on `probe`."""

    def measure() -> list[tuple[tuple[int, ...], int]]:
        with tried(optimizer, group, [probe]):
            own_step(optimizer)
            kept = tensors_in(optimizer.state.get(probe, {})).values()
            return [(tuple(tensor.shape), tensor.element_size()) for tensor in kept]

    return measured_once(optimizer, group, probe, ("state", tuple(probe.shape)), measure)


def scaled(state_shape: tuple[int, ...], probe: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the elements of a state tensor for a parameter of `shape` in place of `probe`."""
    real = dict(zip(probe, shape, strict=False))
    return prod(real.get(n, n) for n in state_shape)


def _update(optimizer: Optimizer, group: dict[str, Any], like: Tensor, sizes: list[int]) -> tuple[int, int]:
    """Return the temporary bytes of a step on parameters of `sizes` bytes, in order, and the bytes that it moves.

    They are found by steps on tiny parameters. Either the optimizer makes temporaries for all parameters at once
    (foreach), or for one after the other. In the second case those of one parameter may still be held while those of
    the next are made. If a trial on unlike parameters takes more, twice the temporaries of the largest parameter are
    reserved.
    """

    def measured(*shapes: tuple[int, int]) -> tuple[int, int]:
        def measure() -> tuple[int, int]:
            with tried(optimizer, group, [_probe(shape, like) for shape in shapes]):
                own_step(optimizer)  # which makes the state
                counted = [StepBytes(like.device) for _ in range(PROBE_STEPS - 1)]
                return max(temporary_bytes(optimizer, tracker) for tracker in counted), counted[-1].moved_bytes

        return measured_once(optimizer, group, like, ("temporaries", shapes), measure)

    # How temporaries grow with one, two and four equal parameters.
    square, flat, small = (64, 64), (16, 64), (16, 16)
    unit = 64 * 64 * like.element_size()
    found = [measured(*[square] * count) for count in (1, 2, 4)]
    one, two, four = (nbytes / unit for nbytes, _ in found)
    moved = round(found[0][1] * like.element_size() / unit) * (sum(sizes) // like.element_size())
    if four > 1.5 * two:
        return int(four / 4 * sum(sizes)), moved

    def in_turn(nbytes: list[int]) -> int:
        return int(max(one * now + max(0.0, two - one) * before for before, now in pairwise([0, *nbytes])))

    # Check that on parameters of different sizes.
    trial = (flat, small, square, flat, small)
    foretold = in_turn([rows * columns * like.element_size() for rows, columns in trial])
    # Where state is smaller than its parameter (Adafactor's rows and columns) temporaries go by shape as well as by
    # bytes, and a fifth more covers what bytes alone miss.
    if any(shape not in (square, ()) for shape, _ in _probe_state(optimizer, group, _probe(square, like))):
        return int(1.2 * in_turn(sizes)), moved
    return in_turn(sizes) if measured(*trial)[0] <= foretold + _SCALAR_BYTES else int(two * max(sizes)), moved


def _probe(shape: tuple[int, ...], like: Tensor) -> Tensor:
    probe = torch.ones(shape, dtype=like.dtype, device=like.device, requires_grad=True)
    probe.grad = torch.ones_like(probe)
    return probe

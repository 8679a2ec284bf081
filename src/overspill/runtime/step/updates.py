"""The optimizer's update as one op per parameter.

An update runs the user's own optimizer's `step` on one parameter, slice by slice, so that its temporaries stay small;
or on several that the plan has gathered, where their temporaries fit too, since a step costs the host as much for one
as for many. None of its arithmetic is written again here, so the numbers are those of `optimizer.step()`. The settings
of parameter groups are read at every step, so that schedulers and users may change them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.capture.compiled.elsewhere import CAPABILITY
from overspill.core.errors import RequestError, UnsupportedError
from overspill.runtime.optimizers import optimizer_like, quiet_step, scaled, temporary_bytes

from .checks import INSTEAD

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"}
)
"""Optimizers of torch.optim that treat each element of a parameter by itself, so that slices give the same bits."""
SLICE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
"""Bytes of a parameter updated at a time; on CUDA a launch costs more than the temporaries."""
PROBE_SHAPES = {1: (3072,), 2: (64, 48), 3: (17, 16, 12), 4: (12, 11, 6, 4), 5: (8, 7, 6, 4, 3)}
"""Shapes of tiny parameters to try an optimizer on, by number of dimensions. All sizes differ, so that a state tensor's
sizes tell which of the parameter's they follow. Their elements outweigh step counts and other scalars."""
SCALAR_BYTES = 1024
"""Bytes for step counts and other scalars; Adafactor makes a dozen, each in its own storage."""
CPU = torch.device("cpu")
"""Where optimizers are tried on tiny parameters."""


class ParameterState:
    """One parameter's state in the optimizer.

    `shaped` names the state tensors of the parameter's shape, with their dtypes, and `rest` is the other state. `order`
    are the names of all, in the optimizer's own order; empty until it has made them, be it at once, as Adagrad does, or
    at its first step. `settings` are the group's settings that decide which state there is. `content` is what the user's
    optimizer has of it, empty until it is given that.
    """

    def __init__(
        self, updates: OptimizerUpdates, group: dict[str, Any], shaped: dict[str, torch.dtype], state: dict[str, Any]
    ) -> None:
        self.updates = updates
        self.group = group
        self.settings = settings_of(group)
        self.shaped = shaped
        self.rest: dict[str, Any] = {}
        self.order: list[str] = []
        self.content: tuple[Any, ...] = ()
        if state:
            self.keep(state)

    def take_over(self, other: ParameterState) -> None:
        """Take the group and state of `other`."""
        self.group, self.rest, self.order, self.content = other.group, other.rest, other.order, ()

    def residents(self, name: str) -> list[str]:
        """Where the state lies that moves, if this is the parameter of that `name`."""
        return [f"{name}.{key}" for key in self.shaped]

    def keep(self, state: dict[str, Any]) -> None:
        """Store the state that the optimizer has made.

        Tensors of the parameter's shape are kept elsewhere, as residents.
        """
        rest = {key: value for key, value in state.items() if key not in self.shaped}
        if self.order != [*state] or not all(map(is_, rest.values(), self.rest.values())):
            self.content = ()
        self.order, self.rest = [*state], rest

    def run(self, parameter: Tensor, gradient: Tensor, scale: Tensor | None, *state: Tensor) -> None:
        """Update `parameter` in place.

        Given its gradient, which `scale` multiplies, and its `state` in the order of `shaped`.
        """
        self.updates.update(self, parameter, gradient, scale, *state)


class _Part(NamedTuple):
    """Rows of one parameter with their gradient and state, for one update.

    `owned` describes the parameter; `given` is the rows' state, and `rest` the other state.
    """

    owned: ParameterState
    rows: Tensor
    gradient: Tensor
    scale: Tensor | None
    given: dict[str, Tensor]
    rest: dict[str, Any]


class OptimizerUpdates:
    """Updates of single parameters by one optimizer."""

    def __init__(self, optimizer: Optimizer, *, clip_value: float | None = None, scales: bool = False) -> None:
        """`scales`: updates get a factor for their gradients.

        Raises UnsupportedError for an optimizer whose update of one parameter depends on others.
        """
        self.optimizer = optimizer
        self.clip_value = clip_value
        self.scales = scales
        made_by_torch = type(optimizer).__module__.startswith("torch.optim.")
        self.groups = made_by_torch and type(optimizer).__name__ in ELEMENTWISE
        """Whether one step on several parameters equals separate steps on each."""
        fused = any(group.get("fused") for group in optimizer.param_groups)  # their kernels treat the ends apart
        self._elementwise = self.groups and not fused
        self._slice_optimizer: Optimizer | None = None
        # Each with its group, by whose id it is found: a group that was freed could leave its id to another.
        self._needs: dict[tuple[Any, ...], tuple[dict[str, Any], Needs]] = {}
        if not made_by_torch:
            _check_separate(optimizer)

    def state_of(self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> ParameterState:
        """The state that the optimizer keeps, or will keep, for `parameter`.

        `state` is what it has now, perhaps nothing.
        """
        shaped = self._probed(parameter, group).shaped
        if state:
            found = {key: state[key] for key in shaped if isinstance(state.get(key), Tensor)}
            shaped = {key: tensor.dtype for key, tensor in found.items() if tensor.shape == parameter.shape}
        return ParameterState(self, group, dict(shaped), state)

    def check_state(self, group: dict[str, Any], parameter: nn.Parameter, state: dict[str, Any]) -> None:
        """Raise RequestError where `group` needs more than the present `state`."""
        lacking = [key for key in self._probed(parameter, group).shaped if state and key not in state]
        if lacking and type(self.optimizer) is not torch.optim.SGD:  # which makes its buffer when it has none
            raise RequestError(
                f"the settings of {type(self.optimizer).__name__} were changed to ones that need {lacking[0]!r}, which its "
                "state does not have; make the optimizer anew, or load a state_dict that has it"
            )

    def workspace_bytes(self, parameter: nn.Parameter, group: dict[str, Any]) -> int:
        """Temporary bytes of the update, besides parameter, gradient and state."""
        needs = self._probed(parameter, group)
        first, later = (
            max(parameter[rows].nbytes for rows in self._slices(parameter, group, new=new)) for new in (True, False)
        )
        work = max(needs.first_share * first, needs.share * later)
        return int(work) + self.rest_bytes(parameter, group) + SCALAR_BYTES

    def rest_bytes(self, parameter: nn.Parameter, group: dict[str, Any]) -> int:
        """Bytes of state of other shapes: step counts, sums over rows."""
        needs = self._probed(parameter, group)
        return sum(scaled(shape, needs.probe, parameter.shape) * itemsize for shape, itemsize in needs.rest)

    def update(
        self, owned: ParameterState, parameter: Tensor, gradient: Tensor, scale: Tensor | None, *state: Tensor
    ) -> None:
        """Update `parameter` slice by slice."""
        given = dict(zip(owned.shaped, state, strict=True))
        after, rest = {}, owned.rest
        for rows in self._slices(parameter, owned.group, new=not owned.order):
            if rows is ...:
                part = _Part(owned, parameter, gradient, scale, given, rest)
            else:  # each slice begins with the state that the first had, as its step count
                before = {key: v.clone() if isinstance(v, Tensor) else v for key, v in rest.items()}
                sliced = {key: tensor[rows] for key, tensor in given.items()}
                part = _Part(owned, parameter[rows], gradient[rows], scale, sliced, before)
            (after,) = self._update_parts([part])
        owned.keep(after)

    def is_elementwise(self, parameter: Tensor) -> bool:
        """Whether slices and other strides of `parameter` update to the same bits.

        In half precision on the CPU they do not: there `add` with a factor rounds vectorised elements otherwise than
        the rest.
        """
        return self._elementwise and (parameter.itemsize >= 4 or _kind_of_device(parameter) != "cpu")

    def is_whole(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Whether `parameter` is updated in one piece, so may be gathered.

        Once its state exists.
        """
        return self.groups and next(self._slices(parameter, group, new=False)) is ...

    def together(self, runs: Sequence[Callable[..., None]]) -> Callable[..., None]:
        """One call that updates several whole parameters, given each one's arguments."""
        owners: list[ParameterState] = [run.__self__ for run in runs]  # type: ignore[attr-defined]

        def update_together(*given: tuple[Any, ...]) -> None:
            if not all(owned.order for owned in owners):  # to make the state takes room of its own
                for owned, arguments in zip(owners, given, strict=True):
                    self.update(owned, *arguments)
                return
            parts = [
                _Part(owned, parameter, gradient, scale, dict(zip(owned.shaped, state, strict=True)), owned.rest)
                for owned, (parameter, gradient, scale, *state) in zip(owners, given, strict=True)
            ]
            for owned, after in zip(owners, self._update_parts(parts), strict=True):
                owned.keep(after)

        return update_together

    def _update_parts(self, parts: Sequence[_Part]) -> list[dict[str, Any]]:
        """Step on all of `parts`; returns each one's state after it.

        Without the tensors of the parameter's shape, which are updated in place.
        """
        # Hand the optimizer a parameter with gradient and state for each part.
        groups: dict[int, dict[str, Any]] = {}
        states: dict[Tensor, dict[str, Any]] = {}
        for owned, rows, gradient, scale, given, rest in parts:
            part = rows.detach().requires_grad_()
            part.grad = self._gradient(gradient, scale)
            if id(owned.group) not in groups:
                groups[id(owned.group)] = {**owned.group, "params": []}
            groups[id(owned.group)]["params"].append(part)
            before = given | rest
            states[part] = {key: before[key] for key in owned.order}
        self._step(list(groups.values()), states)
        # Copy the new state back where the optimizer did not work in place.
        for part, after in zip(parts, states.values(), strict=True):
            for key, tensor in part.given.items():
                if after[key] is not tensor:
                    tensor.copy_(after[key])
                after[key] = None
        return list(states.values())

    def _gradient(self, gradient: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            gradient = gradient * scale.to(gradient.device)
        if self.clip_value is not None:
            gradient = gradient.clamp(-self.clip_value, self.clip_value)
        return gradient

    def _step(self, groups: list[dict[str, Any]], states: dict[Tensor, dict[str, Any]]) -> None:
        """Step on the parameters of `groups`; `states`, by parameter, are then those after it."""
        if self._slice_optimizer is None:
            self._slice_optimizer = optimizer_like(self.optimizer, groups[0], groups[0]["params"])
        # Lend a copy of the optimizer these parameters, and take them away after the step.
        optimizer = self._slice_optimizer
        optimizer.param_groups[:] = groups
        optimizer.state = defaultdict(dict, {part: state for part, state in states.items() if state})
        with torch.enable_grad():  # as a training loop calls it
            quiet_step(optimizer)
        states.update((part, optimizer.state[part]) for part in states)
        optimizer.state = defaultdict(dict)
        optimizer.param_groups[1:] = []
        optimizer.param_groups[0]["params"] = []

    def _slices(self, parameter: Tensor, group: dict[str, Any], *, new: bool) -> Iterator[Any]:
        """Row slices of `parameter` to update one at a time.

        They are smaller while its state is `new`, which takes room of its own.
        """
        nbytes = parameter.nbytes
        limit = min(SLICE_BYTES.get(_kind_of_device(parameter), nbytes), nbytes)
        if new and (needs := self._probed(parameter, group)).first_share > needs.share:
            limit = int(limit * needs.share / needs.first_share)
        if not self.is_elementwise(parameter) or nbytes <= limit or parameter.dim() == 0:
            yield ...
            return
        rows = max(1, limit // (nbytes // parameter.shape[0]))
        for start in range(0, parameter.shape[0], rows):
            yield slice(start, start + rows)

    def _probed(self, parameter: Tensor, group: dict[str, Any]) -> Needs:
        key = (id(group), settings_of(group), parameter.dtype, parameter.dim())
        if key not in self._needs:
            try:
                self._needs[key] = group, self._probe(parameter, group)
            except Exception as error:  # any class of optimizer may refuse a tensor in any way
                raise RequestError(
                    f"{type(self.optimizer).__name__} does not step on a parameter of {parameter.dim()} dimensions "
                    f"of {str(parameter.dtype).removeprefix('torch.')}: {error}"
                ) from error
        return self._needs[key][1]

    def _probe(self, like: Tensor, group: dict[str, Any]) -> Needs:
        """The optimizer's needs, seen in two steps on a tiny parameter.

        The first step makes the state, which the plan has room for besides.
        """
        shape = PROBE_SHAPES.get(max(1, like.dim()), tuple(range(like.dim() + 1, 1, -1)))
        with CPU:  # whatever the default device is, for the optimizer's own tensors too
            probe = torch.ones(shape, dtype=like.dtype, requires_grad=True)
            probe.grad = self._gradient(torch.ones_like(probe), None)
            tiny = optimizer_like(self.optimizer, as_on(like.device, group), [probe])
            peaks = [temporary_bytes(tiny) for _ in range(2)]
        kept = {key: v for key, v in tiny.state[probe].items() if isinstance(v, Tensor)}
        others = self.scales + (self.clip_value is not None)  # the scaled and the clamped gradient
        return Needs(
            shape,
            {key: v.dtype for key, v in kept.items() if v.shape == probe.shape},
            tuple((tuple(v.shape), v.element_size()) for v in kept.values() if v.shape != probe.shape),
            *(peak / probe.nbytes + others for peak in peaks),
        )


def _kind_of_device(parameter: Tensor) -> str:
    """Where `parameter` is updated: on CUDA, too, where a step for a GPU elsewhere is captured."""
    return "cuda" if CAPABILITY.get() else parameter.device.type


def as_on(device: torch.device, group: dict[str, Any]) -> dict[str, Any]:
    """`group` with `foreach` set as the optimizer chooses for `device`.

    All together on CUDA. So torch.optim.optimizer, `_default_to_fused_or_foreach`, and what calls it, decide (PyTorch
    2.11 to 2.14).
    """
    unasked = "foreach" in group and group["foreach"] is None and not group.get("fused")
    asks = "beta2_decay" not in group  # Adafactor does not: for it None is no
    plain = asks and not group.get("differentiable") and not isinstance(group.get("lr"), Tensor)
    return {**group, "foreach": True} if device.type == "cuda" and unasked and plain else group


def settings_of(group: dict[str, Any]) -> tuple[Any, ...]:
    """Settings of a group that may decide which state is kept.

    Its flags, and which numbers are zero.
    """
    return tuple(
        (key, value if value is None or isinstance(value, (bool, str)) else bool(value))
        for key, value in group.items()
        if isinstance(value, (bool, str, int, float, type(None))) and key not in ("lr", "initial_lr")
    )


@dataclass(frozen=True)
class Needs:
    """State and temporaries of an optimizer for parameters of one kind.

    Seen on a `probe` of that shape. `shaped` are the state tensors of the parameter's shape, with their dtypes; `rest`
    the shapes and item sizes of others; `first_share` and `share` the temporaries of the first update and of later
    ones, as multiples of the bytes updated.
    """

    probe: tuple[int, ...]
    shaped: dict[str, torch.dtype]
    rest: tuple[tuple[tuple[int, ...], int], ...]
    first_share: float
    share: float


def _check_separate(optimizer: Optimizer) -> None:
    """Raise UnsupportedError if the update of one parameter depends on others.

    Two tiny parameters are stepped on together and apart.
    """
    group = optimizer.param_groups[0]

    def stepped(which: tuple[int, ...]) -> list[Tensor]:
        probes = [torch.linspace(-1, 1, 48).reshape(8, 6).mul(i + 1).requires_grad_() for i in which]
        tiny = optimizer_like(optimizer, group, list(probes))
        for step in range(1, 4):
            for i, probe in zip(which, probes, strict=True):
                probe.grad = torch.linspace(step, -2, 48).reshape(8, 6) * (3 * i + 1)
            quiet_step(tiny)
        return [probe.detach() for probe in probes]

    try:
        with CPU, torch.random.fork_rng(devices=[]):
            before = torch.get_rng_state()
            together, apart = stepped((0, 1)), [*stepped((0,)), *stepped((1,))]
            draws = not torch.equal(torch.get_rng_state(), before)
    except Exception as error:  # any class of optimizer may refuse tiny parameters in any way
        raise UnsupportedError(
            f"{type(optimizer).__name__} could not be tried on tiny parameters ({error}); {INSTEAD}"
        ) from error
    # Separate means equal to the last bit, and draws follow one another.
    if draws:
        raise UnsupportedError(
            f"{type(optimizer).__name__} draws random numbers, which parameters would get in another order; {INSTEAD}"
        )
    if not all(map(torch.equal, together, apart)):
        raise UnsupportedError(
            f"{type(optimizer).__name__} updates a parameter by what other parameters are, "
            f"so that its step cannot be cut into pieces; {INSTEAD}"
        )


@dataclass(frozen=True)
class NormClipping:
    """`torch.nn.utils.clip_grad_norm_` in two parts: each gradient's norm, and the factor.

    Of gradients that each rank has a part of, `sum_over_ranks` adds a tensor up in place, as torch does with the squares
    of all norms at once.
    """

    max_norm: float
    sum_over_ranks: Callable[[Tensor], None] | None = None

    def norm(self, gradient: Tensor) -> Tensor:
        """The gradient's norm, by the kernel that torch uses for it."""
        if gradient.device.type == "cpu":
            return torch.linalg.vector_norm(gradient, 2.0)
        (norm,) = torch._foreach_norm([gradient], 2.0)
        return norm

    def factor(self, *norms: Tensor) -> Tensor:
        """The factor for all gradients."""
        together = torch.stack([norm.to(norms[0].device) for norm in norms])
        if self.sum_over_ranks is not None:
            together = together**2.0
            self.sum_over_ranks(together)
            together = together**0.5
        total = torch.linalg.vector_norm(together, 2.0)
        return torch.clamp(self.max_norm / (total + 1e-6), max=1.0)

"""The optimizer's update as one op per parameter.

The user's own optimizer does every update. None of its arithmetic is rewritten here. An optimizer of torch.optim that
treats each element by itself steps on one parameter slice by slice, so that its temporaries stay small. Or it steps on
several that the plan has gathered, if their temporaries fit too: a step costs the host as much for one as for many. Any
other optimizer steps on whole parameters, the user's own objects: one at a time if `trials.py` finds that equal,
otherwise all at once. The settings of groups are read at every step, so that schedulers and users may change them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.capture.compiled.whole_step import AtOnce
from overspill.capture.fake_cuda.attention import CAPABILITY
from overspill.core.errors import RequestError, UnsupportedError
from overspill.core.units import format_bytes
from overspill.costs.library_ops import SLICE_BYTES
from overspill.pytorch.optimizers import foreach_norm
from overspill.runtime.optimizer_outside import Changes, Outside
from overspill.runtime.optimizer_step import StepBytes, is_own, lent, own_step, plain_step, temporary_bytes, tried
from overspill.runtime.optimizers import PROBE_STEPS, measured_once, scaled
from overspill.runtime.reachable import tensors_in

from .host_updates import as_of_step, counts_on
from .learned import Learned, Leaves, Needs, Watching, learned
from .parameter_state import Loan, ParameterState
from .trials import AHEAD, Trials

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"}
)
"""Optimizers of torch.optim that treat each element of a parameter by itself, so that slices give the same bits."""
PROBE_SHAPES = {1: (3072,), 2: (64, 48), 3: (17, 16, 12), 4: (12, 11, 6, 4), 5: (8, 7, 6, 4, 3)}
"""Shapes of tiny parameters to try an optimizer on, by number of dimensions. All sizes differ, so that a state tensor's
sizes tell which of the parameter's they follow. Their elements outweigh step counts and other scalars."""
SCALAR_BYTES = 1024
"""Bytes for step counts and other scalars; Adafactor makes a dozen, each in its own storage."""
CPU = torch.device("cpu")
"""Where optimizers are tried on tiny parameters."""
_LOG = logging.getLogger("overspill")


class _Part(NamedTuple):
    """Rows of one parameter with their gradient and state, for one update."""

    owned: ParameterState
    """State of the whole parameter."""
    rows: Tensor
    gradient: Tensor
    scale: Tensor | None
    given: dict[str, Tensor]
    """State of these rows."""
    rest: Mapping[str, Any]
    """The other state, such as step counts."""


class OptimizerUpdates:
    """Updates by one of the user's optimizers."""

    def __init__(self, optimizer: Optimizer, *, clip_value: float | None = None, scales: bool = False) -> None:
        """Create the updates; with `scales`, they get a factor for their gradients."""
        self.optimizer = optimizer
        self.clip_value = clip_value
        self.scales = scales
        made_by_torch = is_own(optimizer)
        self.groups = made_by_torch and type(optimizer).__name__ in ELEMENTWISE
        """Whether one step on several parameters equals separate steps on each, and those steps on slices."""
        fused = any(group.get("fused") for group in optimizer.param_groups)  # their kernels treat the ends apart
        self._elementwise = self.groups and not fused
        self.trials = None if made_by_torch else Trials(optimizer)
        self.outgrown = False
        """Whether updates take more memory than plans assume."""
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context for a call for all parameters, which may look at the model too."""
        # By kind of parameter. Each with its group, by whose id it is found: one that was freed could leave its id to
        # another.
        self._probes: dict[tuple[Any, ...], tuple[dict[str, Any], _Probe]] = {}
        self._learned: dict[tuple[Any, ...], tuple[dict[str, Any], Needs]] = {}
        self._together: Learned | None = None
        self._measured_bytes: dict[Any, int] = {}
        self._planned_outside_bytes = -1
        # Of the step that is running: what there was before it outside of the parameters' state, and what has changed.
        self._before: Outside | None = None
        self._changes = Changes()
        self.hidden: dict[Any, Any] = {}
        """State of the parameters that the running step has not come to: as in trials, a call sees that of its own."""
        self._steps = 0

    # -- what updates take

    @property
    def at_once(self) -> bool:
        """Whether all parameters are updated in one call."""
        return self.trials is not None and bool(self.trials.why_together)

    def look_again(self) -> None:
        """Try the next step, unless torch.optim made the optimizer; set `outgrown` if plans no longer fit."""
        if self.trials is None:
            return
        before = self.at_once
        if self.trials.look_again() and not self.at_once:
            found = learned(self.optimizer, self._trained(), 2, self._given)
            if found is not None and found.draws:
                self.trials.found_to_draw()
            elif found is not None and found.coupled:
                self.trials.found_to_couple()
        if self.trials.outgrown or self.at_once != before or self._kept_bytes() > self._planned_outside_bytes >= 0:
            self.trials.outgrown, self.outgrown = False, True
        if self.outgrown:
            self._learned.clear()
            self._together = None

    def settings_of(self, group: dict[str, Any]) -> tuple[Any, ...]:
        """Return the settings of a group that may decide which state is kept.

        These are its flags, and whether its numbers are zero. A value that each step changes is not a setting.
        """
        changed = set() if self.trials is None else self.trials.changed_keys(group)
        return tuple(
            (key, value if value is None or isinstance(value, (bool, str)) else bool(value))
            for key, value in group.items()
            if isinstance(value, (bool, str, int, float, type(None))) and key not in ("lr", "initial_lr", *changed)
        )

    def needs_of(self, like: Tensor, group: dict[str, Any], parameter: nn.Parameter) -> Needs:
        """Return the memory that updates of a `parameter` of `group` take, if its size is that of `like`."""
        if self.groups:
            return self._probed(like, group).scaled_to(like)
        kind: tuple[Any, ...] = id(group), self.settings_of(group), like.dtype, tuple(like.shape)
        if self.at_once:
            kind = (id(parameter),)
            if self._together is None:
                self._learn_together()
        elif kind not in self._learned:
            steps = AHEAD + (0 if self.trials is None else self.trials.steps)
            found = learned(self.optimizer, [(self.number_of(group), like)], steps, self._given)
            if found is not None and found.draws and self.trials is not None:
                self.trials.found_to_draw()
                self.outgrown = True
                return self.needs_of(like, group, parameter)
            needs = self._probed(like, group).scaled_to(like) if found is None else found.each[0]
            self._learned[kind] = group, needs
        return self._learned[kind][1]

    def kept_outside(self) -> list[Tensor]:
        """Return the tensors that the optimizer keeps outside of the parameters' state."""
        return [] if self.trials is None else Outside(self.optimizer).tensors

    def _trained(self) -> list[tuple[int, nn.Parameter]]:
        """Return the trained parameters, each with the number of its group."""
        groups = enumerate(self.optimizer.param_groups)
        return [(number, p) for number, group in groups for p in group["params"] if p.requires_grad]

    def _kept_bytes(self) -> int:
        """Return the bytes of tensors that the optimizer now keeps outside of the parameters' state."""
        return 0 if self.trials is None else Outside(self.optimizer).nbytes

    def _learn_together(self) -> None:
        """Learn the memory of one call for all parameters; if that fails, assume twice their bytes."""
        groups, all_of_them = self.optimizer.param_groups, self._trained()
        found = learned(self.optimizer, all_of_them, AHEAD, self._given)
        if found is None:
            nbytes = 2 * sum(p.shape.numel() * p.itemsize for _, p in all_of_them)
            _LOG.warning(
                "what %s takes could not be learnt before its first step; it is planned with %s of temporaries",
                type(self.optimizer).__name__, format_bytes(nbytes),
            )  # fmt: skip
            found = Learned([Needs({}, 0, 0, 0)] * len(all_of_them), nbytes, nbytes, 0)
        self._together = found
        for (n, parameter), needs in zip(all_of_them, found.each, strict=True):
            self._learned[id(parameter),] = groups[n], needs

    def workspace_bytes(self, like: Tensor, owned: ParameterState) -> int:
        """Return the temporary bytes of an update of a parameter as `like`.

        Parameter, gradient and state are not included.
        """
        if not self.groups:
            planned = max(self._planned_bytes(owned, owned.name), self._measured_bytes.get(owned.name, 0))
            return planned + self._made_of_gradients() * like.nbytes
        needs = self._probed(like, owned.group)
        # No slice is larger than the first.
        first, later = (like[next(self._slices(like, owned.group, new=new))].nbytes for new in (True, False))
        work = max(needs.first_share * first, needs.share * later)
        return int(work) + owned.rest_bytes(like) + SCALAR_BYTES

    def moved_bytes(self, like: Tensor, owned: ParameterState) -> tuple[int, int]:
        """Return the bytes that an update of a parameter as `like` reads and writes on its device, and on the host.

        Each is 0 if nobody knows.
        """
        if not self.groups:
            found = owned.needs.moved_bytes, owned.needs.moved_bytes
        else:
            probes = [self._probed(like, owned.group, device) for device in (like.device, CPU)]
            found = probes[0].moved_per_element * like.numel(), probes[1].moved_per_element * like.numel()
        of_gradient = 2 * self._made_of_gradients() * like.nbytes
        return found[0] and found[0] + of_gradient, found[1] and found[1] + of_gradient

    def rest_bytes(self, like: Tensor, owned: ParameterState) -> int:
        """Return the bytes of state that does not move, for a parameter as `like`: step counts, sums over rows."""
        return self._probed(like, owned.group).scaled_to(like).rest_bytes if self.groups else owned.needs.rest_bytes

    def call_for_all(self, likes: Sequence[Tensor]) -> AtOnce | None:
        """Return the one call that updates parameters as `likes`, or None if each has its own."""
        if not self.at_once:
            return None
        assert self.trials is not None
        known, others = self._together, self._made_of_gradients()
        planned = 0 if known is None else max(known.first_bytes, known.later_bytes)
        nbytes = max(planned + SCALAR_BYTES * len(likes), self._measured_bytes.get(None, 0))
        of_gradients = sum(like.nbytes for like in likes)
        nbytes += others * of_gradients
        why = f"{type(self.optimizer).__name__}, which {self.trials.why_together}"
        moved = 0 if known is None or not known.moved_bytes else known.moved_bytes + 2 * others * of_gradients
        return AtOnce(self._update_all, nbytes, why, self.trials.draws, moved)

    def outside_bytes(self) -> int:
        """Return the bytes of tensors that the optimizer keeps outside of the parameters' state.

        If they have grown, a quarter is added.
        """
        kept = self._kept_bytes()
        grown = kept + kept // 4 if 0 <= self._planned_outside_bytes < kept else kept
        self._planned_outside_bytes = max(grown, 0 if self._together is None else self._together.outside_bytes)
        return self._planned_outside_bytes

    def check_state(self, group: dict[str, Any], parameter: Tensor, state: dict[str, Any]) -> None:
        """Raise RequestError if `group` needs more than the present `state`."""
        if not self.groups or type(self.optimizer) is torch.optim.SGD:  # which makes its buffer when it has none
            return
        lacking = [key for key in self._probed(parameter, group).shaped if state and key not in state]
        if lacking:
            raise RequestError(
                f"the settings of {type(self.optimizer).__name__} were changed to ones that need {lacking[0]!r}, "
                "which its state does not have; make the optimizer anew, or load a state_dict that has it"
            )

    # -- updates

    def update(
        self, owned: ParameterState, parameter: Tensor, gradient: Tensor, scale: Tensor | None, *state: Tensor
    ) -> None:
        """Update `parameter`, slice by slice or whole."""
        if not self.groups:
            self._update_whole([Loan(owned, parameter, self._gradient(gradient, scale), state)], owned.name)
            return
        given = dict(zip(owned.leaves, state, strict=True))
        after, now, rest = {}, as_of_step(), _rest(owned, parameter, given)
        new = not owned.content and now is None  # on the host there is memory for state that is made
        for rows in self._slices(parameter, owned.group, new=new):
            if rows is ...:
                part = _Part(owned, parameter, gradient, scale, given, rest)
            else:  # each slice begins with the state that the first had, as its step count
                before = {key: v.clone() if isinstance(v, Tensor) else v for key, v in rest.items()}
                sliced = {key: tensor[rows] for key, tensor in given.items()}
                part = _Part(owned, parameter[rows], gradient[rows], scale, sliced, before)
            (after,) = self._update_parts([part])
        if now is not None:
            _in_place(rest, after, owned.content)
        _keep(owned, after)

    def is_elementwise(self, parameter: Tensor) -> bool:
        """Return whether slices and other strides of `parameter` update to the same bits.

        They do not in half precision on the CPU. There, `add` with a factor rounds vectorised elements differently from
        the rest.
        """
        return self._elementwise and (parameter.itemsize >= 4 or _kind_of_device(parameter) != "cpu")

    def is_whole(self, parameter: Tensor, group: dict[str, Any]) -> bool:
        """Return whether `parameter` is updated in one piece once its state exists, so that it may be gathered."""
        return self.groups and next(self._slices(parameter, group, new=False)) is ...

    def together(self, loans: Sequence[tuple[ParameterState, tuple[Any, ...]]]) -> None:
        """Update several whole parameters in one call; each loan has the arguments of one."""
        now = as_of_step()
        if now is None and not all(owned.content for owned, _ in loans):  # to make the state takes room of its own
            for owned, arguments in loans:
                self.update(owned, *arguments)
            return
        parts = []
        for owned, (parameter, gradient, scale, *state) in loans:
            given = dict(zip(owned.leaves, state, strict=True))
            parts.append(_Part(owned, parameter, gradient, scale, given, _rest(owned, parameter, given)))
        for part, after in zip(parts, self._update_parts(parts), strict=True):
            if now is not None:
                _in_place(part.rest, after, part.owned.content)
            _keep(part.owned, after)

    def _update_parts(self, parts: Sequence[_Part]) -> list[dict[str, Any]]:
        """Step on all of `parts`; return the state of each after it.

        Tensors of the parameter's shape are updated in place, and are None in the result.
        """
        # Hand the optimizer a parameter with gradient and state for each part.
        lists: dict[int, list[Tensor]] = {}
        lent_parts = []
        now = as_of_step()
        optimizer, step = (self.optimizer, own_step) if now is None else (now.optimizers[self], plain_step)
        for owned, rows, gradient, scale, given, rest in parts:
            part = rows.detach().requires_grad_()
            part.grad = self._gradient(gradient, scale)
            lists.setdefault(self.number_of(owned.group) if now is None else now.numbers[owned.name], []).append(part)
            if owned.content:
                before = {**given, **rest}
                optimizer.state[part] = {key: before[key] for key in owned.content}
            lent_parts.append(part)
        # Take away what it has of them, also after an error.
        try:
            with lent(optimizer, lists):
                step(optimizer)
        finally:
            states = [optimizer.state.pop(part, {}) for part in lent_parts]
        # Copy the new state back where the optimizer did not work in place.
        for part, after in zip(parts, states, strict=True):
            for key, tensor in part.given.items():
                if after[key] is not tensor:
                    tensor.copy_(after[key])
                after[key] = None
        return states

    def _update_all(
        self, runs: Sequence[Callable[..., None]], scale: Tensor | None, given: Sequence[tuple[Tensor, ...]]
    ) -> None:
        owners: list[ParameterState] = [run.__self__ for run in runs]  # type: ignore[attr-defined]
        loans = [
            Loan(owned, parameter, self._gradient(gradient, scale), state)
            for owned, (parameter, gradient, *state) in zip(owners, given, strict=True)
        ]
        self._update_whole(loans, None)

    def _update_whole(self, loans: Sequence[Loan], name: str | None) -> None:
        """Step on whole parameters, the user's own objects: all of them, or the one of that `name`."""
        one_by_one = self.trials is not None and name is not None
        if one_by_one and self._before is None:
            self._before, self._changes, state = Outside(self.optimizer), Changes(), self.optimizer.state
            self.hidden = {p: state.pop(p) for _, p in self._trained() if p in state}
        lists: dict[int, list[Tensor]] = {self.number_of(loan.owned.group): [loan.owned.parameter] for loan in loans}
        if name is None:
            lists = {number: group["params"] for number, group in enumerate(self.optimizer.param_groups)}
        for loan in loans:
            loan.begin()
        try:
            with lent(self.optimizer, lists), nullcontext() if name or as_of_step() else self.around():
                nbytes, drew = self._stepped()
        finally:
            for loan in loans:
                loan.end()
        # Measured only in some steps, for that takes the host as long as the step.
        planned = max(self._measured_bytes.get(name, 0), *(self._planned_bytes(loan.owned, name) for loan in loans))
        if nbytes > planned:
            self._measured_bytes[name] = nbytes
            self.outgrown = True
            _LOG.warning(
                "the update of %s by %s took %s more than planned; the next step is planned for it",
                name or "all parameters", type(self.optimizer).__name__, format_bytes(nbytes - planned),
            )  # fmt: skip
        if not one_by_one:
            return
        assert self._before is not None
        now = self._before.changes()
        self._before.restore()
        if drew or not self._changes.join(now) or now.keeps_much():
            raise UnsupportedError(
                f"{type(self.optimizer).__name__} drew random numbers, or changed something outside of the "
                "parameters' state by what the parameter was, which its trials did not show; use overspill.compile, "
                "which leaves the optimizer as it is"
            )

    def _planned_bytes(self, owned: ParameterState, name: str | None) -> int:
        if name is None:
            known = self._together
            return 0 if known is None else max(known.first_bytes, known.later_bytes) + SCALAR_BYTES
        return max(owned.needs.first_bytes, owned.needs.later_bytes) + SCALAR_BYTES

    def _stepped(self) -> tuple[int, bool]:
        """Run one step; return its temporary bytes and whether it used random numbers.

        These are 0 and False if not measured.
        """
        count = self._steps + 1
        if self.trials is not None and self.trials.measurable and (count <= AHEAD or not count & (count - 1)):
            device = next(
                p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None
            ).device
            return temporary_bytes(self.optimizer, tracker := Watching(device)), tracker.draws
        own_step(self.optimizer)
        return 0, False

    def finish(self) -> None:
        """End a step: apply the changes of its calls outside of the parameters' state."""
        if self._before is not None:
            self._before.become(self._changes)
            self._before = None
        self.optimizer.state.update(self.hidden)
        self.hidden = {}
        self._steps += 1

    def _gradient(self, gradient: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            gradient = gradient * scale.to(gradient.device)
        if self.clip_value is not None:
            gradient = gradient.clamp(-self.clip_value, self.clip_value)
        return gradient

    def _given(self, gradient: Tensor) -> Tensor:
        """Return a gradient as updates get it, for trials."""
        return self._gradient(gradient, torch.ones(()) if self.scales else None)

    def _made_of_gradients(self) -> int:
        """Return how many tensors an update makes from its gradient before the step: scaled, clamped."""
        return self.scales + (self.clip_value is not None)

    def number_of(self, group: dict[str, Any]) -> int:
        """Return the number of a group in the optimizer."""
        return next(number for number, known in enumerate(self.optimizer.param_groups) if known is group)

    def _slices(self, parameter: Tensor, group: dict[str, Any], *, new: bool) -> Iterator[Any]:
        """Yield row slices of `parameter` to update one at a time; `...` for all of it.

        They are smaller while its state is `new`, which needs memory of its own.
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

    def _probed(self, parameter: Tensor, group: dict[str, Any], device: torch.device | None = None) -> _Probe:
        """Return what updates of a `parameter` of `group` need, with the kernels of `device`, by default its own."""
        settings = as_on(device or parameter.device, group)
        key = (id(group), self.settings_of(settings), parameter.dtype, parameter.dim())
        if key not in self._probes:
            try:
                self._probes[key] = group, self._probe(parameter, settings)
            except Exception as error:  # any class of optimizer may refuse a tensor in any way
                raise RequestError(
                    f"{type(self.optimizer).__name__} does not step on a parameter of {parameter.dim()} dimensions "
                    f"of {str(parameter.dtype).removeprefix('torch.')}: {error}"
                ) from error
        return self._probes[key][1]

    def _probe(self, like: Tensor, settings: dict[str, Any]) -> _Probe:
        """Return the optimizer's needs with these settings of a group, measured in some steps on a tiny parameter.

        The first step makes the state, which the plan counts separately.
        """
        shape = PROBE_SHAPES.get(max(1, like.dim()), tuple(range(like.dim() + 1, 1, -1)))
        others = self._made_of_gradients()

        def measure() -> _Probe:
            probe = torch.ones(shape, dtype=like.dtype, requires_grad=True)
            probe.grad = self._gradient(torch.ones_like(probe), None)
            with tried(self.optimizer, settings, [probe]):
                counted = [StepBytes(CPU) for _ in range(PROBE_STEPS)]
                peaks = [temporary_bytes(self.optimizer, tracker) for tracker in counted]
                kept = tensors_in(self.optimizer.state.get(probe, {}))
            first, later = (peak / probe.nbytes + others for peak in (peaks[0], max(peaks[1:])))
            return _Probe(
                shape,
                {key: v.dtype for key, v in kept.items() if v.shape == probe.shape},
                tuple((tuple(v.shape), v.element_size()) for v in kept.values() if v.shape != probe.shape),
                first,
                later,
                round(counted[-1].moved_bytes / probe.numel()),
            )

        with CPU:  # whatever the default device is, for the optimizer's own tensors too
            return measured_once(self.optimizer, settings, like, ("a step's probe", shape, others), measure)


def _without(content: dict[str, Any], leaves: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key not in leaves}


def _rest(owned: ParameterState, parameter: Tensor, given: dict[str, Tensor]) -> Mapping[str, Any]:
    """Return the state of `owned` that does not move, beside what is `given`, as its update is to have it."""
    if (now := as_of_step()) is not None:
        return now.rest[owned.name]
    counts_on(parameter.device, owned.group, rest := _without(owned.content, given))
    return rest


def _in_place(before: Mapping[str, Any], after: dict[str, Any], content: Mapping[str, Any]) -> None:
    """Let the state `after` have its new step counts in the tensors of `content`, of which `before` has the memory."""
    for key, value in before.items():
        if isinstance(value, Tensor):
            if after[key] is not value:
                value.copy_(after[key])
            after[key] = content[key]


def _keep(owned: ParameterState, state: dict[str, Any]) -> None:
    """Store the state that the optimizer has made, with the residents as its moving tensors."""
    content = {key: owned.resident(key).tensor if key in owned.leaves else value for key, value in state.items()}
    if [*map(id, content.values())] != [*map(id, owned.content.values())]:  # else others may have the dictionary
        owned.content = content


def update_together(runs: Sequence[Callable[..., None]]) -> Callable[..., None]:
    """Return one call that updates several whole parameters, with the arguments of each.

    What cannot be in one step of an optimizer is updated in its turn.
    """
    owners = [of if isinstance(of := getattr(run, "__self__", None), ParameterState) else None for run in runs]

    def together(*given: tuple[Any, ...]) -> None:
        lots: dict[OptimizerUpdates, list[tuple[ParameterState, tuple[Any, ...]]]] = {}
        for run, owned, (parameter, gradient, *rest) in zip(runs, owners, given, strict=True):
            if owned is None or not owned.updates.groups:
                run(parameter, gradient, *rest)
            else:
                loan = owned, (parameter, owned.multiplied(gradient), *rest)
                lots.setdefault(owned.updates, []).append(loan)
        for updates, lot in lots.items():
            updates.together(lot)

    return together


def _kind_of_device(parameter: Tensor) -> str:
    """Return the kind of device that updates `parameter`.

    It is CUDA too when a step is captured for a GPU that this machine does not have.
    """
    return "cuda" if CAPABILITY.get() else parameter.device.type


def as_on(device: torch.device, group: dict[str, Any]) -> dict[str, Any]:
    """Return `group` with `foreach` set as the optimizer chooses for `device`.

    On CUDA it steps on all parameters together, by `_default_to_fused_or_foreach` of torch.optim.optimizer and its
    callers.
    """
    unasked = "foreach" in group and group["foreach"] is None and not group.get("fused")
    asks = "beta2_decay" not in group  # Adafactor does not: for it None is no
    plain = asks and not group.get("differentiable") and not isinstance(group.get("lr"), Tensor)
    return {**group, "foreach": True} if device.type == "cuda" and unasked and plain else group


@dataclass(frozen=True)
class _Probe:
    """State and temporaries of an optimizer for parameters of one kind, measured on a tiny one."""

    probe: tuple[int, ...]
    """Shape of the tiny parameter."""
    shaped: dict[str, torch.dtype]
    """Dtypes of the state tensors of the parameter's shape, by key."""
    rest: tuple[tuple[tuple[int, ...], int], ...]
    """Shape and item size in bytes of each other state tensor."""
    first_share: float
    """Temporaries of the first update, as a multiple of the bytes updated."""
    share: float
    """Most temporaries of a later update, as a multiple of the bytes updated."""
    moved_per_element: int
    """Bytes that a later update reads and writes for each element."""

    def scaled_to(self, like: Tensor) -> Needs:
        """Return the needs of a parameter as `like`, in one piece."""
        rest = sum(scaled(shape, self.probe, tuple(like.shape)) * itemsize for shape, itemsize in self.rest)
        leaves: Leaves = {key: (dtype, None) for key, dtype in self.shaped.items()}
        first, later = (int(share * like.nbytes) for share in (self.first_share, self.share))
        return Needs(leaves, rest, first + rest, later + rest)


@dataclass(frozen=True)
class NormClipping:
    """`torch.nn.utils.clip_grad_norm_` in two parts: the norm of each gradient, and the factor."""

    max_norm: float
    sum_over_ranks: Callable[[Tensor], None] | None = None
    """Adds a tensor up in place over the ranks that hold parts of each gradient.

    Torch does so with the squares of all norms at once.
    """

    def norm(self, gradient: Tensor) -> Tensor:
        """Return the norm of the gradient, by the kernel that torch uses for it."""
        if gradient.device.type == "cpu":
            return torch.linalg.vector_norm(gradient, 2.0)
        (norm,) = foreach_norm([gradient], 2.0)
        return norm

    def factor(self, *norms: Tensor) -> Tensor:
        """Return the factor for all gradients."""
        together = torch.stack([norm.to(norms[0].device) for norm in norms])
        if self.sum_over_ranks is not None:
            together = together**2.0
            self.sum_over_ranks(together)
            together = together**0.5
        total = torch.linalg.vector_norm(together, 2.0)
        return torch.clamp(self.max_norm / (total + 1e-6), max=1.0)

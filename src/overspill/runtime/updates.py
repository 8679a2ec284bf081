"""The optimizer's part of a whole step: each parameter's update as an op of its own, by the user's own optimizer.

An update runs the optimizer's own `step` on one parameter, slice by slice, so that its temporaries stay small. None of
its arithmetic is written again here, so the numbers are those of `optimizer.step()`; the settings of parameter groups
are read anew at every step, so that schedulers and users may change them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.core.errors import UnsupportedError

from .optimizers import optimizer_like
from .tracker import LiveBytes

ELEMENTWISE = frozenset(
    {"SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD", "Rprop"}
)
"""Optimizers of torch.optim that treat each element of a parameter by itself, so that slices give the same bits."""
SLICE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
"""How much of a parameter is updated at a time; on CUDA a launch costs more than the temporaries."""
PROBE_SHAPE = (64, 48)
SCALAR_BYTES = 256
"""Room for step counts and other scalars."""


class ParameterState:
    """One parameter as its optimizer knows it.

    `shaped` names the tensors of the parameter's shape that are kept for it, with their dtypes, and `rest` is what else
    is kept. `begun`: the optimizer has made them, be it at once, as Adagrad does, or at its first step.
    """

    def __init__(
        self, updates: OptimizerUpdates, group: dict[str, Any], shaped: dict[str, torch.dtype], state: dict[str, Any]
    ) -> None:
        self.updates = updates
        self.group = group
        self.shaped = shaped
        self.begun = False
        self.rest: dict[str, Any] = {}
        self.order: list[str] = []
        if state:
            self.keep(state)

    def take_over(self, other: ParameterState) -> None:
        """Go on with the group and the state that `other` was found with."""
        self.group, self.begun, self.rest, self.order = other.group, other.begun, other.rest, other.order

    def keep(self, state: dict[str, Any]) -> None:
        """What the optimizer has made of the state; tensors of the parameter's shape are not kept here."""
        self.order = list(state)
        self.rest = {key: value for key, value in state.items() if key not in self.shaped}
        self.begun = True

    def run(self, parameter: Tensor, gradient: Tensor, scale: Tensor | None, *state: Tensor) -> None:
        """Step on `parameter` in place, given its gradient times `scale`, and its `state` in the order of `shaped`."""
        self.updates.update(self, parameter, gradient, scale, *state)


class OptimizerUpdates:
    """The updates of the parameters of one optimizer."""

    def __init__(self, optimizer: Optimizer, *, clip_value: float | None = None, scales: bool = False) -> None:
        """`scales`: updates will be given a factor for their gradients.

        Raises UnsupportedError for an optimizer that does not update parameters one by one.
        """
        _refuse(optimizer)
        self.optimizer = optimizer
        self.clip_value = clip_value
        self.scales = scales
        made_by_torch = type(optimizer).__module__.startswith("torch.optim.")
        self.elementwise = made_by_torch and type(optimizer).__name__ in ELEMENTWISE
        self._twin: Optimizer | None = None
        self._needs: dict[tuple[int, torch.dtype], tuple[dict[str, torch.dtype], float]] = {}

    def state_of(self, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any]) -> ParameterState:
        """What the optimizer keeps, or will keep, for `parameter` of `group`, now that it has `state` for it."""
        shaped, _ = self._probed(parameter, group)
        if state:
            shaped = {key: state[key].dtype for key in shaped if isinstance(state.get(key), Tensor)}
        return ParameterState(self, group, dict(shaped), state)

    def workspace_bytes(self, parameter: nn.Parameter, group: dict[str, Any]) -> int:
        """Bytes that the update of `parameter` takes besides the parameter, its gradient and its state."""
        _, share = self._probed(parameter, group)
        largest = max(_nbytes(parameter[rows]) for rows in self._slices(parameter))
        return int(share * largest) + SCALAR_BYTES

    def update(
        self, owned: ParameterState, parameter: Tensor, gradient: Tensor, scale: Tensor | None, *state: Tensor
    ) -> None:
        """Step on `parameter`, which `owned` describes, slice by slice."""
        after: dict[str, Any] = {}
        for rows in self._slices(parameter):
            part = parameter[rows].detach().requires_grad_()
            part.grad = self._gradient(gradient[rows], scale)
            given = {key: tensor[rows] for key, tensor in zip(owned.shaped, state, strict=True)}
            before = given | {key: v.clone() if isinstance(v, Tensor) else v for key, v in owned.rest.items()}
            after = self._stepped(owned, part, before if owned.begun else {})
            for key, tensor in given.items():
                if after[key] is not tensor:
                    tensor.copy_(after[key])
                after[key] = None  # else the next slice is made while this one's is still there
        owned.keep(after)

    def _gradient(self, gradient: Tensor, scale: Tensor | None) -> Tensor:
        if scale is not None:
            gradient = gradient * scale.to(gradient.device)
        if self.clip_value is not None:
            gradient = gradient.clamp(-self.clip_value, self.clip_value)
        return gradient

    def _stepped(self, owned: ParameterState, part: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """The state after a step on `part`."""
        if self._twin is None:
            self._twin = optimizer_like(self.optimizer, owned.group, [part])
        twin = self._twin
        twin.param_groups[:] = [{**owned.group, "params": [part]}]
        twin.state = defaultdict(dict, {part: state} if state else {})
        with torch.enable_grad():  # as a training loop calls it
            twin.step()
        after = dict(twin.state[part])
        twin.state.clear()
        twin.param_groups[0]["params"] = []
        return after

    def _slices(self, parameter: Tensor) -> Iterator[Any]:
        """Rows of `parameter` that are updated together."""
        nbytes = _nbytes(parameter)
        limit = SLICE_BYTES.get(parameter.device.type, nbytes)
        if not self.elementwise or nbytes <= limit or parameter.dim() == 0:
            yield ...
            return
        rows = max(1, limit // (nbytes // parameter.shape[0]))
        for start in range(0, parameter.shape[0], rows):
            yield slice(start, start + rows)

    def _probed(self, parameter: nn.Parameter, group: dict[str, Any]) -> tuple[dict[str, torch.dtype], float]:
        """Names and dtypes of state tensors of the parameter's shape, and the workspace as a multiple of its bytes."""
        key = (id(group), parameter.dtype)
        if key not in self._needs:
            self._needs[key] = self._probe(parameter, group)
        return self._needs[key]

    def _probe(self, like: nn.Parameter, group: dict[str, Any]) -> tuple[dict[str, torch.dtype], float]:
        """What two steps on a tiny parameter show; the first makes the state, beside that which the step has room for."""
        probe = torch.ones(PROBE_SHAPE, dtype=like.dtype, requires_grad=True)
        probe.grad = self._gradient(torch.ones_like(probe), None)
        tiny = optimizer_like(self.optimizer, group, [probe])
        peak = 0
        for _ in range(2):
            tracker = LiveBytes(probe.device)
            tracker.add([probe, probe.grad, *(v for v in tiny.state[probe].values())])
            settled = tracker.live_bytes
            with tracker:
                tiny.step()
            peak = max(peak, tracker.peak_bytes - settled)
        shaped = {
            key: v.dtype for key, v in tiny.state[probe].items() if isinstance(v, Tensor) and v.shape == probe.shape
        }
        others = self.scales + (self.clip_value is not None)  # the scaled and the clamped gradient
        return shaped, peak / _nbytes(probe) + others


@dataclass(frozen=True)
class NormClipping:
    """`torch.nn.utils.clip_grad_norm_(parameters, max_norm)`, in two parts: each gradient's norm, and the factor."""

    max_norm: float

    def norm(self, gradient: Tensor) -> Tensor:
        """The gradient's own norm, by the kernel that torch takes for it."""
        if gradient.device.type == "cpu":
            return torch.linalg.vector_norm(gradient, 2.0)
        (norm,) = torch._foreach_norm([gradient], 2.0)
        return norm

    def factor(self, *norms: Tensor) -> Tensor:
        """What all gradients are multiplied by."""
        total = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), 2.0)
        return torch.clamp(self.max_norm / (total + 1e-6), max=1.0)


def _refuse(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if name in ("LBFGS", "SparseAdam"):
        raise UnsupportedError(
            f"{name} cannot be part of a planned step: "
            + ("it evaluates the model several times" if name == "LBFGS" else "its gradients are sparse")
            + f"; use one that updates each parameter once, such as {', '.join(sorted(ELEMENTWISE)[:3])} or SGD, "
            "or overspill.compile, which leaves the optimizer as it is"
        )


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

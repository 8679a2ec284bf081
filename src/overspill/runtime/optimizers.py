"""What an optimizer will need on the device: its state and its temporaries, found by letting it step on tiny parameters."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .tracker import LiveBytes

_PRIMES = (2, 3, 5, 7, 11, 13)
"""The probe's dimensions: distinct, so that each dimension of a state tensor tells which of the parameter's it follows."""


@dataclass(frozen=True)
class OptimizerNeeds:
    """Bytes of an optimizer's state once it has stepped, and of its temporaries while it steps."""

    state_bytes: int
    update_bytes: int

    def __add__(self, other: OptimizerNeeds) -> OptimizerNeeds:
        """Two optimizers that step one after the other."""
        return OptimizerNeeds(self.state_bytes + other.state_bytes, max(self.update_bytes, other.update_bytes))


def find_optimizers(parameters: Collection[Tensor]) -> list[Optimizer]:
    """The optimizers alive in this process that update any of `parameters`."""
    wanted = {id(p) for p in parameters}
    found = [o for o in gc.get_objects() if issubclass(type(o), Optimizer)]
    return [o for o in found if any(id(p) in wanted for group in o.param_groups for p in group["params"])]


def optimizer_needs(optimizers: Iterable[Optimizer]) -> OptimizerNeeds:
    """What all `optimizers` need together."""
    total = OptimizerNeeds(0, 0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            total += _group_needs(optimizer, group)
    return total


def _group_needs(optimizer: Optimizer, group: dict[str, Any]) -> OptimizerNeeds:
    parameters = [p for p in group["params"] if p.requires_grad]
    if not parameters:
        return OptimizerNeeds(0, 0)
    state = 0
    probes: dict[tuple[int, torch.dtype], list[tuple[tuple[int, ...], int]]] = {}
    for parameter in parameters:
        kind = (parameter.dim(), parameter.dtype)
        if kind not in probes:
            probes[kind] = _probe_state(optimizer, group, parameter)
        state += sum(_scaled(shape, parameter.shape) * itemsize for shape, itemsize in probes[kind])
    sizes = [p.numel() * p.element_size() for p in parameters]
    each, together = _probe_temporaries(optimizer, group, parameters[0])
    return OptimizerNeeds(state, int(each * (sum(sizes) if together else max(sizes))))


def _probe_state(optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> list[tuple[tuple[int, ...], int]]:
    """Shape and item size of every state tensor after one step on a tiny parameter like `like`."""
    probe = _probe(_PRIMES[: like.dim()], like)
    tiny = _twin(optimizer, group, [probe])
    tiny.step()
    return [(tuple(v.shape), v.element_size()) for v in tiny.state[probe].values() if isinstance(v, Tensor)]


def _scaled(state_shape: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Elements of a state tensor of the probe, had the probe the dimensions `shape`."""
    real = dict(zip(_PRIMES, shape, strict=False))
    return prod(real.get(n, n) for n in state_shape)


def _probe_temporaries(optimizer: Optimizer, group: dict[str, Any], like: Tensor) -> tuple[float, bool]:
    """Temporary bytes per byte of parameter, and whether the optimizer makes them for all parameters at once."""
    peaks = []
    for count in (1, 2):
        probes = [_probe((64, 64), like) for _ in range(count)]
        tiny = _twin(optimizer, group, probes)
        tiny.step()
        tracker = LiveBytes(like.device)
        states = [v for p in probes for v in tiny.state[p].values()]
        tracker.add([*probes, *(p.grad for p in probes), *states])
        settled = tracker.live_bytes
        with tracker:
            tiny.step()
        peaks.append((tracker.peak_bytes - settled) / (probes[0].numel() * probes[0].element_size()))
    together = peaks[1] > 1.5 * peaks[0]
    return peaks[0], together


def _probe(shape: tuple[int, ...], like: Tensor) -> Tensor:
    probe = torch.ones(shape, dtype=like.dtype, device=like.device, requires_grad=True)
    probe.grad = torch.ones_like(probe)
    return probe


def _twin(optimizer: Optimizer, group: dict[str, Any], probes: list[Tensor]) -> Optimizer:
    """An optimizer of the same class and settings for `probes`."""
    settings = {key: value for key, value in group.items() if key not in ("params", "initial_lr")}
    return type(optimizer)([{**settings, "params": probes}], **_required(optimizer))


def _required(optimizer: Optimizer) -> dict[str, Any]:
    """The learning rate, which some optimizers want as an argument of its own."""
    return {"lr": float(optimizer.defaults["lr"])} if "lr" in optimizer.defaults else {}

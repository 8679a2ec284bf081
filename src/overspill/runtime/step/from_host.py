"""A step of a model in host memory, on a device that may be smaller than the model.

Weights and optimizer state stay where they are until the plan needs them: in memory whose pages are locked, or in the
file of a checkpoint that is mapped. A frozen weight is only read there, and never copied. What an update changes goes
to the store. Buffers, and weights that cannot move, go to the device at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.core import TensorKind, Verb
from overspill.core.errors import RequestError, UnsupportedError
from overspill.plans.plan import Plan
from overspill.pytorch.modules import buffers_of
from overspill.runtime.reachable import tensors_in
from overspill.runtime.transfer.stores import whole_pages

from .away import plain_type
from .learned import LEAST_MOVED_BYTES


def check_on_host(parameters: Mapping[str, nn.Parameter], *, is_sharded: bool) -> None:
    """Raise RequestError or UnsupportedError for a model that cannot begin in host memory."""
    if is_sharded:
        raise UnsupportedError(
            "device= moves a model from the CPU, and fully_shard has sharded this one; shard it on the device"
        )
    if other := next((n for n, p in parameters.items() if plain_type(p) not in (Tensor, nn.Parameter)), ""):
        raise UnsupportedError(
            f"device= moves plain weights, and {other} is a {plain_type(parameters[other]).__name__}; move "
            "the model to the device first"
        )
    if found := next((p.device for p in parameters.values() if p.device.type != "cpu"), None):
        raise RequestError(f"device= moves a model from the CPU, and this one is on {found}; leave device= out")
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes, name) for name, p in parameters.items() if p.nbytes)
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise UnsupportedError(
                f"{name} and {other} share memory, and their copies would not; tie them as one Parameter"
            )


def move_buffers(module: nn.Module, where: torch.device) -> None:
    """Move the buffers of `module` to the device."""
    for part in module.modules():
        for buffer in buffers_of(part).values():
            if buffer is not None:
                buffer.data = buffer.data.to(where)


def move_state(optimizers: Iterable[Optimizer], where: torch.device) -> None:
    """Move optimizer state to the device that a plan leaves there, as `load_state_dict` does."""
    for optimizer in optimizers:
        fused = {id(p) for group in optimizer.param_groups if group.get("fused") for p in group["params"]}
        for parameter, state in optimizer.state.items():
            for tensor in tensors_in(dict(state)).values():
                small = tensor.nbytes < LEAST_MOVED_BYTES and tensor.shape != parameter.shape
                if small and (tensor.dim() or id(parameter) in fused):
                    tensor.data = tensor.data.to(where)


def held_bytes(plan: Plan) -> int:
    """Return the bytes of weights that `plan` only reads, and that stay in host memory where they are."""
    tensors, schedule = plan.graph.tensors, plan.schedule
    read = {*schedule.stored, *schedule.targets(Verb.PREFETCH)}.difference(schedule.targets(Verb.OFFLOAD))
    return sum(whole_pages(tensors[t].nbytes) for t in read if tensors[t].kind is TensorKind.PARAMETER)


def as_on_host(like: Tensor) -> Tensor:
    """Return a tensor without memory that has the shape and dtype of `like`, in host memory."""
    return torch.empty((), dtype=like.dtype, device="cpu").expand(like.shape)

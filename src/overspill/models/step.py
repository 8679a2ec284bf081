"""A model and its loss as one module, so that the captured and compiled program includes the loss."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import RequestError
from overspill.pytorch.modules import buffers_of, parameters_of

from .built_model import BuiltModel


class TrainingStep(nn.Module):
    """A built model (`self.model`) with its loss: on a batch, the scalar loss."""

    def __init__(self, job: BuiltModel) -> None:
        super().__init__()
        self.model = job.module
        self.loss = job.loss

    def forward(self, *batch: Tensor) -> Tensor:
        """Return the loss of the model on `batch`, the tensors that the job's `make_batch` returned."""
        return self.loss(self.model, *batch)


class StepLoss(nn.Module):
    """`model` with its loss: on inputs, the loss.

    `loss` is a criterion of torch.nn, called on the model's output and the last input, or a function of the model and
    all inputs. None is for a model that returns its own loss, as its output or as the output's `loss`.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.gradient_hooks: dict[str, tuple[Callable[[Tensor], Tensor | None], ...]] = {}
        """What is called with the gradients of parameters, by their names."""

    def forward(self, *inputs: Any) -> Any:
        """Return the loss on `inputs`. Raises RequestError.

        A single dictionary gives the model keyword arguments.
        """
        return loss_on(self.model, self.loss, inputs)


def loss_on(model: nn.Module, loss: Callable[..., Any] | None, inputs: tuple[Any, ...]) -> Any:
    """Return the loss of `model` on `inputs`; `loss` is as of StepLoss. Raises RequestError."""
    if loss is None:
        return _own_loss(_call(model, inputs))
    if not is_criterion(loss):
        return loss(model, *inputs)
    if len(inputs) < 2:
        raise RequestError(
            "a criterion needs inputs and a target; or pass loss as a function of the model and all inputs"
        )
    return loss(model(*inputs[:-1]), inputs[-1])


def scalar_loss(model: nn.Module, loss: Callable[..., Any] | None, inputs: tuple[Any, ...]) -> Tensor:
    """Return the loss as of `loss_on`, or the output's mean if the model has no loss of its own.

    Raises RequestError.
    """
    output = _call(model, inputs) if loss is None else loss_on(model, loss, inputs)
    found = loss_in(output)
    if found is None:
        found = output[0] if isinstance(output, (list, tuple)) else output
    if not isinstance(found, Tensor):
        raise RequestError(f"the model returns {type(output).__name__}, which holds no loss; pass loss=")
    return found if found.dim() == 0 else found.float().mean()


def is_criterion(loss: Callable[..., Any]) -> bool:
    """Return whether `loss` takes an output and a target.

    Torch's own losses do; others take the model and all inputs.
    """
    return isinstance(loss, nn.Module) or (getattr(loss, "__module__", "") or "").startswith("torch.")


def loss_in(output: Any) -> Any:
    """Return the `loss` attribute or key of a model's output, or None."""
    # The attribute first: one set on a transformers.ModelOutput that had no loss does not become a key of it.
    found = getattr(output, "loss", None)
    return output.get("loss") if found is None and isinstance(output, Mapping) else found


def without_memory(module: nn.Module) -> nn.Module:
    """Return a copy of `module` whose tensors need no memory.

    Call it in a fake mode, where its parameters and buffers are made.
    """
    copies: dict[int, Any] = {}
    for parameter in module.parameters():
        blank = torch.empty(parameter.shape, dtype=parameter.dtype)
        copies[id(parameter)] = nn.Parameter(blank, parameter.requires_grad)
    for buffer in module.buffers():
        copies[id(buffer)] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return copy.deepcopy(module, copies)


def convert(module: nn.Module, dtype: torch.dtype | None, memory_format: torch.memory_format | None = None) -> None:
    """Apply `module.to(dtype, memory_format=…)` to fake tensors too.

    Torch does that to real tensors only. Shared tensors stay shared.
    """
    made: dict[int, Tensor] = {}
    for part in module.modules():
        for of in (parameters_of(part), buffers_of(part)):
            for name, value in of.items():
                if value is not None and id(value) not in made:
                    new = cast(value.detach(), dtype)
                    if memory_format is not None and value.dim() == 4:
                        new = new.contiguous(memory_format=memory_format)
                    made[id(value)] = nn.Parameter(new, value.requires_grad) if of is parameters_of(part) else new
                of[name] = None if value is None else made[id(value)]


def cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return `value` in `dtype` if it is of floating point."""
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def whole_dtype(dtype: str) -> torch.dtype | None:
    """Return the dtype that the whole model is converted to, or None if its weights keep theirs."""
    return None if dtype == "float32" or dtype.startswith("amp") else getattr(torch, dtype)


def under_autocast(loss: Callable[..., Tensor], model: nn.Module, *batch: Tensor) -> Tensor:
    """Return the loss of `model` on `batch`, under autocast in bfloat16."""
    with torch.autocast(batch[0].device.type, torch.bfloat16):
        return loss(model, *batch)


def _call(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return model(**inputs[0]) if len(inputs) == 1 and isinstance(inputs[0], Mapping) else model(*inputs)


def _own_loss(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else loss_in(output)
    if not isinstance(loss, Tensor):
        raise RequestError(
            "the model returns no loss; pass loss_fn, a criterion or a function of the model and all inputs"
        )
    return loss

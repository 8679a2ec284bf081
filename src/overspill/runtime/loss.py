"""A model and its loss as one module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from overspill.core.errors import RequestError


class StepLoss(nn.Module):
    """`model` with the loss that it is trained on; called on a batch, returns that loss.

    `loss` is a criterion of torch.nn, given the model's output and the last input, or a function of the model and all
    inputs, or None for a model that returns its own loss (as its output, or as the output's `loss`).
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, *inputs: Any) -> Any:
        """The loss on `inputs`; a single dictionary gives the model keyword arguments. Raises RequestError."""
        if self.loss is None:
            return _own_loss(_call(self.model, inputs))
        if not (isinstance(self.loss, nn.Module) or (getattr(self.loss, "__module__", "") or "").startswith("torch.")):
            return self.loss(self.model, *inputs)
        if len(inputs) < 2:
            raise RequestError(
                "a criterion needs inputs and a target; or pass loss as a function of the model and all inputs"
            )
        return self.loss(self.model(*inputs[:-1]), inputs[-1])


def _call(model: nn.Module, inputs: tuple[Any, ...]) -> Any:
    return model(**inputs[0]) if len(inputs) == 1 and isinstance(inputs[0], dict) else model(*inputs)


def _own_loss(output: Any) -> Tensor:
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, dict):
        loss = output.get("loss")
    if not isinstance(loss, Tensor):
        raise RequestError(
            "the model returns no loss; pass loss_fn, a criterion or a function of the model and all inputs"
        )
    return loss

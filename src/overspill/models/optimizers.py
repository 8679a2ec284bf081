"""The optimizers that can be asked for by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from overspill.core.errors import RequestError

if TYPE_CHECKING:
    from torch.optim import Optimizer

# Name: class in torch.optim, and its arguments; all else is torch's default.
_NAMED: dict[str, tuple[str, dict[str, float]]] = {
    "sgd": ("SGD", {"lr": 0.01}),
    "momentum": ("SGD", {"lr": 0.01, "momentum": 0.9}),
    "adam": ("Adam", {"lr": 1e-3}),
    "adamw": ("AdamW", {"lr": 1e-3}),
    "adagrad": ("Adagrad", {"lr": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 0.01}),
    "adafactor": ("Adafactor", {"lr": 0.01}),
}


def optimizer_names() -> tuple[str, ...]:
    """The names that `optimizer_named` knows."""
    return tuple(_NAMED)


def check_optimizer(name: str) -> None:
    """Raise RequestError with the names that exist when `name` is none of them; torch is not imported."""
    if name not in _NAMED:
        raise RequestError(f"unknown optimizer {name!r}; optimizers: {', '.join(_NAMED)}")


def optimizer_named(name: str) -> Callable[[Iterable[Any]], Optimizer]:
    """The optimizer called `name`, as a function of the parameters. Raises RequestError for an unknown name."""
    check_optimizer(name)
    import torch  # noqa: PLC0415 - the names are listed without paying for torch

    class_name, arguments = _NAMED[name]
    return lambda parameters: getattr(torch.optim, class_name)(parameters, **arguments)

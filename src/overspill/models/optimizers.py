"""The optimizers by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from overspill.core.errors import RequestError
from overspill.core.registry import did_you_mean

if TYPE_CHECKING:
    from torch.optim import Optimizer

# Name, by use: the class, in torch.optim or in `eight_bit`, and its arguments; all else is torch's default.
_NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"lr": 1e-3}),
    "adamw-fused": ("AdamW", {"lr": 1e-3, "fused": True}),
    "adam": ("Adam", {"lr": 1e-3}),
    "sgd": ("SGD", {"lr": 0.01}),
    "momentum": ("SGD", {"lr": 0.01, "momentum": 0.9}),
    "adagrad": ("Adagrad", {"lr": 0.01}),
    "rmsprop": ("RMSprop", {"lr": 0.01}),
    "adafactor": ("Adafactor", {"lr": 0.01}),
    "adamw8bit": ("Blockwise8bit", {"states": 2, "paged": False}),
    "adam8bit": ("Blockwise8bit", {"states": 2, "paged": False}),
    "lion8bit": ("Blockwise8bit", {"states": 1, "paged": False}),
    "paged-adamw8bit": ("Blockwise8bit", {"states": 2, "paged": True}),
    "paged-adam8bit": ("Blockwise8bit", {"states": 2, "paged": True}),
    "paged-lion8bit": ("Blockwise8bit", {"states": 1, "paged": True}),
}


def optimizer_names() -> tuple[str, ...]:
    """Return the names of all optimizers."""
    return tuple(_NAMED)


def is_eight_bit(name: str) -> bool:
    """Return whether `name` is an 8-bit optimizer of bitsandbytes.

    The bytes of these are known, and no update is made.
    """
    return name in _NAMED and "states" in _NAMED[name][1]


def check_optimizer(name: str) -> str:
    """Return `name` as it is written here, as which transformers' names count too (`adamw_torch_fused`).

    Raises RequestError for an unknown optimizer; torch is not imported.
    """
    known = name.lower().replace("_", "-").replace("-torch", "").replace("-bnb", "").replace("-8bit", "8bit")
    if known not in _NAMED:
        hint = did_you_mean(name, _NAMED)
        raise RequestError(f"unknown optimizer {name!r}{hint} Optimizers: {', '.join(_NAMED)}", fields=["optimizer"])
    return known


def optimizer_named(name: str) -> Callable[[Iterable[Any]], Optimizer]:
    """Return the optimizer called `name`, as a function of the parameters. Raises RequestError for an unknown name."""
    name = check_optimizer(name)
    from torch import optim  # noqa: PLC0415 - the names are listed without paying for torch

    from .eight_bit import Blockwise8bit  # noqa: PLC0415

    class_name, arguments = _NAMED[name]
    made = Blockwise8bit if is_eight_bit(name) else getattr(optim, class_name)
    return lambda parameters: made(parameters, **arguments)

"""Tensor methods that read values: real, known, or placeholder values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from overspill.pytorch.fake_tensors import DataDependentOutputException, FakeTensor
from overspill.pytorch.patching import Patches

from .assumptions import decides_no_size, goes_on
from .frames import caller, user_frame
from .invented import FRACTION, WHOLE, Invented, placeholders, value_of, with_which_no_error_follows
from .real_values import is_unknown, values_of
from .unknown import UnknownNumber, data_dependent


def value_patches(invented: Invented | None) -> Patches:
    """Return (owner, name, replacement) of methods that read values.

    Unknown values are `invented`, or an error.
    """
    # Methods of Python's protocols and of NumPy's.
    reads = [
        (Tensor, "item", _item),
        (Tensor, "tolist", _array),
        (FakeTensor, "tolist", _array),
        (Tensor, "numpy", _array),
        (Tensor, "__bool__", _truth),
        (Tensor, "__int__", _whole),
        (Tensor, "__index__", _whole),
        (Tensor, "__float__", _number),
    ]
    originals = {name: getattr(Tensor, name) for _, name, _ in reads}
    return [
        (Tensor, "__format__", _written(Tensor.__format__)),
        *((owner, name, _known(originals[name], make(originals[name], invented))) for owner, name, make in reads),
    ]


def _is_unknown(tensor: Tensor) -> bool:
    return tensor.constant is None if isinstance(tensor, FakeTensor) else is_unknown(tensor)


def _known(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `replacement` to return the original's result where values are known."""

    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if _is_unknown(tensor) and (values := values_of(tensor)) is not None:
            return original(values.clone(), *args, **kwargs)
        return replacement(tensor, *args, **kwargs)

    return read


def _written(original: Callable[..., str]) -> Callable[..., str]:
    """Wrap `Tensor.__format__` to write the value of a scalar, or `unknown`."""

    def write(tensor: Tensor, spec: str) -> str:
        values = values_of(tensor) if tensor.dim() == 0 else tensor
        return "unknown" if values is None else original(values, spec)

    return write


def _item(original: Callable[..., Any], invented: Invented | None) -> Callable[..., Any]:
    """Wrap `Tensor.item`, whose result cannot be compared unless placeholder values are allowed."""

    def item(tensor: Tensor) -> Any:
        if not _is_unknown(tensor):
            return original(tensor)
        if tensor.numel() != 1:
            raise data_dependent()
        if tensor.dtype is torch.bool and (answer := goes_on(caller(sys._getframe(1)))) is not None:
            return answer
        if invented is None:
            if tensor.dtype.is_complex:
                raise data_dependent()
            return UnknownNumber()
        # Booleans and complex numbers cannot be UnknownNumbers.
        made = value_of(tensor)
        if type(made) is bool or tensor.dtype.is_complex:
            invented.read(sys._getframe(1))
            return complex(made) if tensor.dtype.is_complex else made
        return UnknownNumber(made, invented)

    return item


def _array(original: Callable[..., Any], invented: Invented | None) -> Callable[..., Any]:
    """Wrap methods that read many values at once."""

    def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not _is_unknown(tensor):
            return original(tensor, *args, **kwargs)
        if invented is not None:
            return original(invented.array(tensor, sys._getframe(1)), *args, **kwargs)
        if decides_no_size(user_frame(sys._getframe(1))):
            return original(placeholders(tensor), *args, **kwargs)
        raise data_dependent()

    return read


def _truth(original: Callable[..., bool], invented: Invented | None) -> Callable[..., bool]:
    """Wrap `Tensor.__bool__`, by which Python branches."""

    def decide(tensor: Tensor) -> bool:
        if invented is not None and _is_unknown(tensor) and tensor.numel() == 1:
            answer = goes_on(caller(sys._getframe(1)))
            return bool(invented.decide(sys._getframe(1), value_of(tensor)) if answer is None else answer)
        try:
            return original(tensor)
        except DataDependentOutputException:
            if (answer := goes_on(caller(sys._getframe(1)))) is None:
                answer = with_which_no_error_follows(sys._getframe(1))
            if answer is None:
                raise data_dependent() from None
            return answer

    return decide


def _whole(original: Callable[..., int], invented: Invented | None) -> Callable[..., int]:
    """Wrap `Tensor.__int__` and `__index__`, by which Python counts and indexes."""

    def count(tensor: Tensor) -> int:
        if invented is not None and _is_unknown(tensor) and tensor.numel() == 1:
            invented.read(sys._getframe(1))
            if original.__name__ == "__index__":
                invented.sized(sys._getframe(1))
            return WHOLE
        try:
            return original(tensor)
        except DataDependentOutputException:
            raise data_dependent() from None

    return count


def _number(original: Callable[..., float], invented: Invented | None) -> Callable[..., float]:
    """Wrap `Tensor.__float__`; Python accepts only plain floats from it, so an unknown value becomes one."""

    def to_float(tensor: Tensor) -> float:
        if _is_unknown(tensor) and tensor.numel() == 1:
            if invented is not None:
                invented.read(sys._getframe(1))
            return FRACTION
        return original(tensor)

    return to_float

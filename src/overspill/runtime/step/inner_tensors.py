"""The tensors that have the bytes of a parameter: itself, or those inside of a tensor subclass.

Quantised weights are parameters of subclasses. One of bitsandbytes has the packed values itself, and their scales in
attributes. Those of torchao and Quanto wrap other tensors, which `__tensor_flatten__` names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from overspill.pytorch.dispatch import is_traceable_wrapper_subclass
from overspill.pytorch.distributed import LOCAL
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.storages import has_storage, storage_key
from overspill.runtime.reachable import tensors_in

from .away import GUARDS, Away, plain_type

LEAST_BYTES = 1024
"""Smaller attributes stay where they are: tables of levels, offsets."""


def inner_tensors(parameter: Tensor) -> dict[str, Tensor]:
    """Return the tensors that have the bytes of a parameter, by their path in it; its own path is empty.

    A part of a DTensor is that of one rank. It counts as one tensor, as does what does not say where its bytes are.
    """
    plain = plain_type(parameter) in (Tensor, nn.Parameter) or isinstance(parameter, FakeTensor)
    if plain or hasattr(parameter, LOCAL):
        return {"": parameter}
    if is_traceable_wrapper_subclass(parameter):
        return dict(_wrapped(parameter))
    found = {"": parameter}
    if has_storage(parameter):
        keys = {_memory_of(parameter)}
        for path, tensor in tensors_in(vars(parameter)).items():
            if plain_type(tensor) is Tensor and tensor.nbytes >= LEAST_BYTES and _memory_of(tensor) not in keys:
                found[path] = tensor
                keys.add(_memory_of(tensor))
    return found


def _memory_of(tensor: Tensor) -> int:
    """Return what tensors over the same memory have in common: their storage, or their guard while they are away."""
    return id(GUARDS.get(id(tensor))) if isinstance(tensor, Away) else storage_key(tensor)


def has_own_memory(parameter: Tensor) -> bool:
    """Return whether a parameter has its bytes itself, and hands them out as a plain tensor (`.data`)."""
    return has_storage(parameter) and (plain_type(parameter) is Tensor or nn.Parameter in type(parameter).__mro__)


def parts_of(wrapper: Tensor) -> dict[str, Tensor]:
    """Return the tensors that a subclass wraps, by attribute."""
    names, _ = wrapper.__tensor_flatten__()
    return {name: getattr(wrapper, name) for name in names}


def wrapped_again(wrapper: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """Return a tensor of the class and sizes of `wrapper` around other `parts`."""
    _, context = wrapper.__tensor_flatten__()
    kind: Any = plain_type(wrapper)
    made: Tensor = kind.__tensor_unflatten__(parts, context, wrapper.size(), wrapper.stride())
    return made


def _wrapped(wrapper: Tensor) -> Iterator[tuple[str, Tensor]]:
    for name, part in parts_of(wrapper).items():
        for path, tensor in inner_tensors(part).items():
            yield f"{name}.{path}" if path else name, tensor


def bytes_of(parameter: Tensor) -> int:
    """Return the bytes of a parameter, with those of its inner tensors."""
    return sum(tensor.nbytes for tensor in inner_tensors(parameter).values())

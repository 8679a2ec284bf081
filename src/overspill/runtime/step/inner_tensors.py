"""The tensors that have the bytes of a parameter: itself, or those inside of a tensor subclass.

Quantised weights are parameters of subclasses. One of bitsandbytes has the packed values itself, and their scales in
attributes. Those of torchao and Quanto wrap other tensors, which `__tensor_flatten__` names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from overspill.core.errors import UnsupportedError
from overspill.pytorch.dispatch import is_traceable_wrapper_subclass
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.storages import has_storage, storage_key
from overspill.runtime.reachable import tensors_in

from .away import plain_type

LEAST_BYTES = 1024
"""Smaller attributes stay where they are: tables of levels, offsets."""


def inner_tensors(parameter: Tensor) -> dict[str, Tensor]:
    """Return the tensors that have the bytes of a parameter, by their path in it; its own path is empty.

    Raises UnsupportedError for a subclass that does not say where its bytes are.
    """
    if plain_type(parameter) in (Tensor, nn.Parameter) or isinstance(parameter, FakeTensor):
        return {"": parameter}
    if is_traceable_wrapper_subclass(parameter):
        return dict(_wrapped(parameter))
    if not has_storage(parameter):
        raise UnsupportedError(
            f"a {plain_type(parameter).__name__} has no memory of its own, and no __tensor_flatten__ that says where "
            "its bytes are"
        )
    found = {"": parameter}
    keys = {storage_key(parameter)}
    for path, tensor in tensors_in(vars(parameter)).items():
        if plain_type(tensor) is Tensor and tensor.nbytes >= LEAST_BYTES and storage_key(tensor) not in keys:
            found[path] = tensor
            keys.add(storage_key(tensor))
    return found


def _wrapped(wrapper: Tensor) -> Iterator[tuple[str, Tensor]]:
    names, _ = wrapper.__tensor_flatten__()
    for name in names:
        for path, tensor in inner_tensors(getattr(wrapper, name)).items():
            yield f"{name}.{path}" if path else name, tensor


def with_inner(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the inner tensors of named parameters, each with a name."""
    for name, parameter in parameters:
        for path, tensor in inner_tensors(parameter).items():
            yield f"{name}.{path}" if path else name, tensor


def bytes_of(parameter: Tensor) -> int:
    """Return the bytes of a parameter, with those of its inner tensors."""
    return sum(tensor.nbytes for tensor in inner_tensors(parameter).values())

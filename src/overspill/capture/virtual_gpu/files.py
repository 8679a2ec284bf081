"""Load and save checkpoints on the virtual GPU.

Unknown values are written only if files are discarded. A tensor is then one value, which the file holds once for all
elements.
"""

from __future__ import annotations

import inspect
import io
import os
import pickle
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from overspill.pytorch.dispatch import DisableTorchDispatch
from overspill.pytorch.fake_tensors import FakeTensor, unset_fake_temporarily
from overspill.pytorch.modules import apply_to
from overspill.pytorch.patching import Patches
from overspill.pytorch.storages import key_of, rebuilt_parameter, storage_key

from .values.invented import value_of
from .values.real_values import values_of


def file_patches(*, saves: bool) -> Patches:
    """Return (owner, name, replacement) for `torch.save` and `torch.load`; `saves`: tensors without values too."""
    save = _save_shapes(torch.save) if saves else _save(torch.save)
    return [(torch, "save", save), (torch, "load", _load(torch.load))]


class _ShapesPickler(pickle.Pickler):
    """Pickles tensors with known values as usual, and others as one repeated value."""

    def reducer_override(self, found: Any) -> Any:
        """Return how to rebuild a fake tensor; everything else is pickled as usual."""
        if not isinstance(found, FakeTensor):
            return NotImplemented
        with DisableTorchDispatch():
            known = values_of(found)
            one = torch.full((), value_of(found), dtype=found.dtype, device="cpu")
            made = one.expand(found.shape) if known is None else known.clone()
        if isinstance(found, nn.Parameter):  # whose class makes fake ones here
            return rebuilt_parameter(made, found.requires_grad)
        return made.__reduce_ex__(2)


class _ShapesPickle(ModuleType):
    """The module `pickle` with another Pickler."""

    Pickler = _ShapesPickler

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)


def _save_shapes(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.save` to write tensors without values by their shapes."""
    pickling = _ShapesPickle("pickle")

    def write(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if _holds_fakes(obj):
            args, kwargs = (), {**kwargs, "pickle_module": pickling}
        save(obj, f, *args, **kwargs)

    return write


class _FoundFake(Exception):
    pass


class _FakeSearch(pickle.Pickler):
    """Walks through the objects that pickle would write, up to the first tensor without values."""

    def persistent_id(self, found: Any) -> str | None:
        """Raise _FoundFake for a fake tensor; skip other tensors."""
        if isinstance(found, FakeTensor):
            raise _FoundFake
        return "tensor" if isinstance(found, (torch.Tensor, torch.UntypedStorage)) else None


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def _holds_fakes(value: Any) -> bool:
    try:
        _FakeSearch(_Nowhere()).dump(value)
    except _FoundFake:
        return True
    except Exception:  # noqa: BLE001 - what pickle does not take is torch.save's to complain about
        return False
    return False


def _save(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.save` to write nothing if values are missing, and to print so once."""
    said = False

    def write(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal said
        if not _holds_fakes(obj):
            if isinstance(f, (str, os.PathLike)):  # torch opens it in C++, which tells Python's audit hooks nothing
                sys.audit("open", f, "wb", os.O_WRONLY | os.O_CREAT)
            save(obj, f, *args, **kwargs)
        elif not said:
            said = True
            print(  # noqa: T201
                "overspill: torch.save writes nothing during an estimate: nothing was computed", file=sys.stderr
            )

    return write


def _load(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.load` to load real values, moved to the virtual GPU as the file or `map_location` states."""
    signature = inspect.signature(load)

    def read(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        asked = given.arguments.get("map_location")
        on_device: set[int] = set()

        # Load to the host, noting the storages that belong on the GPU.
        def place(storage: Any, location: str) -> Any:
            if callable(asked):
                place_to = asked(storage, location)
                location = location if place_to is None else "cpu"
            elif isinstance(asked, dict):
                location = asked.get(location, location)
            elif asked is not None:
                location = str(asked)
            if location.startswith("cuda"):
                on_device.add(key_of(storage))
            return storage

        if str(asked) == "meta":
            return load(*args, **kwargs)
        # Then move their tensors there.
        given.arguments["map_location"] = place
        with unset_fake_temporarily():
            loaded = load(*given.args, **given.kwargs)
        return _moved(loaded, on_device) if on_device else loaded

    return read


def _moved(value: Any, on_device: set[int]) -> Any:
    """Return `value` with tensors on the storages `on_device` moved to the GPU, in containers and modules."""
    if isinstance(value, nn.Module):
        apply_to(value, lambda tensor: _moved(tensor, on_device))
        return value
    if isinstance(value, torch.Tensor):
        there = isinstance(value, FakeTensor) or storage_key(value) in on_device
        return value.cuda() if there else value
    if isinstance(value, dict):
        for name in value:
            value[name] = _moved(value[name], on_device)
    if type(value) in {list, tuple}:
        return type(value)(_moved(item, on_device) for item in value)
    return value

"""What a whole script does besides training, as the virtual GPU can have it: data loading, checkpoints, processes.

The host of a script works for real. Three things of it cannot: worker processes, which would have no virtual GPU;
pinned memory, which needs a driver; and checkpoints of tensors that were never computed.
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.multiprocessing
import torch.utils.data
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import tree_map

from .virtual_gpu import patched

_IN_PROCESS: dict[str, Any] = {
    "num_workers": 0,
    "pin_memory": False,
    "persistent_workers": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "timeout": 0,
    "worker_init_fn": None,
}


def script_patches() -> AbstractContextManager[None]:
    """Inside, data loaders load in this process, unknown values are not saved, and `spawn` runs its first process here."""
    loader, sampler = torch.utils.data.DataLoader, torch.utils.data.RandomSampler
    return patched(
        [
            (loader, "__init__", _in_process(loader.__init__)),
            (sampler, "__iter__", _on_host(sampler.__iter__)),
            (torch, "save", _save(torch.save)),
            (torch, "load", _load(torch.load)),
            (torch.multiprocessing, "spawn", _spawn),
            (nn.DataParallel, "forward", _data_parallel),
            (torch.profiler, "profile", _NoProfiler),
            (torch.autograd.profiler, "profile", _NoProfiler),
            (torch.autograd.profiler, "emit_nvtx", _NoProfiler),
            (torch.cuda, "nvtx", _NoProfiler()),
            (torch.cuda, "profiler", _NoProfiler()),
            (torch.cuda, "cudart", _NoProfiler),
        ]
    )


def _in_process(init: Callable[..., None]) -> Callable[..., None]:
    """`DataLoader.__init__` without worker processes and without pinned memory, whatever is asked for."""
    signature = inspect.signature(init)

    def make(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.arguments |= {name: value for name, value in _IN_PROCESS.items() if name in given.arguments}
        with torch.device("cpu"):
            init(*given.args, **given.kwargs)

    return make


def _on_host(iterate: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
    """`RandomSampler.__iter__` drawing on the host, also where `cuda` is the default device: its order is real."""

    def draw(sampler: Any) -> Iterator[int]:
        with torch.device("cpu"):
            order = list(iterate(sampler))
        return iter(order)

    return draw


# --- Checkpoints ------------------------------------------------------------------------------------------------------


class _FoundFake(Exception):  # noqa: N818 - it ends a search
    pass


class _Search(pickle.Pickler):
    """Walks through all that pickle would write, and stops at the first tensor without values."""

    def persistent_id(self, found: Any) -> str | None:
        """Raises _FoundFake for a fake tensor; other tensors are not looked into."""
        if isinstance(found, FakeTensor):
            raise _FoundFake
        return "tensor" if isinstance(found, (torch.Tensor, torch.UntypedStorage)) else None


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def _holds_fakes(value: Any) -> bool:
    try:
        _Search(_Nowhere()).dump(value)
    except _FoundFake:
        return True
    except Exception:  # noqa: BLE001 - what pickle does not take is torch.save's to complain about
        return False
    return False


def _save(save: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.save` that leaves files alone where it has no values to write, and says so the first time."""
    said = False

    def write(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal said
        if not _holds_fakes(obj):
            save(obj, f, *args, **kwargs)
        elif not said:
            said = True
            print("overspill: torch.save writes nothing during an estimate: nothing was computed", file=sys.stderr)  # noqa: T201

    return write


def _load(load: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.load` of real values, which then go to the virtual GPU where the file or `map_location` says so."""
    signature = inspect.signature(load)

    def read(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        asked = given.arguments.get("map_location")
        on_device: set[int] = set()

        def place(storage: Any, location: str) -> Any:
            if callable(asked):
                place_to = asked(storage, location)
                location = location if place_to is None else "cpu"
            elif isinstance(asked, dict):
                location = asked.get(location, location)
            elif asked is not None:
                location = str(asked)
            if location.startswith("cuda"):
                on_device.add(storage._cdata)
            return storage

        if str(asked) == "meta":
            return load(*args, **kwargs)
        given.arguments["map_location"] = place
        with unset_fake_temporarily():
            loaded = load(*given.args, **given.kwargs)
        return _moved(loaded, on_device) if on_device else loaded

    return read


def _moved(value: Any, on_device: set[int]) -> Any:
    """`value` with the tensors on the storages of `on_device` on the GPU, in containers and modules."""
    if isinstance(value, nn.Module):
        return value._apply(lambda tensor: _moved(tensor, on_device))
    if isinstance(value, torch.Tensor):
        there = isinstance(value, FakeTensor) or value.untyped_storage()._cdata in on_device
        return value.cuda() if there else value
    if isinstance(value, dict):
        for name in value:
            value[name] = _moved(value[name], on_device)
    if type(value) in {list, tuple}:
        return type(value)(_moved(item, on_device) for item in value)
    return value


def _data_parallel(self: nn.DataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """`DataParallel.forward` on the one GPU that there is: inputs of the host are copied there."""

    def there(value: Any) -> Any:
        return value.cuda() if isinstance(value, torch.Tensor) else value

    return self.module(*tree_map(there, inputs), **tree_map(there, kwargs))


class _NoProfiler:
    """A profiler that sees nothing: all of its methods do nothing, and its tables are empty."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _NoProfiler:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> _NoProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __str__(self) -> str:
        return ""


# --- Processes --------------------------------------------------------------------------------------------------------


def _spawn(
    fn: Callable[..., Any], args: tuple[Any, ...] = (), nprocs: int = 1, join: bool = True, daemon: bool = False,
    start_method: str = "spawn",
) -> None:  # fmt: skip
    """`torch.multiprocessing.spawn` of which the first process runs here; the others would do the same."""
    fn(0, *args)

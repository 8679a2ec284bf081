"""Patches for whole scripts on the virtual GPU: data loaders, profilers, processes.

The host side of a script works for real, with three exceptions. Worker processes would have no virtual GPU, pinned
memory needs a driver, and profilers would query one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from threading import get_ident
from typing import Any, ClassVar, Self

import torch
import torch.multiprocessing
import torch.utils.data
from torch import nn

from overspill.pytorch.data_loading import BATCHES, FETCH, NEXT, WORKER, WorkerInfo
from overspill.pytorch.dispatch import disable_current_modes
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.graphs import JitGraph
from overspill.pytorch.patching import Patches, patched
from overspill.pytorch.storages import key_of
from overspill.pytorch.trees import tree_map

from .values import real_values

_WORKER = "_overspill_worker"  # on a data loader: what its first worker knows of itself
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
    """Patch data loaders, profilers and `spawn` to work in this process."""
    loader, sampler = torch.utils.data.DataLoader, torch.utils.data.RandomSampler
    return patched(
        [
            # Data loading.
            (loader, "__init__", _in_process(loader.__init__)),
            (BATCHES, "__init__", _as_worker(BATCHES.__init__, lambda _, loader: loader)),
            (*NEXT, _as_worker(NEXT.now, lambda loading: loading)),
            (*FETCH, _without_device(FETCH.now)),
            (sampler, "__iter__", _on_host(sampler.__iter__)),
            # Processes and GPUs of which there is one.
            (torch.multiprocessing, "spawn", _spawn),
            (torch.multiprocessing, "Process", type("Process", (_Process,), {"started": []})),
            (ThreadPoolExecutor, "submit", _at_once(ThreadPoolExecutor.submit)),
            (nn.DataParallel, "forward", _data_parallel),
            # Profilers and traces, which TensorBoard draws.
            (torch.jit, "trace", _trace(torch.jit.trace)),
            (torch.profiler, "profile", _NoProfiler),
            (torch.autograd.profiler, "profile", _NoProfiler),
            (torch.autograd.profiler, "emit_nvtx", _NoProfiler),
            (torch.cuda, "nvtx", _NoProfiler()),
            (torch.cuda, "profiler", _NoProfiler()),
            (torch.cuda, "cudart", _NoProfiler),
            *_files_of_bytes(),
        ]
    )


def _in_process(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap `DataLoader.__init__` to use no worker processes and no pinned memory.

    To the data set this process is then the first worker.
    """
    signature = inspect.signature(init)

    def make(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        workers, first = given.arguments.get("num_workers", 0), given.arguments.get("worker_init_fn")
        given.arguments |= {name: value for name, value in _IN_PROCESS.items() if name in given.arguments}
        with torch.device("cpu"):
            init(*given.args, **given.kwargs)
        # The data set may ask which worker it is in.
        if workers:
            loader = args[0]
            loader.__dict__[_WORKER] = WorkerInfo(
                id=0, num_workers=workers, seed=torch.initial_seed(), dataset=loader.dataset
            )
            if first is not None:
                _as_worker(lambda _: first(0), lambda loader: loader)(loader)

    return make


def _as_worker(load: Callable[..., Any], loader_of: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `load`, a method that gets data, to run as the first worker of its loader."""

    def run(*args: Any) -> Any:
        loading = args[0]
        loading.__dict__.setdefault(_WORKER, getattr(loader_of(*args), _WORKER, None))
        with patched([(*WORKER, loading.__dict__[_WORKER])]):
            return load(*args)

    return run


class _FakeSample(BaseException):
    """Raised where a sample uses a fake tensor; no Exception, which a data set might catch."""


def _without_device(fetch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `fetch`, by which data sets make samples, to run at full speed in a worker: a forked process has no device.

    If it meets a fake tensor, which would leave a plain one without its values, it runs again as the program's own.
    """

    def met(*_: Any) -> None:
        raise _FakeSample

    def run(*args: Any) -> Any:
        if WORKER.now is not None and not real_values.is_any_unknown():
            try:
                with disable_current_modes(), patched([(FakeTensor, "__torch_dispatch__", classmethod(met))]):
                    return fetch(*args)
            except _FakeSample:
                pass
        return fetch(*args)

    return run


def _on_host(iterate: Callable[..., Iterator[int]]) -> Callable[..., Iterator[int]]:
    """Wrap `RandomSampler.__iter__` to draw on the host even if `cuda` is the default device: its order is real."""

    def draw(sampler: Any) -> Iterator[int]:
        order = iterate(sampler)
        while True:  # a sampler may have no end, so each index is drawn when asked for
            with torch.device("cpu"):
                index = next(order, None)
            if index is None:
                return
            yield index

    return draw


def _at_once(submit: Callable[..., Future[Any]]) -> Callable[..., Future[Any]]:
    """Wrap `ThreadPoolExecutor.submit` to run work of the script's own thread there.

    No other thread has tensors of the virtual GPU.
    """
    here = get_ident()

    def run(pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        if get_ident() != here:
            return submit(pool, work, *args, **kwargs)
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for, as of a thread
            done.set_exception(error)
        return done

    return run


# --- Models and profilers ---------------------------------------------------------------------------------------------


def _data_parallel(self: nn.DataParallel, *inputs: Any, **kwargs: Any) -> Any:
    """Run `DataParallel.forward` on the only GPU, to which inputs on the host are copied."""

    def there(value: Any) -> Any:
        return value.cuda() if isinstance(value, torch.Tensor) else value

    return self.module(*tree_map(there, inputs), **tree_map(there, kwargs))


def _trace(trace: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `torch.jit.trace` to run a model once and return it, because sizes are tensors to the tracer."""

    def run(traced: Any, example_inputs: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(traced, _TracedModel):
            return traced
        if not isinstance(traced, nn.Module) or example_inputs is None:
            return trace(traced, example_inputs, *args, **kwargs)
        traced(*example_inputs) if isinstance(example_inputs, tuple) else traced(example_inputs)
        return _TracedModel(traced)

    return run


class _TracedModel:
    """A model in place of its trace, with a graph of no ops."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.graph = model, JitGraph()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *_: Any, **__: Any) -> None:
        """Do nothing: the model has no values to save."""


class _NoProfiler:
    """A profiler that does nothing and has empty tables."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> _NoProfiler:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __str__(self) -> str:
        return ""


# --- Files of bytes ---------------------------------------------------------------------------------------------------


def _files_of_bytes() -> Patches:
    """Return patches for safetensors, which skip fake tensors.

    safetensors needs addresses of storages and writes their bytes.
    """
    pointer = torch.UntypedStorage.data_ptr

    def address(storage: torch.UntypedStorage) -> int:
        try:
            return pointer(storage)
        except RuntimeError:  # a fake tensor's, which is known by its own object
            return key_of(storage)

    # Addresses tell storages apart; nothing is read from them.
    patches: Patches = [
        (torch.UntypedStorage, "data_ptr", address),
        (FakeTensor, "data_ptr", lambda tensor: address(tensor.untyped_storage()) + tensor.storage_offset()),
    ]
    if find_spec("safetensors") is not None:
        module: Any = import_module("safetensors.torch")
        patches += [(module, name, _with_values(getattr(module, name))) for name in ("save", "save_file")]
    return patches


def _with_values(save: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of safetensors to save real tensors only, possibly none."""

    def write(tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        return save({k: v for k, v in tensors.items() if not isinstance(v, FakeTensor)}, *args, **kwargs)

    return write


# --- Processes --------------------------------------------------------------------------------------------------------


def _spawn(fn: Callable[..., Any], args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
    """Run the first process of `torch.multiprocessing.spawn` here, and no other; they would do the same."""
    fn(0, *args)


class _Process:
    """A `torch.multiprocessing.Process` of which the first runs here when it starts; the others would do the same."""

    started: ClassVar[list[Any]]
    exitcode, pid, daemon = 0, 0, False

    def __init__(
        self, group: Any = None, target: Callable[..., Any] | None = None, name: str | None = None,
        args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None, **_: Any,
    ) -> None:  # fmt: skip
        del group
        self.name, self._work = name, target and partial(target, *args, **(kwargs or {}))

    def start(self) -> None:
        """Do its work, if no other process has started."""
        self.started.append(self)
        if len(self.started) == 1 and self._work is not None:
            self._work()

    def is_alive(self) -> bool:
        """Return False: it is done."""
        return False

    def _nothing(self, *_: Any) -> None:
        pass

    join = terminate = kill = close = _nothing

"""The state of a Python process that a script may change, put back after it."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

Restore = Callable[[], Any]
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


@contextmanager
def kept_process(folder: Path) -> Iterator[None]:
    """What runs inside leaves no trace in Python's and torch's global settings, nor modules from below `folder`."""
    with ExitStack() as stack:
        for remember in (_interpreter, _logs, _signals, _random_numbers, _torch_settings, _autocast):
            for restore in remember():
                stack.callback(restore)
        for restore in _modules(str(folder)):
            stack.callback(restore)
        yield


def _interpreter() -> Iterator[Restore]:
    arguments, path, hook = list(sys.argv), list(sys.path), sys.excepthook
    directory, environment = os.getcwd(), dict(os.environ)  # noqa: PTH109

    def restore() -> None:
        sys.argv[:], sys.path[:], sys.excepthook = arguments, path, hook
        os.chdir(directory)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if os.environ.get(name) != value})

    yield restore


def _modules(folder: str) -> Iterator[Restore]:
    """Modules that came from the script's folder go again; those of libraries cannot be imported twice."""
    before = dict(sys.modules)

    def restore() -> None:
        for name, module in list(sys.modules.items()):
            if name not in before and name.split(".")[0] != "overspill":
                origin = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), "")
                if origin.startswith(folder) and not origin.startswith(_LIBRARIES):
                    del sys.modules[name]
        for name, module in before.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module

    yield restore


def _logs() -> Iterator[Restore]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def restore() -> None:
        root.handlers[:] = handlers
        root.setLevel(level)

    yield restore


def _signals() -> Iterator[Restore]:
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        handler = signal.getsignal(number)
        if handler is not None:
            yield partial(signal.signal, number, handler)


def _random_numbers() -> Iterator[Restore]:
    yield partial(random.setstate, random.getstate())
    yield partial(np.random.set_state, np.random.get_state(legacy=False))  # noqa: NPY002 - it is what scripts seed
    yield partial(torch.set_rng_state, torch.get_rng_state())


def _torch_settings() -> Iterator[Restore]:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    yield partial(torch.set_default_device, None if context is None else context.device)
    for get, put in (
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
        (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
        (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    ):
        yield partial(put, get())
    for owner, names in (
        (torch.backends.cudnn, ("benchmark", "deterministic", "allow_tf32", "enabled")),
        (torch.backends.cuda.matmul, ("allow_tf32",)),
    ):
        for name in names:
            yield partial(setattr, owner, name, getattr(owner, name))


def _autocast() -> Iterator[Restore]:
    for device in ("cpu", "cuda"):
        yield partial(torch.set_autocast_enabled, device, torch.is_autocast_enabled(device))
        yield partial(torch.set_autocast_dtype, device, torch.get_autocast_dtype(device))
    yield torch.clear_autocast_cache

"""Collectives whose memory is free when they are done, and the error of a rank that others wait for."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overspill.core.errors import OverspillError
from overspill.pytorch.dispatch import no_python_dispatcher
from overspill.pytorch.distributed import default_store
from overspill.pytorch.storages import storage_uses, tensor_uses

MOST_LOOKS = 2000
"""How often a thread that waits for gloo's looks whether it has let a tensor go."""
WAITED = "another rank did not come to a collective of this step"
FAILURE = "overspill: a rank failed"
"""The key of the process group's store under which the first rank that fails within a step records why."""


def _named(name: str, before: str) -> Any:
    """Return a collective by its name since PyTorch 2.13, or by the earlier one."""
    return getattr(dist, name, None) or getattr(dist, before, None)


all_gather = _named("all_gather_single", "all_gather_into_tensor")
reduce_scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")


def in_one_call(tensors: Sequence[Tensor], collective: Callable[[Tensor], None]) -> None:
    """Run `collective` on all `tensors` in one call, because each call has a cost."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if len(tensors) == 1 and tensors[0].is_contiguous():
        lent((tensors[0],), collective)
    elif tensors:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        lent((flat,), collective)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view(tensor.shape))


@contextmanager
def others_needed() -> Iterator[None]:
    """Turn the failure of another rank during a collective in the context into a one-line error.

    While AOTAutograd traces, PyTorch would call a collective's kernel with Python's lock held. The thread of gloo needs
    that to release tensors, and has its queue locked then: both would wait for ever.
    """
    try:
        with no_python_dispatcher():
            yield
    except RuntimeError as error:
        raise OverspillError(
            f"{WAITED}: {_told_failure()}; look at the other ranks' errors, and start all again from a checkpoint"
        ) from error


def _told_failure() -> str:
    """Return the reason that a failed rank has recorded, or a general one."""
    with suppress(RuntimeError):  # the store is gone with the process that had it
        if (store := default_store()).check([FAILURE]) and (told := store.get(FAILURE)):
            return told.decode()
    return "it has failed, has ended, or the group's timeout was over"


def lent(tensors: Sequence[Tensor], collective: Callable[..., Any]) -> None:
    """Run `collective` on `tensors`, and wait until the backend has released them."""
    started(tensors, collective)()


def started(tensors: Sequence[Tensor], collective: Callable[..., Any]) -> Callable[[], None]:
    """Start `collective` on `tensors`; return a function that waits until the backend has released them.

    The thread of gloo holds its tensors, or views of them, for a moment after the collective is done. Until then the
    memory cannot be freed.
    """
    kept = [*tensors, *(tensor.detach() for tensor in tensors)]
    given = kept[len(tensors) :]
    held = [*map(_holders, given)]
    with others_needed():
        works = [collective(*given)]

    def wait() -> None:
        with others_needed():
            if (work := works.pop()) is not None:
                work.wait()
                del work
        if given[0].device.type == "cpu":
            for looks in range(MOST_LOOKS):  # no deadline: on a machine that stood still, the thread may come later
                if all(now <= before for now, before in zip(map(_holders, given), held, strict=True)):
                    break
                time.sleep(0 if looks < MOST_LOOKS // 2 else 0.001)
        kept.clear()

    return wait


def _holders(tensor: Tensor) -> int:
    """Return how many references hold `tensor` and others that share its memory.

    References from Python count too: a thread of gloo releases the Python object later than the tensor.
    """
    storage = storage_uses(tensor.untyped_storage())
    return sys.getrefcount(tensor) + tensor_uses(tensor) + storage


def whole_storage(tensor: Tensor) -> Tensor:
    """Return the storage of `tensor` as one row, `[elements]`, shared with all its views."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((elements,), (1,), 0)

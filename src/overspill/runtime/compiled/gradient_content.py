"""The bytes of a stored gradient, and their way to the device and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TypeAlias

import torch
from torch import Tensor

from overspill.core.errors import OverspillError, StoreError
from overspill.runtime.step.residency import Spec
from overspill.runtime.transfer.engine import TransferEngine
from overspill.runtime.transfer.lanes import CLOSED

Factor: TypeAlias = float | Tensor
"""A number, or a tensor of one element without dimensions."""


class Content:
    """The bytes of a gradient. Tensor objects share a content, as `g` and `g.detach()` do.

    It is *stored* while it has a handle, on the device while it is `real`, and empty without either.
    """

    __slots__ = ("added_to", "engine", "factors", "handle", "leaving", "lock", "real", "spec", "was_read")

    def __init__(self, spec: Spec, engine: TransferEngine | None) -> None:
        self.spec = spec
        self.engine = engine
        """None if it is on the device from the start."""
        self.handle: Tensor | None = None
        """The handle of its bytes in the store."""
        self.leaving: Tensor | None = None
        """The gradient while its bytes are on their way to the store."""
        self.factors: tuple[Factor, ...] = ()
        """By what the stored bytes have to be multiplied, in this order."""
        self.real: Tensor | None = None
        """The gradient, once it is on the device for good."""
        self.added_to: Content | None = None
        """The gradient to which the program has added this one already, of which there are no bytes."""
        self.was_read = False
        """Whether its bytes have been brought from the store since this was last set."""
        self.lock = RLock()
        """Held while an op uses it: autograd's threads do so too."""

    def check(self) -> None:
        """Raise OverspillError if it is empty."""
        if self.added_to is not None:
            raise OverspillError(
                "this gradient has no values: it has been added to the one that the parameter had before; "
                "read the parameter's `.grad` after backward"
            )
        if self.handle is None and self.real is None:
            raise OverspillError(
                "this gradient is gone: the update of its parameter has used it up; read it before optimizer.step()"
            )

    def leave(self, data: Tensor) -> None:
        """Start to send `data` as its bytes, which `settle` ends. Raises StoreError; then it stays on the device."""
        assert self.engine is not None
        self.stay(data)  # the old bytes go first, so that their slot is used again
        self.handle = self.engine.offload(data)
        self.real, self.leaving = None, data

    def settle(self) -> None:
        """Wait until its bytes are in the store. Raises StoreError; then it stays on the device."""
        with self.lock:
            if self.leaving is None:
                return
            assert self.engine is not None
            assert self.handle is not None
            try:
                self.engine.await_offload(self.handle, self.leaving)
            except BaseException:
                self.stay(self._multiplied(self.leaving))
                raise
            self.leaving = None

    def start(self) -> Tensor:
        """Start to bring it, and return the memory for it. Raises StoreError."""
        self.settle()
        assert self.handle is not None
        assert self.engine is not None
        self.was_read = True
        with torch.inference_mode(False):  # what stays is changed outside of it too
            try:
                self.engine.await_offload(self.handle)
                return self.engine.prefetch(self.handle)
            except KeyError:
                raise StoreError(CLOSED) from None

    def arrived(self, data: Tensor) -> Tensor:
        """Wait for the memory from `start`, and return the gradient in it. Raises StoreError."""
        assert self.engine is not None
        self.engine.await_prefetch(data)
        return self._multiplied(data)

    def _multiplied(self, data: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            for factor in self.factors:
                data.mul_(factor)
        return data

    def stay(self, data: Tensor) -> Tensor:
        """Keep `data` on the device for good, and return it."""
        self.real, self.handle, self.leaving, self.factors = data, None, None, ()
        return data

    def give_up(self) -> tuple[Tensor, tuple[Factor, ...]]:
        """Hand over its handle and factors; it is empty then. Raises OverspillError if it is not stored."""
        with self.lock:
            self.check()
            self.settle()
            if self.handle is None:
                raise OverspillError("this gradient is on the device; call take() instead of give_up()")
            given = self.handle, self.factors
            self.handle, self.factors = None, ()
        return given

    def take(self) -> Tensor:
        """Bring it for good. Raises StoreError, and OverspillError if it is empty."""
        with self.lock:
            self.check()
            return self.stay(self.arrived(self.start())) if self.real is None else self.real

    @contextmanager
    def read(self) -> Iterator[Tensor]:
        """Give its values to a reader for the time of the block."""
        with self.lock:
            self.check()
            yield self.arrived(self.start()) if self.real is None else self.real

    def multiply(self, factor: Factor) -> bool:
        """Multiply it at its next use; return False if it is not stored."""
        with self.lock:
            if self.handle is None:
                return False
            # The caller may change the tensor afterwards.
            self.factors += (factor.detach().clone() if isinstance(factor, Tensor) else factor,)
        return True


class GradientTransfers:
    """The transfers around ops: gradients that arrive for this op or the next, or leave after one."""

    def __init__(self) -> None:
        self._arriving: dict[Content, tuple[Tensor, Tensor]] = {}
        self._leaving: list[Content] = []

    def start(self, contents: Iterable[Content]) -> None:
        """Start to bring the stored ones, but for those that another thread uses. Raises StoreError."""
        for content in contents:
            if content not in self._arriving and content.lock.acquire(blocking=False):  # waiting, two might for ever
                try:
                    if (handle := content.handle) is not None:
                        self._arriving[content] = handle, content.start()
                finally:
                    content.lock.release()

    def arrive(self, content: Content) -> Tensor:
        """Return the gradient, on the device; its lock is held. Raises StoreError."""
        handle, data = self._arriving.pop(content, (None, None))
        if data is not None and handle is not content.handle:  # it has changed since
            _cancel(content, data)
            data = None
        return content.arrived(content.start() if data is None else data)

    def leave(self, content: Content, data: Tensor) -> None:
        """Start to send `data` as the gradient's bytes; its lock is held. Raises StoreError."""
        content.leave(data)
        self._leaving.append(content)

    def settle(self) -> None:
        """Wait for those that leave; no lock is held. Raises StoreError; what could not be written is on the device."""
        while self._leaving:
            self._leaving.pop().settle()

    def close(self) -> None:
        """Finish those that leave, and cancel those that nobody has waited for."""
        try:
            self.settle()
        finally:
            while self._arriving:
                content, (_, data) = self._arriving.popitem()
                _cancel(content, data)


def _cancel(content: Content, data: Tensor) -> None:
    assert content.engine is not None
    content.engine.cancel(data)

"""Count the live bytes of a real run, independently of the planner.

Every storage that an op reads or makes counts while it lives, and on the CPU what an op takes and gives back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from overspill.capture.programs.allocations import changes_of, peak_of
from overspill.pytorch.autograd import profiler_enabled
from overspill.pytorch.dispatch import DisableTorchFunctionSubclass, TorchDispatchMode
from overspill.pytorch.storages import key_of
from overspill.pytorch.trees import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that counts live and peak bytes on `device`.

    Enter it inside compiled callables and around eager code, never around a call of a compiled model. Dynamo would
    silently run that eagerly.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.live_bytes = 0
        self.peak_bytes = 0
        self.watch: Callable[[int, int], None] | None = None
        """Called with a storage's key and bytes when it is counted, and with negative bytes when it is freed."""
        self.left_out: set[int] = set()
        """Keys of storages that others count."""
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, values: Iterable[Any]) -> None:
        """Count the storages of all tensors among `values`, each once."""
        with DisableTorchFunctionSubclass():  # what a train step has in its store stays there
            for value in values:
                if isinstance(value, torch.Tensor) and value.device == self.device:
                    self._count(value.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Return whether `storage` is counted."""
        return key_of(storage) in self._known

    def there(self) -> Iterator[tuple[int, int]]:
        """Yield key and bytes of each storage counted now."""
        for key, known in list(self._known.items()):
            if (storage := known()) is not None:
                yield key, storage.nbytes()

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = key_of(storage)
        nbytes = 0 if key in self.left_out else storage.nbytes()
        if key in self._known:
            return

        def died(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._known[key]
            self.left_out.discard(key)  # another may get it
            self.live_bytes -= nbytes
            if self.watch is not None:
                self.watch(key, -nbytes)

        self._known[key] = weakref.ref(storage, died)
        self.live_bytes += nbytes
        if self.watch is not None:
            self.watch(key, nbytes)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, and count the storages of its arguments and results, and on the CPU what it takes meanwhile."""
        del types
        self.add(tree_leaves((args, kwargs)))
        before, changes = self.live_bytes, list[int]()
        if self.device.type != "cpu" or profiler_enabled():
            result = func(*args, **(kwargs or {}))
        else:
            result, changes = changes_of(lambda: func(*args, **(kwargs or {})))
        self.peak_bytes = max(self.peak_bytes, before + peak_of(changes)[0])
        self.add(tree_leaves(result))
        return result

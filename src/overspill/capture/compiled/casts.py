"""Let autocast cast each parameter once while a step is traced, as in eager.

In eager, a parameter that several ops of one autocast region read is cast at the first of them. Its gradients add up
before the cast's backward, in the lower precision. PyTorch's cast cache works on leaf tensors, and a trace has none:
without this module each op would cast the parameter again.

While a step is traced, `torch.set_autocast_enabled` and `torch.clear_autocast_cache` are replaced, to learn where
regions begin and end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from overspill.pytorch.dispatch import DispatchKey, call_kernel
from overspill.pytorch.storages import is_view

CAST = torch.ops.aten.to.dtype


class Casts:
    """The autocast cache of one trace: which parameters have been cast already."""

    def __init__(self) -> None:
        self._leaves: dict[int, Tensor] = {}
        self._cast: dict[int, tuple[Tensor, Tensor]] = {}  # by id; holds the original too, so that its id stays its own
        self._in_region: dict[str, bool] = {}
        self._wanted = torch.is_autocast_cache_enabled()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Follow where autocast regions begin and end, inside the block."""
        enable, clear = torch.set_autocast_enabled, torch.clear_autocast_cache
        self._in_region = {d: torch.is_autocast_enabled(d) for d in ("cpu", "cuda")}

        # autocast calls these two where a region begins and ends.
        def set_enabled(*args: Any) -> None:
            device, enabled = args if len(args) > 1 else ("cuda", *args)
            self._in_region[str(device)] = enabled
            enable(*args)

        def clear_cache() -> None:
            self._cast.clear()
            clear()

        try:
            with (
                patch.object(torch, "set_autocast_enabled", set_enabled),
                patch.object(torch, "clear_autocast_cache", clear_cache),
            ):
                yield
        finally:
            self._leaves.clear()
            self._cast.clear()

    def begin(self, leaves: Iterable[Tensor]) -> None:
        """Start a trace of the step; `leaves` are the traced tensors of its parameters."""
        self._leaves = {id(leaf): leaf for leaf in leaves}
        self._cast = {}

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Cast parameters again inside the block, as in the recomputation of a checkpoint."""
        before, self._cast = self._cast, {}
        try:
            yield
        finally:
            self._cast = before

    def cast(self, x: Tensor, dtype: torch.dtype, *options: Any, **named: Any) -> Tensor:
        """Return `x.to(dtype)`, or the earlier cast where autocast casts a leaf again."""
        asked = self._is_leaf(x) and self._asks(x, dtype)
        if asked and id(x) in self._cast:
            return self._cast[id(x)][1]
        result = call_kernel(CAST, DispatchKey.CompositeImplicitAutograd, x, dtype, *options, **named)
        if asked:
            self._cast[id(x)] = x, result
        return result

    def _is_leaf(self, x: Tensor) -> bool:
        """Return whether eager caches the cast of `x`: a leaf, such as a parameter."""
        return id(x) in self._leaves or (isinstance(x, Tensor) and x.requires_grad and x.is_leaf and not is_view(x))

    def _asks(self, x: Tensor, dtype: torch.dtype) -> bool:
        """Return whether autocast requests `x` in `dtype`, inside an op whose arguments it casts."""
        device = x.device.type
        return (
            self._wanted
            and x.dtype is torch.float32
            and self._in_region.get(device, False)
            and dtype == torch.get_autocast_dtype(device)  # which some devices, as meta, have none of
            and not torch.is_autocast_enabled(device)  # within such an op
        )

"""Says to the stand-in GPU what the kernels of each op read and write: its tensors' bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import stand_in
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MAKES_ONLY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "set_", "detach", "alias"}
"""Ops that touch no byte of any tensor."""


class Touching(TorchDispatchMode):
    """A dispatch mode that stands where the tracker of a session or step stands, and logs what ops touch on CUDA.

    What a kernel touches beside its tensors, such as its workspace, is not seen. Transfers are seen by the stand-in itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.names: list[str] = [""]
        self._labels: dict[str, int] = {}

    def add(self, values: Iterable[Any]) -> None:
        """Nothing is counted here."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.namespace != "overspill" and func._schema.name.split("::")[1] not in MAKES_ONLY:
            self._touched(func, args, kwargs, result)
        return result

    def _touched(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        schema = func._schema
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if is_view:
            return
        label = self._label(schema.name)
        for argument, value in zip(schema.arguments, (*args, *map(kwargs.get, _names(schema, args)))):  # noqa: B905
            written = argument.alias_info is not None and argument.alias_info.is_write
            _log(value, written, label)
        _log(result, True, label)

    def _label(self, name: str) -> int:
        if name not in self._labels:
            self._labels[name] = len(self.names)
            self.names.append(name)
        return self._labels[name]


def _names(schema: Any, args: tuple[Any, ...]) -> list[str]:
    return [argument.name for argument in schema.arguments[len(args) :]]


def _log(value: Any, writes: bool, label: int) -> None:
    for tensor in tree_leaves(value):
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.numel():
            extent = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True)) + 1
            stream = torch.cuda.current_stream(tensor.device).cuda_stream
            stand_in.access(stream, tensor.data_ptr(), extent * tensor.element_size(), writes=writes, label=label)

"""Find in-place ops of autograd's engine, which it runs out of place on fake tensors.

torch/csrc/autograd/input_buffer.cpp, `accumulate`: where gradients meet, the second is added to the first in place if
nothing else holds the first. torch/csrc/autograd/FunctionsManual.cpp, `index_backward`: values go into new zeros in
place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from overspill.capture.frames import ENGINE
from overspill.pytorch.autograd import current_backward, current_node, sequence_number
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.storages import storage_uses, tensor_uses

aten = torch.ops.aten
_FOLDER = str(Path(__file__).parents[1])
# References to a tensor, and to its storage, while a dispatched op looks at it that only its caller in C++ holds.
_ONE_TENSOR, _ONE_STORAGE = 4, 2


def in_place(func: Any, args: Any, made_by: Callable[[Tensor], int | None]) -> Any:
    """Return the in-place op that the engine runs for plain tensors, or None.

    `made_by` gives the autograd node that made a tensor: adding two tensors of the running node is part of its own
    formula.
    """
    instead = _IN_PLACE.get(func)
    if instead is None or current_backward() == -1 or torch.is_grad_enabled():
        return None
    node = current_node()
    if node is None or not called_by_engine():
        return None
    if func is aten.index_put.default:
        return instead if node.name() == "IndexBackward0" else None
    # Gradients that meet: added in place if nothing else holds the first.
    old, new = args
    if not isinstance(old, FakeTensor) or not isinstance(new, FakeTensor) or old.shape != new.shape:
        return None
    alone = tensor_uses(old) == _ONE_TENSOR and storage_uses(old.untyped_storage()) == _ONE_STORAGE
    if alone and made_by(old) != sequence_number(node) and _is_dense(old):
        return instead
    return None


def called_by_engine() -> bool:
    """Return whether the engine itself dispatches, not Python of a hook or backward."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_FOLDER):
        frame = frame.f_back
    return frame.f_code is ENGINE


def _is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` are contiguous in some order of dimensions, without overlap."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


_IN_PLACE = {aten.add.Tensor: aten.add_.Tensor, aten.index_put.default: aten.index_put_.default}

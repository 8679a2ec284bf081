"""Tensors without values: those of FakeTensorMode, and the functional ones of AOTAutograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch._guards
import torch._subclasses.fake_impls
import torch._subclasses.fake_tensor
import torch._subclasses.meta_utils
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,  # an op asked for a value
)
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException as DynamicOutputShapeException,  # a shape follows from values
)
from torch._subclasses.fake_tensor import (
    FakeTensor as FakeTensor,  # a tensor with a shape, a dtype and a device, and no values
)
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode  # the mode that makes them
from torch._subclasses.fake_tensor import (
    UnsupportedOperatorException as UnsupportedOperatorException,  # an op has no fake kernel
)
from torch._subclasses.functional_tensor import (
    FunctionalTensor as FunctionalTensor,  # a tensor whose changes in place are recorded as new values
)
from torch._subclasses.functional_tensor import FunctionalTensorMode as FunctionalTensorMode  # the mode that makes them

from .patching import Target

op_implementations_dict = torch._subclasses.fake_impls.op_implementations_dict
"""Ops that FakeTensorMode treats by functions of its own."""
in_kernel_invocation_manager = torch._subclasses.fake_tensor.in_kernel_invocation_manager
"""Context: a fake tensor is its meta tensor."""
fake_log = torch._subclasses.fake_tensor.log
"""The logger of fake tensors."""
unset_fake_temporarily = torch._subclasses.fake_tensor.unset_fake_temporarily
"""Context: tensors are real ones."""
active_fake_mode = torch._guards.active_fake_mode
"""The FakeTensorMode that is on, or None."""
detect_fake_mode = torch._guards.detect_fake_mode
"""The FakeTensorMode of these tensors, or of the trace that runs."""


CLASS = Target(torch._subclasses, "FakeTensor")
"""Where libraries find FakeTensor, to ask whether they are traced."""
GPU_CONTEXT = Target(torch._subclasses.fake_tensor, "init_gpu_context")
"""What starts CUDA for a fake tensor on a GPU."""
_FAKE = torch._C._TorchDispatchModeKey.FAKE


FROM_TENSOR = Target(FakeTensorMode, "from_tensor")
"""What makes the fake of a real tensor."""


def fake_parameter(mode: FakeTensorMode, parameter: Tensor, empty: Callable[[], Tensor]) -> FakeTensor:
    """Return the fake of `parameter` in `mode`, as `empty()` makes it there; always the same one."""
    converter = mode.fake_tensor_converter
    if (known := converter._get_memo(parameter)) is not None:
        return known
    with mode:
        fake: Any = empty().requires_grad_(parameter.requires_grad)
    fake._is_param = isinstance(parameter, torch.nn.Parameter)
    converter.set_tensor_memo(parameter, fake)
    found: FakeTensor = fake
    return found


def current_fake_mode() -> Any:
    """Return the FakeTensorMode of the current dispatch, or None."""
    return torch._C._get_dispatch_mode(_FAKE)


def is_functional(tensor: Tensor) -> bool:
    """Return whether a tensor is a functional one, in C or in Python."""
    return torch._is_functional_tensor(tensor)


def functional_value(tensor: Tensor) -> Tensor:
    """Return the value that a functional tensor has now."""
    return torch._from_functional_tensor(tensor)


def replace_value(tensor: Tensor, value: Tensor) -> None:
    """Give a functional tensor another value."""
    torch._functionalize_replace(tensor, value)


def is_description() -> bool:
    """Return whether PyTorch looks at a real tensor only to describe it to a FakeTensorMode: it reads no memory."""
    describes = torch._subclasses.meta_utils.MetaTensorDescriber.describe_tensor.__code__
    frame = inspect.currentframe()
    for _ in range(6):  # some of the frames are ours and Dynamo's
        if frame is not None and frame.f_code is not describes:
            frame = frame.f_back
    return frame is not None and frame.f_code is describes

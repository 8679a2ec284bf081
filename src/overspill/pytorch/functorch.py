"""Transforms of torch.func, and the settings of AOTAutograd."""

from __future__ import annotations

import torch
import torch._functorch.config
import torch._functorch.eager_transforms
import torch._functorch.pyfunctorch
from torch._C._functorch import TransformType as TransformType  # their kinds

from .patching import Target

functorch_config = torch._functorch.config
"""AOTAutograd's settings."""
WRAP_FOR_GRAD = Target(torch._functorch.eager_transforms, "_wrap_for_grad")
"""What takes a tensor in as the input of a transform."""
active_transforms = torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters
"""The transforms that are running, innermost last."""
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Whether a tensor is one of a transform."""

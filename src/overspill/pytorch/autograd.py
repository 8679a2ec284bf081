"""The engine that runs backward, and the nodes of its graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.autograd
import torch.autograd.graph
import torch.utils.checkpoint
from torch import Tensor

from .patching import Target

current_node = torch._C._current_autograd_node
"""The node that backward runs in this thread, or None."""
current_backward = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread, or -1."""
keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether it runs with retain_graph=True."""
push_saved_hooks = torch._C._autograd._push_saved_tensors_default_hooks
"""Set hooks on what autograd saves."""
PUSH_SAVED_HOOKS = Target(torch._C._autograd, "_push_saved_tensors_default_hooks")
"""The same, to be replaced."""
top_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""The hooks that are set."""
SAVED = "_saved_"
"""How the attributes of a node begin that hold what forward saved."""
next_sequence_number = torch.autograd._get_sequence_nr
"""The number that the next node will have."""
profiler_enabled = torch.autograd._profiler_enabled
"""Whether a profiler records in this thread."""
engine_run_backward = torch.autograd.graph._engine_run_backward
"""Where backward begins."""
_CHECKPOINT = "_checkpoint_without_reentrant_generator"
_SINCE_2_14 = f"{_CHECKPOINT}_impl"
CHECKPOINT = Target(
    torch.utils.checkpoint, _SINCE_2_14 if hasattr(torch.utils.checkpoint, _SINCE_2_14) else _CHECKPOINT
)
"""A checkpoint, before and after its function."""
is_compiling_checkpoint = torch.utils.checkpoint._is_compiling
"""Whether a checkpoint is traced by torch.compile."""


def sequence_number(node: Any) -> int:
    """Return the number of a node, by which backward of one forward op is found."""
    return node._sequence_nr()


def hooks_of(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks that `register_hook` gave a tensor."""
    return tensor._backward_hooks or {}


def accumulate_hooks_of(tensor: Tensor) -> dict[int, Any]:
    """Return the hooks that `register_post_accumulate_grad_hook` gave a tensor."""
    return getattr(tensor, "_post_accumulate_grad_hooks", None) or {}

"""TorchInductor: kernels and the programs that call them. Its import takes two seconds."""

from __future__ import annotations

import torch._inductor.compile_fx
import torch._inductor.utils
from torch._inductor.codecache import PyCodeCache as PyCodeCache  # the programs that it has written: `load_by_key_path`
from torch._inductor.custom_graph_pass import (
    CustomPartitionerFn as CustomPartitionerFn,  # a partition of one's own; since 2.8
)
from torch._inductor.utils import ALIGNMENT as ALIGNMENT  # bytes that inputs of kernels are aligned to

compile_fx = torch._inductor.compile_fx.compile_fx
"""Compile a graph as stock torch.compile does."""
compile_fx_inner = torch._inductor.compile_fx.compile_fx_inner
"""Compile one graph of forward or backward."""
align_inputs_from_check_idxs = torch._inductor.utils.align_inputs_from_check_idxs
"""The function around a program that copies unaligned inputs."""
clone_preserve_strides = torch._inductor.utils.clone_preserve_strides
"""Such a copy."""

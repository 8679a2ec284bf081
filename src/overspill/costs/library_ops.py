"""Ops that take memory in addition to their results, and the bytes of an update: one table for estimates and plans.

`scratch.py` has the sizes of workspaces.
"""

from __future__ import annotations

from .scratch import Scratch, Software, scratch_bytes

MATRIX_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "addbmm", "_addmm_activation"})
"""Ops whose first call on each thread makes a cuBLAS handle, with a workspace that stays."""
CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
"""Ops that can do with less workspace than is likely, or with none: cuDNN's next engine is tried."""
CUDNN = CONVOLUTIONS | {"_cudnn_rnn", "Convolution", "Conv2D"}
"""Ops of PyTorch, MXNet and TensorFlow that load cuDNN, whose kernels count in the CUDA context."""
SLICE_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
"""Bytes of a parameter that a whole step updates at a time; on CUDA a launch costs more than the temporaries."""


def handle_bytes(compute_capability: str, software: Software) -> tuple[int, ...]:
    """Return the bytes that libraries keep for each thread that multiplies matrices, in order of allocation."""
    kept = (Scratch(family, (), "") for family in ("gemm_handle", "lt_handle"))
    sizes = (scratch_bytes(scratch, compute_capability, software).central for scratch in kept)
    return tuple(nbytes for nbytes in sizes if nbytes)

"""Workspaces of libraries: cuBLAS, cuDNN, sorting, attention kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from .blas_workspace import Lifetime, cublas_workspace_bytes, cublaslt_workspace_bytes
from .capability import capability_of
from .engines import Convolution, kind_of, likeliest, roomy, workspaces
from .interval import NOTHING, Interval

LARGE_GPU = 132
"""Multiprocessors of an H100, used where the GPU's own number is unknown."""
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "DISABLE_ADDMM_CUDA_LT",
)  # fmt: skip


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


@dataclass(frozen=True)
class Software:
    """Releases of PyTorch and CUDA, and cuBLAS's environment variables."""

    torch_version: str = "2.13"
    cuda_version: str = "13.0"
    environment: Mapping[str, str] = field(default_factory=_environment)


@dataclass(frozen=True)
class Scratch:
    """A library's workspace: the family of algorithm, and its sizes.

    The bytes depend on the GPU and are worked out when a recording is replayed, so one recording serves all GPUs.
    """

    family: str
    sizes: tuple[int, ...]
    dtype: str


def elastic(scratch: Scratch) -> bool:
    """Return whether the op can do without its workspace if memory is short.

    PyTorch then tries cuDNN's next engine (Conv_v8.cpp).
    """
    return scratch.family.startswith("conv_")


def scratch_bytes(
    scratch: Scratch, compute_capability: str, software: Software, multiprocessors: int = LARGE_GPU
) -> Interval:
    """Return the bytes of workspace for `scratch` on a GPU of this compute capability."""
    sizes = scratch.sizes
    if scratch.family in {"floats", "bytes", "conv_trial"}:
        return _exactly(sizes[0] * (4 if scratch.family == "floats" else 1))
    # Workspaces of matrix products.
    if scratch.family == "gemm_handle":
        blas = cublas_workspace_bytes(compute_capability, software.environment, software.torch_version)
        return _exactly(blas.own_bytes)
    if scratch.family in {"lt_call", "lt_handle"}:
        lt = cublaslt_workspace_bytes(compute_capability, software.environment, software.torch_version)
        wanted = Lifetime.CALL if scratch.family == "lt_call" else Lifetime.KEPT
        return _exactly(lt.own_bytes if lt.lifetime is wanted else 0)
    # Reductions, sorts and convolutions.
    if scratch.family in {"sum_parts", "sum_counts"}:
        return _exactly(_shared_sum(scratch, capability_of(compute_capability), multiprocessors))
    if scratch.family == "sort":
        besides, pairs = sizes  # cub sorts few pairs within a block, more with as much memory as they take
        return Interval(besides, besides + pairs, besides + pairs)
    if scratch.family.startswith("conv_"):
        return _convolution(scratch, compute_capability)
    raise ValueError(f"unknown scratch {scratch.family!r}")


def _exactly(nbytes: int) -> Interval:
    return Interval(nbytes, nbytes, nbytes)


def _shared_sum(scratch: Scratch, capability: tuple[int, int], multiprocessors: int) -> int:
    """Return the bytes that thread blocks sharing a sum exchange, or of their counters.

    Source: Reduce.cuh, `setReduceConfig`.
    """
    a_block, threads, grid, a_thread = scratch.sizes
    at_once = multiprocessors * (_threads_of(capability) // threads)
    blocks = max(min(-(-at_once // grid), -(-a_thread // 16)), -(-a_thread // 256)) if grid <= at_once else 1
    if blocks == 1:
        return 0
    return a_block * blocks if scratch.family == "sum_parts" else 4 * grid


def _threads_of(capability: tuple[int, int]) -> int:
    """Return how many threads a multiprocessor runs at once.

    Source: NVIDIA CUDA C Programming Guide, technical specifications.
    """
    if capability == (7, 5):
        return 1024
    return 1536 if capability in {(8, 6), (8, 7), (8, 9)} or capability >= (12, 0) else 2048


def room_bytes(scratch: Scratch, compute_capability: str, software: Software) -> int:
    """Return the bytes that a plan reserves for `scratch`.

    They are the likeliest bytes, and for a convolution those of a faster engine.
    """
    if elastic(scratch) and scratch.family != "conv_trial":
        kind, found = engines_of(scratch, compute_capability)
        return found[roomy(kind)] if kind is not None else 0
    return scratch_bytes(scratch, compute_capability, software).central


def _convolution(scratch: Scratch, compute_capability: str) -> Interval:
    """Return the workspace bytes of cuDNN's engine with benchmark off.

    They are none up to the largest, most likely those of the likeliest engine.
    """
    kind, found = engines_of(scratch, compute_capability)
    return NOTHING if kind is None else Interval(0, found[likeliest(kind)], max(found))


def engines_of(scratch: Scratch, compute_capability: str) -> tuple[str | None, tuple[int, int, int, int]]:
    """Return the kind of a convolution, and the workspaces of ENGINES.

    The kind is None if all engines work in place.
    """
    convolution = Convolution(*scratch.sizes)
    kind = kind_of(scratch.family, convolution, scratch.dtype, compute_capability)
    return kind, workspaces(scratch.family, convolution, ITEM_BYTES.get(scratch.dtype, 4), compute_capability)

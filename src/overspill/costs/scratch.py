"""Memory that libraries take inside an op or keep for themselves: cuBLAS, cuDNN, sorting, attention kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from .blas_workspace import Lifetime, cublas_workspace_bytes, cublaslt_workspace_bytes
from .capability import capability_of
from .interval import NOTHING, Interval

LARGE_GPU = 132
"""The multiprocessors of an H100, for where the GPU's are not known."""
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4}
_VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE", "TORCH_CUBLASLT_UNIFIED_WORKSPACE", "DISABLE_ADDMM_CUDA_LT",
)  # fmt: skip


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if name in os.environ}


@dataclass(frozen=True)
class Software:
    """The software that the job runs with: releases of PyTorch and CUDA, and what the environment says to cuBLAS."""

    torch_version: str = "2.13"
    cuda_version: str = "13.0"
    environment: Mapping[str, str] = field(default_factory=_environment)


@dataclass(frozen=True)
class Scratch:
    """What a library asks for: the family of algorithm, and the sizes that decide how much.

    How many bytes that is depends on the GPU and is decided when a recording is replayed, so one recording serves
    all GPUs.
    """

    family: str
    sizes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Convolution:
    """The sizes of a convolution: elements of its input `x`, weight `w` and output `y` as forward sees them, and more.

    `kernel` is the number of taps, `channels_last` and `dimensions` say how the tensors lie.
    """

    x: int
    w: int
    y: int
    batch: int
    channels_in: int
    channels_out: int
    groups: int
    kernel: int
    stride: int
    channels_last: int
    dimensions: int


def elastic(scratch: Scratch) -> bool:
    """Whether the op does without when there is no room: PyTorch then tries cuDNN's next engine (Conv_v8.cpp)."""
    return scratch.family.startswith("conv_")


def scratch_bytes(
    scratch: Scratch, compute_capability: str, software: Software, multiprocessors: int = LARGE_GPU
) -> Interval:
    """How much a library takes for `scratch` on a GPU of this compute capability."""
    sizes, item = scratch.sizes, _ITEM_BYTES.get(scratch.dtype, 4)
    if scratch.family in {"floats", "bytes", "conv_trial"}:
        return _exactly(sizes[0] * (4 if scratch.family == "floats" else 1))
    if scratch.family == "gemm_handle":
        blas = cublas_workspace_bytes(compute_capability, software.environment, software.torch_version)
        return _exactly(blas.own_bytes)
    if scratch.family in {"lt_call", "lt_handle"}:
        lt = cublaslt_workspace_bytes(compute_capability, software.environment, software.torch_version)
        wanted = Lifetime.CALL if scratch.family == "lt_call" else Lifetime.KEPT
        return _exactly(lt.own_bytes if lt.lifetime is wanted else 0)
    if scratch.family in {"sum_parts", "sum_counts"}:
        return _exactly(_shared_sum(scratch, capability_of(compute_capability), multiprocessors))
    if scratch.family == "sort":
        besides, pairs = sizes  # cub sorts few pairs within a block, more with as much memory as they take
        return Interval(besides, besides + pairs, besides + pairs)
    if scratch.family.startswith("conv_"):
        return _convolution(scratch.family, Convolution(*sizes), scratch.dtype, item, compute_capability)
    raise ValueError(f"unknown scratch {scratch.family!r}")


def _exactly(nbytes: int) -> Interval:
    return Interval(nbytes, nbytes, nbytes)


def _shared_sum(scratch: Scratch, capability: tuple[int, int], multiprocessors: int) -> int:
    """What the blocks that share a sum have for one another, or the count of them: Reduce.cuh, `setReduceConfig`."""
    a_block, threads, grid, a_thread = scratch.sizes
    at_once = multiprocessors * (_threads_of(capability) // threads)
    blocks = max(min(-(-at_once // grid), -(-a_thread // 16)), -(-a_thread // 256)) if grid <= at_once else 1
    if blocks == 1:
        return 0
    return a_block * blocks if scratch.family == "sum_parts" else 4 * grid


def _threads_of(capability: tuple[int, int]) -> int:
    """Threads that a multiprocessor has at once (NVIDIA CUDA C Programming Guide, technical specifications)."""
    if capability == (7, 5):
        return 1024
    return 1536 if capability in {(8, 6), (8, 7), (8, 9)} or capability >= (12, 0) else 2048


def _convolution(family: str, conv: Convolution, dtype: str, item: int, compute_capability: str) -> Interval:
    """The workspace of cuDNN's engine, benchmark off.

    Tensor-core engines work on channels-last tensors: on others they first copy them, so that the workspace holds the
    input, the weight and, unless the kernel writes the other layout itself, the output (kernel counts in published
    profiles; pytorch issue 166643 has input + weight + output to four digits). Other engines take next to nothing:
    direct and depthwise kernels, 1x1 convolutions as plain products, Winograd with the transformed weight alone. Which
    engine the heuristics choose cannot be known without cuDNN, hence the wide interval. The central value follows
    RTX 30 and 40 cards: forward of a k x k convolution copies input and weight, backward takes Winograd or a
    kernel for the given layout.
    """
    x, w, y = conv.x * item, conv.w * item, conv.y * item
    copies = x + w + y
    if conv.groups == conv.channels_in > 1 and dtype == "float32":  # depthwise: PyTorch's own kernel
        return NOTHING
    capability = capability_of(compute_capability)
    tensor_cores = capability >= (8, 0) or (capability >= (7, 0) and dtype != "float32")
    winograd = min(16 * conv.channels_in * conv.channels_out // conv.groups * item, copies)
    if not tensor_cores or conv.channels_last or conv.groups > 1 or conv.channels_in <= 4 or conv.kernel == 1:
        return Interval(0, 0, copies)
    if family == "conv_forward":
        writes_any_layout = capability not in {(8, 0), (9, 0)}
        return Interval(0, x + w if writes_any_layout else copies, copies)
    if family == "conv_backward_data":
        return Interval(0, winograd, copies)
    return Interval(0, 0, copies)

"""cuBLAS and cuBLASLt workspaces: their bytes, and whether they stay.

It follows aten/src/ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp. A handle belongs to one thread. A training step has
two handles: the main thread's for forward, the autograd thread's for backward. All blocks come from the caching
allocator. On CUDA a cuBLASLt handle is the cuBLAS handle, so a cuBLASLt call also allocates the cuBLAS block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf

from overspill.core.errors import RequestError

from .capability import capability_of

_KIB = 1 << 10
# parseChosenWorkspaceSize: `:4096:2:16:8` spelled out, and `4096 * 8 * 1024` for the architectures that want more.
_USUAL = 4096 * _KIB * 2 + 16 * _KIB * 8
_LARGE = 32 * _KIB * _KIB
_LT_DEFAULT_KIB = 1024  # pytorch issue 73328
_INT_MAX = 2**31 - 1

# Behaviour by release; where a change landed between two, its pull request and the branch cut decide.
_OLDEST = (2, 0)  # PR 91564: the default above; before it, 4 MiB
_LT_KEPT = (2, 9)  # PR 156495
_LT_CAPPED = (2, 11)  # PR 168175: the size function treats an unset variable as unified
_LT_SHARED = (2, 12)  # PR 175879: so does the allocation
_LARGE_ON_BLACKWELL = (2, 12)  # PR 175344
_LT_MAY_SHARE = (2, 8)  # PR 151163: only when asked to


class Lifetime(StrEnum):
    """How long a workspace exists."""

    CALL = "call"  # allocated before every call and freed after it
    KEPT = "kept"  # allocated at the first call of each handle and stream, and never freed
    SHARED = "shared"  # the cuBLAS block of that handle and stream serves, nothing is added


@dataclass(frozen=True)
class Workspace:
    """`nbytes` that a call may use, and how long they stay."""

    nbytes: int
    lifetime: Lifetime

    @property
    def own_bytes(self) -> int:
        """Bytes requested from the allocator for it; a request of 0 bytes makes no block."""
        return 0 if self.lifetime is Lifetime.SHARED else self.nbytes


def cublas_workspace_bytes(
    compute_capability: str, environment: Mapping[str, str] | None = None, torch_version: str = "2.6"
) -> Workspace:
    """Return the workspace of one cuBLAS handle on one stream, kept from its first call.

    `environment` is that of the job, `{}` by default. Every `:KiB:count` in CUBLAS_WORKSPACE_CONFIG adds to the sum, at
    any place. Without one, PyTorch warns and takes the default. `:0:0` means no block.
    """
    major, minor = capability_of(compute_capability)
    release = _release(torch_version)
    large = major in {9, 10, 12} if release >= _LARGE_ON_BLACKWELL else (major, minor) == (9, 0)
    nbytes = _LARGE if large else _USUAL
    # The environment overrides the default.
    config = (environment or {}).get("CUBLAS_WORKSPACE_CONFIG")
    if config is not None and (pairs := re.findall(r":([0-9]+):([0-9]+)", config)):
        nbytes = sum(int(size) * _KIB * int(count) for size, count in pairs)
    return Workspace(nbytes, Lifetime.KEPT)


def cublaslt_workspace_bytes(
    compute_capability: str, environment: Mapping[str, str] | None = None, torch_version: str = "2.6"
) -> Workspace:
    """Return the workspace of cuBLASLt calls.

    Through PyTorch 2.8 it is one per call, through 2.11 one that is kept, then the cuBLAS block itself.
    """
    variables = environment or {}
    release = _release(torch_version)
    # check_env: 0 and 1 count, anything else warns and is as good as unset.
    unified = {"0": False, "1": True}.get(variables.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE", ""))
    shared = release >= _LT_MAY_SHARE and (unified if unified is not None else release >= _LT_SHARED)
    capped = shared or (unified is None and release >= _LT_CAPPED)
    kib = _stoi(variables["CUBLASLT_WORKSPACE_SIZE"]) if "CUBLASLT_WORKSPACE_SIZE" in variables else _LT_DEFAULT_KIB
    asked = _KIB * kib if kib >= 0 else inf  # a negative count wraps around to one that nothing can hold
    limit = cublas_workspace_bytes(compute_capability, variables, torch_version).nbytes if capped else inf
    if (nbytes := min(asked, limit)) == inf:
        raise RequestError(f"CUBLASLT_WORKSPACE_SIZE={kib} asks for more than any GPU has; write a number of KiB")
    kept = Lifetime.KEPT if release >= _LT_KEPT else Lifetime.CALL
    return Workspace(int(nbytes), Lifetime.SHARED if shared else kept)


def _stoi(text: str) -> int:
    """Return the number that std::stoi reads in `text`: leading digits alone.

    Where std::stoi fails, PyTorch warns and takes the default.
    """
    match = re.match(r"\s*([+-]?\d+)", text, re.ASCII)
    number = int(match.group(1)) if match else _LT_DEFAULT_KIB
    return number if -_INT_MAX - 1 <= number <= _INT_MAX else _LT_DEFAULT_KIB


def _release(version: str) -> tuple[int, int]:
    """Return `2.6.0+cu124` as (2, 6)."""
    match = re.match(r"(\d+)\.(\d+)", version, re.ASCII)
    if match is None:
        raise RequestError(f"{version!r} is not a PyTorch release; write it as 2.6")
    release = int(match.group(1)), int(match.group(2))
    if release < _OLDEST:
        raise RequestError(f"the workspaces of PyTorch {version} are not known; 2.0 and later are")
    return release

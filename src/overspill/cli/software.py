"""The options that name the software of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from overspill.core.errors import RequestError

from .common import optional

if TYPE_CHECKING:
    from overspill.core import Device

Torch = Annotated[str | None, optional("RELEASE", "PyTorch of the job, as 2.6.  [default: the one here]", "--torch")]
Cuda = Annotated[str | None, optional("RELEASE", "CUDA of the job, as 12.4.  [default: PyTorch's]", "--cuda")]


def check_gpu(device: Device, torch: str | None, cuda: str | None) -> None:
    """Raise RequestError if `torch` or `cuda` is given for a device that is no CUDA GPU.

    Only on CUDA does a release of PyTorch decide the allocator.
    """
    if device.kind != "cuda" and (torch is not None or cuda is not None):
        raise RequestError("--torch and --cuda are of a GPU's job; name the GPU with --gpu, or leave them out")

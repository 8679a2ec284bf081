"""The options that name the software of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from overspill.core.errors import RequestError

if TYPE_CHECKING:
    from overspill.core import Device

Torch = Annotated[
    str | None,
    typer.Option(
        "--torch", metavar="RELEASE", help="PyTorch of the job, as 2.6.  [default: the one here]", show_default=False
    ),
]
Cuda = Annotated[
    str | None,
    typer.Option(
        "--cuda", metavar="RELEASE", help="CUDA of the job, as 12.4.  [default: PyTorch's]", show_default=False
    ),
]


def check_gpu(device: Device, torch: str | None, cuda: str | None) -> None:
    """Raise RequestError where software does not apply to the device.

    It was named for one that has no allocator of PyTorch's to follow.
    """
    if device.kind != "cuda" and (torch is not None or cuda is not None):
        raise RequestError("--torch and --cuda are of a GPU's job; name the GPU with --gpu, or leave them out")

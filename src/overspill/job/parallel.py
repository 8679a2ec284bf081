"""Options of training on several GPUs: kind, number of GPUs, details."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from overspill.core import Device
from overspill.core.errors import RequestError
from overspill.costs import Interval
from overspill.costs.nccl import nccl_bytes

KINDS = ("ddp", "fsdp", "horovod", "tp", "pp")
MOST_GPUS = 1 << 17
"""More than any job has; torch's own set-up goes from one to the next, and so takes seconds."""
_ZERO: dict[str, tuple[str, dict[str, Any]]] = {
    "zero1": ("ddp", {"shard_optimizer": True}),
    "zero2": ("fsdp", {"reshard_after_forward": False}),
    "zero3": ("fsdp", {}),
}
"""The stages of ZeRO (Rajbhandari et al., 2020), by torch's options; 2 keeps parameters from forward to backward."""
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Parallel:
    """How a model is trained on several GPUs, one process each.

    The names and defaults of options are torch's.
    """

    kind: str = "ddp"
    """`ddp`, `fsdp`, `tp` or `pp`.

    `tp` cuts linear layers, and all GPUs read the same batch. `pp` cuts the model in consecutive stages, one a GPU.
    """
    gpus: int = 2
    """The number of GPUs; batches are those of one GPU, for `pp` of all of them."""
    gradient_as_bucket_view: bool = False
    """For `ddp`."""
    find_unused_parameters: bool = False
    """For `ddp`."""
    static_graph: bool = False
    """For `ddp`."""
    bucket_cap_mb: float | None = None
    """For `ddp`; None: 25 MiB."""
    reshard_after_forward: bool = True
    """For `fsdp`; False keeps each block's parameters from its forward to its backward."""
    param_dtype: str | None = None
    """For `fsdp`, that of MixedPrecisionPolicy."""
    reduce_dtype: str | None = None
    """For `fsdp`, that of MixedPrecisionPolicy."""
    replicas: int = 1
    """For `fsdp`: HSDP, with each shard on that many GPUs."""
    blocks: tuple[str, ...] = ()
    """For `fsdp`: class names of the modules that are sharded one by one; by default `repeated_blocks`."""
    cpu_offload: bool = False
    """For `fsdp`: CPUOffloadPolicy, with shards, their gradients and the optimizer on the host."""
    shard_optimizer: bool = False
    """For `ddp`: ZeRO-1, torch's ZeroRedundancyOptimizer."""
    micro_batches: int | None = None
    """For `pp`, of one batch; None: as many as GPUs."""
    stage: int = 0
    """For `pp`, the stage that is estimated."""
    nvlink: bool = True
    """Whether GPUs that can be linked by NVLink are."""

    def __str__(self) -> str:
        return f"{self.kind} over {self.gpus} GPUs"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"unknown kind of parallel training {self.kind!r}; kinds: {', '.join(KINDS)}")
        if not 1 <= self.gpus <= MOST_GPUS:
            wrong = "not a positive number" if self.gpus < 1 else f"more than the {MOST_GPUS} that an estimate takes"
            raise RequestError(f"gpus={self.gpus} is {wrong}; give 1 to {MOST_GPUS}")
        if self.replicas < 1 or self.gpus % self.replicas:
            raise RequestError(f"replicas={self.replicas} does not divide gpus={self.gpus}; take a divisor of it")
        if self.bucket_cap_mb is not None and self.bucket_cap_mb <= 0:
            raise RequestError(f"bucket_cap_mb={self.bucket_cap_mb} is not a positive number; leave it out for 25 MiB")
        for dtype in (self.param_dtype, self.reduce_dtype):
            if dtype is not None and dtype not in _DTYPES:
                raise RequestError(f"unknown dtype {dtype!r}; dtypes: {', '.join(_DTYPES)}")
        self._check_stages()
        self._check_options()

    def _check_stages(self) -> None:
        if self.micro_batches is not None and self.micro_batches < 1:
            raise RequestError(f"micro_batches={self.micro_batches} is not a positive number; give 1 or more")
        if self.kind == "pp" and not 0 <= self.stage < self.gpus:
            raise RequestError(
                f"stage={self.stage} is none of {self.gpus} stages, counted from 0; give 0 to {self.gpus - 1}"
            )

    def _check_options(self) -> None:
        """Raise RequestError for options of another kind."""
        # The options that one kind alone has.
        only = {
            "ddp": (
                "gradient_as_bucket_view",
                "find_unused_parameters",
                "static_graph",
                "bucket_cap_mb",
                "shard_optimizer",
            ),
            "fsdp": ("reshard_after_forward", "param_dtype", "reduce_dtype", "replicas", "blocks", "cpu_offload"),
            "pp": ("micro_batches", "stage"),
        }
        for kind, names in only.items():
            for name in names:
                if kind != self.kind and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                    raise RequestError(
                        f"{name}= is an option of {kind}, not of {self.kind}; leave it out, or take {kind}"
                    )

    @property
    def pieces(self) -> int:
        """The number of micro-batches in a batch."""
        return (self.micro_batches or self.gpus) if self.kind == "pp" else 1

    def communication(self, device: Device) -> Interval:
        """Return the bytes that NCCL keeps on each GPU, outside the allocator.

        HSDP has a communicator in each direction.
        """
        communicators = 2 if 1 < self.replicas < self.gpus else 1
        return nccl_bytes(device, self.gpus, nvlink=self.nvlink, communicators=communicators, environment=os.environ)


def parallel_of(kind: str | None, gpus: int | None, **options: Any) -> Parallel | None:
    """Return the options of `--parallel KIND --gpus N`; None for one GPU.

    If only the number of GPUs is given, they are DDP's.
    """
    if gpus is not None and gpus < 1:
        raise RequestError(f"{gpus} GPUs is not a positive number")
    if kind is None and (gpus is None or gpus == 1):
        return None
    if gpus is None:
        raise RequestError(f"{kind} needs the number of GPUs; pass --gpus")
    if kind is not None and kind not in (known := (*KINDS, *_ZERO)):
        raise RequestError(f"unknown kind of parallel training {kind!r}; kinds: {', '.join(known)}")
    name, of_kind = _ZERO.get(kind or "ddp", (kind or "ddp", {}))
    return Parallel(name, gpus, **of_kind, **options)

"""The DistributedDataParallel around a compiled model: its buckets, and whose gradients it averages."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

from overspill.core.errors import RequestError
from overspill.pytorch.distributed import active_ddp
from overspill.pytorch.dynamo import dynamo_config


def whole_models() -> AbstractContextManager[Any]:
    """Return a context in which Dynamo does not split a model at the buckets of DDP.

    Otherwise each part would be planned without the others. The hooks of DDP get all gradients at the end of backward.
    """
    distributed = dist.is_available() and dist.is_initialized()
    return dynamo_config.patch(optimize_ddp=False) if distributed else nullcontext()


def refuse_split(module: fx.GraphModule) -> None:
    """Raise RequestError for a part into which Dynamo has split a model."""
    if _running() is not None and any("grapharg" not in n.meta for n in module.graph.find_nodes(op="placeholder")):
        raise RequestError(
            "Dynamo has split the model at the buckets of its DistributedDataParallel, and the parts cannot share a "
            "budget; set torch._dynamo.config.optimize_ddp = False, or use overspill.compile, which does"
        )


def bucket_bytes() -> int:
    """Return the bytes of the gradient buckets of the running DDP, or 0.

    Even with `gradient_as_bucket_view`, gradients and buckets exist together when backward ends.
    """
    return sum(p.nbytes for p in reduced())


def reduced() -> list[nn.Parameter]:
    """Return the parameters whose gradients the running DDP averages, and of which it holds references."""
    ddp = _running()
    if ddp is None:
        return []
    own = ddp.module.named_parameters()
    return [p for name, p in own if p.requires_grad and name not in ddp.parameters_to_ignore]


def _running() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward is running, or None."""
    return active_ddp() if dist.is_available() else None

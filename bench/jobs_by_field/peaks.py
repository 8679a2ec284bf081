"""The measured peak of each step of a job, by a dispatch mode that knows nothing of plans."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from overspill.capture.compiled.graph import HANDLE_BYTES
from overspill.runtime.tracker import LiveBytes

TOLD = "may take more than the budget"
"""Of the warning that this step may exceed the budget, which is given while not all models of a session are known."""
Step = Callable[..., Tensor]
There = tuple[list[nn.Module], list[Optimizer]]


class _Live(LiveBytes):
    """Counts live bytes around compiled calls too: Dynamo leaves this mode aside while it compiles, not while graphs run."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: see above."""
        return True

    def add(self, values: Iterable[Any]) -> None:
        """Count tensors that hold memory; tracing has others."""
        super().add(v for v in values if type(v) in (Tensor, nn.Parameter) and v.layout == torch.strided)


def measured(step: Step, there: Callable[[], There], peaks: list[tuple[int, int]]) -> Step:
    """`step`, which adds two figures of each run to `peaks`: what there was before, and its peak.

    They count the models and optimizers `there`, the batch, and what it takes. The comparison has read all weights and state
    before, which brings them back, be they more than the budget; as they leave again, each has a handle too. Left out
    are runs that may exceed the budget, as a warning says.
    """

    def taken(*batch: Any) -> Tensor:
        live = _Live(torch.device("cpu"))
        models, optimizers = there()
        for model in models:
            live.add([*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())])
        live.add(tree_leaves([*batch, *(optimizer.state_dict()["state"] for optimizer in optimizers)]))
        before = live.live_bytes + HANDLE_BYTES * sum(1 for _ in live.there())
        live.peak_bytes = live.live_bytes  # a state dict has copies of what is away
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with live:
                loss = step(*batch)
        if not any(TOLD in str(warning.message) for warning in caught):
            peaks.append((before, live.peak_bytes))
        return loss

    return taken

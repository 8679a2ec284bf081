"""A plugin with which accelerate compiles models for a budget.

accelerate takes a backend by name from a list of its own (1.15: `DynamoBackend`), and refuses any other. But what it
passes to torch.compile comes from a method of its plugin for Dynamo, which is overridden here.
"""

from __future__ import annotations

from typing import Any

from accelerate.utils import TorchDynamoPlugin

from overspill.runtime.compiled.named_backend import session_with
from overspill.runtime.compiled.session import Session
from overspill.runtime.options import Options


class DynamoPlugin(TorchDynamoPlugin):
    """Trains within a budget: `Accelerator(dynamo_plugin=DynamoPlugin("20GiB"))`.

    `Accelerator.prepare` compiles each model for it, after its own wrappers for mixed precision and DDP. All models of
    one plugin share the budget. A model that trains without a plan is an error when its optimizer steps.
    """

    def __init__(self, budget: str | float | None = None, *, fullgraph: bool = False, **options: Any) -> None:
        """Check the options of `overspill.compile`. Raises RequestError."""
        Options(budget, **options)
        # Any backend of accelerate's list but "no" makes it compile.
        super().__init__(backend="eager", fullgraph=fullgraph, dynamic=False, options={"budget": budget, **options})

    @property
    def session(self) -> Session | None:
        """The session, with its plans; None before the first call of a model."""
        return session_with(self.options)

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for torch.compile."""
        return {
            "backend": "overspill", "options": self.options, "fullgraph": self.fullgraph, "dynamic": self.dynamic,
        }  # fmt: skip

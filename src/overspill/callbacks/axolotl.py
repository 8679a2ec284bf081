"""A plugin for axolotl that trains within a budget.

In axolotl's config file:

    plugins:
      - overspill.callbacks.axolotl.OverspillPlugin
    overspill:
      budget: 20GiB

What is below `overspill` are the options of `overspill.compile`. It follows axolotl's plugin interface as of July 2026
(src/axolotl/integrations/base.py, commit 067b021). It is tested with a copy of that interface, not with axolotl itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from overspill.core.errors import RequestError

from .trainer import TrainerBudget

KEY = "overspill"


class OverspillArgs(BaseModel):
    """What the plugin adds to axolotl's config file."""

    overspill: dict[str, Any] | None = None
    """The options of `overspill.compile`, budget among them."""


class OverspillPlugin(BasePlugin):
    """Adds a Budget to axolotl's trainer, which compiles the model when training begins."""

    def get_input_args(self) -> str:
        """Return the class that describes the plugin's part of the config file."""
        return f"{OverspillArgs.__module__}.{OverspillArgs.__qualname__}"

    def register(self, cfg: Mapping[str, Any]) -> None:
        """Check the options before a model is loaded. Raises RequestError for those that cannot be right."""
        _budget_of(cfg)

    def add_callbacks_post_trainer(self, cfg: Mapping[str, Any], trainer: Any) -> list[TrainerBudget]:  # noqa: ARG002
        """Return the callback for the trainer, which has its model by then."""
        return [_budget_of(cfg)]


def _budget_of(cfg: Mapping[str, Any]) -> TrainerBudget:
    options = cfg.get(KEY)
    if not isinstance(options, Mapping) or options.get("budget") is None:
        raise RequestError("overspill.callbacks.axolotl needs a budget in the config file: overspill: {budget: 20GiB}")
    try:
        return TrainerBudget(**options)
    except TypeError as error:
        raise RequestError(f"overspill in the config file has the options of overspill.compile: {error}") from None

"""A Lightning callback that logs figures of each batch.

They go through the module's own log, to the logger of the trainer.
"""

from __future__ import annotations

from typing import Any

import lightning

from .figures import StepFigures


class LightningCallback(lightning.Callback):
    """Logs the figures of each batch by `pl_module.log_dict`.

    Use it as `lightning.Trainer(callbacks=[LightningCallback()])`. `model` is the compiled model, if it cannot be found
    in the module, as where several sessions are.
    """

    def __init__(self, model: Any = None) -> None:
        super().__init__()
        self._model = model
        self._figures: StepFigures | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - as it is called
        """Start counting steps."""
        self._figures = StepFigures(pl_module if self._model is None else self._model)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:  # noqa: ARG002
        """Log the figures of a batch. Raises RequestError if Overspill takes no part in it."""
        assert self._figures is not None
        self._figures.step()
        pl_module.log_dict(self._figures.take())

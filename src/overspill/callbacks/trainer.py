"""A callback for Hugging Face's Trainer that logs figures.

They go where its own log goes, TensorBoard and Weights & Biases among them.
"""

from __future__ import annotations

from typing import Any

import transformers

from .figures import StepFigures


class TrainerCallback(transformers.TrainerCallback):
    """Logs the figures of the steps since the last log.

    Use it as `trainer.add_callback(TrainerCallback(trainer))`: the figures come with each log of a training loss.
    `model` is the compiled model, if it cannot be found in the trainer's model, as in mixed precision.
    """

    def __init__(self, trainer: transformers.Trainer, model: Any = None) -> None:
        self._trainer = trainer
        self._figures = StepFigures(trainer.model if model is None else model)

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002 - as it is called
        """Count a step."""
        self._figures.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:  # noqa: ARG002
        """Log the figures with the loss. Raises RequestError if Overspill takes no part in the training."""
        if logs and "loss" in logs:
            self._trainer.log(self._figures.take())

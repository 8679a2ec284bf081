"""Callbacks for Hugging Face's Trainer: one trains within a budget, one logs figures.

TRL's trainers are Trainers. Figures go where Trainer's own log goes, TensorBoard and Weights & Biases among them.
"""

from __future__ import annotations

from typing import Any

import transformers

from overspill.core.errors import UnsupportedError
from overspill.runtime.compiled.session import Session

from .attached import AttachedForwards
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


class TrainerBudget(transformers.TrainerCallback):
    """Trains within a budget: `Trainer(..., callbacks=[overspill.callbacks.Budget("20GiB")])`.

    It compiles the model's forward when training begins, after Trainer, TRL, peft and accelerate have put theirs in
    place, and puts the original back when training ends. Evaluations during the training run by plans too. Use it in
    place of `overspill.compile`, with the same options.

    Each call of `train` has its own plans. After an error in the training, the next one begins anew.
    """

    def __init__(self, budget: str | float | None = None, **options: Any) -> None:
        """Check the options of `overspill.compile`. Raises RequestError."""
        self._forwards = AttachedForwards(budget, options)

    @property
    def session(self) -> Session | None:
        """The session of the last training, with its plans; None before it begins."""
        return self._forwards.session

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:  # noqa: ARG002
        """Compile the model's forward.

        Raises RequestError if it is compiled already, UnsupportedError for DataParallel.
        """
        is_quantized = getattr(model, "is_loaded_in_8bit", False) or getattr(model, "is_loaded_in_4bit", False)
        if args.n_gpu > 1 and not is_quantized:
            raise UnsupportedError(
                f"Trainer uses DataParallel for {args.n_gpu} GPUs in one process, which has no plans; start a process "
                "for each: torchrun --nproc-per-node gpu"
            )
        self._forwards.attach([model])

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Check a micro-batch that the optimizer does not step after. Raises UnplannedError if no plan ran."""
        self._forwards.check()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Check the last micro-batch of a step before the update. Raises UnplannedError if no plan ran."""
        self._forwards.check()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Put the model's forward back."""
        self._forwards.detach()

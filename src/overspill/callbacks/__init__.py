"""Train within a budget in common trainers, and log figures of it.

The first two compile the model when training begins, after the trainer has put its own forward in place, and raise an
UnplannedError if a step runs without a plan. They take the options of `overspill.compile`.

    Trainer(..., callbacks=[overspill.callbacks.Budget("20GiB")])                # Hugging Face, and TRL's trainers
    lightning.Trainer(callbacks=[overspill.callbacks.LightningBudget("20GiB")])  # Lightning

axolotl has a plugin: `overspill.callbacks.axolotl.OverspillPlugin`. The figures go to Trainer's log, Lightning's,
TensorBoard's, and Python's `logging`.

    trainer.add_callback(overspill.callbacks.TrainerCallback(trainer))           # Hugging Face
    lightning.Trainer(callbacks=[overspill.callbacks.LightningCallback()])       # Lightning
    log = overspill.callbacks.StepLogger(model, every=100)                       # logger "overspill", at INFO
    write = overspill.callbacks.TensorBoardWriter(model, SummaryWriter())        # torch.utils.tensorboard

Call the last two of these after each step. A library is imported when its callback is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from overspill.core.errors import RequestError
from overspill.core.text import pip_install

if TYPE_CHECKING:
    from .figures import StepFigures, figures_of
    from .lightning import LightningBudget, LightningCallback
    from .loops import StepLogger, TensorBoardWriter
    from .trainer import TrainerBudget as Budget
    from .trainer import TrainerCallback

__all__ = [
    "Budget",
    "LightningBudget",
    "LightningCallback",
    "StepFigures",
    "StepLogger",
    "TensorBoardWriter",
    "TrainerCallback",
    "figures_of",
]

_LAZY = {
    "Budget": "trainer.TrainerBudget",
    "LightningBudget": "lightning.LightningBudget",
    "LightningCallback": "lightning.LightningCallback",
    "StepFigures": "figures.StepFigures",
    "StepLogger": "loops.StepLogger",
    "TensorBoardWriter": "loops.TensorBoardWriter",
    "TrainerCallback": "trainer.TrainerCallback",
    "figures_of": "figures.figures_of",
}
_LIBRARIES = {"lightning": "lightning", "trainer": "transformers"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'overspill.callbacks' has no attribute {name!r}")
    module, _, own_name = _LAZY[name].partition(".")
    try:
        return getattr(import_module(f"{__name__}.{module}"), own_name)
    except ModuleNotFoundError as error:
        library = _LIBRARIES.get(module)
        if library is None or (error.name or "").partition(".")[0] != library:
            raise
        raise RequestError(f"{name} needs {library}: {pip_install('recipes')}") from None

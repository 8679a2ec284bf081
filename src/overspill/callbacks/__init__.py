"""Log figures of budgeted training in common tools.

They are Trainer's logs, Lightning's, TensorBoard's, and Python's `logging`.

    trainer.add_callback(overspill.callbacks.TrainerCallback(trainer))           # Hugging Face
    lightning.Trainer(callbacks=[overspill.callbacks.LightningCallback()])       # Lightning
    log = overspill.callbacks.StepLogger(model, every=100)                       # logger "overspill", at INFO
    write = overspill.callbacks.TensorBoardWriter(model, SummaryWriter())        # torch.utils.tensorboard

Call the last two after each step. A library is imported when its callback is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from overspill.core.errors import RequestError

if TYPE_CHECKING:
    from .figures import StepFigures, figures_of
    from .lightning import LightningCallback
    from .loops import StepLogger, TensorBoardWriter
    from .trainer import TrainerCallback

__all__ = ["LightningCallback", "StepFigures", "StepLogger", "TensorBoardWriter", "TrainerCallback", "figures_of"]

_LAZY = {
    "LightningCallback": "lightning",
    "StepFigures": "figures",
    "StepLogger": "loops",
    "TensorBoardWriter": "loops",
    "TrainerCallback": "trainer",
    "figures_of": "figures",
}
_LIBRARIES = {"LightningCallback": "lightning", "TrainerCallback": "transformers"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'overspill.callbacks' has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        library = _LIBRARIES.get(name)
        if library is None or (error.name or "").partition(".")[0] != library:
            raise
        raise RequestError(f"{name} needs {library}: pip install overspill[recipes]") from None

"""Callbacks for Lightning: one trains within a budget, one logs figures of each batch.

Figures go through the module's own log, to the logger of the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning
from torch import nn

from overspill.core.errors import RequestError
from overspill.runtime.compiled.session import Session

from .attached import AttachedForwards
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


class LightningBudget(lightning.Callback):
    """Trains within a budget: `lightning.Trainer(callbacks=[LightningBudget("8GiB")])`.

    It compiles the forward of the network inside the LightningModule when the fit begins, and puts the original back
    when it ends. Evaluations during the fit run by plans too. Use it in place of `overspill.compile`, with the same
    options.

    `parts` names the submodules to compile, which share the budget. Without it, the one that has all parameters is
    taken. What `training_step` computes from their outputs is no part of the plans.
    """

    def __init__(
        self, budget: str | float | None = None, *, parts: str | Sequence[str] | None = None, **options: Any
    ) -> None:
        """Check the options of `overspill.compile`. Raises RequestError."""
        super().__init__()
        self._forwards = AttachedForwards(budget, options)
        self._parts = [parts] if isinstance(parts, str) else parts
        self._backwards = 0

    @property
    def session(self) -> Session | None:
        """The session of the last fit, with its plans; None before it begins."""
        return self._forwards.session

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002 - as it is called
        """Compile the forward of each part, before the first evaluation.

        Raises RequestError if a part is missing or compiled already, or if it is unclear which parts are meant.
        """
        names = _parts_of(pl_module) if self._parts is None else self._parts
        try:
            parts = [pl_module.get_submodule(name) for name in names]
        except AttributeError as error:
            raise RequestError(f"parts={names}: {error}") from None
        self._backwards = 0
        self._forwards.attach(parts)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Count a backward; a batch may have none, or several."""
        self._backwards += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:  # noqa: ARG002
        """Check a batch with a backward. Raises UnplannedError if no plan ran."""
        if self._backwards:
            self._forwards.check()
        self._backwards = 0

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Put the forwards back."""
        self._forwards.detach()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Put the forwards back after an error or an interrupt."""
        self._forwards.detach()


def _parts_of(module: nn.Module) -> list[str]:
    """Return the name of the only submodule with parameters. Raises RequestError if there is no such one."""
    names = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if len(names) == 1 and not own:
        return names
    raise RequestError(
        f"{type(module).__name__} has parameters in {', '.join(names + own) or 'no submodule'}; name the submodules to "
        f"compile: LightningBudget(..., parts={names})"
    )

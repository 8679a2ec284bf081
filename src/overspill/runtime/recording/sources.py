"""Recordable objects: a session with all its models, or a train step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from overspill.core import TensorKind
from overspill.plans.plan import Plan
from overspill.runtime.compiled.session import Session
from overspill.runtime.step.train_step import TrainStep
from overspill.runtime.tracker import LiveBytes

from .recorder import RunRecorder


class RecordedSource(ABC):
    """One session or train step that can be recorded."""

    def __init__(self, of: Session | TrainStep) -> None:
        self._of = of

    @property
    def recorder(self) -> RunRecorder | None:
        """The attached recorder, or None."""
        return self._of.recorder

    def tell(self, recorder: RunRecorder | None) -> None:
        """Attach `recorder`, or detach with None."""
        self._of.recorder = recorder
        if self._of.engine is not None:
            self._of.engine.recorder = recorder

    @property
    def tracker(self) -> LiveBytes | None:
        """Its own tracker of live bytes, if it has one."""
        return self._of.tracker

    @property
    def plans(self) -> list[Plan]:
        """The current plans."""
        return self._of.plans

    @property
    @abstractmethod
    def device(self) -> torch.device | None:
        """The device it runs on; None if not known yet."""

    @abstractmethod
    def present(self) -> Iterable[tuple[TensorKind | None, Sequence[Tensor]]]:
        """Return the tensors known to be on the device between calls, by kind."""

    def ends_by(self, optimizer: Optimizer) -> bool:  # noqa: ARG002 - of a session
        """Return whether a step of `optimizer` ends a recorded step of this source."""
        return False


class _OfSession(RecordedSource):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._session = session

    @property
    def device(self) -> torch.device | None:
        if self._session.plans:
            return self._session.device
        return next((p.device for p in self._session.followed.parameters), None)

    def present(self) -> Iterable[tuple[TensorKind | None, Sequence[Tensor]]]:
        return self._session.followed.present()

    def ends_by(self, optimizer: Optimizer) -> bool:
        return self._session.followed.updated_by(optimizer)


class _OfStep(RecordedSource):
    def __init__(self, step: TrainStep) -> None:
        super().__init__(step)
        self._step = step

    @property
    def device(self) -> torch.device | None:
        return self._step.device

    def present(self) -> Iterable[tuple[TensorKind | None, Sequence[Tensor]]]:
        return [(None, self._step.present())]


def sources_of(found: Session | TrainStep) -> list[RecordedSource]:
    """Return the sources to record for `found`.

    For a session these include the train steps that share its budget.
    """
    if isinstance(found, TrainStep):
        return [_OfStep(found)]
    return [_OfSession(found), *(_OfStep(step) for step in found.train_steps if isinstance(step, TrainStep))]

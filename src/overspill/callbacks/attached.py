"""Compile the forwards of a trainer's modules for the time of a training, and check that each step ran by plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from overspill.core.errors import RequestError
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.plan_check import WARN_INSTEAD
from overspill.runtime.compiled.session import Session
from overspill.runtime.compiled.step_check import shown
from overspill.runtime.options import Options

ABSENT = object()
"""Stands for no forward in a module's own dictionary."""


class _Attached(NamedTuple):
    """A module with a compiled forward in its own dictionary, and what was there before."""

    module: nn.Module
    before: Any
    compiled: Any


class AttachedForwards:
    """Compiled forwards of a trainer's modules, which share one session.

    The outermost forward is compiled, with all that libraries have put around it: mixed precision of accelerate, a loss
    of TRL.
    """

    def __init__(self, budget: str | float | None, options: dict[str, Any]) -> None:
        """Check the options, which are those of `overspill.compile`. Raises RequestError."""
        self._fullgraph = bool(options.pop("fullgraph", False))
        self._options = Options(budget, **options)
        self._places: list[_Attached] = []
        self._backwards = 0
        self.session: Session | None = None
        """The session of the last training."""

    def attach(self, modules: Sequence[nn.Module]) -> None:
        """Compile the forward of each module, in a new session. Raises RequestError if one is compiled already."""
        self.detach()  # an error may have ended the training before
        session = self.session = Session(self._options)
        session.watch_calls.checks_steps = False  # `check` does, at each step
        self._backwards = 0
        for module in modules:
            if isinstance(getattr(module.forward, "overspill", None), Session):
                raise RequestError(
                    f"the forward of {type(module).__name__} is compiled already; leave out overspill.compile, or this "
                    "callback"
                )
            before = module.__dict__.get("forward", ABSENT)
            module.forward = compile_in(session, module.forward, fullgraph=self._fullgraph)
            session.follow(module.parameters())
            self._places.append(_Attached(module, before, module.forward))

    def check(self) -> None:
        """Raise UnplannedError, or warn once, if no planned backward ran since the last check."""
        if self.session is None:
            return
        before, self._backwards = self._backwards, self.session.watch_calls.backwards_run
        if self._backwards == before:
            self.session.watch_calls.tell(self._reason())

    def _reason(self) -> str:
        for place in self._places:
            if (now := place.module.__dict__.get("forward")) is not place.compiled:
                who = "something" if now is None else shown(now)
                return (
                    f"{type(place.module).__name__} took a training step without a plan: {who} replaced its compiled "
                    f"forward after the training began; let it do so before, {WARN_INSTEAD}"
                )
        names = ", ".join(type(place.module).__name__ for place in self._places)
        return (
            f"{names} took a training step without a plan: the step did not call its forward, or called a part of it; "
            f"use overspill.train_step, or overspill.compile on the function that computes the loss, {WARN_INSTEAD}"
        )

    def detach(self) -> None:
        """Put the forwards back that were there before, but for those that others have replaced.

        The session gives its store back, unless a replacement may call it.
        """
        is_free = True
        for module, before, compiled in self._places:
            if module.__dict__.get("forward") is not compiled:
                is_free = False
                continue
            del module.forward
            if before is not ABSENT:
                module.forward = before
        if is_free and self.session is not None:
            self.session.close()
        self._places.clear()

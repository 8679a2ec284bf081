"""When the plans of a session are made again: before a call, if they do not know of something on the device."""

from __future__ import annotations

import warnings

MOST_ROUNDS = 4
"""Most rounds of replanning because concurrent calls keep more than the plans assumed."""
MOST_WAITING = 1024
"""Calls for which outdated plans stay in use while any backward is pending."""


class Renewal:
    """Whether plans are outdated; each call of a model checks this first."""

    def __init__(self) -> None:
        self.is_asked = False
        self.steps_over = 0
        """How many steps did what their plans did not know: they began again, or may have been over the budget."""
        self._is_over = False
        self._rounds = 0
        self._waited = 0

    def ask(self, what: str) -> None:
        """Mark the plans as outdated, and warn that this step may exceed the budget.

        `what` describes the action of the step that the plans do not know.
        """
        if not self.is_asked:
            self.is_asked = True
            self.steps_over += not self._is_over
            self._is_over = True
            warnings.warn(
                f"this step {what}, which the first plans did not know: it may take more than the budget; from the "
                "next step on the plans know it",
                stacklevel=4,
            )

    def over(self, what: str) -> None:
        """Count a step for which plans are made before anything has gone beyond them, and warn.

        `what` describes the action that ended its call.
        """
        self.steps_over += 1
        warnings.warn(f"this step {what}: it begins again, by plans for more", stacklevel=3)

    def is_due(self, pending: int) -> bool:
        """Return whether plans are outdated and no step is running, whose calls would be recompiled one by one.

        `pending` counts calls whose backward is still to come.
        """
        if not self.is_asked:
            return False
        self._waited += 1
        if pending and self._waited < MOST_WAITING:
            return False
        self._waited = 0
        self._is_over = False
        return True

    def begin_rounds(self) -> None:
        """Count rounds from here, because something new was seen."""
        self._rounds = 0

    def is_endless(self) -> bool:
        """Count a round of replanning; return whether they are too many.

        Then the bytes that calls keep do not settle.
        """
        self._rounds += 1
        return self._rounds > MOST_ROUNDS

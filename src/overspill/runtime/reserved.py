"""Check that PyTorch's allocator takes no more than plans assume.

The check runs now and then while plans are in use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from overspill.core.units import format_apart

from .allocator import in_force
from .hardware import held_bytes

LEARNING = 4
_LOG = logging.getLogger("overspill")


class ReservedWatch:
    """Compares reserved with planned bytes, and warns once if they are more."""

    def __init__(self) -> None:
        self._steps = 0
        self._told = False

    def look(self, planned_bytes: Callable[[], int | None], where: torch.device) -> None:
        """Check after a step on `where`, at steps 1, 2, 4, 8, ….

        The interval grows because the check takes as long as some ops. Nothing is missed: the allocator keeps its
        memory until it runs out.
        """
        if where.type == "cpu" or self._told:
            return
        self._steps += 1
        if self._steps & (self._steps - 1):  # no power of two
            return
        if self._steps <= LEARNING and in_force() is not None:  # before steps are planned it takes what there is
            return
        planned = planned_bytes()
        if planned is None or (held := held_bytes(where)) <= planned:
            return
        # More than planned: warn once.
        self._told = True
        taken, counted_on = format_apart(held, planned)
        _LOG.warning(
            "PyTorch's allocator has taken %s of %s, more than the %s that the plan counts on: for tensors that are "
            "not the step's, or cached for what ran before; torch.cuda.empty_cache() before the first step gives that "
            "back",
            taken,
            where,
            counted_on,
        )

"""Which of many combinations the short suite tries."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def rest_long(values: Iterable[Any], short: Collection[Any]) -> list[Any]:
    """All `values`: those in `short` in the short suite, the others in the long suite."""
    return [value if value in short else pytest.param(value, marks=pytest.mark.long) for value in values]


def by_turns(*axes: Iterable[Any]) -> list[Any]:
    """All combinations of one of each of the `axes`: in the short suite each value by turns, the others in the long suite."""
    values = [list(axis) for axis in axes]
    turns = {tuple(turn % len(axis) for axis in values) for turn in range(max(map(len, values)))}
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(values, at, strict=True)), marks=() if at in turns else pytest.mark.long
        )
        for at in product(*(range(len(axis)) for axis in values))
    ]

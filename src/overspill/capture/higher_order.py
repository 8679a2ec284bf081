"""Run higher-order operators on fake tensors of Overspill's own modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overspill.pytorch.dispatch import HigherOrderOperator
from overspill.pytorch.fake_tensors import FakeTensorMode
from overspill.pytorch.higher_order import registered_hop_fake_fns


def fake_rule(func: Any) -> Callable[..., Any] | None:
    """Return FakeTensorMode's rule for a higher-order operator, or None if it needs none.

    Call it with the mode before the operator's arguments. PyTorch looks for the rule by that exact class, and so finds
    none for a subclass.
    """
    if not isinstance(func, HigherOrderOperator) or func in registered_hop_fake_fns:
        return None
    rule: Callable[..., Any] | None = getattr(func, "python_key_table", {}).get(FakeTensorMode)
    return rule

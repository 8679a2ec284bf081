"""Hooks that bring the optimizer's tensors back before others use them."""

from __future__ import annotations

from threading import get_ident
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .gate import Reading
from .state import StepState


def optimizer_hooks(optimizer: Optimizer, state: StepState) -> list[RemovableHandle]:
    """Return hooks that bring the tensors of `optimizer` back before it saves, loads or steps."""
    readings: dict[int, Reading] = {}

    # Loading and stepping need all tensors there; saving also keeps other threads off.
    def synchronize(*_: Any) -> None:
        state.gate.alone(state.synchronize)

    def begin_reading(_: Optimizer) -> None:
        if (reading := state.gate.read(state.synchronize, loops=True)) is not None:
            readings[get_ident()] = reading

    def end_reading(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        try:
            return _with_plain_state(state_dict)
        finally:
            readings.pop(get_ident(), None)

    return [
        optimizer.register_state_dict_pre_hook(begin_reading),
        optimizer.register_state_dict_post_hook(end_reading),
        optimizer.register_load_state_dict_pre_hook(synchronize),
        optimizer.register_step_pre_hook(synchronize),
    ]


def _with_plain_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict without guards, with the optimizer's own tensors."""
    state = {key: dict(of.items()) if isinstance(of, dict) else of for key, of in state_dict["state"].items()}
    return {**state_dict, "state": state}

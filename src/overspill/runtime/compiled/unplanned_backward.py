"""Measure what backwards of the user's code take, where a compiled model has code that torch.compile does not trace.

Such code has nodes of its own in the graph of autograd, next to those of planned graphs. An autograd function of the
user's may make tensors there that are larger than all that it keeps: TRL's losses make logits. So the backward of each
such node is measured once, the first time that it runs.

Known limits:

- What ops take and give back inside is seen on the CPU alone, and only while no profiler runs.
- Code behind the outputs of the compiled model counts by a formula (`LossOutside` in `runtime/surroundings.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from overspill.pytorch.dispatch import DisableTorchFunctionSubclass, pop_mode, push_mode
from overspill.pytorch.storages import has_storage, storage_key
from overspill.runtime.step.away import GUARDS
from overspill.runtime.tracker import LiveBytes

from .loop_state import TensorGuard


class _Taken(LiveBytes):
    """Counts all but parameters that plans have on the device meanwhile."""

    def add(self, values: Iterable[Any]) -> None:
        """Count the storages of tensors among `values`, each once."""
        found = [value for value in values if isinstance(value, Tensor) and has_storage(value)]
        with DisableTorchFunctionSubclass():
            self.left_out.update(storage_key(v) for v in found if isinstance(v, nn.Parameter) and _is_planned(v))
        super().add(found)


def _is_planned(parameter: nn.Parameter) -> bool:
    guard = GUARDS.get(id(parameter))
    return not (isinstance(guard, TensorGuard) and guard.may_leave)


def measure_backward(node: Node, saved: Sequence[Tensor], tell: Callable[[str, int, set[int]], None]) -> None:
    """Call `tell(name, nbytes, lengths)` once the backward of `node` has run, which keeps `saved` until then.

    The bytes are the most that it has at once, with the gradients that it is given. The lengths are those of all these
    tensors.
    """
    if hasattr(node, "variable"):  # it adds to the gradient of a parameter, which plans count
        return
    kept = {storage_key(tensor) for tensor in saved if has_storage(tensor)}
    running: list[_Taken] = []
    lengths = {len(t) for t in saved if t.dim()}

    def begin(gradients: Sequence[Tensor | None]) -> None:
        before.remove()
        if (device := next((g.device for g in gradients if g is not None), None)) is None:
            after.remove()
            return
        lengths.update(len(g) for g in gradients if g is not None and g.dim())
        running.append(_Taken(device))
        running[0].left_out |= kept
        running[0].add(gradients)
        push_mode(running[0])

    def end(*_: Any) -> None:
        after.remove()
        pop_mode()
        tell(node_name, running.pop().peak_bytes, lengths)

    node_name = name_of(node)
    before, after = node.register_prehook(begin), node.register_hook(end)


def name_of(node: Node) -> str:
    """Return the name of the op or function whose backward `node` is."""
    return node.name().removesuffix("0").removesuffix("Backward")

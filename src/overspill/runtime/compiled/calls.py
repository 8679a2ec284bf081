"""Planned forward and backward of Inductor's programs, as AOTAutograd calls them.

Assumed of AOTAutograd, not checked: it saves all outputs of forward after the model's own. They come before the
gradients among the arguments of backward. The last ones, as many as its metadata says, are not checked for changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.joint import NO_VERSION_CHECK, JointGraph, mutated_args, storages
from overspill.core.errors import InvalidScheduleError, UnsupportedError
from overspill.pytorch.autograd import keeps_graph
from overspill.runtime.arena import storage_at, tensor_at
from overspill.runtime.lower import Stretch


class Lowered(NamedTuple):
    """A captured step, lowered by its plan."""

    captured: Captured
    stretches: Sequence[Stretch]
    """Forward, and backward if any; the update where it is captured."""
    runs: Sequence[Callable[[list[Any]], Any]]
    """How forward and backward run, on lists of arguments, which they empty."""


WRITES_OVER = "backward(retain_graph=True) would read what this backward writes over; {}"
LEAVE_OUT = 'pass placement="pytorch", or on the CPU leave placement="planned" out'


class CallsOfPlan:
    """A lowered forward and its backward.

    AOTAutograd does not check the last `unchecked` saved tensors for changes.
    """

    def __init__(self, lowered: Lowered, unchecked: int) -> None:
        captured, (fore, *_), self._runs = lowered
        # Empty tensors pad the saved ones to the number that AOTAutograd counted.
        outputs = fore.module.graph.find_nodes(op="output")[0].args[0][: fore.own]
        self._own = len(captured.joint.forward_outputs)
        loose = sum(bool(node.meta.get(NO_VERSION_CHECK)) for node in outputs[self._own :])
        if loose > unchecked:
            raise InvalidScheduleError(f"{loose} tensors that change cross to backward, for {unchecked} places")
        self._place = len(outputs) - loose
        self._padding = [torch.empty(0, device="cpu")] * (unchecked - loose)
        self._saved = self._place - self._own
        self._cure = _no_second_time(captured.joint, [stretch.module for stretch in lowered.stretches])

    def forward(self, args: list[Any]) -> list[Any]:
        """Return the results, followed by the saved tensors."""
        found = list(self._runs[0](args))
        # Inductor returns a tensor and its detach() as one, and AOTAutograd marks that one: pytorch #195357.
        first = {id(result): i for i, result in reversed([*enumerate(found[: self._own])])}
        for i, result in enumerate(found[: self._own]):
            found[i] = result.detach() if isinstance(result, Tensor) and first[id(result)] != i else result
        if len(self._runs) > 1:
            found[self._place : self._place] = self._padding
        return found

    def backward(self, args: list[Any]) -> Sequence[Any]:
        """Return the gradients. Raises UnsupportedError if it would have to run twice, and cannot."""
        if self._cure and keeps_graph():
            raise UnsupportedError(WRITES_OVER.format(self._cure))
        del args[self._saved : self._saved + len(self._padding)]
        made: Sequence[Any] = self._runs[1](args)
        return made


def _no_second_time(joint: JointGraph, modules: Sequence[fx.GraphModule]) -> str:
    """Return the remedy if backward overwrites tensors that it reads, or an empty string."""
    if any(node.target is tensor_at or node.target is storage_at for m in modules for node in m.graph.nodes):
        return LEAVE_OUT
    made = {key for node in joint.forward for key in storages(node)} - {k for n in joint.primals for k in storages(n)}
    if any(key in made for node in joint.backward for changed in mutated_args(node) for key in storages(changed)):
        return "set torch._functorch.config.donated_buffer = False before the model is called, as for torch.compile"
    return ""

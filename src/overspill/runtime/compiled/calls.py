"""Forward and backward of Inductor's programs by a plan, as AOTAutograd calls them.

Relies on AOTAutograd (2.11 to 2.14): all outputs of forward behind its own are saved, and come before the gradients
among backward's arguments; the last ones, as many as its metadata says, are not checked for changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.graph import _BoxedCodeGen

from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.joint import NO_VERSION_CHECK, JointGraph, mutated_args, storages
from overspill.core.errors import InvalidSchedule, UnsupportedError
from overspill.runtime.arena import storage_at, tensor_at
from overspill.runtime.recording.recorder import Recorder
from overspill.runtime.recording.told import told_module

Run = Callable[[list[Any]], Any]
Lowered = tuple[Captured, tuple[fx.GraphModule, ...]]
"""What was captured, and the graphs that carry its plan out: forward, and backward where there is one."""


class CallsOfPlan:
    """The functions of a forward and its backward that were lowered, `unchecked` of whose saved tensors nobody checks.

    `plain` are they as they are, `told` those that tell a recorder what they do as well.
    """

    def __init__(self, captured: Captured, modules: Sequence[fx.GraphModule], unchecked: int) -> None:
        self._graph = captured.graph
        self._modules = modules
        for module in modules:
            module.graph.set_codegen(_BoxedCodeGen())
            module.recompile()
        outputs = modules[0].graph.find_nodes(op="output")[0].args[0]
        own = len(captured.joint.forward_outputs)
        loose = sum(bool(node.meta.get(NO_VERSION_CHECK)) for node in outputs[own:])
        if loose > unchecked:
            raise InvalidSchedule(f"{loose} tensors that change cross to backward, for {unchecked} places")
        self._place = len(outputs) - loose
        self._padding = [torch.empty(0, device="cpu")] * (unchecked - loose)
        self._saved = self._place - own
        self._cure = _no_second_time(captured.joint, modules)
        self.plain = self._wrapped(module.forward for module in modules)

    def told(self, recorder: Recorder) -> tuple[Run, ...]:
        """The functions that tell `recorder` what they do."""
        return self._wrapped(told_module(module, self._graph, recorder) for module in self._modules)

    def _wrapped(self, runs: Iterable[Run]) -> tuple[Run, ...]:
        return tuple(partial(wrap, run) for wrap, run in zip((self._forward, self._backward), runs, strict=False))

    def _forward(self, run: Run, args: list[Any]) -> list[Any]:
        found = list(run(args))
        if len(self._modules) > 1:
            found[self._place : self._place] = self._padding
        return found

    def _backward(self, run: Run, args: list[Any]) -> Any:
        if self._cure and torch._C._autograd._get_current_graph_task_keep_graph():
            raise UnsupportedError(
                f"backward(retain_graph=True) would read what this backward writes over; {self._cure}"
            )
        del args[self._saved : self._saved + len(self._padding)]
        return run(args)


def _no_second_time(joint: JointGraph, modules: Sequence[fx.GraphModule]) -> str:
    """What would let backward run twice, where it writes over what it has read; nothing where it does not."""
    if any(node.target is tensor_at or node.target is storage_at for m in modules for node in m.graph.nodes):
        return 'leave placement="planned" out'
    made = {key for node in joint.forward for key in storages(node)} - {k for n in joint.primals for k in storages(n)}
    if any(key in made for node in joint.backward for changed in mutated_args(node) for key in storages(changed)):
        return "set torch._functorch.config.donated_buffer = False before the model is called, as for torch.compile"
    return ""

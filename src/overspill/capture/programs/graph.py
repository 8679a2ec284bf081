"""Turn Inductor's compiled programs into the Graph of one training step.

Each kernel and library call is an op.
"""

from __future__ import annotations

import operator

from torch import Tensor, fx

from overspill.capture.compiled.graph import Captured, CaptureOfStep, InputInfo, Surroundings
from overspill.capture.compiled.joint import JointGraph, StorageKey
from overspill.capture.layers import layer_type_of
from overspill.core import Phase, TensorKind
from overspill.pytorch.storages import storage_key

from .functions import ProgramFunction
from .joint import JointOfPrograms
from .storages import Call, Storages


def capture_programs(
    programs: Storages, traced: JointGraph, joint: JointOfPrograms, inputs: list[InputInfo], surroundings: Surroundings
) -> Captured:
    """Return the Graph of the step around `programs`, which Inductor made from `traced`.

    `joint` has the calls of the programs as nodes.
    """
    capture = CallsOfPrograms(joint, inputs, surroundings)
    capture.take(programs, traced)
    return capture.build()


class CallsOfPrograms(CaptureOfStep):
    """Adds calls of compiled programs as ops."""

    programs: Storages

    def take(self, programs: Storages, traced: JointGraph) -> None:
        """Set the programs to add, and the graph that they come from."""
        self.programs = programs
        self.origins = self.lines.by_name(traced.forward, traced.backward)
        self.updated = {k for part in programs.calls for call in part for k in call.updated}
        self.grads -= programs.unwritten
        self.returned -= programs.unwritten

    def _is_random(self) -> bool:
        return any(call.random for part in self.programs.calls for call in part)

    def _add_constants(self) -> None:
        for name, value in self.programs.constants.items():
            key = storage_key(value)
            self.tensor_of[key] = self._add_tensor(
                value.untyped_storage().nbytes(), TensorKind.BUFFER, name, value, persistent=True
            )

    def _add_node(self, node: fx.Node, phase: Phase) -> None:
        if isinstance(node.target, ProgramFunction) and node.target.call is not None:
            self.nodes[len(self.ops)] = node
            self._add_call(node.target.call, phase)
        elif not isinstance(node.target, ProgramFunction) and node.target is not operator.getitem:
            super()._add_node(node, phase)

    def _add_call(self, call: Call, phase: Phase) -> None:
        # Tensors that it reads and writes.
        for key in call.writes:
            if key not in self.tensor_of:
                self._add_made(key, phase)
        # Buffers without elements, which no call writes, are left out of the graph.
        read = self._ids(set(call.reads) - self.programs.unwritten)
        reads = tuple(dict.fromkeys((*read, *self._ids(set(call.updated)))))
        writes = tuple(self.tensor_of[key] for key in call.writes)
        if call.random:
            reads, writes = reads + self.random_state, writes + self.random_state
        # Whether it can be recomputed: as often as wanted, with the same result.
        again = phase is Phase.FORWARD and call.repeatable and bool(call.writes)
        again = again and self.updated.isdisjoint((*call.reads, *call.writes)) and not call.updated
        again = again and all(len(self.programs.roots[k]) == 1 for k in call.writes)
        name = call.name.rsplit(".", 1)[-1]
        origins = self.origins[phase is Phase.BACKWARD]
        # The last op of a fused kernel says most about it.
        frames = dict.fromkeys(at for name in reversed(call.origins) for at in origins.get(name, ()))
        self._add_op(
            name, name, layer_type_of(name), phase, reads, writes,
            flops=call.flops, moved_bytes=call.moved_bytes,
            workspace_bytes=call.workspace.nbytes + self._dropped_bytes(call), workspaces=call.workspace.blocks,
            recomputable=again, recompute_reads=reads if again else (), recompute_writes=writes if again else (),
            frames=tuple(frames), given=self._allocated(call),
        )  # fmt: skip

    def _allocated(self, call: Call) -> tuple[int, ...]:
        """Return the tensors that the program itself allocates for `call`, and no library call does."""
        programs = self.programs
        return tuple(
            self.tensor_of[key]
            for key in call.writes
            if len(programs.roots[key]) == 1 and programs.roots[key][0] in programs.allocations
        )

    def _dropped_bytes(self, call: Call) -> int:
        """Return the bytes that a library call returns and the program drops."""
        if call.container is None:
            return 0
        results = [v for v in self.programs.values[call.container] if isinstance(v, Tensor)]
        return sum(int(v.untyped_storage().nbytes()) for v in results if storage_key(v) not in self.tensor_of)

    def _add_made(self, key: StorageKey, phase: Phase) -> None:
        """Add a buffer of the program, movable if internal and a single variable."""
        roots = self.programs.roots[key]
        value: Tensor = self.programs.values[roots[0]]
        nbytes = int(value.untyped_storage().nbytes())
        whole = len(roots) == 1 and value.numel() * value.element_size() == nbytes
        self.tensor_of[key] = self._add_tensor(
            nbytes, self._kind(key, phase), roots[0][2:], value, movable=whole and key not in self.returned
        )

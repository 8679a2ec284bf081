"""Capture a compiled model that is sharded, with the gathers and scatters of its step."""

from __future__ import annotations

from dataclasses import replace

from overspill.core import numbered

from .gathers import GatheredGroup
from .graph import Captured, CaptureOfStep, InputInfo, Surroundings
from .joint import JointGraph
from .whole_step import CaptureOfWholeStep, GradientOps, early


class CaptureOfShardedStep(CaptureOfWholeStep):
    """Builds the Graph around the joint graph of a compiled model whose inputs are shards."""

    def __init__(
        self, joint: JointGraph, inputs: list[InputInfo], groups: tuple[GatheredGroup, ...], surroundings: Surroundings
    ) -> None:
        super().__init__(joint, inputs, GradientOps(groups=groups), surroundings)

    def build(self) -> Captured:  # type: ignore[override]
        """Return the captured step. Gradients are scattered once those of their group are complete."""
        captured = CaptureOfStep.build(self)
        order = early(captured.graph.ops)
        graph = replace(captured.graph, ops=numbered(captured.graph.ops[old] for old in order))
        nodes = {new: captured.nodes[old] for new, old in enumerate(order) if old in captured.nodes}
        return replace(captured, graph=graph, nodes=nodes)

    @property
    def whole_step(self) -> bool:
        """The update is the user's."""
        return False

    _add_write_back = CaptureOfStep._add_write_back  # AOTAutograd writes back, behind forward

    def _add_gradients_and_update(self) -> None:
        gradients = {self.input_nodes.index(primal): node for primal, node in self.joint.gradients.items()}
        parts = self._scattered(gradients)
        scattered = {gradients[position]: part for position, part in parts.items()}
        self.joint.backward_outputs = [scattered.get(node, node) for node in self.joint.backward_outputs]
        del self.joint.gradients  # of the outputs before
        self.grads = self._output_storages(self.joint.backward_outputs)
        CaptureOfStep._add_gradients_and_update(self)

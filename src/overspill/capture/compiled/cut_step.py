"""Capture a training step that is cut where the user's code runs, with all of its memory.

The joint graph is that of a compiled model: forward | the user's loss | backward. Behind them come the updates of an
optimizer that the user's loop calls: forward | backward | update. Parameters, gradients and optimizer state are tensors
that may move, as in a whole step (`whole_step.py`), but ops do not cross the cuts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import fx

from overspill.core import LayerType, Phase, TensorKind

from .graph import CLIP, GRADIENTS, TANGENTS_ARE_GIVEN, Captured, CaptureOfStep, InputInfo, Surroundings, lies_as
from .joint import JointGraph, storages
from .whole_step import UPDATE, CaptureOfWholeStep, GradientOps, ParameterUpdate

Build = Callable[[JointGraph, list[InputInfo], GradientOps, Surroundings], "CapturedCutStep"]
"""Captures a step that is cut, as `capture_cut_step` does."""


def capture_cut_step(
    joint: JointGraph, inputs: list[InputInfo], ops: GradientOps, surroundings: Surroundings
) -> CapturedCutStep:
    """Return the Graph of the step around `joint`, which is changed; `inputs` are by position."""
    return CaptureOfCutStep(joint, inputs, ops, surroundings).build()


@dataclass(frozen=True)
class CapturedCutStep(Captured):
    """A captured step of forward, backward and update."""

    updates: tuple[ParameterUpdate, ...]
    """Those of parameters that get a gradient, in the order of their ops."""
    made: dict[int, fx.Node]
    """Gradients that may move, as backward makes them, by the position of the parameter."""
    read: dict[int, fx.Node]
    """Gradients as updates read them, by the position of the parameter."""
    states: dict[int, list[fx.Node]]
    """The optimizer state of each updated parameter, by the position of the parameter."""

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """The inputs of forward; behind them, primals are optimizer state."""
        return tuple(self.joint.primals[: len(self.joint.primals) - sum(map(len, self.states.values()))])


class CaptureOfCutStep(CaptureOfWholeStep):
    """Builds the Graph of a step around the joint graph of a compiled model."""

    def __init__(
        self, joint: JointGraph, inputs: list[InputInfo], ops: GradientOps, surroundings: Surroundings
    ) -> None:
        super().__init__(joint, inputs, ops, surroundings)
        self.made: dict[int, fx.Node] = {}
        self.read: dict[int, fx.Node] = {}

    def build(self) -> CapturedCutStep:  # type: ignore[override]
        """Return the captured step."""
        found = CaptureOfStep.build(self)
        return CapturedCutStep(
            found.graph, found.joint, found.nodes, found.tensor_of, self.updates, self.made,
            self.read, self.states,
        )  # fmt: skip

    @property
    def whole_step(self) -> bool:
        """Ops stay in their phases."""
        return False

    _add_write_back = CaptureOfStep._add_write_back  # AOTAutograd writes back, behind forward

    def _index(self, position: int, node: fx.Node) -> int:  # noqa: ARG002 - as it is called
        """Return the index of the description of an input: its position, for a subclass is several."""
        return position

    def _add_gradients_and_update(self) -> None:
        if not self.joint.backward_outputs:
            return
        shared = Counter(key for n in self.joint.backward_outputs if isinstance(n, fx.Node) for key in storages(n))
        gradients = {self.input_nodes.index(primal): node for primal, node in self.joint.gradients.items()}
        updated = {update.parameter for update in self.updates}
        for position, node in gradients.items():
            if position in updated and self._may_move(self.input_nodes[position], node, shared):
                self.made[position] = node
        self._hand_out(gradients)
        self._add_reads()
        for update in self.updates:
            position = update.parameter
            gradient = self.read[position] = self._stand_in(position, gradients[position])
            self._step_op(
                UPDATE, update.run, (self.input_nodes[position], gradient, None, *self.states[position]), Phase.UPDATE,
                updates=(self.input_nodes[position], *self.states[position])
                + ((gradient,) if update.changes_gradient else ()),
                workspace_bytes=update.workspace_bytes, moved_bytes=update.moved_bytes,
                layer=self.inputs[position].name,
            )  # fmt: skip

    def _add_reads(self) -> None:
        """Add an op for what the user's code does with gradients before the update, such as clipping.

        While it reads one that was away, the next one arrives (`StoredGradient`).
        """
        largest = sorted(self.tensors[self.tensor_of[storages(made)[0]]].nbytes for made in self.made.values())[-2:]
        if largest:
            self._add_op(CLIP, "", LayerType.UPDATE, Phase.UPDATE, (), (), workspace_bytes=sum(largest))

    def _may_move(self, parameter: fx.Node, gradient: fx.Node, shared: Counter[int]) -> bool:
        """Return whether a gradient has memory of its own, laid out as autograd keeps it."""
        (key,) = storages(gradient)
        value = gradient.meta["val"]
        return (
            len(self.joint.roots.get(key, ())) == 1
            and shared[key] == 1
            and self.tensors[self.tensor_of[key]].kind is TensorKind.GRADIENT
            and value.nbytes == value.untyped_storage().nbytes()
            and lies_as(value, parameter.meta["val"])
        )

    def _stand_in(self, position: int, gradient: fx.Node) -> fx.Node:
        """Return an input of the update for a gradient that backward makes: the same tensor of the plan."""
        parameter = self.input_nodes[position]
        with self.graph.inserting_after(self.input_nodes[-1]):
            node = self.graph.placeholder(f"gradient_of_{parameter.name}")
        with self.fake_mode:
            node.meta = {"val": parameter.meta["val"].detach().clone()}
        (key,) = storages(node)
        self.tensor_of[key] = self.tensor_of[storages(gradient)[0]]
        return node

    def _hand_out(self, gradients: dict[int, fx.Node]) -> None:
        """Add the op by which backward returns the gradients that stay where they are."""
        leave = {self.tensor_of[storages(made)[0]] for made in self.made.values()}
        stay = tuple(t for t in self._ids({k for k in self.grads if k in self.tensor_of}) if t not in leave)
        for tensor in stay:
            self.tensors[tensor] = replace(self.tensors[tensor], movable=False)
        # Gradients of before are added to, one after another, behind backward: the store has those that move.
        sizes = [self.tensors[t].nbytes for t in leave]
        adds = self.surroundings.accumulates or self.surroundings.sums
        again = 2 * max(sizes, default=0) if adds else 0
        kept: tuple[int, ...] = ()
        if self.surroundings.accumulates and stay:
            nbytes = sum(self.tensors[t].nbytes for t in stay)
            kept = (self._add_tensor(nbytes, TensorKind.GRADIENT, "accumulated gradients", persistent=True),)
        tangents = () if TANGENTS_ARE_GIVEN else self._ids({k for n in self.joint.given_tangents for k in storages(n)})
        reads = tuple(dict.fromkeys((*stay, *tangents, *kept, *self.pending)))
        self._add_op(
            GRADIENTS, "", LayerType.UPDATE, Phase.BACKWARD, reads, kept,
            workspace_bytes=max(again, self._relaid_bytes() if len(leave) < len(gradients) else 0),
        )  # fmt: skip

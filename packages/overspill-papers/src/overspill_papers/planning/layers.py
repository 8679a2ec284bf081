"""Group ops into layers, the unit of vDNN, SuperNeurons and Dymem."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from overspill.core import LayerType, Phase
from overspill.planning.gaps import saved_gaps
from overspill.planning.step_program import Gap, StepProgram


@dataclass
class Layer:
    """A forward layer: its steps, and the inputs it offloads.

    A layer that is called several times ends with its last call.
    """

    name: str
    type: LayerType
    forward: tuple[int, int]
    """Its [first, last] steps in forward."""
    backward: tuple[int, int] | None = None
    """Its [first, last] steps in backward."""
    inputs: list[Gap] = field(default_factory=list)
    """The gaps of the input activations X of which it was the last reader."""


def layers_of(program: StepProgram) -> list[Layer]:
    """Return the layers in forward order, with their inputs.

    Each has the movable saved tensors of which it was the last reader. The last reader decides (vDNN's Refcnt, Fig. 3).
    A tensor that a layer made and read itself is not its input.
    """
    layers: dict[str, Layer] = {}
    for position, step in enumerate(program.steps):
        op = program.op(step)
        if op.phase is Phase.FORWARD:
            layer = layers.setdefault(op.layer, Layer(op.layer, op.layer_type, (position, position)))
            layer.forward = (layer.forward[0], position)
            if op.layer_type is LayerType.CONV:
                layer.type = LayerType.CONV
        elif op.phase is Phase.BACKWARD and (found := layers.get(op.layer)) is not None:
            first = found.backward[0] if found.backward else position
            found.backward = (first, position)
    # Saved tensors belong to the layer that read them last.
    for gap in saved_gaps(program).values():
        reader = layers[program.op(program.steps[gap.start]).layer]
        if reader.name != program.graph.ops[program.graph.producer[gap.tensor]].layer:
            reader.inputs.append(gap)
    return list(layers.values())


def backward_order(layers: Sequence[Layer]) -> list[int]:
    """Return the indices of layers in the order of their backward, for those that have one."""
    begins = {i: layer.backward[0] for i, layer in enumerate(layers) if layer.backward is not None}
    return sorted(begins, key=begins.__getitem__)


def offload_step(program: StepProgram, gap: Gap) -> int:
    """Return the step before which the offload of an input starts.

    It is the last step that reads it, and runs concurrently with the offload. Inputs are read-only (vDNN §III-B, Dymem
    §3.2.1). If its last user writes it, the offload starts after that step.
    """
    _, writes = program.reads_writes(program.steps[gap.start])
    return gap.start + (gap.tensor in writes)

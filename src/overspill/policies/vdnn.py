"""`vdnn-all` and `vdnn-conv`: the static policies of vDNN (Rhu et al., MICRO'16, §III)."""

from __future__ import annotations

from dataclasses import dataclass, field

from overspill.core import Device, Graph, LayerType, Phase, Schedule

from .assemble import Transfer, assemble
from .base import Policy, earliest_return, latest_release, saved_gaps
from .program import Gap, Program


@dataclass
class _Layer:
    """A forward layer: its steps, and the gaps of the input feature maps X that it was the last to read."""

    name: str
    type: LayerType
    forward_end: int
    backward: tuple[int, int] | None = None  # [first, last] backward step
    offloaded: list[Gap] = field(default_factory=list)
    prefetched: bool = False


class VdnnAll(Policy):
    """Offload the input feature maps X of all layers, as each layer that is the last to read them runs (§III-A, -B).

    Offload overlaps that layer's forward and is awaited at its end (Fig. 9). Each layer's backward starts the prefetch
    for the nearest earlier layer found by Fig. 10's search and awaits it at its own end. Activation layers are left
    out: in place, they need only Y (§III-B). What Fig. 10 does not reach in time is fetched when it is needed.
    """

    name = "vdnn-all"
    summary = "offload the input feature maps of all layers"
    source = "vDNN §III (vDNN_all)"
    offloads = True

    def _offloads_layer(self, layer: LayerType) -> bool:
        return layer is not LayerType.ACTIVATION

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        program = Program(graph)
        layers = _layers(program)
        position = {layer.name: index for index, layer in enumerate(layers)}
        for gap in saved_gaps(program).values():
            # The reader that was last decides (Refcnt, Fig. 3); what a layer made and read itself is not its input.
            reader = layers[position[program.op(program.steps[gap.start]).layer]]
            maker = graph.ops[graph.producer[gap.tensor]].layer
            if reader.name != maker and self._offloads_layer(reader.type):
                reader.offloaded.append(gap)
        return assemble(program, _transfers(program, layers), self.name, budget_bytes)


class VdnnConv(VdnnAll):
    """As `vdnn-all`, for the inputs of convolution layers only: their long run time hides the transfer (§III-C)."""

    name = "vdnn-conv"
    summary = "offload the input feature maps of convolution layers"
    source = "vDNN §III (vDNN_conv)"

    def _offloads_layer(self, layer: LayerType) -> bool:
        return layer is LayerType.CONV


def _layers(program: Program) -> list[_Layer]:
    """The layers in forward order; a layer that is called several times ends with its last call."""
    layers: dict[str, _Layer] = {}
    for position, step in enumerate(program.steps):
        op = program.op(step)
        if op.phase is Phase.FORWARD:
            layer = layers.setdefault(op.layer, _Layer(op.layer, op.layer_type, position))
            layer.forward_end = position
            if op.layer_type is LayerType.CONV:
                layer.type = LayerType.CONV
        elif op.phase is Phase.BACKWARD and (found := layers.get(op.layer)) is not None:
            first = found.backward[0] if found.backward else position
            found.backward = (first, position)
    return list(layers.values())


def _transfers(program: Program, layers: list[_Layer]) -> list[Transfer]:
    """Transfers of all offloaded inputs, prefetched as Fig. 10 finds them."""
    started: dict[int, tuple[int, int]] = {}  # layer index -> [issue, await) steps of its prefetch
    in_backward = sorted(
        (i for i, layer in enumerate(layers) if layer.backward), key=lambda i: layers[i].backward or (0, 0)
    )
    for current in in_backward:
        found = _find_prefetch_layer(layers, current)
        first, last = layers[current].backward or (0, 0)
        if found is not None:
            started[found] = (first, last + 1)
    transfers = []
    for index, layer in enumerate(layers):
        for gap in layer.offloaded:
            release = min(max(layer.forward_end, gap.start) + 1, latest_release(program, gap))
            issue, arrive = started.get(index, (gap.end, gap.end))
            prefetch = min(max(issue, earliest_return(program, gap), release), gap.end)
            transfers.append(Transfer(gap, gap.start, release, prefetch, min(max(arrive, prefetch), gap.end)))
    return transfers


def _find_prefetch_layer(layers: list[_Layer], current: int) -> int | None:
    """Fig. 10's findPrefetchLayer: the closest earlier layer to prefetch, searching no further than the next CONV."""
    for index in range(current - 1, -1, -1):
        layer = layers[index]
        if layer.offloaded and not layer.prefetched:
            layer.prefetched = True
            return index
        if layer.type is LayerType.CONV:
            return None
    return None

"""`vdnn-all` and `vdnn-conv`: the static policies of vDNN (Rhu et al., MICRO'16, §III)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from overspill.core import Device, Graph, LayerType, Schedule

from .assemble import Transfer, assemble
from .base import Policy, earliest_return, latest_release
from .layers import Layer, layers_of
from .program import Program


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
        layers = layers_of(program)
        offloading = [index for index, layer in enumerate(layers) if layer.inputs and self._offloads_layer(layer.type)]
        return assemble(program, _transfers(program, layers, offloading), self.name, budget_bytes)


class VdnnConv(VdnnAll):
    """As `vdnn-all`, for the inputs of convolution layers only: their long run time hides the transfer (§III-C)."""

    name = "vdnn-conv"
    summary = "offload the input feature maps of convolution layers"
    source = "vDNN §III (vDNN_conv)"

    def _offloads_layer(self, layer: LayerType) -> bool:
        return layer is LayerType.CONV


def _transfers(program: Program, layers: Sequence[Layer], offloading: Sequence[int]) -> list[Transfer]:
    """Transfers of the inputs of the layers `offloading`, prefetched as Fig. 10 finds them."""
    started: dict[int, tuple[int, int]] = {}  # layer index -> [issue, await) steps of its prefetch
    waiting = set(offloading)
    in_backward = sorted(
        (i for i, layer in enumerate(layers) if layer.backward), key=lambda i: layers[i].backward or (0, 0)
    )
    for current in in_backward:
        found = _find_prefetch_layer(layers, current, waiting)
        first, last = layers[current].backward or (0, 0)
        if found is not None:
            waiting.remove(found)
            started[found] = (first, last + 1)
    transfers = []
    for index in offloading:
        for gap in layers[index].inputs:
            release = min(max(layers[index].forward[1], gap.start) + 1, latest_release(program, gap))
            issue, arrive = started.get(index, (gap.end, gap.end))
            prefetch = min(max(issue, earliest_return(program, gap), release), gap.end)
            transfers.append(Transfer(gap, gap.start, release, prefetch, min(max(arrive, prefetch), gap.end)))
    return transfers


def _find_prefetch_layer(layers: Sequence[Layer], current: int, waiting: Collection[int]) -> int | None:
    """Fig. 10's findPrefetchLayer: the closest earlier layer to prefetch, searching no further than the next CONV."""
    for index in range(current - 1, -1, -1):
        if index in waiting:
            return index
        if layers[index].type is LayerType.CONV:
            return None
    return None

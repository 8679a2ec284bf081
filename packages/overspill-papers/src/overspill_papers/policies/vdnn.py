"""The policies of vDNN (Rhu et al., MICRO'16, §III), and the one-stream baseline of Dymem's comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from overspill.core import Device, Graph, LayerType, Schedule, Verb
from overspill.planning.algorithms import fastest_within, memory_optimal
from overspill.planning.assemble import Transfer, assemble
from overspill.planning.floor import below, peak_of
from overspill.planning.gaps import earliest_return, latest_release
from overspill.planning.step_program import StepProgram
from overspill.policies.base import Policy
from overspill.policies.parameters import choice, flag
from overspill.simulate import simulate
from overspill_papers.planning.layers import Layer, backward_order, layers_of, offload_step

Offloading = Callable[[LayerType], bool]
"""Selects the layers whose input activations are offloaded."""
PASSES = ("none", "conv", "all", "conv-slower", "all-slower", "least")
"""Passes of the dynamic policy (§III-C): the offloaded layers, with the fastest algorithms or with slower ones where
memory is short. The last one offloads all, with memory-optimal algorithms."""
LEAST = PASSES[-1]


def no_layer(kind: LayerType) -> bool:  # noqa: ARG001
    """Select no layer: all tensors stay until their last use."""
    return False


def conv_layers(kind: LayerType) -> bool:
    """Select vDNN_conv's layers: convolutions, whose long run time hides the transfer (§III-C)."""
    return kind is LayerType.CONV


def all_layers(kind: LayerType) -> bool:
    """Return whether vDNN_all offloads the inputs of a layer of this kind.

    It is every layer except activations, which work in place and need only Y (§III-B).
    """
    return kind is not LayerType.ACTIVATION


def vdnn_schedule(
    program: StepProgram,
    offloads: Offloading,
    policy: str,
    budget_bytes: int | None,
    *,
    one_stream: bool = False,
    pooling_searches: bool = True,
) -> Schedule:
    """Return a schedule that offloads inputs X of the layers `offloads`, as vDNN does.

    It prefetches in the order of Fig. 10. With `pooling_searches` false, a pooling layer's backward starts no prefetch.
    With `one_stream`, compute waits for every transfer: out after the layer, back before its backward.
    """
    layers = layers_of(program)
    offloading = [index for index, layer in enumerate(layers) if layer.inputs and offloads(layer.type)]
    transfers = (
        _one_by_one(layers, offloading)
        if one_stream
        else _beside_layers(program, layers, offloading, pooling_searches=pooling_searches)
    )
    return assemble(program, transfers, policy, budget_bytes)


class VdnnAll(Policy):
    """Offload the input activations X of all layers.

    The offload of each runs with the last layer that reads it (§III-A, -B). It overlaps that layer's forward and is
    awaited at its end (Fig. 9). Each layer's backward starts the prefetch for the nearest earlier layer found by Fig.
    10's search and awaits it at its own end. Activation layers are left out: in place, they need only Y (§III-B).
    Tensors that Fig. 10 does not reach in time are fetched when needed.
    """

    name = "vdnn-all"
    summary = "offload the input feature maps of all layers"
    source = "vDNN §III (vDNN_all)"
    offloads = True
    placement = "cnmem"
    parameters = (
        flag(
            "pooling_searches",
            "pooling_searches",
            "a pooling's backward starts a prefetch, as Fig. 10 has it",
            default=True,
        ),
    )

    def __init__(self, *, memory_optimal: bool = False, pooling_searches: bool = True) -> None:
        """Set the variant; with `pooling_searches` false, a pooling layer's backward starts no prefetch.

        Fig. 10 makes no such exception. But the paper's 4.8 GB (§V-A) leave no free memory next to a pooling's maps for
        the tensors it would fetch. The cost is small, since a pooling hides little of a transfer.
        """
        super().__init__(memory_optimal=memory_optimal)
        self.pooling_searches = pooling_searches

    def _offloads(self, kind: LayerType) -> bool:
        return all_layers(kind)

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        program = StepProgram(graph)
        return vdnn_schedule(program, self._offloads, self.name, budget_bytes, pooling_searches=self.pooling_searches)


class VdnnConv(VdnnAll):
    """As `vdnn-all`, for the inputs of convolution layers only.

    Their long run time hides the transfer (§III-C).
    """

    name = "vdnn-conv"
    summary = "offload the input feature maps of convolution layers"
    source = "vDNN §III (vDNN_conv)"

    def _offloads(self, kind: LayerType) -> bool:
        return conv_layers(kind)


class Sequential(Policy):
    """The transfers of `vdnn-all` on one stream.

    Each transfer is awaited as soon as it starts, so that none is hidden.
    """

    name = "sequential"
    summary = "one stream: compute waits for every transfer"
    source = "Dymem §5.3 (baseline of Fig. 14)"
    offloads = True
    placement = "cnmem"

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:  # noqa: ARG002
        return vdnn_schedule(StepProgram(graph), all_layers, self.name, budget_bytes, one_stream=True)


class VdnnDynamic(Policy):
    """The first of these passes that fits (§III-C, "Dynamic vDNN").

    In the paper each is a profiling pass.

    1. vDNN_all with memory-optimal algorithms, which needs the least: if it does not fit, nothing does.
    2. The fastest algorithms, with nothing offloaded, then under vDNN_conv, then under vDNN_all.
    3. Under vDNN_conv, then under vDNN_all, each op that would overflow the budget with its fastest algorithm takes
       the next slower one until it fits or is memory-optimal. If both fail, the pass of 1.

    With nothing offloaded, tensors are still freed at their last use, as vDNN's memory manager always does. Without a
    budget the limit is the device's memory. The order of the passes is fastest first, as the paper expects. Where that
    order errs, a larger budget can give a slower step. `vdnn-fastest` takes the fastest instead.
    """

    name = "vdnn-dynamic"
    summary = "the first of vDNN's policies and algorithm choices that fits"
    source = "vDNN §III-C (vDNN_dyn)"
    offloads = True
    plans_for_budget = True
    placement = "cnmem"
    parameters = (choice("pass", "only", "this pass alone", PASSES),)

    def __init__(self, *, memory_optimal: bool = False, only: str | None = None) -> None:
        """Set the variant; `only` is the one pass that is made."""
        super().__init__(memory_optimal=memory_optimal)
        self.only = only

    def _plan(self, graph: Graph, device: Device, budget_bytes: int | None, seconds: tuple[float, ...]) -> Schedule:
        limit = device.usable_bytes if budget_bytes is None else budget_bytes
        least = vdnn_schedule(
            StepProgram(graph, algorithms=memory_optimal(graph)), all_layers, self.spelled(only=LEAST), None
        )
        if (floor := peak_of(graph, least)).nbytes > limit:
            raise below(floor, limit, self.name)
        passes = itertools.chain(self._passes(StepProgram(graph), device, limit, seconds), [(LEAST, least)])
        made = [(name, schedule) for name, schedule in passes if name == self.only] if self.only else passes
        timed = ((one, simulate(graph, one, device, seconds)) for _, one in made)
        passed = ((one, line.step_seconds) for one, line in timed if line.peak_bytes <= limit)
        chosen = self._chosen(passed)
        if chosen is None:
            needs = (peak_of(graph, one) for _, one in made)
            raise below(min(needs, key=lambda need: need.nbytes), limit, self.spelled())
        return replace(chosen, budget_bytes=budget_bytes)

    def _chosen(self, passed: Iterator[tuple[Schedule, float]]) -> Schedule | None:
        """Return one of the passes that fit, or None if none fits. Each comes with the seconds of its step."""
        return next((schedule for schedule, _ in passed), None)

    def _passes(
        self, program: StepProgram, device: Device, limit: int, seconds: tuple[float, ...]
    ) -> Iterator[tuple[str, Schedule]]:
        fastest = []
        for name, kinds in zip(PASSES, (no_layer, conv_layers, all_layers), strict=False):
            fastest.append(vdnn_schedule(program, kinds, self.spelled(only=name), None))
            yield name, fastest[-1]
        for name, made in zip(PASSES[len(fastest) :], fastest[1:], strict=False):
            live = simulate(program.graph, made, device, seconds).live_bytes
            slower = downgraded(program.graph, made, live, limit)
            yield name, replace(slower, policy=self.spelled(only=name))


class VdnnFastest(VdnnDynamic):
    """The fastest of `vdnn-dynamic`'s passes that fit.

    Among equals it is the first: our rule, not the paper's. A larger budget is then never slower. No pass is, since its
    transfers depend on layers and its ops have faster algorithms.
    """

    name = "vdnn-fastest"
    summary = "the fastest of vDNN's policies and algorithm choices that fits"
    source = "after vDNN §III-C"

    def _chosen(self, passed: Iterator[tuple[Schedule, float]]) -> Schedule | None:
        return min(passed, key=lambda one: one[1], default=(None, 0.0))[0]


def downgraded(graph: Graph, schedule: Schedule, live: Sequence[int], limit: int) -> Schedule:
    """Return `schedule` with slower algorithms where memory is over `limit`.

    It has fastest algorithms and `live` bytes at each instruction. vDNN's transfers depend on layers and not on time,
    so live bytes during an op do not depend on any choice.
    """
    instructions = list(schedule.instructions)
    for index, instruction in enumerate(instructions):
        if instruction.verb is Verb.RUN and live[index] > limit:
            op = graph.ops[instruction.target]
            room = limit - (live[index] - op.workspace_bytes)
            instructions[index] = replace(instruction, algorithm=fastest_within(op, room))
    return replace(schedule, instructions=tuple(instructions))


def _beside_layers(
    program: StepProgram, layers: Sequence[Layer], offloading: Sequence[int], *, pooling_searches: bool
) -> list[Transfer]:
    """Return transfers of the inputs of layers `offloading`, concurrent with layers.

    They go out during their own layer, and return in the order of Fig. 10.
    """
    started: dict[int, tuple[int, int]] = {}  # layer index -> [issue, await) steps of its prefetch
    # When each layer's prefetch starts.
    waiting = set(offloading)
    for current in backward_order(layers):
        if layers[current].type is LayerType.POOL and not pooling_searches:
            continue
        found = _find_prefetch_layer(layers, current, waiting)
        first, last = layers[current].backward or (0, 0)
        if found is not None:
            waiting.remove(found)
            started[found] = (first, last + 1)
    transfers = []
    # The transfers, within what the schedule's rules allow.
    for index in offloading:
        for gap in layers[index].inputs:
            release = min(max(layers[index].forward[1], gap.start) + 1, latest_release(program, gap))
            issue, arrive = started.get(index, (gap.end, gap.end))
            prefetch = min(max(issue, earliest_return(program, gap), release), gap.end)
            offload = offload_step(program, gap)
            transfers.append(Transfer(gap, offload, release, prefetch, min(max(arrive, prefetch), gap.end)))
    return transfers


def _one_by_one(layers: Sequence[Layer], offloading: Sequence[int]) -> list[Transfer]:
    """Return transfers of the inputs of layers `offloading`, with nothing concurrent."""
    gaps = [gap for index in offloading for gap in layers[index].inputs]
    return [Transfer(gap, gap.start + 1, gap.start + 1, gap.end, gap.end) for gap in gaps]


def _find_prefetch_layer(layers: Sequence[Layer], current: int, waiting: Collection[int]) -> int | None:
    """Return the closest earlier layer to prefetch, or None.

    It is Fig. 10's findPrefetchLayer, which searches no further than the next CONV.
    """
    for index in range(current - 1, -1, -1):
        if index in waiting:
            return index
        if layers[index].type is LayerType.CONV:
            return None
    return None

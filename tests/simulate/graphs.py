"""Training steps made by hand and at random, devices to run them on, and a naive recount: shared by many tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from hypothesis import strategies as st

from overspill.core import Device, Frame, Graph, Instruction, LayerType, Op, Phase, Schedule, Tensor, TensorKind, Verb
from overspill.planning.gaps import SMALLEST_MOVE_BYTES

DEVICE = Device(
    name="toy",
    kind="cpu",
    memory_bytes=1 << 40,
    flops_per_second={"float32": 1e9, "float16": 4e9},
    memory_bytes_per_second=1e9,
    offload_bytes_per_second=1e6,
    prefetch_bytes_per_second=2e6,
    transfer_latency_seconds=1e-4,
    op_overhead_seconds=1e-5,
    full_duplex=True,
    context_bytes=0,
)


class Build:
    """A graph under construction; `tensor` and `op` give the ids."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []

    def tensor(
        self,
        nbytes: int,
        kind: TensorKind = TensorKind.ACTIVATION,
        name: str = "",
        *,
        persistent: bool = False,
        movable: bool = True,
    ) -> int:
        number = len(self.tensors)
        movable = movable and not persistent
        self.tensors.append(
            Tensor(
                number,
                nbytes,
                kind,
                name or f"t{number}",
                (nbytes // 4,),
                "float32",
                persistent=persistent,
                movable=movable,
            )
        )
        return number

    def op(
        self,
        reads: Sequence[int],
        writes: Sequence[int],
        phase: Phase = Phase.FORWARD,
        *,
        layer: str = "",
        kind: LayerType = LayerType.OTHER,
        again: bool = False,
        state: Sequence[int] = (),
        workspace_bytes: int = 0,
        flops: int = 0,
    ) -> int:
        """One op; `again`: it may be recomputed, but not the update of `state`."""
        number = len(self.ops)
        self.ops.append(
            Op(
                number, f"op{number}", layer or f"layer{number}", kind, phase, (*reads, *state), (*writes, *state),
                workspace_bytes=workspace_bytes, flops=flops, recomputable=again,
                recompute_reads=tuple(reads) if again else (), recompute_writes=tuple(writes) if again else (),
            )
        )  # fmt: skip
        return number

    def graph(self, outputs: Sequence[int] = (), name: str = "made by hand") -> Graph:
        return Graph(name, tuple(self.tensors), tuple(self.ops), tuple(outputs))


def with_lines(graph: Graph, file: str = "nets/model.py", function: str = "forward") -> Graph:
    """`graph` as if line 100 + i of `file`, called by line 7 of train.py, had run op i, or the op that it is the backward of."""
    lines = (Frame(file, 100 + op.id, function, 0, backward=op.phase is Phase.BACKWARD) for op in graph.ops)
    ops = tuple(replace(op, frames=(op.id + 1,)) for op in graph.ops)
    return replace(graph, ops=ops, frames=(Frame("train.py", 7, "main"), *lines))


@dataclass(frozen=True)
class Layer:
    """A forward layer: it reads the layer before (and the outputs of the layers `skips`), and makes `nbytes`."""

    nbytes: int
    kind: LayerType = LayerType.OTHER
    saves_input: bool = True
    saves_output: bool = False
    mask_bytes: int = 0
    weight_bytes: int = 0
    workspace_bytes: int = 0
    flops: int = 1000
    state_bytes: int = 0
    random: bool = False
    movable: bool = True
    returned: bool = False
    skips: tuple[int, ...] = field(default=())


def network(layers: Sequence[Layer], input_bytes: int = 8192) -> Graph:
    """One step of `layers` in a row: forward, a loss, backward with summed gradients at forks, updates in place."""
    build = Build()
    image = build.tensor(input_bytes, TensorKind.INPUT, "x", persistent=True)
    weights = [
        build.tensor(layer.weight_bytes, TensorKind.PARAMETER, f"w{i}", persistent=True) if layer.weight_bytes else None
        for i, layer in enumerate(layers)
    ]
    states = [
        [build.tensor(layer.state_bytes, TensorKind.BUFFER, f"s{i}", persistent=True)] if layer.state_bytes else []
        for i, layer in enumerate(layers)
    ]
    outputs: list[int] = []
    masks: list[list[int]] = []
    inputs: list[list[int]] = []
    for i, layer in enumerate(layers):
        sources = [outputs[i - 1] if i else image]
        sources += [outputs[s] for s in dict.fromkeys(layer.skips) if s < i - 1]
        out = build.tensor(layer.nbytes, TensorKind.ACTIVATION, f"y{i}", movable=layer.movable and not layer.returned)
        mask = (
            [build.tensor(layer.mask_bytes, TensorKind.ACTIVATION, f"m{i}", movable=layer.movable)]
            if layer.mask_bytes
            else []
        )
        weight = weights[i]
        build.op(
            [*sources, *([] if weight is None else [weight])], [out, *mask], layer=f"l{i}", kind=layer.kind,
            again=not layer.random, state=states[i], workspace_bytes=layer.workspace_bytes, flops=layer.flops,
        )  # fmt: skip
        outputs.append(out)
        masks.append(mask)
        inputs.append(sources)
    loss = build.tensor(4, TensorKind.TEMPORARY, "loss", movable=False)
    build.op([outputs[-1]], [loss], layer="loss", kind=LayerType.LOSS, again=True, flops=10)
    gradients: dict[int, list[int]] = {outputs[-1]: [_gradient(build, outputs[-1])]}
    build.op([outputs[-1], loss], gradients[outputs[-1]], Phase.BACKWARD, layer="loss", kind=LayerType.LOSS, flops=10)
    updates: list[tuple[int, int]] = []
    for i in reversed(range(len(layers))):
        layer, weight = layers[i], weights[i]
        arriving = gradients[outputs[i]]
        while len(arriving) > 1:
            total = _gradient(build, outputs[i])
            build.op([arriving.pop(), arriving.pop()], [total], Phase.BACKWARD, layer=f"l{i}", kind=LayerType.JOIN)
            arriving.append(total)
        saved = (inputs[i] if layer.saves_input else []) + ([outputs[i]] if layer.saves_output else []) + masks[i]
        made = []
        for source in inputs[i]:
            if source != image:
                gradients.setdefault(source, []).append(_gradient(build, source))
                made.append(gradients[source][-1])
        if weight is not None:
            updates.append((weight, build.tensor(layer.weight_bytes, TensorKind.GRADIENT, f"dw{i}")))
            made.append(updates[-1][1])
        build.op(
            [*arriving, *saved, *([] if weight is None else [weight])], made, Phase.BACKWARD, layer=f"l{i}",
            kind=layer.kind, workspace_bytes=layer.workspace_bytes, flops=2 * layer.flops,
        )  # fmt: skip
    for weight, gradient in updates:
        build.op([weight, gradient], [weight], Phase.UPDATE, layer="optimizer", kind=LayerType.UPDATE)
    returned = [out for out, layer in zip(outputs, layers, strict=True) if layer.returned]
    return _with_kinds(build.graph([*returned, loss], "a network"))


def _gradient(build: Build, of: int) -> int:
    return build.tensor(build.tensors[of].nbytes, TensorKind.GRADIENT, f"d{build.tensors[of].name}")


def _with_kinds(graph: Graph) -> Graph:
    """What backward does not read is no feature map."""
    saved = {t for op in graph.ops if op.phase is Phase.BACKWARD for t in op.reads}
    tensors = [
        replace(t, kind=TensorKind.TEMPORARY) if t.kind is TensorKind.ACTIVATION and t.id not in saved else t
        for t in graph.tensors
    ]
    return replace(graph, tensors=tuple(tensors))


_SIZES = st.sampled_from([1, SMALLEST_MOVE_BYTES - 1, SMALLEST_MOVE_BYTES, 5000, 10_000, 20_001, 40_000, 1 << 16])
_LAYERS = st.builds(
    Layer,
    nbytes=_SIZES,
    kind=st.sampled_from([LayerType.CONV, LayerType.LINEAR, LayerType.ACTIVATION, LayerType.POOL, LayerType.NORM]),
    saves_input=st.sampled_from([True, True, False]),
    saves_output=st.booleans(),
    mask_bytes=st.sampled_from([0, 0, 100, 8192]),
    weight_bytes=st.sampled_from([0, 500, 16_000]),
    workspace_bytes=st.sampled_from([0, 0, 999, 1 << 15]),
    flops=st.sampled_from([10**5, 10**7, 10**8, 0]),
    state_bytes=st.sampled_from([0, 0, 128]),
    random=st.sampled_from([False, False, False, True]),
    movable=st.sampled_from([True, True, True, False]),
    skips=st.lists(st.integers(0, 10), max_size=2).map(tuple),
)


def layers(max_layers: int = 12) -> st.SearchStrategy[list[Layer]]:
    """Random layers, mostly many."""
    lengths = st.sampled_from([*range(max_layers // 2, max_layers + 1), 1, 2])
    return lengths.flatmap(lambda n: st.lists(_LAYERS, min_size=n, max_size=n))


def networks() -> st.SearchStrategy[Graph]:
    """Random steps: forks, masks, random ops, tensors that are small or must stay, ops of no time."""
    return layers().map(network)


def networks_that_return() -> st.SearchStrategy[Graph]:
    """Random steps of models that return what one of their layers makes, besides the loss."""

    def build(made: list[Layer], which: int) -> Graph:
        which %= len(made)
        return network([*made[:which], replace(made[which], returned=True), *made[which + 1 :]])

    return st.builds(build, layers(), st.integers(0, 11))


def long_networks(least_ops: int = 20, most_ops: int = 500) -> st.SearchStrategy[Graph]:
    """Random steps of so many ops: a few kinds of layers, repeated in an order drawn at random."""

    def build(kinds: list[Layer], ops: int, random: Random) -> Graph:
        made = [random.choice(kinds) for _ in range(max(1, ops // 4))]  # forward, backward, mostly update or sum
        while len((graph := network(made)).ops) < least_ops:
            made.append(random.choice(kinds))
        return graph

    kinds = st.lists(_LAYERS, min_size=2, max_size=6)
    return st.builds(build, kinds, st.integers(least_ops, most_ops), st.randoms(use_true_random=False)).filter(
        lambda graph: len(graph.ops) <= most_ops
    )


def tangles(most_ops: int = 200) -> st.SearchStrategy[Graph]:
    """Random steps whose backward reads what forward made in any order, again and again, as that of a loop over time does."""

    def build(ops: int, reach: int, random: Random) -> Graph:
        made = Build()
        outputs = [made.tensor(8192, TensorKind.INPUT, "x", persistent=True)]
        for _ in range(ops // 2):
            reads = {outputs[-1], *random.sample(outputs[-reach:], random.randint(0, min(2, len(outputs), reach)))}
            outputs.append(made.tensor(random.choice((2000, 5000, 5000, 20_000))))
            made.op(sorted(reads), [outputs[-1]], again=random.random() < 0.9, flops=random.choice((10**5, 10**7)))
        gradient = made.tensor(4, TensorKind.TEMPORARY, "loss", movable=False)
        made.op([outputs[-1]], [gradient], layer="loss")
        for _ in range(ops // 2):
            reads = {gradient, *random.sample(outputs, random.randint(1, min(3, len(outputs))))}
            gradient = made.tensor(2000, TensorKind.GRADIENT)
            made.op(sorted(reads), [gradient], Phase.BACKWARD, flops=10**6)
        return _with_kinds(made.graph(name="a tangle"))

    return st.builds(build, st.integers(10, most_ops), st.integers(1, 30), st.randoms(use_true_random=False))


def devices(max_share: float = 0.5) -> st.SearchStrategy[Device]:
    """Random devices, slow links and fast, one way at a time or both, with hosts that are quick or slow."""
    rates = st.sampled_from([1e5, 1e6, 1e7, 1e9])
    return st.builds(
        lambda out, back, latency, full, share, kind, host: replace(
            DEVICE, offload_bytes_per_second=out, prefetch_bytes_per_second=back, transfer_latency_seconds=latency,
            full_duplex=full, transfer_compute_share=share, kind=kind, transfer_host_seconds=host,
        ),
        rates, rates, st.sampled_from([0.0, 1e-4]), st.booleans(), st.sampled_from([0.0, max_share / 2, max_share]),
        st.sampled_from(["cpu", "cuda"]), st.sampled_from([0.0, 2e-5]),
    )  # fmt: skip


def schedule(*instructions: tuple[Verb, int], budget_bytes: int | None = None) -> Schedule:
    """A Schedule by hand."""
    return Schedule("by hand", tuple(Instruction(verb, target) for verb, target in instructions), budget_bytes)


def recount(graph: Graph, made: Schedule) -> list[int]:
    """The most bytes on the device during each instruction, counted anew from the set of tensors that are there."""
    there = {t.id for t in graph.tensors if t.persistent}
    most = []
    for verb, target in ((i.verb, i.target) for i in made.instructions):
        size = sum(graph.tensors[t].nbytes for t in there)
        if verb is Verb.RUN:
            there |= set(graph.ops[target].writes)
            size = sum(graph.tensors[t].nbytes for t in there) + graph.ops[target].workspace_bytes
        elif verb is Verb.RECOMPUTE:
            size += (
                sum(graph.tensors[t].nbytes for t in graph.ops[target].recompute_writes)
                + graph.ops[target].workspace_bytes
            )
            there |= set(graph.ops[target].recompute_writes)
        elif verb is Verb.PREFETCH:
            there.add(target)
            size = sum(graph.tensors[t].nbytes for t in there)
        elif verb is Verb.FREE:
            there.remove(target)
        most.append(size)
    return most

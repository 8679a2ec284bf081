"""Which mobility the blocks of a schedule have: Dymem's Algorithm 3 and the example below it (HPDC'20, §3.3.2)."""

import pytest
from tests.simulate.graphs import Build

from overspill.core import Graph, Instruction, LayerType, Mobility, Phase, Schedule, TensorKind, Trace, Verb
from overspill.simulate import trace_of

MIB = 1 << 20


def run_of(graph: Graph) -> Trace:
    """The trace of running all ops, freeing each tensor after its last use."""
    instructions: list[Instruction] = []
    for op in graph.ops:
        instructions.append(Instruction(Verb.RUN, op.id))
        last = [t for t, uses in enumerate(graph.uses) if uses[-1] == op.id and not graph.tensors[t].persistent]
        instructions += [Instruction(Verb.FREE, t) for t in last]
    return trace_of(graph, Schedule("made by hand", tuple(instructions)))


def mobility_of(trace: Trace) -> dict[str, Mobility]:
    return {block.name: block.mobility for block in trace.blocks}


def inception_block() -> Graph:
    """Fig. 10: l0 forks into l1 -> l5, l2, l3 -> l6 and l4 -> l7 -> l8, which l9 joins; in depth-first order."""
    build = Build()
    made = {"x": build.tensor(MIB, TensorKind.INPUT, "x", persistent=True)}
    for layer, sources in (
        *[("l0", "x"), ("l1", "l0"), ("l5", "l1"), ("l2", "l0"), ("l3", "l0"), ("l6", "l3"), ("l4", "l0")],
        *[("l7", "l4"), ("l8", "l7"), ("l9", "l5 l2 l6 l8"), ("end", "l9")],
    ):
        made[layer] = build.tensor(MIB, name=layer)
        build.op([made[s] for s in sources.split()], [made[layer]], layer=layer, kind=LayerType.CONV)
    return build.graph()


def test_figure_10_forks_and_what_waits_to_be_joined_are_temporary() -> None:
    found = mobility_of(run_of(inception_block()))
    assert {name for name, mobility in found.items() if mobility is Mobility.TEMPORARY} == {"l0", "l5", "l2", "l6"}
    assert {name for name, mobility in found.items() if mobility is Mobility.MOVABLE} == {
        *("x", "l1", "l3", "l4", "l7", "l8", "l9", "end")
    }


@pytest.mark.parametrize("kind", [LayerType.LINEAR, LayerType.SOFTMAX, LayerType.LOSS, LayerType.DROPOUT])
def test_line_2_what_fc_softmax_and_dropout_make_is_reclaimed(kind: LayerType) -> None:
    build = Build()
    build.tensor(MIB, name="y")
    build.op([], [0], kind=kind)
    build.op([0], [])
    build.op([0], [])
    assert mobility_of(run_of(build.graph()))["y"] is Mobility.RECLAIMED


def test_in_backward_only_forks_are_temporary() -> None:
    build = Build()
    for name in ("forked", "waiting", "other"):
        build.tensor(MIB, TensorKind.OUTPUT_GRADIENT, name)
    build.op([], [0, 1], Phase.BACKWARD, kind=LayerType.CONV)
    build.op([0], [2], Phase.BACKWARD)
    build.op([0, 2], [], Phase.BACKWARD)
    build.op([1], [], Phase.BACKWARD)
    assert mobility_of(run_of(build.graph())) == {
        "forked": Mobility.TEMPORARY,
        "waiting": Mobility.MOVABLE,
        "other": Mobility.MOVABLE,
    }


def test_workspaces_are_temporary_and_weights_with_their_gradients_stay_at_the_low_end() -> None:
    build = Build()
    build.tensor(MIB, TensorKind.PARAMETER, "w", persistent=True)
    build.tensor(MIB, TensorKind.GRADIENT, "dw")
    build.op([0], [1], workspace_bytes=MIB, kind=LayerType.LINEAR)
    build.op([0], [])
    build.op([0, 1], [0], Phase.UPDATE)
    assert mobility_of(run_of(build.graph())) == {
        "w": Mobility.MOVABLE,
        "dw": Mobility.MOVABLE,
        "workspace of op0": Mobility.TEMPORARY,
    }


def test_what_was_brought_back_is_movable_unless_several_layers_need_it() -> None:
    build = Build()
    build.tensor(MIB, name="y")
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD):
        build.op([] if phase is Phase.FORWARD else [0], [0] if phase is Phase.FORWARD else [], phase)
    graph = build.graph()
    verbs = [
        *[(Verb.RUN, 0), (Verb.OFFLOAD, 0), (Verb.AWAIT_OFFLOAD, 0), (Verb.FREE, 0)],
        *[(Verb.PREFETCH, 0), (Verb.AWAIT_PREFETCH, 0), (Verb.RUN, 1), (Verb.FREE, 0)],
        *[(Verb.PREFETCH, 0), (Verb.AWAIT_PREFETCH, 0), (Verb.RUN, 1), (Verb.RUN, 2), (Verb.FREE, 0)],
    ]
    trace = trace_of(graph, Schedule("made by hand", tuple(Instruction(*verb) for verb in verbs)))
    assert [b.mobility.name for b in trace.blocks] == ["MOVABLE", "MOVABLE", "TEMPORARY"]

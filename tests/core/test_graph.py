"""The Graph's derived views, on one step that is small enough to read."""

import pytest

from overspill.core import Device, Graph, LayerType, Op, Phase, Tensor, TensorKind, numbered

X, W, H, LOSS, GRAD, SCRATCH = range(6)


def tensor(number: int, kind: TensorKind, nbytes: int, *, persistent: bool = False) -> Tensor:
    return Tensor(number, nbytes, kind, f"t{number}", (nbytes // 4,), "float32", persistent=persistent)


def op(number: int, layer: str, phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...]) -> Op:
    return Op(number, f"op{number}", layer, LayerType.LINEAR, phase, reads, writes)


@pytest.fixture
def graph() -> Graph:
    """One linear layer and its loss: h = x·w, loss(h), h in place, the gradient, w updated in place."""
    return Graph(
        "one layer",
        (
            tensor(X, TensorKind.INPUT, 40, persistent=True),
            tensor(W, TensorKind.PARAMETER, 100, persistent=True),
            tensor(H, TensorKind.ACTIVATION, 20),
            tensor(LOSS, TensorKind.TEMPORARY, 4),
            tensor(GRAD, TensorKind.GRADIENT, 100),
            tensor(SCRATCH, TensorKind.TEMPORARY, 8),
        ),
        (
            op(0, "fc", Phase.FORWARD, (X, W), (H,)),
            op(1, "fc", Phase.FORWARD, (H, H), (H,)),
            op(2, "loss", Phase.FORWARD, (H,), (LOSS,)),
            op(3, "loss", Phase.BACKWARD, (LOSS, H), (SCRATCH,)),
            op(4, "fc", Phase.BACKWARD, (X, SCRATCH, H), (GRAD,)),
            op(5, "sgd", Phase.UPDATE, (W, GRAD), (W,)),
        ),
        outputs=(LOSS,),
    )


def test_the_producer_is_the_first_writer_of_what_is_not_persistent(graph: Graph) -> None:
    assert graph.producer == {H: 0, LOSS: 2, SCRATCH: 3, GRAD: 4}


def test_uses_are_all_readers_and_writers_once_each_in_order(graph: Graph) -> None:
    assert graph.uses == ((0, 4), (0, 5), (0, 1, 2, 3, 4), (2, 3), (4, 5), (3, 4))


def test_consumers_are_the_readers_only(graph: Graph) -> None:
    assert graph.consumers == ((0, 4), (0, 5), (1, 2, 3, 4), (3,), (5,), (4,))


def test_the_last_forward_use_ends_where_backward_starts(graph: Graph) -> None:
    assert [graph.last_forward_use(t) for t in range(6)] == [0, 0, 2, 2, None, None]


def test_the_first_backward_use_ignores_forward_and_update(graph: Graph) -> None:
    assert [graph.first_backward_use(t) for t in range(6)] == [4, None, 3, 3, 4, 3]


def test_layers_come_in_the_order_of_their_first_op(graph: Graph) -> None:
    assert list(graph.layers.items()) == [("fc", (0, 1, 4)), ("loss", (2, 3)), ("sgd", (5,))]


def test_bytes_add_up_by_kind_and_persistence(graph: Graph) -> None:
    assert graph.persistent_bytes == 140
    assert graph.bytes_of(TensorKind.TEMPORARY) == 12
    assert graph.bytes_of(TensorKind.WORKSPACE) == 0
    assert sum(graph.bytes_of(kind) for kind in TensorKind) == sum(t.nbytes for t in graph.tensors)


def test_an_empty_graph_has_empty_views() -> None:
    empty = Graph("nothing", (), ())
    assert (empty.producer, empty.uses, empty.consumers, empty.layers) == ({}, (), (), {})
    assert empty.persistent_bytes == 0


def test_ops_are_numbered_by_their_positions_and_touch_what_they_touched(graph: Graph) -> None:
    chosen = [graph.ops[i] for i in (4, 0, 2)]
    made = numbered(chosen)
    assert [op.id for op in made] == [0, 1, 2]
    assert [(op.name, op.reads, op.writes) for op in made] == [(op.name, op.reads, op.writes) for op in chosen]
    assert numbered(graph.ops) == graph.ops
    assert numbered(()) == ()


def test_a_transfer_costs_its_latency_and_its_bytes() -> None:
    device = Device("d", "cuda", 1, {}, 1.0, 10.0, 20.0, 0.5, 0.0, full_duplex=True, context_bytes=0)
    assert device.offload_seconds(100) == 10.5
    assert device.prefetch_seconds(100) == 5.5
    assert device.prefetch_seconds(0) == 0.5

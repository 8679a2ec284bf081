"""A step layer by layer: names, bytes by use, and the figures that a page draws of them."""

from __future__ import annotations

import pytest

from overspill import models
from overspill.core import Graph, LayerType, Phase, TensorKind
from overspill.job import Job
from overspill.runtime.capture_job import step_graph
from overspill_papers.papers import PAPERS
from overspill_papers.papers.figures import figures_of
from overspill_papers.papers.lab import network_wide_bytes
from overspill_papers.papers.layers import bytes_by_kind, bytes_of, maps_by_layer, most_at_once, weighted


@pytest.fixture(scope="module")
def graph() -> Graph:
    return step_graph(Job(lambda: models.load("alexnet", small=True), 4))


def test_layers_with_weights_have_numbers_in_the_order_of_forward(graph: Graph) -> None:
    layers = weighted(graph)
    assert list(layers) == ["CONV_01", "CONV_02", "CONV_03", "CONV_04", "CONV_05", "FC_01", "FC_02", "FC_03"]
    assert list(weighted(graph, (LayerType.CONV,))) == list(layers)[:5]
    for ops in layers.values():
        assert ops[0].phase is Phase.FORWARD
        assert {op.phase for op in ops} >= {Phase.FORWARD, Phase.BACKWARD}
        assert len({op.layer for op in ops}) == 1


def test_bytes_by_use_are_those_of_the_baseline(graph: Graph) -> None:
    shown = bytes_by_kind(graph)
    others = sum(
        t.nbytes
        for t in graph.tensors
        if t.persistent
        and t.kind not in {TensorKind.PARAMETER, TensorKind.BUFFER, TensorKind.GRADIENT, TensorKind.INPUT}
    )
    assert sum(shown.values()) + others == network_wide_bytes(graph)
    assert 0 < most_at_once(graph) < network_wide_bytes(graph)
    assert sum(maps_by_layer(graph).values()) == sum(
        t.nbytes for t in graph.tensors if t.kind is TensorKind.ACTIVATION and t.id in graph.producer
    )


def test_an_ops_bytes_are_its_maps_weights_and_workspace(graph: Graph) -> None:
    first = weighted(graph)["CONV_01"][0]
    touched = {t: graph.tensors[t] for t in first.reads + first.writes}
    maps, weights, workspace = bytes_of(graph, first)
    assert maps + weights == sum(t.nbytes for t in touched.values())
    assert weights == sum(t.nbytes for t in touched.values() if t.kind is TensorKind.PARAMETER)
    assert workspace == first.workspace_bytes


def test_papers_that_draw_more_than_they_say_have_figures() -> None:
    found = {paper.name: {figure.where for figure in figures_of(paper.name)} for paper in PAPERS}
    assert found["vdnn"] == {f"Fig. {n}" for n in (1, 4, 5, 6, 11, 12, 13, 14, 15)}
    assert found["dymem"] == {f"Fig. {n}" for n in (1, 5, 8, 12, 13, 14, 15)}
    assert found["window"] == {f"Fig. {n}" for n in (3, 4, 5)}
    assert found["placement"] == set()
    assert [figure.where for figure in figures_of("vdnn", "fig 5")] == ["Fig. 5"]


def test_a_figure_is_computed_from_a_step_that_stands_for_its_own(
    graph: Graph, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overspill_papers.papers import Lab

    lab = Lab()
    monkeypatch.setattr(lab, "graph", lambda _: graph)
    for where in ("Fig. 1", "Fig. 4", "Fig. 5", "Fig. 6", "Fig. 13"):
        (figure,) = figures_of("vdnn", where)
        curves = figure.compute(lab)
        assert curves
        assert all(value >= 0 for curve in curves.values() for value in curve.values())

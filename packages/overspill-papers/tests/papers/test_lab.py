"""The lab: any batch size of one capture, the network-wide baseline, and what is left without the classifier."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill import models
from overspill.core import Graph, LayerType, Phase, TensorKind
from overspill.core.errors import InfeasibleBudgetError
from overspill.devices import load_device
from overspill.job import Job
from overspill.placement.allocators.chunked import ChunkedConfig
from overspill.runtime.capture_job import step_graph
from overspill.simulate import check
from overspill_papers.papers.lab import (
    IMAGES,
    Lab,
    LabSetting,
    at_batch,
    feature_extraction,
    network_wide_bytes,
    with_gradients_applied,
)
from overspill_papers.papers.run import PaperPool
from overspill_papers.policies.window import Window

TITAN_X = load_device("titan-x")
MIB = 1 << 20


def small(name: str, batch: int, *, whole_step: bool = False) -> Graph:
    return step_graph(Job(lambda: models.load(name, small=True), batch), whole_step=whole_step)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "whole_step"),
    [("alexnet", False), *(pytest.param(n, True, marks=pytest.mark.long) for n in ("resnet18", "pix2pixhd"))],
)
def test_a_step_captured_at_a_huge_batch_is_that_of_any_other(name: str, *, whole_step: bool) -> None:
    made = at_batch(small(name, IMAGES, whole_step=whole_step), 6)
    assert made == small(name, 6, whole_step=whole_step)
    assert made.whole_step is whole_step


def test_another_policy_stands_in_the_place_of_the_mechanism_and_is_not_asked_to_fit() -> None:
    lab, setting = Lab(), LabSetting("alexnet", 4)
    lab._graphs[setting] = small("alexnet", 4)
    without = lab.instead_of({"vdnn-all": "liveness"})
    assert without.run(setting, "vdnn-all:m").schedule.policy == "liveness:m"
    assert lab.run(setting, "vdnn-all:m").schedule.policy == "vdnn-all:m"
    run, budget = without.run_within(setting, "vdnn-all", PaperPool("pytorch"))
    assert (run, budget) == (lab.run(setting, "liveness"), lab.device(setting).usable_bytes)


def test_the_baseline_is_all_that_is_ever_needed_at_once() -> None:
    graph = small("alexnet", 4)
    held = sum(
        t.nbytes for t in graph.tensors if t.persistent or t.kind in (TensorKind.ACTIVATION, TensorKind.GRADIENT)
    )
    largest = max(
        t.nbytes
        for t in graph.tensors
        if t.kind is TensorKind.TEMPORARY and graph.ops[graph.producer[t.id]].phase is Phase.BACKWARD
    )
    assert network_wide_bytes(graph) == held + 2 * largest + max(op.workspace_bytes for op in graph.ops)


def test_without_the_classifier_its_weights_and_times_count_nothing() -> None:
    graph = small("alexnet", 4)
    features = feature_extraction(graph)
    for op in features.ops:
        if op.layer_type is LayerType.LINEAR:
            assert not op.flops
            assert not sum(features.tensors[t].nbytes for t in op.reads if features.tensors[t].persistent)
        if op.layer_type is LayerType.CONV:
            assert op == graph.ops[op.id]
    assert features.persistent_bytes < graph.persistent_bytes


def test_a_run_is_made_once_and_its_pool_holds_at_least_its_live_bytes() -> None:
    said: list[str] = []
    lab = Lab(said.append)
    setting = LabSetting("resnet32-cifar", 2, batch_norm=False)
    run = lab.run(setting, "vdnn-all:m")
    assert lab.run(setting, "vdnn-all:m") is run
    assert said == ["capturing resnet32-cifar", "resnet32-cifar (2): vdnn-all:m"]
    assert not any(op.layer_type is LayerType.NORM for op in run.graph.ops)
    assert run.peak_bytes == check(run.graph, run.schedule).peak_bytes
    assert run.peak_bytes <= run.pool_bytes <= run.spread_bytes
    assert 0 < run.seconds_of(LayerType.CONV) < run.seconds


def test_gradients_that_are_applied_at_once_take_nothing() -> None:
    graph = small("alexnet", 4)
    applied = with_gradients_applied(graph)
    gradients = [t for t in graph.tensors if t.kind is TensorKind.GRADIENT]
    assert gradients
    assert network_wide_bytes(graph) - network_wide_bytes(applied) == sum(t.nbytes for t in gradients)


@pytest.mark.long
def test_dymems_pool_holds_at_least_the_live_bytes_and_a_step_that_repeats_no_more_than_chunks() -> None:
    lab = Lab()
    run = lab.run(LabSetting("resnet32-cifar", 64, batch_norm=False), "dymem:m")
    assert run.peak_bytes <= run.two_ended_bytes
    chunks = PaperPool("chunked", ChunkedConfig(2 * MIB))
    assert run.peak_bytes <= run.reserved_bytes(chunks)
    assert run.fits(chunks)
    # A step that repeats maps less than all of its large blocks: those of a size that was freed are mapped already.
    sizes = run.events.nbytes.tolist()
    assert 0 < run.mapped_bytes(chunks) < sum(-(-n // (2 * MIB)) * 2 * MIB for n in sizes if n > MIB)


@pytest.mark.long
def test_the_largest_budget_is_one_whose_replay_fits() -> None:
    lab = Lab()
    setting = LabSetting("alexnet", 2, whole_step=True)
    policy, pool = Window(every_step=True), PaperPool("pytorch")
    run, budget = lab.run_within(setting, policy, pool)
    assert run.fits(pool)
    assert budget == lab.device(setting).usable_bytes
    tight = Lab()
    need = run.reserved_bytes(pool)
    tight.device = lambda _: replace(lab.device(setting), memory_bytes=need, context_bytes=need // 10)  # type: ignore[method-assign]
    run, budget = tight.run_within(setting, policy, pool)
    assert run.fits(pool)
    assert tight.floor_bytes(setting, policy) <= budget <= tight.device(setting).usable_bytes
    none = Lab()
    none.device = lambda _: replace(lab.device(setting), memory_bytes=1 << 20, context_bytes=0)  # type: ignore[method-assign]
    with pytest.raises(InfeasibleBudgetError):
        none.run_within(setting, policy, pool)

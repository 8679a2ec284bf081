"""The views of a step as it was measured say what the record says: bytes at every instant, ops, copies and waits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.simulate.graphs import Layer, network
from torch import Tensor, nn

import overspill
from overspill.core import Graph, TensorKind, Verb
from overspill.report.page import Page, Step, StepRun, Verdict, write_page
from overspill.report.page.measured import measured_step, with_measured
from overspill.report.page.step import VERBS, step
from overspill.report.recording import Recording, recording_page
from overspill.runtime.recording.record import Label, Measured, MemoryChange, RunRecord, StepFacts

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import Browser

STEPS = 3


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.fixture(scope="module", params=[1, 2], ids=["one graph", "two graphs"])
def recording(request: pytest.FixtureRequest) -> Recording:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    made = overspill.train_step(model, mean_square, optimizer, budget=0.8, store="host", accumulate=request.param)
    made(torch.randn(2048, 64))
    with overspill.record(made) as found:
        for _ in range(STEPS):
            made(torch.randn(2048, 64))
    made.close()
    return found


def views(recording: Recording) -> tuple[Step, StepRun]:
    """The section with the views, and the run in it that is measured."""
    section = recording_page(recording).sections[0]
    assert isinstance(section, Step)
    (found,) = (run for run in section.runs if run.measured)
    return section, found


def bytes_at(found: StepRun, position: int) -> int:
    return int(found.nbytes[(found.start <= position) & (position < found.end)].sum())


@pytest.mark.short("two graphs")
def test_bytes_at_every_instant_are_those_that_were_recorded(recording: Recording) -> None:
    _, found = views(recording)
    record = recording.record
    begun = record.steps[-1].begin_seconds
    assert np.all(np.diff(found.seconds) >= 0)
    assert found.positions == len(found.seconds)
    for change, live in record.live_bytes():
        if change.step == STEPS - 1 and change.seconds >= begun:
            (ends,) = np.nonzero(found.seconds == change.seconds - begun)
            assert live in [bytes_at(found, end + 1) for end in ends]
    assert max(bytes_at(found, p) for p in range(found.positions)) == record.peak_bytes(STEPS - 1)


def test_ops_copies_and_waits_are_those_of_the_last_step(recording: Recording) -> None:
    section, found = views(recording)
    record = recording.record
    assert found.name == f"measured (step {STEPS})"
    compute = record.within(record.compute, STEPS - 1)
    ops = [thing.label for thing in compute if thing.is_op and thing.label is not None]
    on_compute = found.stream == 0
    assert [section.ops.name[op] for op in found.target[on_compute]] == [
        label.graph.ops[label.target].name for label in ops
    ]
    for verb, copies in record.copies.items():
        labels = [c.label for c in record.within(copies, STEPS - 1) if c.label is not None]
        moved = found.target[(found.stream > 0) & (found.verb == VERBS.index(verb))]
        names = [section.tensors.name[t] for t in moved]
        assert names == [label.graph.tensors[label.target].name for label in labels]
        assert names
    assert list(found.stall_cause) == [t.label.cause for t in compute if t.is_wait and t.label is not None]
    assert found.streams == ("compute", "offload", "prefetch")
    assert found.begun.min() >= 0
    assert found.ended.max() <= found.seconds[-1] == recording.step_seconds[-1]
    assert np.all((found.event_at >= 0) & (found.event_at < found.positions))


def test_each_block_is_the_tensor_that_was_made_or_given(recording: Recording) -> None:
    section, found = views(recording)
    kinds = {section.tensors.kind[t] for t in found.tensor if t >= 0}
    assert {"parameter", "optimizer_state", "activation", "input"} <= kinds
    sizes = section.tensors.nbytes
    assert all(sizes[t] == n for t, n in zip(found.tensor, found.nbytes, strict=True) if t >= 0)
    assert len(section.tensors.name) == len(sizes) == len(section.tensors.maker) == len(section.tensors.layer)


def test_columns_of_several_graphs_are_those_of_each(recording: Recording) -> None:
    graphs = [plan.graph for plan in recording.plans]
    joined = measured_step(recording.record, "all")
    order = {id(graph): at for at, graph in enumerate(graphs)}
    assert len(joined.ops.name) == sum(len(graph.ops) for graph in graphs)
    ran = next(c.label.graph for c in recording.record.within(recording.record.compute, 2) if c.label is not None)
    first = graphs[order[id(ran)]]
    others = [graph for graph in graphs if graph is not first]
    tensors, ops = 0, 0
    for graph in (first, *others):
        for op in graph.ops:
            at = ops + op.id
            read = joined.ops.read[joined.ops.first_read[at] : joined.ops.first_read[at + 1]]
            assert [joined.tensors.name[t] for t in read] == [graph.tensors[t].name or f"tensor {t}" for t in op.reads]
            assert joined.layers[joined.ops.layer[at]] == op.layer
        for tensor in graph.tensors:
            maker = joined.tensors.maker[tensors + tensor.id]
            assert maker == (ops + graph.producer[tensor.id] if tensor.id in graph.producer else -1)
        tensors, ops = tensors + len(graph.tensors), ops + len(graph.ops)


def test_what_no_graph_knows_is_named_by_its_kind_and_an_ops_own_memory_is_its_workspace() -> None:
    graph = network([Layer(65536, flops=10**6) for _ in range(3)])
    run_op, nothing = Label(graph, Verb.RUN, 1), None
    record = RunRecord(
        compute=[Measured(run_op, 1.0, 1.5)],
        copies={Verb.OFFLOAD: [Measured(None, 1.6, 9.9)], Verb.PREFETCH: []},
        steps=[Measured(None, 1.0, 2.0)],
        facts=[StepFacts(False, 0.0, True)],
        changes=[
            MemoryChange(0.5, 1, 100, nothing, TensorKind.OPTIMIZER_STATE, 0),
            MemoryChange(1.2, 2, 12345, run_op, None, 0),
            MemoryChange(1.3, 2, -12345, run_op, None, 0),
            MemoryChange(1.4, 3, 7, nothing, None, 0),
        ],
    )
    section = with_measured(Step("", *_tables(graph), ()), record, [graph])
    (found,) = section.runs
    external_tensors = section.tensors.name[len(graph.tensors) :]
    assert external_tensors == [
        "optimizer state, outside planned ops",
        "other, outside planned ops",
        "moved between steps",
    ]
    assert list(found.tensor) == [len(graph.tensors), -2, len(graph.tensors) + 1]
    assert found.start[0] == 0
    assert found.seconds[-1] == 1.0
    assert found.ended.max() == 1.0, "what goes on behind the step is cut there"


def _tables(graph: Graph) -> tuple[tuple[str, ...], object, object]:
    from overspill.report.page.step import of_graph

    made = of_graph(graph, (), "")
    return made.layers, made.tensors, made.ops  # type: ignore[return-value]


def test_measured_and_simulated_never_share_a_picture(recording: Recording, browser: Browser, tmp_path: Path) -> None:
    (plan, *others) = recording.plans
    section, _ = views(recording)
    if not others:
        assert [run.measured for run in section.runs] == [True, False, False]
        section = with_measured(step(plan), recording.record, [plan.graph])
    path = tmp_path / "page.html"
    write_page(path, Page("a run", Verdict("ran", None), (section,)))
    browser.open(path)

    def headings() -> list[str]:
        return [heading.text for heading in browser.all(".heading h3")]

    def others_drawn() -> int:
        return len(browser.all(".legend .dash"))

    if not others:
        assert headings() == ["Memory over the step", "Streams", "Addresses, placed by pytorch"]
        assert others_drawn() == 1, "the plan and the unmanaged step, both simulated"
        browser.find("[aria-label='Axis'] [data-value='positions']").click()
        browser.find("[aria-label='Run'] [data-value='2']").click()
    assert headings() == ["Memory over the step, measured", "Streams, measured"]
    assert others_drawn() == 0
    assert not browser.all("[aria-label='Axis']"), "its positions are instants"
    browser.settle()
    browser.shot(f"measured_{len(others) + 1}")
    assert len(set(browser.pictures())) == 2
    if not others:
        browser.find("[aria-label='Run'] [data-value='0']").click()
        assert headings()[0] == "Memory over the step"
    assert browser.complaints() == []

"""What a run measured, as a trace and as a memory snapshot, by whichever kernels; and that to be recorded changes no number."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.report.tracing.format import counted, named, of_process, read_trace
from torch import nn

from overspill.core import TensorKind, Verb
from overspill.job import Job
from overspill.models import BuiltModel
from overspill.placement.snapshot import read_snapshot, replay_snapshot
from overspill.plans.plan import Plan
from overspill.report.tracing.memory_viz import write_run_snapshot
from overspill.report.tracing.plan_trace import LIVE, PLANNED
from overspill.report.tracing.run_trace import MEASURED, write_run_trace
from overspill.runtime.options import Options
from overspill.runtime.recording.record import RunRecord
from overspill.runtime.recording.recorder import RunRecorder
from overspill.runtime.training import Run, train

STEPS = 3
Recorded = tuple[RunRecord, Run, Plan]
CASES = {
    "step": (True, "eager", Options(0.7, store="host", whole_step=True)),
    "compile": (False, "eager", Options(0.9, "vdnn-all", store="host")),
    "inductor step": (True, "inductor", Options(0.75, store="host", backend="inductor", whole_step=True)),
    "inductor": (False, "inductor", Options(0.75, store="host", backend="inductor")),
}


def build() -> BuiltModel:
    layers = [nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)]
    return BuiltModel(
        "layers",
        nn.Sequential(*layers),
        lambda size: (torch.randn(size, 128),),
        lambda model, inputs: model(inputs).square().mean(),
    )


HERE = Path(__file__).name, build.__code__.co_firstlineno + 6
"""The line of the loss, which is the only one of ours that runs while a step is captured."""


@pytest.fixture(
    scope="module",
    params=["step", *(pytest.param(c, marks=pytest.mark.long) for c in ("inductor step", "compile", "inductor"))],
)
def run(request: pytest.FixtureRequest) -> Recorded:
    *_, options = CASES[request.param]
    job, recorder = Job(build, 2048), RunRecorder(by_hand=True)
    done = train(job, options, recorder=recorder, steps=STEPS)
    assert done.plan is not None
    assert done.record is recorder.record
    plain = train(job, options, steps=STEPS)
    assert plain.record is None
    assert done.identical_to(plain)
    assert done.measured_peak_bytes == plain.measured_peak_bytes
    return done.record, done, done.plan


def seen_peak(done: Run) -> Any:
    """The peak that a record has to have: that of the run, less what no instruction makes, which is a scalar or two."""
    return pytest.approx(done.measured_peak_bytes, abs=64)


def test_the_trace_has_what_the_schedule_does_in_each_step(run: Recorded, tmp_path: Path) -> None:
    record, done, plan = run
    write_run_trace(record, record.plans, tmp_path / "run.json", "layers")
    events = read_trace(tmp_path / "run.json")
    assert named(events, "process_name") == ["simulated: layers", "measured: layers"]
    measured = of_process(events, MEASURED)
    assert sum(e.get("cat") == "step" for e in measured) == STEPS
    moves = plan.schedule.counts
    assert moves[Verb.OFFLOAD] > 0
    for verb in (Verb.OFFLOAD, Verb.PREFETCH):
        ours = [e for e in measured if e.get("cat") == verb and "args" in e]
        assert len(ours) == STEPS * moves[verb]
        names = {plan.graph.tensors[t].name for t in plan.schedule.targets(verb)}
        assert {e["name"] for e in ours} == names
    ran = {e["name"] for e in measured if e.get("cat") == Verb.RUN}
    assert ran
    assert {name.partition(" and ")[0] for name in ran} <= {op.name for op in plan.graph.ops}
    said = {e["args"]["source"] for e in measured if e.get("cat") == Verb.RUN and "source" in e["args"]}
    assert said <= {f"{HERE[0]}:{HERE[1]} <lambda>", f"backward of {HERE[0]}:{HERE[1]} <lambda>"}
    assert said or done.partition is not None  # kernels of Inductor for the CPU name no lines
    assert max(counted(measured, LIVE)) == seen_peak(done)
    assert max(counted(of_process(events, PLANNED), LIVE)) == plan.peak_bytes


def test_the_snapshot_has_the_peak_that_was_measured(run: Recorded, tmp_path: Path) -> None:
    record, done, plan = run
    path = tmp_path / "run.pickle"
    write_run_snapshot(record, path)
    replayed = replay_snapshot(read_snapshot(path))
    assert replayed.equal
    assert replayed.peak_requested_bytes == seen_peak(done)
    entries = pickle.loads(path.read_bytes())["device_traces"][0]
    layers = {e["frames"][1]["filename"] for e in entries if e["action"] == "alloc" and len(e["frames"]) >= 4}
    assert layers <= {op.layer or "(outside layers)" for op in plan.graph.ops}
    assert layers
    lines = {(f["filename"], f["line"]) for e in entries for f in e["frames"] if f["filename"].endswith(".py")}
    names_lines = (
        done.partition is None or not plan.graph.whole_step
    )  # of Inductor's programs calls of a library have them
    assert {(Path(file).name, line) for file, line in lines} == ({HERE} if names_lines else set())


def test_what_is_there_before_it_is_made_has_the_name_by_which_a_graph_was_given_it(run: Recorded) -> None:
    record, _, plan = run
    named = {c.label.target for c in record.changes if c.label is not None and c.label.verb is None}
    weights = {t.id for t in plan.graph.tensors if t.kind is TensorKind.PARAMETER} - set(plan.schedule.stored)
    assert weights <= named
    assert {TensorKind.INPUT, TensorKind.PARAMETER} & {plan.graph.tensors[t].kind for t in named}


def test_only_the_step_in_which_plans_were_made_says_so(run: Recorded) -> None:
    record, _, _ = run
    assert [facts.plans for facts in record.facts] == [True, False, False]
    assert [facts.prepared_seconds > 0 for facts in record.facts] == [True, False, False]
    assert all(facts.is_whole for facts in record.facts)

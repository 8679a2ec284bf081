"""What a run measured, as a trace and as a memory snapshot; and that to be recorded changes no number."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from tests.report.tracing.format import counted, named, of_process, read_trace
from torch import nn

from overspill.core import Verb
from overspill.core.errors import RequestError
from overspill.models import Job
from overspill.placement.snapshot import read_snapshot, replay_snapshot
from overspill.plans.plan import Plan
from overspill.report.tracing.memory_viz import write_run_snapshot
from overspill.report.tracing.plan_trace import LIVE, PLANNED
from overspill.report.tracing.run_trace import MEASURED, write_run_trace
from overspill.runtime.options import Options
from overspill.runtime.record import RunRecord
from overspill.runtime.training import Run, Training, train
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.stores import HostStore

STEPS = 3
Recorded = tuple[RunRecord, Run, Plan]


def build() -> Job:
    layers = [nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(4)]
    return Job(
        "layers",
        nn.Sequential(*layers),
        lambda size: (torch.randn(size, 128),),
        lambda model, inputs: model(inputs).square().mean(),
    )


HERE = Path(__file__).name, build.__code__.co_firstlineno + 6
"""The line of the loss, which is the only one of ours that runs while a step is captured."""


def recorded(*, whole_step: bool, record: RunRecord | None) -> Run:
    options = Options(0.7 if whole_step else 0.9, "auto" if whole_step else "vdnn-all", store="host", record=record)
    return train(Training(build, 2048, steps=STEPS, whole_step=whole_step), options)


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.long)], ids=["step", "compile"])
def run(request: pytest.FixtureRequest) -> Recorded:
    record = RunRecord()
    done = recorded(whole_step=request.param, record=record)
    assert done.plan is not None
    plain = recorded(whole_step=request.param, record=None)
    assert done.identical_to(plain)
    assert done.measured_peak_bytes == plain.measured_peak_bytes
    return record, done, done.plan


def test_the_trace_has_what_the_schedule_does_in_each_step(run: Recorded, tmp_path: Path) -> None:
    record, done, plan = run
    write_run_trace(record, plan, tmp_path / "run.json", "layers")
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
    assert ran <= {op.name for op in plan.graph.ops}
    said = {e["args"]["source"] for e in measured if e.get("cat") == Verb.RUN and "source" in e["args"]}
    assert said == {f"{HERE[0]}:{HERE[1]} <lambda>", f"backward of {HERE[0]}:{HERE[1]} <lambda>"}
    assert max(counted(measured, LIVE)) == done.measured_peak_bytes
    assert max(counted(of_process(events, PLANNED), LIVE)) == plan.peak_bytes


def test_the_snapshot_has_the_peak_that_was_measured(run: Recorded, tmp_path: Path) -> None:
    record, done, plan = run
    path = tmp_path / "run.pickle"
    write_run_snapshot(record, path)
    replayed = replay_snapshot(read_snapshot(path))
    assert replayed.equal
    assert replayed.peak_requested_bytes == done.measured_peak_bytes
    entries = pickle.loads(path.read_bytes())["device_traces"][0]
    layers = {e["frames"][1]["filename"] for e in entries if e["action"] == "alloc" and len(e["frames"]) >= 4}
    assert layers <= {op.layer or "(outside layers)" for op in plan.graph.ops}
    assert layers
    lines = {(f["filename"], f["line"]) for e in entries for f in e["frames"] if f["filename"].endswith(".py")}
    assert {(Path(file).name, line) for file, line in lines} == {HERE}


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(RequestError, match="eager backend"):
        Options(backend="inductor", record=RunRecord())
    store = HostStore()
    with pytest.raises(RequestError, match=r"torch\.profiler"):
        make_engine(store, torch.device("cuda"), record=RunRecord())
    store.close()

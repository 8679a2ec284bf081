"""The bench of simulated against measured step times runs, and records what it prints."""

import importlib
import json
from pathlib import Path

import pytest

from overspill.devices import this_cpu

BENCH = Path(__file__).parents[2] / "bench"


@pytest.mark.long
def test_a_row_for_each_policy_and_store_with_its_simulated_and_its_measured_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCH)
    bench = importlib.import_module("simulation_fidelity")
    monkeypatch.setattr(bench, "calibrated", lambda: dict.fromkeys(("host", "disk"), this_cpu()))
    found = tmp_path / "fidelity.json"
    bench.main(["--small", "--models=vgg-a", "--policies=liveness,vdnn-all", "--steps=1", f"--json={found}"])
    rows = json.loads(found.read_text())["rows"]
    assert [(row["policy"], row["store"]) for row in rows] == [
        ("liveness", "none"),
        ("vdnn-all", "host"),
        ("vdnn-all", "disk"),
    ]
    for row in rows:
        simulated, measured = row["simulated_step_seconds"], row["measured_step_seconds"]
        assert min(simulated, measured) > 0
        assert row["error"] == pytest.approx(simulated / measured - 1)
    printed = capsys.readouterr().out.splitlines()
    bench.main([f"--read={found}"])
    again = capsys.readouterr().out.splitlines()
    assert again == printed[-len(again) :]
    assert again[-4].startswith("median error")

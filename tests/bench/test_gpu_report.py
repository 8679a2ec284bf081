"""The report on a campaign: every rule is crossed and held by made-up lines, and a record that is none of a GPU says so.

`synthetic_gpu_campaign.jsonl` is made up for these tests; no machine gave its figures.
"""

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SYNTHETIC = Path(__file__).parent / "synthetic_gpu_campaign.jsonl"

# By rule: what crosses it, and how many figures hold it.
EXPECTED = {
    "installed": ([], 1),
    "whole_round_trips": (["round-trips-late: 3 of 200 wrong"], 1),
    "same_bits": (["resnet50, compile: model.0.weight"], 1),
    "within_budget": (
        [
            "3-bits-resnet50, compile: reserved 3.0 GiB of 2.0 GiB",
            "5-peak-gpt2-50%-default: reserved 3.0 GiB (3222274048 bytes) of 3.0 GiB (3221225472 bytes)",
            "5-peak-gpt2-50%-default: device in use 4.0 GiB (4296015872 bytes) of 4.0 GiB (4294967296 bytes)",
        ],
        3,
    ),
    "card_of_that_size": (["resnet50-50%-x1.0: out of memory", "gpt2-100%-x1.0: 2 retries"], 1),
    "cheap_swaps": (["50.0 small ops a swap"], 0),
    "device_bound": (["6-gpt2-overspill-at-save-on-cpu: host 300.0 ms, GPU 250.0 ms"], 1),
    "faster_than_peers": (
        [
            "6-gpt2-overspill-at-save-on-cpu: 1.25 times the peer's step (noise 2%)",
            "6-gpt2-overspill-at-offload-hooks: infeasible",
        ],
        1,
    ),
    "overlap": (["resnet50-60%: 25% of copy time"], 1),
    "true_recordings": (
        [
            "resnet50-step-60%: 50% of copy time beside ops, by the profiler 75% beside kernels",
            "resnet50-step-60%: the snapshot does not replay",
        ],
        2,
    ),
    "cheap_recordings": (["resnet50-step-60%: +25.0%"], 1),
    "true_device_file": (
        [f"{way}_bytes_per_second: 30.0 GB/s measured, 41.0 GB/s in h100.toml" for way in ("offload", "prefetch")], 1,
    ),
    "good_device_file": (["resnet50: +20.0%"], 1),
    "true_estimates": (["median 2.0%, largest 20.0% (lstm-64-adam), 3 jobs"], 0),
    "larger_than_memory": (["10-decoder-6GiB: 7.0 GiB of 6.0 GiB"], 1),
    "shared": (["12-parked-compile-60%: 20.0% stay reserved", "12-parked-step-60%: losses are not equal"], 2),
    "allocators": (["13-gpt2-planned: reserved 3.0 GiB of 2.0 GiB", "13-gpt2-planned: a step takes +50.0%"], 1),
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "bench")
    for name in [n for n in sys.modules if n.split(".")[0] in ("gpu", "gpu_report")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("gpu.decisions", "gpu.tables", "gpu_report"):
        importlib.import_module(name)
    return importlib.import_module("gpu")


def test_the_lines_are_plainly_marked_as_made_up(gpu: ModuleType) -> None:
    assert all(str(line.device["name"]).startswith("SYNTHETIC") for line in gpu.lines.read([SYNTHETIC]))


def test_every_rule_decides_by_its_threshold(gpu: ModuleType) -> None:
    found = gpu.tables.figures_of(gpu.lines.read([SYNTHETIC]))
    told = {}
    for rule in gpu.decisions.RULES:
        said = list(rule(found))
        crossed = [v.evidence for v in said if v.state == gpu.decisions.CROSSED]
        told[rule.__name__] = crossed, sum(v.state == gpu.decisions.HELD for v in said)
    assert told == EXPECTED


def test_what_is_crossed_says_what_to_do(gpu: ModuleType) -> None:
    found = gpu.tables.figures_of(gpu.lines.read([SYNTHETIC]))
    for verdict in gpu.decisions.verdicts(found):
        open_ = verdict.state == gpu.decisions.UNKNOWN and bool(verdict.evidence)
        assert bool(verdict.action) == (verdict.state == gpu.decisions.CROSSED or open_)


def test_a_rule_without_figures_says_so(gpu: ModuleType) -> None:
    told = gpu.decisions.verdicts({})
    assert {verdict.state for verdict in told} == {gpu.decisions.UNKNOWN}
    assert [verdict.rule for verdict in told] == list(gpu.decisions.RULES.values())


def test_plain_training_that_does_not_repeat_itself_decides_nothing_of_ours(gpu: ModuleType) -> None:
    found = gpu.tables.figures_of(gpu.lines.read([SYNTHETIC]))
    (said,) = gpu.decisions.same_bits({"3-bits-gpt2": found["3-bits-gpt2"]})
    assert (said.state, said.evidence) == (gpu.decisions.UNKNOWN, "gpt2: plain training does not repeat itself")


def test_a_refusal_is_no_answer_about_bits(gpu: ModuleType) -> None:
    found = gpu.tables.figures_of(gpu.lines.read([SYNTHETIC]))
    (said,) = gpu.decisions.same_bits({"3-bits-inductor-gpt2": found["3-bits-inductor-gpt2"]})
    assert (said.state, said.evidence) == (gpu.decisions.UNKNOWN, "inductor-gpt2, compile: refused: made-up refusal")


def test_simulated_and_measured_figures_have_columns_of_their_own(gpu: ModuleType) -> None:
    found = gpu.tables.figures_of(gpu.lines.read([SYNTHETIC]))
    head = gpu.tables.step_times(found, "gpt2").splitlines()[0]
    assert "measured step" in head
    assert "simulated slowdown" in head
    row = next(r for r in gpu.tables.step_times(found, "gpt2").splitlines() if "overspill-at-checkpoint" in r)
    assert (
        row == "| overspill-at-checkpoint | 120.0 ms | 1.20 | 120.0 ms | 10.0 ms | 8.0 GiB | 9.0 GiB | 8.0 GiB | 1.10 |"
    )


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ({"kind": "cpu"}, "A rehearsal on the CPU"),
        ({"kind": "cuda", "name": "NVIDIA H200 stand-in"}, "A rehearsal on a stand-in"),
    ],
)
def test_a_rehearsal_is_called_one(gpu: ModuleType, device: dict[str, object], told: str) -> None:
    line = replace(gpu.lines.read([SYNTHETIC])[0], device=device)
    said = sys.modules["gpu_report"].machine([line])
    assert told in said
    assert "No figure is one of a GPU" in said


def test_lines_of_two_devices_are_no_report(gpu: ModuleType) -> None:
    known = gpu.lines.read([SYNTHETIC])[:2]
    known[1] = replace(known[1], device={"kind": "cpu"})
    with pytest.raises(ValueError, match="several devices"):
        sys.modules["gpu_report"].report(known)


def test_the_command_prints_every_table_and_what_did_not_finish() -> None:
    said = report(str(SYNTHETIC))
    assert said.returncode == 1, said.stderr
    for title in ("What it decides", "Costs", "Bits", "Peaks", "Step times: gpt2", "Estimates"):
        assert f"## {title}\n\n|" in said.stdout
    assert "| 6-resnet50-eager | failed | RuntimeError: made up, to be shown |" in said.stdout


def test_a_file_that_is_no_campaign_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for name, told in (("empty", "there is no line in it"), ("nowhere", "No such file")):
        said = report(str(tmp_path / name))
        assert said.returncode == 2
        assert told in said.stderr.splitlines()[-1]


def report(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "bench" / "gpu_report.py"), *words], capture_output=True, text=True, check=False
    )

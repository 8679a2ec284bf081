"""What each command promises: what its JSON says (test_reference.py has its keys), its exit code, and that JSON stands alone on standard output."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.commands import Overspill
from tests.placement.packing.first_fit import FirstFit

import overspill as package
from overspill.cli import group
from overspill.cli.panels import COMMAND_PANELS, NEVER
from overspill.core import Device, Schedule
from overspill.core.budget import Budget
from overspill.core.registry import Registry
from overspill.core.units import parse_bytes
from overspill.devices import device_names
from overspill.job import Job, NamedModel
from overspill.models import names
from overspill.policies import POLICIES
from overspill.runtime import training

TIGHT = "train nets:shallow --batch 512 --budget 80%"


def assert_units(value: Any, name: str = "") -> None:
    """Sizes are integers called `*_bytes`, times are floats called `*_seconds`."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key != "sources":
                assert_units(inner, str(key))
    elif isinstance(value, list):
        for inner in value:
            assert_units(inner, name)
    elif value is not None and name.endswith("_bytes"):
        assert isinstance(value, int)
    elif value is not None and name.endswith("_seconds"):
        assert isinstance(value, float)


@pytest.mark.long
def test_a_plan_says_what_it_takes_of_the_card(overspill: Overspill) -> None:
    done = overspill("plan alexnet --small --batch 16 --json --gpu titan-x")
    answer = done.answer
    assert done.code == 0
    assert_units(answer)
    assert answer["feasible"] is True
    assert answer["gpu"] == "titan-x"
    assert (
        answer["device_bytes"] < answer["budget_bytes"] == 11_742 << 20
    )  # the card, less what its context may take more
    assert answer["offloaded_bytes"] == 0
    estimate = overspill("estimate alexnet --small --batch 16 --json --gpu titan-x").answer
    assert answer["unmanaged_device_bytes"] == estimate["total_bytes"]
    assert answer["peak_bytes"] < answer["reserved_bytes"] < answer["device_bytes"]
    assert answer["unmanaged_peak_bytes"] < answer["unmanaged_device_bytes"]
    assert sum(answer["breakdown"].values()) == answer["peak_bytes"]


def test_a_run_is_identical_and_moves_what_it_planned(overspill: Overspill, store_dir: Path) -> None:
    done = overspill(f"{TIGHT} --check --json --store-dir {store_dir} --optimizer momentum")
    answer = done.answer
    assert done.code == 0
    assert_units(answer)
    assert answer["identical"] is True
    assert answer["losses"] == answer["reference_losses"]
    assert len(answer["losses"]) == len(answer["step_seconds"]) == 3
    assert answer["measured_peak_bytes"] <= answer["planned_peak_bytes"] <= answer["budget_bytes"]
    assert answer["reference_peak_bytes"] > answer["budget_bytes"]
    assert answer["offloaded_bytes"] > 0
    assert (answer["store"], answer["device"], answer["backend"]) == ("disk", "cpu", "eager")
    assert not list(store_dir.iterdir())


def test_train_tells_a_reader_the_peaks_the_losses_and_that_they_are_identical(overspill: Overspill) -> None:
    done = overspill(f"{TIGHT} --check --steps 2 --store host --report page.html")
    assert done.code == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "with the same numbers to the last bit" in page
    assert "Planned against measured" in page
    assert "measured peak" in done.out
    assert (
        "identical: losses and all 8 tensors of weights and buffers are equal to plain PyTorch to the last bit"
        in " ".join(done.out.split())  # the terminal's width breaks lines
    )
    assert "simulated" in done.out
    assert [line.split(":")[0] for line in done.err.splitlines()] == [
        "capturing and planning nets",
        "step 1/2",
        "step 2/2",
        "training the same steps without Overspill",
    ]


@pytest.mark.parametrize(("capacity", "code"), [(200, 0), (140, 1)])
def test_a_packing_says_whether_it_fits_and_how_near_it_is_to_the_bound(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch, capacity: int, code: int
) -> None:
    solvers = Registry("solver", "solvers", {"portfolio": FirstFit()})
    monkeypatch.setattr("overspill.placement.packing.registry.SOLVERS", solvers)
    Path("blocks.csv").write_text("id,lower,upper,size\na,0,4,100\nb,2,6,50\n", encoding="utf-8")
    done = overspill(f"pack blocks.csv --capacity {capacity} --json")
    answer = done.answer
    assert done.code == code
    assert_units(answer)
    assert (answer["feasible"], answer["blocks"], answer["capacity_bytes"]) == (code == 0, 2, capacity)
    assert answer["lower_bound_bytes"] == answer["bound_bytes"] == answer["peak_bytes"] == 150
    assert (answer["gap"], answer["optimal"], answer.get("blame")) == (0.0, True, ["a", "b"] if code else None)


@pytest.mark.long
def test_plan_labels_what_is_simulated_and_names_the_peak(overspill: Overspill) -> None:
    words = "plan alexnet --small --batch 16 --budget 1140KiB"
    done = overspill(f"{words} --verbose")
    assert done.code == 0
    assert "simulated step" in done.out
    assert "Times and memory are simulated, not measured." in done.out
    assert "What the peak is made of, at" in done.out
    brief = overspill(words).out.splitlines()
    assert brief[2].startswith("Fits in 1.1 MiB: takes 1.1 MiB; without a plan ")
    assert [line.split()[0] for line in brief[4:7]] == ["minimum", "slowdown", "host"]
    (line,) = (line for line in brief if line.startswith("  model = overspill.compile(model, budget="))
    assert 1.1 * 2**20 < parse_bytes(line.split('"')[1]) <= 1140 << 10


def test_a_run_that_differs_from_plain_training_is_a_clear_negative(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = training.train_plain

    def shifted(*arguments: Any, **named: Any) -> training.Run:
        run = plain(*arguments, **named)
        run.losses[1] += 1.0
        run.state["model.0.weight"][0, 0] += 1.0
        return run

    monkeypatch.setattr(training, "train_plain", shifted)
    done = overspill("train nets:shallow --batch 4 --check --json")
    assert done.code == 1
    assert done.answer["identical"] is False
    assert done.answer["differing_tensors"] == ["model.0.weight"]
    assert "the loss of step 2 is" in done.error
    assert "1 of 8 tensors of weights and buffers differ (model.0.weight)" in done.error


def test_what_the_users_code_prints_does_not_mix_with_the_json(overspill: Overspill) -> None:
    done = overspill("train nets:talkative --batch 4 --steps 1 --json")
    assert done.answer["model"] == "nets:talkative"
    assert "hello from" in done.err


def test_a_loss_that_is_no_number_is_null_in_json(overspill: Overspill) -> None:
    answer = overspill("train nets:diverges --batch 4 --steps 1 --json").answer
    assert answer["losses"] == [None]


@pytest.mark.parametrize("command", ["plan nets:shallow --batch 4", "train nets:shallow --batch 4 --steps 1"])
def test_the_plan_is_saved_where_asked(overspill: Overspill, tmp_path: Path, command: str) -> None:
    assert overspill(f"{command} --out plan.json").code == 0
    assert Schedule.load(tmp_path / "plan.json").policy == "auto"


def test_the_lists_hold_all_there_is(overspill: Overspill) -> None:
    models, policies, devices = (overspill(f"{what} --json").answer for what in ("models", "policies", "devices"))
    assert [m["name"] for m in models["models"]] == list(names())
    assert "llama-3.1-8b" in overspill("models").out
    assert [p["name"] for p in policies["policies"]] == list(POLICIES)
    assert [d["name"] for d in devices["devices"]] == list(device_names())
    for answer in (models, policies, devices):
        assert_units(answer)


def test_the_lists_can_be_read(overspill: Overspill) -> None:
    for what, name in (("models", "resnet50"), ("policies", "vdnn-conv"), ("devices", "titan-x")):
        done = overspill(what)
        assert done.code == 0
        assert name in done.out
        assert done.err == ""


def test_the_list_of_models_notes_which_one_the_papers_call_vgg_16(overspill: Overspill) -> None:
    note = "the papers' VGG-16: 16 convolutions, torchvision's VGG-19"
    text = " ".join(overspill("models").out.split())
    assert f"vgg16-vdnn VGG images 3x224x224 {note}" in text
    assert text.count(note) == 1
    assert [m["name"] for m in overspill("models --json").answer["models"] if note in m["summary"]] == ["vgg16-vdnn"]


def test_calibrate_prints_the_profile_and_keeps_it_where_plans_find_it(
    overspill: Overspill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(
        "cpu", "cpu", 1 << 30, {"float32": 1e10}, 1e10, 2e9, 3e9, 1e-5, 2e-6, full_duplex=False, context_bytes=0
    )
    monkeypatch.setattr("overspill.runtime.calibrate.calibrate", lambda *_: device)
    answer = overspill("calibrate --json").answer
    assert answer["offload_bytes_per_second"] == 2e9
    assert answer["path"] == str(tmp_path / "cache" / "cpu.json")
    done = overspill("calibrate --out mine.json")
    assert "store, write" in done.out
    assert Device.load(tmp_path / "mine.json") == device
    listed = {d["name"]: d for d in overspill("devices --json").answer["devices"]}
    assert listed["cpu"]["offload_bytes_per_second"] == 2e9


def test_the_version_is_the_packages(overspill: Overspill) -> None:
    said = overspill("--version").out
    assert said.startswith(f"overspill {package.__version__} (CPython {platform.python_version()}, ")
    assert said.endswith(f"torch {version('torch')})\n")


def test_help_names_every_command_and_option(overspill: Overspill) -> None:
    top = overspill("--help").out
    for command in ("train", "plan", "pack", "models", "policies", "devices", "calibrate"):
        assert command in top
        done = overspill(f"{command} --help")
        assert done.code == 0
        assert "--json" in done.out


def test_help_shows_what_most_need_and_help_all_what_the_command_takes(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    short, everything = overspill("train -h").out, overspill("train --help-all").out
    assert len(short.splitlines()) < 45 < len(everything.splitlines())
    assert "--budget" in short
    assert "--partition" not in short
    for text in ("--partition", "Fine-tuning", "Budget and plan"):
        assert text in everything
    for refused in NEVER["train"]:
        assert f"--{refused} " not in everything
    output = re.findall(r"│ (--[\w-]+)", everything.partition("─ Output ─")[2])
    assert output == ["--out", "--profile", "--report", "--trace", "--snapshot", "--json"]
    assert overspill("train -h").out == short
    assert {name for names in COMMAND_PANELS.values() for name in names.split()} == set(group().commands)


def test_what_everyone_types_is_taken() -> None:
    for dtype in ("bf16", "BFloat16", torch.bfloat16):
        assert Job(NamedModel("alexnet"), 2, "AdamW", dtype).dtype == "bfloat16"  # type: ignore[arg-type]
    named = {"paged_AdamW8bit": "paged-adamw8bit", "adamw_torch_fused": "adamw-fused", "adamw_bnb_8bit": "adamw8bit"}
    for given, known in named.items():
        assert Job(NamedModel("alexnet"), 2, given, "fp16").optimizer == known


@pytest.mark.parametrize("budget", ["8", "45", "8000"])
def test_a_budget_without_a_unit_is_asked_about(overspill: Overspill, budget: str) -> None:
    done = overspill(f"plan alexnet --batch 2 --budget {budget}")
    assert done.code == 2
    assert f"write {budget}GiB" in done.err
    assert Budget.parse(f"{budget}B").nbytes == int(budget)


def test_help_lists_and_packings_do_without_torch(tmp_path: Path) -> None:
    blocks = tmp_path / "blocks.csv"
    blocks.write_text("id,lower,upper,size\na,0,4,4096\nb,2,6,4096\n", encoding="utf-8")
    program = (
        "import sys; from overspill.cli import main\n"
        "codes = [main(words.split()) for words in ('--help', 'models', 'policies', 'devices', 'train --help', 'pack blocks.csv')]\n"
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

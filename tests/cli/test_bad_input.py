"""Every mistake ends in one clear line and its exit code, without a traceback, and leaves nothing in the store directory."""

from __future__ import annotations

import errno
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from tests.cli.commands import Overspill

from overspill.cli.failures import in_options
from overspill.core.units import parse_bytes
from overspill.runtime import training

TRAIN = "train nets:shallow --batch 512"
TIGHT = f"{TRAIN} --budget 80%"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", ""),
        ("trian", "No such command 'trian'"),
        ("train", "name a model"),
        ("train alexnet", "--batch 32"),
        ("train alexnet --batch many", "'--batch'"),
        ("train alexnet --batch 0", "'--batch'"),
        ("train alexnet --batch -3", "'--batch'"),
        ("train alexnet --batch 2 --steps 0", "'--steps'"),
        ("train alexnet --batch 2 --bugdet 1GiB", "No such option: --bugdet"),
        ("plan alexnet --batch 0", "'--batch'"),
        ("train alexnut --batch 2", "unknown model 'alexnut'; did you mean 'alexnet"),
        ("plan alexnut --batch 2", "unknown model 'alexnut'; did you mean 'alexnet"),
        ("train nets:absent --batch 2", "nets has no attribute absent"),
        ("train no_such_package:net --batch 2", "cannot import no_such_package"),
        ("plan nets.py:deep --batch 2", "'nets.py:deep' names a file; write nets:deep"),
        ("plan gpt2 --batch 2 --gpu rtx3060 --update auto", "--update: how fast the host of rtx3060 updates weights"),
        ("train alexnet --batch 2 --policy aut", "unknown policy 'aut'; did you mean 'auto'"),
        ("train alexnet --batch 2 --budget 12XB", "'12XB' is not a size; write 12GiB"),
        ("plan alexnet --batch 2 --budget 12XB", "'12XB' is not a size; write 12GiB"),
        ("train alexnet --batch 2 --budget 0", "'0' is not a positive size"),
        ("train alexnet --batch 2 --store tape", "unknown store 'tape'. Stores: disk, host, host+disk, pinned"),
        ("train alexnet --batch 2 --store host --store-dir .", "--store-dir is for the disk store"),
        ("plan alexnet --batch 2 --gpu t4 --store host+disk", "use --store pinned or --store pinned+disk"),
        ("plan alexnet --batch 2 --store pinned+disk", "use --store disk or --store host or --store host+disk"),
        ("train alexnet --batch 2 --backend fast", "unknown backend 'fast'; backends: eager, inductor"),
        (
            "train alexnet --batch 2 --optimizer lion",
            "unknown optimizer 'lion'; did you mean 'lion8bit'? Optimizers: adamw",
        ),
        ("train alexnet --batch 2 --dtype int8", "unknown dtype 'int8'. Dtypes: float32"),
        ("plan alexnet --batch 2 --dtype amp", "amp-bfloat16 takes the same bytes"),
        ("train alexnet --batch 2 --device tpu", "unknown device 'tpu'"),
        (
            "train alexnet --batch 2 --seq-len 8",
            "--seq-len does not apply to alexnet, which reads images 3x224x224; use --image-size",
        ),
        ("train nets:deep --batch 2 --small", "only built-in ones have a small configuration"),
        ("plan alexnet --batch 2 --gpu titan-z", "unknown device 'titan-z'; did you mean 'titan-"),
        ("plan alexnet --batch 2 --out no/such/plan.json", "there is no directory no/such"),
        ("train alexnet --batch 2 --out .", "it is a directory"),
        ("calibrate --out profile.txt", "must end in .json"),
        ("calibrate --store-dir absent", "cannot write to the store directory absent"),
    ],
)
def test_a_wrong_request_is_answered_in_one_line_with_exit_code_2(
    overspill: Overspill, command: str, said: str
) -> None:
    if not command:
        assert overspill().code == 0  # nothing asked: the help
        return
    done = overspill(command)
    assert done.code == 2
    assert said in done.error
    assert any(mark in done.error for mark in ("; ", "did you mean", "Did you mean", "Stores: ", "Dtypes: ")), (
        "it says what would work"
    )
    assert done.out == ""


@pytest.mark.parametrize(
    ("message", "options", "said"),
    [
        ("add lora=, or leave quantize= out", {"--lora", "--quantize"}, "add --lora, or leave --quantize out"),
        ("micro_batches=0 is no number", {"--micro-batches"}, "--micro-batches 0 is no number"),
        (
            "take placement='planned' with backend=\"eager\"",
            {"--placement"},
            'take --placement planned with backend="eager"',
        ),
        ("whole_step=True helps", {"--whole-step"}, "--whole-step helps"),
        (
            "overspill.compile(model, budget=0.5) takes it",
            {"--budget"},
            "overspill.compile(model, budget=0.5) takes it",
        ),
        ("decoder:width=8,seq_len=4 and 'seq_len'", {"--seq-len"}, "decoder:width=8,seq_len=4 and 'seq_len'"),
    ],
)
def test_an_argument_is_named_as_the_command_writes_it(message: str, options: set[str], said: str) -> None:
    assert in_options(message, options) == said


@pytest.mark.parametrize(
    "command", ["train alexnet --batch 2 --budget 12XB", "train alexnet", "plan alexnut --batch 1"]
)
def test_with_json_the_error_is_one_object_too(overspill: Overspill, command: str) -> None:
    done = overspill(f"{command} --json")
    assert done.code == 2
    assert done.answer == {"error": done.error.removeprefix("error: "), "exit_code": 2}


@pytest.mark.parametrize("place", ["absent", "nets.py", "/proc"])
def test_a_store_directory_that_cannot_be_written_is_refused_before_anything_is_built(
    overspill: Overspill, place: str
) -> None:
    done = overspill(f"train alexnet --batch 2 --store-dir {place}")
    assert done.code == 2
    assert f"cannot write to the store directory {place}" in done.error
    assert "capturing" not in done.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write into any directory")
def test_a_read_only_store_directory_is_refused(overspill: Overspill, store_dir: Path) -> None:
    store_dir.chmod(0o500)
    done = overspill(f"{TRAIN} --store-dir {store_dir}")
    assert done.code == 2
    assert "Permission denied" in done.error


@pytest.mark.short("train")
@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_budget_below_the_floor_is_infeasible_and_the_floor_that_is_named_works(
    overspill: Overspill, store_dir: Path, command: str
) -> None:
    extra = f"--store-dir {store_dir} --steps 1" if command == "train" else ""
    done = overspill(f"{command} nets:shallow --batch 512 --budget 10KiB --json {extra}")
    assert done.code == 1
    answer = done.answer
    would_do = r"infeasible: --budget (\d\S+) would do"  # first of all, and once
    said = re.search(rf"{would_do}[^;]*; budget 10\.0 KiB is below the minimum of policy auto", done.error)
    assert said is not None
    assert answer["floor_bytes"] <= parse_bytes(said[1]) <= 1.01 * answer["floor_bytes"]
    assert done.error.count("would do") == 1
    assert answer["exit_code"] == 1
    assert answer["feasible"] is False
    assert answer["budget_bytes"] == 10240
    assert "parameters" not in answer["cause"]  # they move
    assert command == "train" or answer.keys() >= {"policy", "peak_bytes", "slowdown", "plan_seconds"}
    assert not list(store_dir.iterdir())
    again = overspill(f"{command} nets:shallow --batch 512 --budget {answer['floor_bytes']}B --json {extra}")
    assert again.code == 0
    assert not list(store_dir.iterdir())


def test_a_full_disk_ends_in_one_line_with_exit_code_3_and_leaves_nothing(
    overspill: Overspill, store_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    done = overspill(f"{TIGHT} --store-dir {store_dir} --json")
    assert done.code == 3
    assert "the disk store needs" in done.error
    assert "No space left on device" in done.error
    assert done.answer["exit_code"] == 3
    assert not list(store_dir.iterdir())


@pytest.mark.short("pwrite")
@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_disk_that_fails_in_the_middle_of_a_step_ends_in_one_line(
    overspill: Overspill, store_dir: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def broken(*_: object) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, broken)
    done = overspill(f"{TIGHT} --store-dir {store_dir}")
    assert done.code == 3
    assert "Input/output error" in done.error
    assert not list(store_dir.iterdir())


@pytest.mark.long
def test_a_store_that_may_not_grow_ends_in_one_line_in_a_process_of_its_own(store_dir: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    done = subprocess.run(
        [sys.executable, "-m", "overspill", *TIGHT.split(), "--store-dir", str(store_dir)],
        capture_output=True, text=True, check=False, preexec_fn=limit,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},  # which would end at the limit too, half written
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    assert "error: the disk store needs" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(store_dir.iterdir())


@pytest.mark.parametrize("command", ["train", "plan"])
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("raises", "nets:raises raised KeyError: 'nothing\\nhere'"),
        *(
            pytest.param(
                *each,
                marks=pytest.mark.skipif(torch.__version__ < "2.12", reason="Dynamo of 2.11 drops what an error says"),
            )
            for each in (
                ("forward_raises", "the model's own code (nets.py, line 8) raised ValueError: no such luck;"),
                ("detached", "error: the loss of nets:detached follows from no parameter that requires a gradient"),
            )
        ),
        ("breaks", "the model does not compile to one graph, as a plan needs (Unsupported (nets.py, line 13): "),
        ("by_values", "a branch, or a number of rows, follows from values); overspill.compile"),
    ],
)
def test_what_the_users_model_raises_is_said_to_be_the_models(
    overspill: Overspill, command: str, model: str, said: str
) -> None:
    done = overspill(f"{command} nets:{model} --batch 2")
    assert done.code == 2
    assert said in done.error


@pytest.mark.parametrize("command", ["estimate", "plan", "plan --whole-step"])
def test_a_layer_of_a_wrong_size_is_named_with_the_line_that_called_it(overspill: Overspill, command: str) -> None:
    done = overspill(f"{command} nets:wrong_size --batch 2")
    assert done.code == 2
    assert re.search(
        r"the model's own code \(nets.py, line \d+\) raised RuntimeError: .*, in layer head \(", done.error
    )
    assert "OVERSPILL_DEBUG=1" in done.error


def test_an_error_that_only_a_real_step_meets_is_the_models_too(overspill: Overspill) -> None:
    done = overspill("train nets:reads_too_far --batch 2")
    assert done.code == 2
    assert "the model's own code raised IndexError: index out of range in self" in done.error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("could not create a primitive"),
        torch.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_memory_that_runs_out_is_an_outside_failure(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def run_out(*_: object, **__: object) -> NoReturn:
        raise error

    monkeypatch.setattr(training, "_train", run_out)
    done = overspill(TRAIN)
    assert done.code == 3
    assert "memory ran out" in done.error
    assert "a smaller --budget or --batch" in done.error


def test_a_reference_that_does_not_fit_in_memory_is_told_from_the_managed_run(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*_: object, **__: object) -> NoReturn:
        raise MemoryError

    monkeypatch.setattr(training, "train_plain", run_out)
    done = overspill(f"{TRAIN} --steps 1 --check")
    assert done.code == 3
    assert "the managed run finished, but its reference" in done.error


def test_a_defect_of_overspill_is_not_blamed_on_the_model(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.plans.plan.retained_bytes", len)  # which takes one argument, not two
    done = overspill(TRAIN)
    assert done.code == 3
    assert "Overspill itself failed" in done.error


def test_debug_mode_shows_the_traceback(overspill: Overspill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_DEBUG", "1")
    with pytest.raises(Exception, match="12XB"):
        overspill("train alexnet --batch 2 --budget 12XB")


def test_an_interrupt_ends_in_one_line_with_exit_code_130(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "_train", interrupt)
    done = overspill(f"{TRAIN} --json")
    assert done.code == 130
    assert done.error == "error: interrupted"
    assert done.answer == {"error": "interrupted", "exit_code": 130}

"""`overspill estimate`: its keys, its exit codes, its words, and one clear line for every mistake."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.cli.commands import MODELS, Overspill

from overspill.cli.common import ARGUMENTS, same_job
from overspill.devices import load_device
from overspill.estimation.peak import CATEGORIES


def test_what_it_gives_adds_up(overspill: Overspill) -> None:
    done = overspill("estimate alexnet --small --batch 8 --optimizer adamw --gpu t4 --json")
    answer = done.answer
    assert done.code == 0
    assert answer["fits"] is True
    assert answer["capacity_bytes"] == load_device("t4").memory_bytes
    assert set(answer["breakdown"]) == set(CATEGORIES)
    assert sum(answer["breakdown"].values()) == answer["total_bytes"]
    assert all(isinstance(value, int) for name, value in answer.items() if name.endswith("_bytes"))
    assert isinstance(answer["seconds"], float)
    assert answer["largest_batch"] >= 8


def test_the_peak_and_its_largest_tensors_have_lines(overspill: Overspill) -> None:
    tanh = 1 + MODELS.splitlines().index("        return torch.tanh(x)")
    answer = overspill("estimate nets:lined --batch 4096 --json --report page.html").answer
    rows = answer["peak_tensors"]
    assert [row["size_bytes"] for row in rows] == sorted((row["size_bytes"] for row in rows), reverse=True)
    (made,) = (row for row in rows if row["op"] == "tanh" and row["shape"] == [4096, 64])
    assert (made["source"], made["kind"], made["dtype"]) == (f"nets.py:{tanh} forward", "activation", "float32")
    assert answer["peak"]["source"] is None or answer["peak"]["source"].startswith(("nets.py:", "backward of nets.py:"))
    page = Path("page.html").read_text(encoding="utf-8")
    assert f'["tanh","activation","4096x64 float32","","nets.py:{tanh} forward",{4096 * 64 * 4}]' in page


def test_without_a_gpu_there_is_no_verdict_but_a_list_of_those_it_fits(overspill: Overspill) -> None:
    done = overspill("estimate alexnet --small --batch 8 --json")
    assert done.code == 0
    assert done.answer["gpu"] is None
    assert done.answer["fits"] is None
    assert done.answer["capacity_bytes"] is None
    assert "t4" in done.answer["fitting_gpus"]
    assert "fits on " in overspill("estimate alexnet --small --batch 8").out


def test_what_does_not_fit_exits_with_1_and_says_what_would_help(overspill: Overspill) -> None:
    done = overspill("estimate nets:shallow --batch 20000000 --optimizer adamw --gpu t4 --json")
    assert done.code == 1
    assert done.answer["fits"] is False
    assert done.answer["minimum_capacity_bytes"] > done.answer["capacity_bytes"]
    assert 0 < done.answer["largest_batch"] < 20000000
    assert done.answer["changes"]


def test_what_fits_says_so_first(overspill: Overspill) -> None:
    done = overspill("estimate alexnet --small --batch 2 --gpu h100 --report page.html")
    assert "Fits: alexnet, batch 2, takes" in Path("page.html").read_text(encoding="utf-8")
    assert done.code == 0
    assert done.out.splitlines()[2].startswith("Fits: alexnet, batch 2, takes ")


def test_with_a_store_each_place_has_its_bytes(overspill: Overspill) -> None:
    command = "estimate alexnet --small --batch 2 --optimizer adamw --store pinned+disk --host-budget 64KiB"
    done = overspill(f"{command} --report page.html --json")
    found = done.answer["in_store"]
    assert found["host_bytes"] == 1 << 16
    assert found["kept_bytes"] == 0
    assert found["loop"]["disk_bytes"] == found["state_bytes"] - (1 << 16)
    assert found["loop"]["disk_bytes"] > found["whole_step"]["disk_bytes"] > 0
    assert "optimizer state in the store" in Path("page.html").read_text(encoding="utf-8")
    assert re.search(r"\n +with train_step +[\d.]+ KiB", overspill(f"{command} --gpu t4").out) is None
    assert re.search(r"\n +with train_step +[\d.]+ KiB", overspill(command).out)


def test_inference_takes_less_than_training(overspill: Overspill) -> None:
    training = overspill("estimate alexnet --small --batch 8 --json").answer
    inference = overspill("estimate alexnet --small --batch 8 --inference --json").answer
    assert inference["peak_requested_bytes"] < training["peak_requested_bytes"]
    assert inference["optimizer"] is None


@pytest.mark.long
def test_ways_to_train_are_options(overspill: Overspill) -> None:
    answer = overspill(
        "estimate gpt2 --small --batch 2 --optimizer paged-adamw8bit --dtype bfloat16 --accumulate 2 --no-set-to-none "
        "--checkpointing --attention flash --lora 4 --quantize 4bit --no-upcast --json"
    ).answer
    assert answer["ways"] == {
        "accumulate": 2, "set_to_none": False, "checkpointing": True, "attention": "flash", "lora": 4, "quantize": "4bit",
        "upcast": False,
    }  # fmt: skip


@pytest.mark.long
def test_options_of_sharding_and_of_generation(overspill: Overspill) -> None:
    sharded = "estimate gpt2 --small --batch 2 --parallel zero3 --gpus 4 --param-dtype bfloat16 --cpu-offload --json"
    assert overspill(sharded).answer["parallel"] == "fsdp"
    assert overspill("estimate gpt2 --small --batch 2 --inference --generate 8 --json").answer["ways"] == {
        "generate": 8
    }


@pytest.mark.parametrize(
    "allocator",
    [
        "gtbm",
        *(
            pytest.param(a, marks=pytest.mark.long)
            for a in ("tensorflow", "mxnet", "chainer", "cnmem", "chunked", "best-fit", "buddy")
        ),
    ],
)
def test_other_allocators_take_at_least_what_is_requested(overspill: Overspill, allocator: str) -> None:
    answer = overspill(f"estimate alexnet --small --batch 8 --allocator {allocator} --gpu t4 --json").answer
    assert answer["allocator"] == allocator
    assert answer["peak_requested_bytes"] <= answer["peak_reserved_bytes"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "name a model"),
        ("resnet50", "--batch"),
        ("resnet50 vgg16 --batch 1", "one model at a time"),
        ("resnet5 --batch 1", "resnet50"),
        ("resnet50 --batch 0", "--batch"),
        ("resnet50 --batch 1 --gpu rtx409", "did you mean 'rtx4090"),
        ("resnet50 --batch 1 --gpu cpu", "not a GPU"),
        ("resnet50 --batch 1 --dtype int3", "unknown dtype 'int3'"),
        ("resnet50 --batch 1 --optimizer adamm", "unknown optimizer 'adamm'"),
        ("resnet50 --batch 1 --allocator malloc", "unknown allocator 'malloc'"),
        ("resnet50 --batch 1 --allocator-config nonsense", "nonsense"),
        ("resnet50 --batch 1 --seq-len 8", "--seq-len does not apply"),
        ("nets:forward_raises --batch 2", "the model's own code (nets.py, line 8) raised ValueError: no such luck;"),
        ("nets:raises --batch 2", "KeyError"),
        ("gpt2 --batch 1 --quantize 4bit", "add --lora, or leave --quantize out"),
        ("gpt2 --batch 1 --generate 8", "--generate is for --inference"),
        ("gpt2 --batch 1 --inference --lora 8", "--lora: only for training"),
        ("gpt2 --batch 1 --micro-batches 2", "--parallel pp --gpus N"),
        ("gpt2 --batch 1 --param-dtype bfloat16", "--parallel fsdp --gpus N"),
        ("gpt2 --batch 1 --gpus 2 --parallel ring", "kinds: ddp, fsdp, horovod, tp, pp, zero1, zero2, zero3"),
        ("gpt2 --batch 1 --compiled --checkpointing", "checkpointing: estimated of eager PyTorch alone"),
        ("--script nets.py --lora 8", "--lora: for a model, and a script has its own way to train"),
        ("resnet50 --batch 1 --host-budget 1GiB", "add --store"),
        ("resnet50 --batch 1 --store host+disk --host-budget 1GiB", "use --store pinned or --store pinned+disk"),
        ("resnet50 --batch 1 --store pinned+disk", "how much host memory"),
        ("--script nowhere.py", "nowhere.py"),
        ("--script nets.py --batch 3", "--batch"),
    ],
)
def test_every_mistake_is_one_line_and_exit_code_2(overspill: Overspill, arguments: str, says: str) -> None:
    done = overspill(f"estimate {arguments}")
    assert done.code == 2
    assert says in done.err
    assert len([line for line in done.err.splitlines() if line.startswith("error: ")]) == 1
    assert "Traceback" not in done.err


@pytest.mark.long
def test_a_compiled_job_has_figures_and_a_plan_of_its_own(overspill: Overspill) -> None:
    done = overspill("estimate nets:deep --batch 4 --gpu t4 --compiled --budget 100% --json")
    assert done.code == 0
    compiled = done.answer["compiled"]
    assert compiled["fits"] is True
    assert sum(compiled["breakdown"].values()) == compiled["total_bytes"]
    assert compiled["within"]["feasible"] is True
    assert compiled["within"]["peak_bytes"] <= compiled["within"]["budget_bytes"]
    assert compiled["within"]["slowdown"] == 1


def test_what_is_no_compiled_job_is_refused_at_once(overspill: Overspill) -> None:
    assert "--budget is for --compiled" in overspill("estimate alexnet --batch 4 --budget 1GiB").error
    assert (
        "--budget is for training" in overspill("estimate alexnet --batch 4 --compiled --budget 1GiB --inference").error
    )
    assert "--compiled is a model's" in overspill("estimate --script x.py --compiled").error
    done = overspill("estimate alexnet --small --batch 4 --compiled --dtype amp")
    assert done.code == 2
    assert "not with autocast" in done.error


@pytest.mark.long
def test_a_job_that_needs_more_than_is_allowed_has_exit_code_1(overspill: Overspill) -> None:
    enough, needed = (overspill(f"estimate alexnet --small --batch 4 --max {size}") for size in ("24GiB", "100MiB"))
    assert (enough.code, needed.code) == (0, 1)
    assert re.search(r"it needs [\d.]+ MiB, more than --max 100.0 MiB", needed.err)
    assert "overspill estimate alexnet --small --batch 4 --gpu rtx4090" in enough.out
    assert "a size; write one" in overspill("estimate alexnet --batch 4 --max 50%").error


def test_a_line_to_paste_is_of_the_same_job() -> None:
    words = "estimate --script 'a b.py' --gpu t4 --store pinned+disk --host-budget=1GiB --report x.html --json --max=3GiB --compiled -- --report y"
    token = ARGUMENTS.set(shlex.split(words))
    try:
        assert (
            same_job("plan", "--budget", "50%")
            == "overspill plan --script 'a b.py' --gpu t4 --store pinned+disk --host-budget=1GiB --budget 50% -- --report y"
        )
        assert same_job("advise") == "overspill advise --script 'a b.py' --gpu t4 -- --report y"
    finally:
        ARGUMENTS.reset(token)

"""One set of options says what is trained, to every command; what makes no sense is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.commands import Overspill

from overspill.cli.job import job_of

SCRIPT = """
import sys
import torch
from torch import nn

amp, parts = "amp" in sys.argv, 2 if "parts" in sys.argv else 1
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(3))).cuda()
optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda", enabled=amp)
for _ in range(5):
    optimizer.zero_grad()
    for _ in range(parts):
        with torch.autocast("cuda", torch.float16, enabled=amp):
            loss = model(torch.randn(8192, 256, device="cuda")).square().mean() / parts
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.fixture
def script() -> str:
    Path("job.py").write_text(SCRIPT)
    return "job.py"


@pytest.mark.short("")
@pytest.mark.parametrize("arguments", ["", "amp parts"])
def test_a_recorded_step_of_a_script_is_planned_and_compared(overspill: Overspill, script: str, arguments: str) -> None:
    words = f"--script {script} --gpu t4 --json"
    estimate = overspill(f"estimate {words} -- {arguments}").answer
    done = overspill(f"plan {words} --budget smallest -- {arguments}")
    assert done.code == 0
    assert done.answer["unmanaged_device_bytes"] == estimate["total_bytes"]
    assert done.answer["device_bytes"] < estimate["total_bytes"]
    assert done.answer["offloaded_bytes"] > 0
    compared = overspill(f"compare {words} --policies liveness -- {arguments}").answer
    assert compared["unmanaged_bytes"] == estimate["total_bytes"]


def test_advice_is_given_on_scripts(overspill: Overspill, script: str) -> None:
    whole = overspill(f"advise --script {script} --gpu t4 --json").answer
    assert whole["changes"][0]["what"] == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@pytest.mark.long
def test_advice_is_given_on_jobs_of_micro_batches(overspill: Overspill) -> None:
    words = (
        "decoder:width=512,depth=2,heads=8,vocabulary=64 --batch 600 --accumulate 2 --gpu t4 --optimizer adamw --json"
    )
    planned = [change for change in overspill(f"advise {words}").answer["changes"] if "overspill." in change["what"]]
    assert planned[0]["slowdown"] is not None


def test_a_title_names_the_job_as_it_was_asked_for() -> None:
    asked = {"lora": 16, "quantize": "4bit", "accumulate": 4}
    job = job_of(words=["llama-3.1-8b"], batch=2, seq_len=2048, optimizer="AdamW", dtype="bf16", **asked)
    kind = "llama-3.1-8b, batch 2, 2048 tokens, bfloat16, lora 16, quantize 4bit, adamw"
    assert job.titled(whole_step=True) == f"{kind}, whole step, 4 micro-batches"
    assert (
        job_of(words=["gpt2"], batch=1, small=True, inference=True).titled()
        == "gpt2, batch 1, small, float32, inference"
    )


def test_a_plan_of_a_script_says_that_it_is_not_run_so(overspill: Overspill, script: str) -> None:
    done = overspill(f"plan --script {script} --gpu t4")
    assert "a recorded step that is not run so: tensors are swapped" in " ".join(done.out.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("plan --optimizer adamw8bit --whole-step", "--optimizer adamw8bit: --whole-step runs"),
        ("compare --gpus 2", "--parallel ddp: plans are of one GPU"),
        ("sweep --inference", "a plan is of a training step, and this is inference"),
        ("train --quantize 4bit --lora 4", "--quantize 4bit: estimated and planned, not trained"),
        ("plan --attention efficient", "--attention efficient: a kernel of GPUs"),
        ("plan --dtype amp", "amp scales the loss by a GradScaler"),
        ("plan --script job.py", "--script job.py: is recorded on a GPU that is not there; name which, with --gpu"),
        ("plan --script job.py --gpu t4 --whole-step", "its recorded step is planned, without --whole-step"),
        ("train --script job.py", "--script job.py: estimated and planned, not trained"),
        ("sweep --script job.py --gpu t4 --lora 8", "--lora: for a model, and a script has its own way to train"),
        ("estimate --script job.py --optimizer sgd", "--optimizer: for a model, and a script has its own way to train"),
        ("estimate --inference --optimizer sgd", "--optimizer sgd trains it"),
        ("estimate --time-limit 600", "--time-limit and --allow-writes are for --script"),
        ("estimate --lora-dropout 0.1", "--lora-dropout: of adapters; add --lora"),
        ("estimate --gpu=", "unknown device ''"),
        ("plan --gpu=", "unknown device ''"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(overspill: Overspill, words: str, said: str) -> None:
    command, _, options = words.partition(" ")
    done = overspill(words if "--script" in words else f"{command} gpt2 --small --batch 2 {options}")
    assert done.code == 2
    assert said in done.error

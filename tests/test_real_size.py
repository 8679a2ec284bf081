"""Training for real where plain PyTorch dies for want of memory, with plain PyTorch's losses: small here, real sizes in `make test-all`."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from overspill.core.errors import is_out_of_memory

PLANNED = (("resnet50", 32, 0.45), ("vgg16-vdnn", 16, 0.60), ("gpt2", 4, 0.60))
SMALL_DECODER = "decoder:width=512,depth=12,heads=8,vocabulary=8192,seq_len=64"
DECODER = "decoder:width=768,depth=12,heads=12,vocabulary=50257,seq_len=128"
PLAIN = """
from overspill.models import load
from overspill.job import Job
from overspill.runtime.training import train_plain
from overspill.runtime.options import Options
print(train_plain(Job(lambda: load({model!r}), {batch}, {optimizer!r}), Options(), steps=1).losses)
"""


def run(command: Sequence[str], limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    """`command` in a child process, in at most `limit_bytes` of address space."""

    def limit() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))

    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, env=environment, check=False)


def trained_where_plain_training_fails(
    model: str, batch: int, optimizer: str, *options: str, limit_bytes: int, store_dir: Path
) -> dict[str, Any]:
    """What one managed step reports of itself, in an address space in which the plain step, of the same loss, fails."""
    train = ["train", model, "--batch", str(batch), "--optimizer", optimizer, "--steps", "1", *options, "--json"]
    managed = run([sys.executable, "-m", "overspill", *train, "--store-dir", str(store_dir)], limit_bytes)
    assert managed.returncode == 0, managed.stderr
    result: dict[str, Any] = json.loads(managed.stdout)
    program = [sys.executable, "-c", PLAIN.format(model=model, batch=batch, optimizer=optimizer)]
    limited = run(program, limit_bytes)
    assert limited.returncode != 0
    assert is_out_of_memory(RuntimeError(limited.stderr)), limited.stderr
    plain = run(program)
    assert plain.returncode == 0, plain.stderr
    assert result["losses"] == json.loads(plain.stdout)
    assert 0.98 * result["planned_peak_bytes"] <= result["measured_peak_bytes"] <= result["planned_peak_bytes"]
    assert list(store_dir.iterdir()) == []
    return result


@pytest.mark.long
def test_a_decoder_trains_in_an_address_space_in_which_plain_training_fails(tmp_path: Path) -> None:
    result = trained_where_plain_training_fails(
        SMALL_DECODER, 2, "adamw", "--whole-step", "--budget", "128MiB", limit_bytes=11 * 2**27, store_dir=tmp_path
    )
    assert result["planned_peak_bytes"] <= 128 * 2**20
    assert result["measured_peak_bytes"] <= 0.3 * result["unmanaged_peak_bytes"]


@pytest.mark.long
def test_resnet50_trains_in_an_address_space_in_which_plain_training_fails(tmp_path: Path) -> None:
    result = trained_where_plain_training_fails(
        "resnet50", 32, "sgd", "--budget", "1.2GiB", limit_bytes=3 * 2**30, store_dir=tmp_path
    )
    assert result["planned_peak_bytes"] <= result["budget_bytes"]
    assert result["measured_peak_bytes"] <= 0.48 * result["unmanaged_peak_bytes"]


@pytest.mark.long
@pytest.mark.parametrize(("model", "batch", "share"), PLANNED)
def test_the_planned_share_of_the_unmanaged_peak_is_feasible_and_auto_moves_fewer_bytes_than_vdnn_all(
    model: str, batch: int, share: float
) -> None:
    from overspill.job import Job
    from overspill.models import load
    from overspill.runtime.options import Options
    from overspill.runtime.preview import preview

    job = Job(lambda: load(model), batch)
    plan = preview(job, Options(budget=share))
    assert plan.peak_bytes <= share * plan.unmanaged_peak_bytes
    at_sixty = preview(job, Options(budget=0.6))
    everything = preview(job, Options(budget="1TiB", policy="vdnn-all"))
    if everything.peak_bytes <= at_sixty.budget_bytes or model != "vgg16-vdnn":
        assert at_sixty.offloaded_bytes < 0.9 * everything.offloaded_bytes
    else:
        # vDNN leaves all gradients on the device, so it cannot meet this budget at all, and moves less for it.
        assert at_sixty.peak_bytes < 0.9 * everything.peak_bytes


@pytest.mark.long
def test_a_decoder_with_2_gb_of_state_trains_within_700_mib_where_plain_training_fails(tmp_path: Path) -> None:
    result = trained_where_plain_training_fails(
        DECODER, 1, "adamw", "--whole-step", "--budget", "700MiB", limit_bytes=5 * 2**29, store_dir=tmp_path
    )
    assert result["planned_peak_bytes"] <= 700 * 2**20

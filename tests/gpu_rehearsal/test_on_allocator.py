"""The live allocator under PyTorch's own CUDA build: its loops, streams, statistics and errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.gpu_rehearsal.processes import found_on_card

from overspill.runtime.allocator import LIVE


@pytest.fixture
def found(record: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OVERSPILL_ALLOCATOR_CHECK", "1")

    def told(what: str) -> dict[str, Any]:
        answer = found_on_card("allocator_work", what, card_bytes=8 << 30)
        record.rows("allocator").append({"what": what} | answer)
        return answer

    return told


def test_a_plain_loop_gets_planned_addresses_and_pytorch_s_statistics(found: Any) -> None:
    answer = found("plain_loop")
    assert min(answer["planned"][6:9] + answer["planned"][-2:]) > 60
    assert answer["allocated"]
    assert answer["reserved"]
    assert answer["summary"]
    assert answer["beyond"] < 1.1


@pytest.mark.parametrize("name", LIVE)
def test_a_loop_of_changing_lengths_runs_on_each_allocator(found: Any, name: str) -> None:
    answer = found(name)
    assert answer == {"name": name, "steps": 8, "reserved": answer["used"], "used": answer["used"]}
    assert answer["used"] > 0


def test_streams_are_respected_and_an_empty_cache_gives_all_back(found: Any) -> None:
    answer = found("streams")
    assert answer == {"waiting": [1, 0], "used_bytes": 0}


@pytest.mark.parametrize("name", LIVE)
def test_memory_of_graphs_is_theirs_until_they_are_gone(found: Any, name: str) -> None:
    answer = found(f"graphs_on_{name}")
    assert answer == {
        "waiting": 2, "launches": True, "apart": True, "held": True, "ones": 1 << 20, "left": 0, "used": True,
    }  # fmt: skip


def test_errors_are_pytorch_s_or_name_the_allocator(found: Any) -> None:
    answer = found("errors")
    assert "createOrIncrefPool" in answer["pool"]["said"]  # vLLM's sleep mode calls it
    assert "getCheckpointState" in answer["checkpoint"]["said"]  # and torch.compile(mode="reduce-overhead")
    assert "does not yet support snapshot" in answer["snapshot"]["said"]
    assert answer["memory"]["torch"]
    assert answer["memory"]["recognised"]
    assert answer["ones"] == 3
    assert "CUDA is in use" in found("late")["said"]


def test_a_managed_step_lives_in_it(found: Any) -> None:
    answer = found("beside_train_step")
    assert min(answer.values()) > 0


def test_a_script_runs_on_it_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--epochs', '3']\n"
        "x = torch.zeros(1 << 20, device='cuda')\n"
        "print(torch.cuda.memory_allocated(), torch.cuda.memory.get_allocator_backend())\n"
        "sys.exit(7)\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "overspill", "run", "--allocator", "planned", str(script), "--", "--epochs", "3"],
        env=os.environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert done.stdout.split() == [str(4 << 20), "pluggable"]
    assert "do not work with it" in done.stderr

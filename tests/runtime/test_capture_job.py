"""A deep model on a GPU that is not here: its graphs follow from those of models with fewer blocks, or are captured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from overspill.capture.compiled.micro_batches import graph_side_by_side, side_by_side, why_one_by_one
from overspill.core import forked
from overspill.core.device import ABSENT
from overspill.devices import load_device
from overspill.job import Job, Parallel, job_of
from overspill.runtime import capture_job
from overspill.runtime.capture_job import captures_of
from overspill.runtime.options import Options

GPU = replace(load_device("rtx4090"), index=ABSENT)
DEPTH = 6


class Block(nn.Module):
    def __init__(self, number: int, width: int = 8) -> None:
        super().__init__()
        self.number, self.width = number, width
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, *, uneven: int = False, special: int | None = None) -> None:
        super().__init__()
        self.special, self.kinds = special, ["full"] * DEPTH
        self.blocks = nn.ModuleList(Block(n, 16 if uneven and n == DEPTH - 1 else 8) for n in range(DEPTH))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.special is not None and number == self.special:
                x = x.relu()
        return self.head(x).mean()


def job(**how: int) -> Job:
    return job_of(lambda: Tower(**how), torch.empty(4, 64, 8), None, 4, "adamw")


def graphs(job: Job, options: Options, monkeypatch: pytest.MonkeyPatch, deep: int) -> list[object]:
    monkeypatch.setattr(capture_job, "DEEP", deep)
    return [captured.graph for captured in captures_of(job, options, GPU, moves=True)]


def captured_by(asked: Job, options: Options, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks each graph has that follows from others."""
    calls: list[int] = []
    plain = capture_job.with_blocks
    monkeypatch.setattr(capture_job, "DEEP", DEPTH)
    monkeypatch.setattr(capture_job, "with_blocks", lambda g, n: calls.append(n) or plain(g, n))
    next(iter(captures_of(asked, options, GPU, moves=True)))
    return calls


@pytest.mark.short("calls")
@pytest.mark.parametrize("way", ["calls", "whole step", "fsdp"])
def test_what_follows_from_fewer_blocks_is_what_is_captured_with_all(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = job() if way != "fsdp" else replace(job(), parallel=Parallel("fsdp", 2))
    options = Options(device=GPU, whole_step=way != "calls")
    captured = graphs(asked, options, monkeypatch, DEPTH + 1)
    assert captured_by(asked, options, monkeypatch)[:1] == [DEPTH]
    assert graphs(asked, options, monkeypatch, DEPTH) == captured
    # The same from copies of this process.
    begun, here = [], []
    enter = forked.Forked.__enter__
    monkeypatch.setattr(forked, "can_fork", lambda: True)
    monkeypatch.setattr(forked.Forked, "__enter__", lambda copy: begun.append(copy) or enter(copy))
    monkeypatch.setattr(forked, "islice", lambda *how: here.append(how) or iter(()))
    assert graphs(asked, options, monkeypatch, DEPTH) == captured
    assert (len(begun), here) == (2, [])


def test_micro_batches_beside_one_another_need_only_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, found = replace(job(), accumulate=2), []
    for deep in (DEPTH + 1, DEPTH):
        monkeypatch.setattr(capture_job, "DEEP", deep)
        found.append(next(iter(captures_of(asked, Options(device=GPU, whole_step=True), GPU, moves=True))))
    captured, followed = found
    assert len(followed.nodes) < len(captured.nodes)
    assert why_one_by_one(followed) == why_one_by_one(captured) == ""
    assert graph_side_by_side(followed.graph, 2) == side_by_side(captured, 2).graph


@pytest.mark.parametrize("how", [{"special": 4}, pytest.param({"uneven": True}, marks=pytest.mark.long)], ids=str)
def test_a_model_whose_blocks_differ_is_captured_with_all(how: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(device=GPU)
    captured = graphs(job(**how), options, monkeypatch, DEPTH + 1)
    assert graphs(job(**how), options, monkeypatch, DEPTH) == captured


def test_a_model_that_the_caller_has_keeps_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    tower = Tower()
    asked = job_of(lambda: tower, torch.empty(4, 64, 8), None, 4, "adamw")
    assert captured_by(asked, Options(device=GPU), monkeypatch) == []
    assert len(tower.blocks) == DEPTH


def test_blocks_that_a_list_tells_apart_are_all_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def told_apart() -> Tower:
        tower = Tower()
        tower.kinds[-1] = "sliding"
        return tower

    asked = job_of(told_apart, torch.empty(4, 64, 8), None, 4, "adamw")
    assert captured_by(asked, Options(device=GPU), monkeypatch) == []
    assert captured_by(job(), Options(device=GPU), monkeypatch) == [DEPTH]

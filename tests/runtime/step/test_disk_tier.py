"""Training with a disk below host memory: plain's bits, the planned traffic, and faults that lose nothing."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import Mlp, Pair, batch_for, cross_entropy, differences, made
from torch import Tensor, nn

import overspill
from overspill.core import Verb
from overspill.core.errors import RequestError, StoreError
from overspill.runtime.reachable import same_bits
from overspill.runtime.transfer.tiers import HostDiskStore

Wide = partial(Mlp, 128)


class Adapted(nn.Module):
    """Frozen linear layers, with a trained one in front."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 96)
        self.frozen = nn.Sequential(*(nn.Linear(96, 96) for _ in range(6))).requires_grad_(False)
        self.last = nn.Linear(96, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.frozen(self.first(x)))


def pair_of(directory: Path, model: Any = Wide, host_budget: str = "600KiB", **options: Any) -> Pair:
    given = {"store": "host+disk", "store_dir": directory, "host_budget": host_budget, "policy": "auto"}
    gradients = {key: options.pop(key) for key in ("accumulate", "clip_norm") if key in options}
    return Pair(model, options=given | options, gradients=gradients)


def store_of(pair: Pair) -> HostDiskStore:
    assert pair.step.engine is not None
    assert isinstance(pair.step.engine.store, HostDiskStore)
    return pair.step.engine.store


def named_bytes(error: RequestError) -> int:
    """The host budget that an error says would do."""
    found = re.search(r'host_budget="(\d+)B" would do', str(error))
    assert found is not None
    return int(found[1])


def settle(store: HostDiskStore) -> None:
    """Let the drives finish what has been given to them."""
    for lane in store._writers:
        lane.drain()


UPDATES = pytest.mark.parametrize("update", ["device", "host"])


@pytest.mark.short("checksums", "wherever they are faster")
@pytest.mark.parametrize(
    ("model", "host_budget", "options"),
    [
        pytest.param(Wide, "600KiB", {}, marks=pytest.mark.long),
        (Wide, "600KiB", {"policy": "window", "checksum": True}),
        pytest.param(Wide, "600KiB", {"accumulate": 2, "clip_norm": 0.5}, marks=pytest.mark.long),
        (Wide, "600KiB", {"placement": "planned"}),
        (Wide, "600KiB", {"update": "host"}),
        (Wide, "600KiB", {"update": "auto", "accumulate": 2, "clip_norm": 0.5, "checksum": True}),
    ],
    ids=["whole step", "checksums", "micro-batches", "arena", "updates on the host", "wherever they are faster"],
)
def test_bits_are_plain_s(model: Any, host_budget: str, options: dict[str, Any], tmp_path: Path) -> None:
    pair = pair_of(tmp_path, model, host_budget, **options)
    pair.train(3)
    pair.assert_same()  # which reads everything, so that all is where no plan has it
    pair.train(2)
    store = store_of(pair)
    assert store.written_bytes > 0
    assert store.host_bytes <= store.host_budget_bytes
    pair.assert_same()
    pair.step.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_step_writes_and_reads_what_its_plan_says(tmp_path: Path) -> None:
    pair = pair_of(tmp_path)
    pair.train(3)
    (plan,) = pair.step.plans
    assert plan.tiers is not None
    store = store_of(pair)
    settle(store)
    before = store.written_bytes, store.unplanned
    pair.train(4)
    settle(store)
    assert plan.disk_written_bytes > 0
    assert store.written_bytes - before[0] == 4 * plan.disk_written_bytes
    assert store.unplanned == before[1]
    pair.step.close()


@pytest.mark.long
def test_what_is_frozen_is_written_once(tmp_path: Path) -> None:
    pair = pair_of(tmp_path, Adapted, "120KiB")
    pair.train(2)
    (plan,) = pair.step.plans
    store = store_of(pair)
    settle(store)
    before, read = store.written_bytes, store.read_bytes
    pair.train(3)
    settle(store)
    assert store.read_bytes > read
    assert store.written_bytes - before == 3 * plan.disk_written_bytes < sum(p.nbytes for p in Adapted().parameters())
    pair.assert_same()
    pair.step.close()


def resumed(pair: Pair) -> Tensor:
    """The loss of a step that goes on: each copy that failed while there was no room may say so at its own wait."""
    for _ in range(8):
        with contextlib.suppress(StoreError):
            return pair.step.resume()
    return pair.step.resume()


@pytest.mark.short("host")
@UPDATES
def test_a_full_disk_is_an_error_and_nothing_is_lost(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(tmp_path, update=update)
    pair.train(2)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    failure, seed = None, 4
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        patched.setattr(os, "pwritev", full)
        while failure is None and seed < 8:  # a copy for which there is space for now is missed by a later step
            torch.manual_seed(seed)
            expected = pair.plain(*pair.inputs)
            torch.manual_seed(seed)
            try:
                assert same_bits(pair.step(*pair.inputs), expected)
            except StoreError as error:
                failure = error
            seed += 1
    assert "are missing" in str(failure)
    assert same_bits(resumed(pair), expected)
    pair.train(2)
    pair.assert_same()
    pair.step.close()


@pytest.mark.short("host")
@UPDATES
def test_a_disk_that_gives_nothing_back_is_an_error_until_it_does(
    update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(tmp_path, update=update)
    pair.train(2)
    torch.manual_seed(4)
    expected = pair.plain(*pair.inputs)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    torch.manual_seed(4)
    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", broken)
        with pytest.raises(StoreError, match="failed to read"):
            pair.step(*pair.inputs)
    assert same_bits(resumed(pair), expected)
    pair.assert_same()
    pair.step.close()


def test_too_little_host_memory_or_disk_is_said_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="host_budget=") as refused:
        pair_of(tmp_path, host_budget="8KiB").train()
    pair_of(tmp_path, host_budget=f"{named_bytes(refused.value)}B").train()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    pair = pair_of(tmp_path)
    with pytest.raises(StoreError, match="are missing"):
        pair.step(*pair.inputs)
    assert not pair.step.is_unfinished


@pytest.mark.short("auto")
@pytest.mark.parametrize("update", ["device", "host", "auto"])
def test_a_loop_has_plain_s_bits(update: str, tmp_path: Path) -> None:
    plain = made(Wide)
    model = copy.deepcopy(plain)
    where = {"store": "host+disk", "store_dir": tmp_path, "host_budget": "600KiB", "update": update}
    compiled = overspill.compile(model, budget="smallest", **where)
    pairs = [(m, torch.optim.AdamW(o.parameters(), 1e-2)) for m, o in ((plain, plain), (compiled, model))]
    inputs = batch_for(plain)
    for seed in range(4):
        losses = []
        for called, optimizer in pairs:
            torch.manual_seed(seed)
            loss = cross_entropy(called, *inputs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert same_bits(*losses)
    store = compiled.overspill.engine.store
    assert isinstance(store, HostDiskStore)
    assert store.written_bytes > 0
    on_host = compiled.overspill.plans[-1].schedule.counts[Verb.RUN_ON_HOST]
    assert update == "auto" or bool(on_host) == (update == "host")
    assert differences(plain, pairs[0][1], model, pairs[1][1]) == []

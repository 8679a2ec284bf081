"""What goes wrong in the store ends in one clear error, never in wrong numbers; and the exactness tests can fail.

What a store does about its own trouble is in tests/runtime/transfer.
"""

import errno
import os
from dataclasses import replace

import pytest
import torch

import overspill
from overspill.core.errors import StoreError
from overspill.job import Job
from overspill.models import load
from overspill.runtime.options import Options
from overspill.runtime.training import train, train_plain
from overspill.runtime.transfer.disk_store import DiskStore
from overspill.runtime.transfer.host_store import HostStore

JOB = Job(lambda: load("alexnet", small=True), 4, "momentum")
OPTIONS = Options(budget="1GiB", policy="vdnn-all", store="disk")


def test_a_disk_that_fills_up_during_training_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    written, real = [0], os.pwrite

    def pwrite(file: int, data: bytes, offset: int) -> int:
        written[0] += 1
        if written[0] > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(StoreError, match="bytes are missing"):
        train(JOB, Options(budget="1GiB", policy="vdnn-all", store_dir=tmp_path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_one_flipped_bit_in_the_store_is_seen_by_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    real, done = HostStore.read, [False]

    def read(self: HostStore, slot, target: torch.Tensor) -> None:
        real(self, slot, target)
        if not done[0] and target.numel() > 2003:
            target[2003] ^= 64  # an exponent bit of one number
            done[0] = True

    monkeypatch.setattr(HostStore, "read", read)
    changed = train(JOB, Options(budget="1GiB", policy="vdnn-conv", store="host"))
    assert done[0]
    assert not changed.identical_to(train_plain(JOB, OPTIONS))


def test_offloading_without_waiting_for_the_copy_is_caught_by_the_checker() -> None:
    from dataclasses import replace

    from overspill.core import Verb
    from overspill.core.errors import InvalidScheduleError
    from overspill.runtime.preview import preview
    from overspill.simulate import check

    plan = preview(JOB, OPTIONS)
    for verb in (Verb.AWAIT_OFFLOAD, Verb.AWAIT_PREFETCH, Verb.PREFETCH, Verb.FREE, Verb.RUN):
        index = next(i for i, x in enumerate(plan.schedule.instructions) if x.verb is verb)
        cut = plan.schedule.instructions[:index] + plan.schedule.instructions[index + 1 :]
        with pytest.raises(InvalidScheduleError):
            check(plan.graph, replace(plan.schedule, instructions=cut))


@pytest.mark.long
def test_the_store_does_not_grow_after_the_first_step(tmp_path) -> None:
    store = DiskStore(tmp_path)
    sizes = []
    import overspill.runtime.transfer.ops as module

    original = module.make_store
    module.make_store = lambda *_: store
    try:
        train(replace(JOB, optimizer="sgd"), OPTIONS, lambda *_: sizes.append((store.capacity_bytes, store.peak_bytes)))
    finally:
        module.make_store = original
    assert len(set(sizes)) == 1
    assert store.used_bytes == 0


@pytest.mark.parametrize(
    "place",
    ["overspill.runtime.compiled.session.Session.plan", "torch._dynamo.symbolic_convert.InstructionTranslator.run"],
)
def test_memory_that_runs_out_while_a_model_is_compiled_is_pythons_own_error(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    model = torch.nn.Linear(4, 4)
    compiled = overspill.compile(model, budget="1MiB")
    x = torch.randn(2, 4)

    def nothing_left(*_args: object, **_named: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(place, nothing_left)
        with pytest.raises(MemoryError, match="call it again"):
            compiled(x)
    assert torch.equal(compiled(x), model(x))
    assert compiled.overspill.plans

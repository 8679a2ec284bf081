"""Whatever stops a whole step, nothing is lost: it goes on from there with the same bits, or all is as it was before."""

from __future__ import annotations

import copy
import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import OPTIMIZERS, Cnn, Lm, Mlp, Pair, batch_for, beside, cross_entropy, made
from torch import Tensor, nn

import overspill
from overspill.core.errors import RequestError, StoreError
from overspill.planning.effort import at_effort
from overspill.runtime.reachable import same_bits
from overspill.runtime.step.updates import OptimizerUpdates
from overspill.runtime.transfer.host_store import HostStore
from overspill.runtime.transfer.stores import Slot


class Flaky(HostStore):
    """A host store whose reads, writes and allocations are counted; the one numbered `fails_at` raises `error`."""

    name = "flaky"

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.fails_at = -1
        self.failures = 1
        self.error: BaseException = StoreError("the disk is full")

    def _tick(self) -> None:
        self.count += 1
        if self.fails_at <= self.count < self.fails_at + self.failures and self.fails_at > 0:
            raise self.error

    def fail(self, at: int, failures: int = 1, error: BaseException | None = None) -> None:
        self.count, self.fails_at, self.failures = 0, at, failures
        self.error = error or StoreError("the disk is full")

    def allocate(self, nbytes: int) -> Slot:
        self._tick()
        return super().allocate(nbytes)

    def write(self, slot: Slot, source: Tensor) -> None:
        self._tick()
        super().write(slot, source)

    def read(self, slot: Slot, target: Tensor) -> None:
        self._tick()
        super().read(slot, target)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    found = Flaky()
    monkeypatch.setattr("overspill.runtime.transfer.ops.make_store", lambda *_: found)
    return found


def finish(pair: Pair, call: Callable[[], Tensor], limit: int = 50) -> Tensor:
    """The loss of a step whose store fails now and then."""
    for _ in range(limit):
        try:
            return call()
        except StoreError:
            if pair.step.is_unfinished and pair.step._underway.call.run is not None:  # type: ignore[union-attr]
                with pytest.raises(RequestError, match="unfinished"):
                    pair.model.state_dict()
                with pytest.raises(RequestError, match="unfinished"):
                    pair.optimizer.state_dict()
    raise AssertionError("the step does not get on")


def train_with_failures(pair: Pair, store: Flaky, **failing: Any) -> None:
    pair.seed += 1
    torch.manual_seed(pair.seed)
    expected = pair.plain(*pair.inputs)
    torch.manual_seed(pair.seed)
    store.fail(**failing)
    assert same_bits(finish(pair, lambda: pair.step(*pair.inputs)), expected)


@pytest.mark.parametrize(
    ("make", "stride"),
    [
        (lambda: Pair(Mlp, gradients={"accumulate": 2, "clip_norm": 0.5}), 5),
        pytest.param(
            lambda: beside(2, clip_norm=0.5),
            11,
            marks=pytest.mark.filterwarnings("ignore:the memory of"),  # an error's traceback holds a weight for a while
        ),
        pytest.param(lambda: Pair(Lm, gradients={"clip_norm": 0.5}), 9, marks=pytest.mark.long),
    ],
    ids=["one by one", "beside one another", "one"],
)
def test_a_step_that_any_failing_transfer_stops_goes_on_with_the_same_bits(
    store: Flaky, make: Callable[[], Pair], stride: int
) -> None:
    with at_effort(0.05):
        pair = make()
        pair.train(2)
    transfers = 0
    store.fail(-1)
    pair.train()
    transfers = store.count
    assert transfers > 20
    for number in range(1, transfers + 1, stride):
        train_with_failures(pair, store, at=number, failures=1 + number % 3)
    store.fail(-1)
    pair.assert_same()
    pair.step.close()


@pytest.mark.long
def test_slots_are_given_back_after_failures(store: Flaky) -> None:
    pair = Pair(Mlp)
    pair.train(3)
    before = store.used_bytes
    for number in range(1, 60, 7):
        train_with_failures(pair, store, at=number)
    store.fail(-1)
    pair.train()
    gc.collect()  # of the errors, whose tracebacks hold handles
    assert store.used_bytes == before


def test_an_unfinished_step_takes_no_other_inputs(store: Flaky) -> None:
    pair = Pair(Mlp)
    pair.train(2)
    before = copy.deepcopy(pair.model.state_dict())
    pair.step(*pair.inputs)
    store.fail(12)
    with pytest.raises(StoreError, match=r"is full.*resume"):
        pair.step(*pair.inputs)
    with pytest.raises(RequestError, match=r"other inputs.*unfinished"):
        pair.step(*batch_for(pair.model, 4))
    for use in (pair.step.synchronize, pair.step.close, pair.optimizer.step, lambda: pair.model(pair.inputs[0])):
        with pytest.raises(RequestError, match="unfinished"):
            use()
    pair.step(*(t.clone() for t in pair.inputs))
    assert not same_bits(before["last.weight"], pair.model.last.weight)
    with pytest.raises(RequestError, match="is unfinished"):
        pair.step.resume()


def test_a_given_up_step_leaves_a_model_that_a_checkpoint_can_be_loaded_into(store: Flaky) -> None:
    pair = Pair(Mlp)
    pair.train(2)
    weights, state = copy.deepcopy(pair.model.state_dict()), copy.deepcopy(pair.optimizer.state_dict())
    for number in (3, 9, 17, 25, 33, 41):
        pair.step(*pair.inputs)
        store.fail(number)
        with pytest.raises(StoreError):
            pair.step(*pair.inputs)
        pair.step.abandon()
        assert not any(v.isnan().any() for v in pair.model.state_dict().values())
    store.fail(-1)
    pair.model.load_state_dict(weights)
    pair.optimizer.load_state_dict(state)
    pair.train(2)
    pair.assert_same()


def test_what_cannot_be_sent_between_steps_stays(store: Flaky) -> None:
    pair = Pair(Mlp)
    pair.train(2)
    for number in (1, 2, 5, 9):
        pair.assert_same()  # reads all, so that all has to be sent again
        store.fail(number)
        with pytest.raises(StoreError):
            pair.step(*pair.inputs)
        assert not pair.step.is_unfinished
        pair.assert_same()
        pair.train()
    pair.assert_same()


def test_what_cannot_be_brought_back_stays_in_the_store(store: Flaky) -> None:
    pair = Pair(Mlp)
    pair.train(2)
    store.fail(2)
    with pytest.raises(StoreError, match="disk is full"):
        pair.model.state_dict()
    pair.assert_same()
    pair.train()
    pair.assert_same()


@pytest.mark.short("True")
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("unfinished", [False, True])
def test_a_step_that_is_dropped_where_nothing_works_any_more_says_so_in_one_line(
    unfinished: bool, store: Flaky, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a GPU's error that stays: every transfer fails, and so does the end of the store."""
    pair = Pair(Mlp)
    pair.train(2)
    broken = RuntimeError("CUDA error: an illegal memory access\nCompile with TORCH_USE_CUDA_DSA")

    def close() -> None:
        raise broken

    store.fail(20 if unfinished else 1, failures=1 << 30, error=broken)
    monkeypatch.setattr(store, "close", close)
    if unfinished:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            pair.step(*pair.inputs)
        broken.__traceback__ = None  # whose frames hold the step
    del pair.step
    gc.collect()
    (record,) = (r for r in caplog.records if r.name == "overspill")
    assert record.getMessage().endswith("what is lost reads as NaN: CUDA error: an illegal memory access")
    assert type(pair.model.last._parameters) is dict


def test_an_op_that_fails_before_any_update_undoes_the_step() -> None:
    pair = Pair(Lm)
    pair.train(2)
    words = pair.inputs[0].clone()
    words[-1, -1] = 1000
    with pytest.raises(IndexError):
        pair.step(words, pair.inputs[1])
    assert not pair.step.is_unfinished
    pair.assert_same()
    pair.train(2)
    pair.assert_same()


def test_a_step_that_runs_out_of_memory_when_only_buffers_have_changed_goes_on(store: Flaky) -> None:
    pair = Pair(Cnn)
    pair.train(2)
    mean = pair.model.body[1].running_mean
    before = mean.clone()
    pair.seed += 1
    torch.manual_seed(pair.seed)
    expected = pair.plain(*pair.inputs)
    torch.manual_seed(pair.seed)
    store.fail(10, error=MemoryError())
    with pytest.raises(StoreError, match="host memory"):
        pair.step(*pair.inputs)
    assert not same_bits(mean, before)
    assert not pair.step._underway.call.run.changed  # type: ignore[union-attr]
    assert same_bits(pair.step.resume(), expected)
    pair.assert_same()


def test_another_error_after_an_update_leaves_the_step_unfinished(store: Flaky) -> None:
    pair = Pair(Mlp)
    pair.train(2)
    store.fail(-1)
    pair.train()
    last = store.count
    pair.seed += 1
    torch.manual_seed(pair.seed)
    expected = pair.plain(*pair.inputs)
    torch.manual_seed(pair.seed)
    store.fail(last, error=RuntimeError("what is this"))
    with pytest.raises(RuntimeError, match="what is this") as raised:
        pair.step(*pair.inputs)
    assert "unfinished" in raised.value.__notes__[0]
    assert same_bits(pair.step.resume(), expected)
    pair.assert_same()


def test_an_update_that_was_stopped_half_way_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(Mlp)
    pair.train(2)
    weights, state = copy.deepcopy(pair.model.state_dict()), copy.deepcopy(pair.optimizer.state_dict())
    real = OptimizerUpdates._update_parts

    def step(self: OptimizerUpdates, parts: Any) -> None:
        real(self, parts)
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(OptimizerUpdates, "_update_parts", step)
        with pytest.raises(MemoryError):
            pair.step(*pair.inputs)
    for use in (pair.step.resume, pair.model.state_dict, lambda: pair.step(*pair.inputs)):
        with pytest.raises(RequestError, match=r"half-way; .*abandon\(\)"):
            use()
    pair.step.abandon()
    pair.model.load_state_dict(weights)
    pair.optimizer.load_state_dict(state)
    pair.train(2)
    pair.assert_same()


@pytest.mark.short("1")
@pytest.mark.parametrize("presses", [1, 2])
def test_one_ctrl_c_waits_for_the_end_of_the_step_and_two_can_be_resumed(store: Flaky, presses: int) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts the tests may ignore it
    pair = Pair(Mlp)
    pair.train(2)
    torch.manual_seed(9)
    expected = pair.plain(*pair.inputs)
    torch.manual_seed(9)
    real = store.write

    def write(slot: Slot, source: Tensor) -> None:
        real(slot, source)
        store.write = real  # type: ignore[method-assign]
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)
            signal.sigpending()

    store.write = write  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt) as stopped:
            pair.step(*pair.inputs)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    unfinished = pair.step.is_unfinished
    assert hasattr(stopped.value, "step_result") != unfinished
    assert not (unfinished and presses == 1)
    loss = pair.step.resume() if unfinished else stopped.value.step_result  # type: ignore[attr-defined]
    assert same_bits(loss, expected)
    pair.assert_same()
    pair.train()


def test_a_full_disk_names_the_file_system_and_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair = Pair(Mlp, options={"store": "disk", "store_dir": tmp_path})
    pair.train(2)
    real, full = os.pwrite, [True]

    def pwrite(file: int, data: bytes, offset: int) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    torch.manual_seed(4)
    expected = pair.plain(*pair.inputs)
    torch.manual_seed(4)
    with pytest.raises(StoreError, match=rf"{tmp_path}.*are missing"):
        pair.step(*pair.inputs)
    full[0] = False
    assert same_bits(pair.step.resume(), expected)
    pair.assert_same()


def test_no_room_at_planning_leaves_all_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair = Pair(Mlp, options={"store": "disk", "store_dir": tmp_path})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(StoreError, match="bytes are missing"):
            pair.step(*pair.inputs)
    assert not pair.step.is_unfinished
    pair.train(2)
    pair.assert_same()


@pytest.mark.parametrize("where", ["in a step", "between steps"])
def test_a_corrupted_page_is_noticed_and_never_trained_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(Mlp, options={"checksum": True})
    pair.train(2)
    assert pair.step.engine is not None
    real, bad = HostStore.read, [True]

    def read(self: HostStore, slot: Slot, target: Tensor) -> None:
        real(self, slot, target)
        if bad[0] and target.numel() > 1000:
            target[77] ^= 1

    monkeypatch.setattr(HostStore, "read", read)
    torch.manual_seed(4)
    expected = pair.plain(*pair.inputs)
    torch.manual_seed(4)
    if where == "between steps":
        with pytest.raises(StoreError, match=r"weight.*checksums differ"):
            pair.model.state_dict()
        bad[0] = False
        assert same_bits(pair.step(*pair.inputs), expected)
    else:
        for _ in range(2):
            with pytest.raises(StoreError, match=r"\w+: .*checksums differ"):
                pair.step(*pair.inputs)
        bad[0] = False
        assert same_bits(pair.step.resume(), expected)
    pair.assert_same()


def test_a_compiled_model_can_have_checksums_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    compiled = overspill.compile(model, budget="1GiB", policy="vdnn-all", store="host", checksum=True)
    x = torch.randn(256, 64)
    compiled(x).sum().backward()
    real = HostStore.read

    def read(self: HostStore, slot: Slot, target: Tensor) -> None:
        real(self, slot, target)
        target[5] ^= 1

    monkeypatch.setattr(HostStore, "read", read)
    with pytest.raises(StoreError, match="checksums differ"):
        compiled(x).sum().backward()
    torch._dynamo.reset()


@pytest.mark.long
def test_a_checkpoint_outlives_a_process_that_is_killed_within_a_step(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import torch
        from tests.runtime.step.whole_steps import Pair, Mlp
        pair = Pair(Mlp, options={{"store": "disk", "store_dir": {str(tmp_path)!r}}})
        pair.train(2)
        torch.save((pair.model.state_dict(), pair.optimizer.state_dict()), {str(tmp_path / "checkpoint")!r})
        print("saved", flush=True)
        while True:
            pair.step(*pair.inputs)
    """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()) as child:
        assert child.stdout is not None
        assert child.stdout.readline().strip() == "saved"
        child.send_signal(signal.SIGKILL)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
    pair = Pair(Mlp)
    pair.train(2)
    model, optimizer = torch.load(tmp_path / "checkpoint")
    pair.model.load_state_dict(model)
    pair.optimizer.load_state_dict(optimizer)
    pair.assert_same()


@pytest.mark.long
def test_reads_of_a_cnn_that_fail_are_retried(store: Flaky) -> None:
    pair = Pair(Cnn, OPTIMIZERS["momentum"])
    pair.train(2)
    for number in range(1, 30, 5):
        train_with_failures(pair, store, at=number)
    pair.assert_same()


@pytest.mark.long
def test_a_step_of_another_model_goes_on_meanwhile(store: Flaky) -> None:
    pair = Pair(Mlp)
    pair.train(2)
    store.fail(12)
    with pytest.raises(StoreError):
        pair.step(*pair.inputs)
    model = made()
    other = overspill.train_step(model, cross_entropy, OPTIMIZERS["sgd"](model.parameters()), policy="liveness")
    other(*pair.inputs)
    pair.step.resume()

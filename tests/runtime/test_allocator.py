"""The live allocator on the stand-in for the driver: real bytes behind its addresses, no GPU and no CUDA build of PyTorch.

Every block is filled with a mark of its own and read again before it is freed, so that an overlap or a page without
memory cannot go unseen; the allocator's own checker ends the process on one.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placement.allocators.test_planned import Row, a_step, carrying, of_turn

from overspill.cli import main
from overspill.core.errors import RequestError, UnsupportedError
from overspill.runtime import allocator as live
from overspill.runtime.allocator import LIVE, AllocatorFigures, LiveAllocator, library_path

COMPILER = shutil.which("g++") or shutil.which("c++")
STAND_IN = Path(__file__).parents[2] / "native" / "tests" / "gpu_stand_in"
MIB = 1 << 20
GPUS = 16

pytestmark = pytest.mark.skipif(COMPILER is None or sys.platform != "linux", reason="needs a C++ compiler on Linux")


@functools.cache
def stand_in_path() -> Path:
    """The stand-in, compiled once a process; by its name every later load of the driver finds it."""
    assert COMPILER is not None
    path = Path(tempfile.mkdtemp(prefix="overspill-test-")) / "libcuda.so.1"
    sources = (STAND_IN / "card.cpp", STAND_IN / "driver.cpp")
    flags = ("-std=c++20", "-O0", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
    subprocess.run([COMPILER, *flags, "-o", path, *sources, "-ldl"], check=True)
    return path


@functools.cache
def stand_in() -> ctypes.CDLL:
    os.environ["STAND_IN_DEVICES"] = str(GPUS)
    found = ctypes.CDLL(str(stand_in_path()))
    found.stand_in_used.restype = ctypes.c_size_t
    found.stand_in_fail.argtypes = (ctypes.c_int, ctypes.c_int64)
    return found


@functools.cache
def allocator(name: str = "planned") -> LiveAllocator:
    """Return the allocator, which is what GPUs that are not yet in use get."""
    stand_in()
    return LiveAllocator(library_path(), name, check=True)


_unused = itertools.count(len(LIVE))


class Gpu:
    """A GPU and what lives there."""

    def __init__(self, device: int, name: str = "planned") -> None:
        self.device = device
        self.library = allocator().library
        LiveAllocator(library_path(), name, check=True)  # of the GPUs used from now on
        self.library.overspill_give(self.library.overspill_take(1, device, None), device)
        self.live: dict[object, tuple[int, int, int]] = {}
        self.marks = itertools.cycle(range(1, 256))

    def take(self, name: object, nbytes: int, stream: int = 0) -> bool:
        address = self.library.overspill_take(nbytes, self.device, stream * 16)
        if address is None:
            return False
        assert address % 512 == 0
        mark = next(self.marks)
        stand_in().stand_in_launch(stream * 16)  # the host has not waited for what uses it
        for place in {address, address + nbytes // 2, address + nbytes - 1}:
            ctypes.memset(place, mark, 1)
        self.live[name] = (address, nbytes, mark)
        return True

    def give(self, name: object) -> int:
        address, nbytes, mark = self.live.pop(name)
        for place in (address, address + nbytes // 2, address + nbytes - 1):
            assert ctypes.c_ubyte.from_address(place).value == mark
        assert self.library.overspill_give(address, self.device)
        return address

    def uses(self, name: object, stream: int) -> None:
        self.library.overspill_record_stream(ctypes.c_void_p(self.live[name][0]), ctypes.c_void_p(stream * 16))

    def run(self, rows: list[Row], turn: object = 0) -> list[int]:
        """Do a step, and return its addresses."""
        for allocates, block, nbytes, stream in rows:
            if allocates:
                assert self.take((turn, block), nbytes, stream), allocator().error()
            else:
                self.give((turn, block))
        return [self.live[name][0] for name in self.live]

    @property
    def figures(self) -> AllocatorFigures:
        return allocator().figures(self.device)

    @property
    def used(self) -> int:
        return int(stand_in().stand_in_used(self.device))

    def limit(self, nbytes: int) -> None:
        self.library.overspill_set_fraction(nbytes / (140 << 30), self.device)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu(next(_unused))


@pytest.mark.long
@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(LIVE), seed=st.integers(0, 10**9), marks=st.booleans(), tight=st.booleans())
def test_every_block_keeps_its_bytes_whatever_the_job_does(name: str, seed: int, marks: bool, tight: bool) -> None:
    r, gpu = random.Random(seed), Gpu(LIVE.index(name), name)
    allocator().library.overspill_empty_cache()
    before = gpu.figures
    gpu.limit(48 * MIB if tight else 100 << 30)
    step = carrying(r, a_step(r, r.choice([5, 30]), streams=r.choice([1, 2]), large=22), r.choice([0, 0.3]))
    for turn in range(8):
        rows = step if turn < 4 or r.random() < 0.5 else a_step(r, 20, streams=2, large=23)
        stand_in().stand_in_hold_events(int(r.random() < 0.3))
        for allocates, block, nbytes, stream in rows:
            if allocates:
                gpu.take((turn, block), nbytes, stream)  # where it is tight, some fail
            elif (key := of_turn(turn, block)) in gpu.live and r.random() < 0.97:
                if r.random() < 0.1:
                    gpu.uses(key, 1 - stream)
                gpu.give(key)
            if r.random() < 0.01:
                allocator().library.overspill_empty_cache()
        stand_in().stand_in_hold_events(0)
        if marks:
            allocator().step()
        if r.random() < 0.7:
            allocator().wait()
        assert gpu.figures.reserved == gpu.used
    for block in list(gpu.live):
        gpu.give(block)
    allocator().library.overspill_empty_cache()
    assert gpu.used == 0
    assert (gpu.figures.blocks, gpu.figures.waiting, gpu.figures.allocated) == (0, 0, 0)
    assert gpu.figures.taken - before.taken == gpu.figures.given - before.given


def test_a_step_that_repeats_gets_its_planned_addresses_and_no_calls_of_the_driver(gpu: Gpu) -> None:
    step = a_step(random.Random(4), 60, large=24)
    for turn in range(6):
        gpu.run(step, turn)
        allocator().step()
        allocator().wait()
    calls = stand_in().stand_in_counter(8), gpu.figures
    found = []
    for turn in range(2):
        addresses = []
        for allocates, block, nbytes, _ in step:
            gpu.take((turn, block), nbytes) if allocates else gpu.give((turn, block))
            addresses += [gpu.live[turn, block][0]] if allocates else []
        found.append(addresses)
        allocator().step()
    assert found[0] == found[1]
    assert gpu.figures.counts.planned - calls[1].counts.planned == 2 * 60
    assert stand_in().stand_in_counter(8) == calls[0]


def test_steps_of_three_lengths_that_leave_a_block_to_the_next_make_no_calls_of_the_driver(gpu: Gpu) -> None:
    step = a_step(random.Random(6), 60, large=24)
    gpu.take(("weights", 0), 30 * MIB)
    calls = []
    for turn in range(24):
        gpu.take(("input", turn), 3 * MIB * (1 + turn % 3))
        if turn:
            gpu.give(("input", turn - 1))
        gpu.run([(a, b, 1 + nbytes * (8 + turn % 3) // 10, s) for a, b, nbytes, s in step], turn)
        allocator().step()
        allocator().wait()
        calls.append(stand_in().stand_in_counter(8))
    assert calls[12:] == calls[12:13] * 12
    assert gpu.figures.counts.planned > 12 * 60


def test_what_another_stream_uses_is_given_to_nobody_before_it_has_passed(gpu: Gpu) -> None:
    gpu.take("a", 4 * MIB)
    gpu.uses("a", 1)
    stand_in().stand_in_hold_events(1)
    address = gpu.give("a")
    assert gpu.figures.waiting == 1
    gpu.take("b", 4 * MIB)
    assert gpu.live["b"][0] != address
    stand_in().stand_in_hold_events(0)
    gpu.take("c", 4 * MIB)
    assert gpu.live["c"][0] == address
    # Where there is no room, the host waits for it.
    gpu.uses("c", 1)
    gpu.limit(gpu.used)
    stand_in().stand_in_hold_events(1)
    gpu.give("c")
    assert gpu.take("d", 4 * MIB)
    assert gpu.live["d"][0] == address


def test_out_of_memory_says_so_as_pytorch_does_and_the_job_goes_on(gpu: Gpu) -> None:
    gpu.take("a", 10 * MIB)
    gpu.limit(20 * MIB)
    assert not gpu.take("b", 16 * MIB)
    assert allocator().error().startswith("CUDA out of memory. Tried to allocate 16.00 MiB. GPU")
    assert (gpu.figures.out_of_memory, gpu.figures.retries) == (1, 1)
    gpu.give("a")
    assert gpu.take("b", 16 * MIB)
    assert gpu.used == 16 * MIB


def test_a_plan_that_does_not_fit_lies_where_there_is_room(gpu: Gpu) -> None:
    step = [(True, block, 6 * MIB, 0) for block in range(10)] + [(False, block, 0, 0) for block in reversed(range(10))]
    for _ in range(4):
        gpu.run(step)
        allocator().step()
        allocator().wait()
    allocator().library.overspill_empty_cache()
    gpu.limit(40 * MIB)
    before = gpu.figures.counts.planned
    for block in range(10):
        gpu.take(block, 6 * MIB)
    assert 5 <= len(gpu.live) <= gpu.figures.counts.planned - before + 1
    assert gpu.used <= 40 * MIB


def test_a_refusal_of_the_driver_harms_nothing(gpu: Gpu) -> None:
    gpu.take("a", 6 * MIB)
    stand_in().stand_in_fail(0, 2)  # the second page of the next mapping
    assert gpu.take("b", 9 * MIB)
    assert (gpu.figures.retries, gpu.used) == (1, gpu.figures.reserved)
    gpu.give("a")
    gpu.give("b")


def test_a_pointer_that_is_not_there_is_refused(gpu: Gpu) -> None:
    gpu.take("a", 100)
    assert not allocator().library.overspill_give(12345, gpu.device)
    assert "not there" in allocator().error()


ALONE = """
import ctypes, sys
from overspill.runtime.allocator import LiveAllocator, library_path
if len(sys.argv) > 1: ctypes.CDLL(sys.argv[1])
a = LiveAllocator(library_path(), check=True)
try:
    print(a.has_virtual_memory())
except Exception as error:
    print(type(error).__name__, error)
else:
    blocks = [a.library.overspill_take(3 << 20, 0, None) for _ in range(20)]
    print(len(set(blocks)), a.figures(0).reserved >> 20)
    for block in blocks:
        a.library.overspill_give(block, 0)
    a.library.overspill_empty_cache()
    print(a.figures(0).reserved)
"""


@pytest.mark.parametrize(
    ("driver", "said"),
    [(True, ["False", "20 80", "0"]), (False, ["UnsupportedError the allocator cannot be used: there is no CUDA"])],
)
def test_without_virtual_memory_it_caches_and_without_a_driver_it_says_so(driver: bool, said: list[str]) -> None:
    arguments = [str(stand_in_path())] if driver else []
    environment = {**os.environ, "STAND_IN_VIRTUAL_MEMORY": "0"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(line.startswith(words) for line, words in zip(done.stdout.splitlines(), said, strict=True))


def test_it_says_why_it_cannot_be_put_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    with pytest.raises(RequestError, match="there are planned"):
        live.allocator("buddy")
    if torch.backends.cuda.is_built():
        pytest.skip("this PyTorch has CUDA")
    with pytest.raises(UnsupportedError, match="PyTorch for CUDA"):
        live.allocator()
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UnsupportedError, match="in use"):
        live.allocator()
    live.step()  # does nothing


def test_steps_of_optimizers_end_steps_one_of_several_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    ended = []
    monkeypatch.setattr(live, "step", lambda: ended.append(True))
    steps = live._Steps()
    one, other, third = (torch.optim.SGD([torch.zeros(1)], lr=0.1) for _ in range(3))
    for optimizer in (one, other, third, one, third, other):
        steps.stepped(optimizer)
    assert len(ended) == 2
    steps.stepped(third)  # twice, and the first not once
    assert len(ended) == 3
    for optimizer in (third, other, third, one):
        steps.stepped(optimizer)
    assert len(ended) == 5
    del optimizer, third
    steps.stepped(other)
    steps.stepped(one)
    assert len(ended) == 6


@pytest.mark.long
def test_a_script_that_cannot_have_it_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("print('ran')")
    monkeypatch.chdir(tmp_path)
    begun: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda *given: begun.append(given))
    for words in (["--epochs", "3"], ["--", "--epochs", "3"]):
        main(["run", "train.py", *words])
    first, (program, command) = begun
    assert first == (program, command)
    assert command[-4:] == ["planned", "train.py", "--epochs", "3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "needs PyTorch for CUDA" in done.stderr
    capsys.readouterr()
    assert main(["run", "absent.py"]) == main(["run", "--allocator", "x", "train.py"]) == 2
    said = capsys.readouterr().err
    assert "there is no file and no module absent.py" in said
    assert "there is no allocator 'x'" in said
    assert len(begun) == 2

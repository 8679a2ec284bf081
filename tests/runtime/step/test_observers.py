"""Whoever looks at a model during a step, from wherever: right values or one clear error, and the step has the same bits.

`observers.py` has them look at lines of the runtime's code drawn at random, so at every state that a step can be in.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.runtime.step import observers
from tests.runtime.step.observers import READS, Values, expected, explore, in_child, same, small, values
from tests.runtime.step.whole_steps import OPTIMIZERS, Mlp, Pair, batch_for
from tests.turns import rest_long
from torch import Tensor, nn

from overspill.core.errors import OverspillError, RequestError
from overspill.runtime.reachable import same_bits
from overspill.runtime.step import gate
from overspill.runtime.step.gate import Gate, held_signals
from overspill.runtime.step.residency import Guarded
from overspill.runtime.step.train_step import TrainStep
from overspill.runtime.transfer.host_store import HostStore

# -- every observer at every moment


@pytest.mark.parametrize(
    ("store", "seed", "cases"), [("host", 1, 18), pytest.param("disk", 2, 60, marks=pytest.mark.long)]
)
def test_who_looks_at_any_moment_sees_right_values_or_one_error_and_changes_nothing(
    store: str, seed: int, cases: int
) -> None:
    observed = explore(seed, cases, 600, store)  # a busy machine shall try as many; not all reach their line
    assert observed.faults == []
    assert observed.right > 2
    assert observed.refused > 2


@pytest.mark.long
@pytest.mark.parametrize("store", ["host", "disk"])
def test_who_looks_at_any_moment_for_minutes(store: str) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end:
        seed = random.SystemRandom().randrange(2**32)
        observed = explore(seed, 300, end - time.monotonic(), store)
        assert observed.faults == [], f"seed {seed}"


class NoLock:
    """In the place of a lock."""

    def acquire(self, blocking: bool = True) -> bool:
        return True

    def release(self) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def fetched_when_armed(self: Guarded, **_: object) -> None:
    if self._gate is not None and not torch.compiler.is_compiling():
        self._bring_now()


@contextmanager
def nothing_held() -> Iterator[Callable[[], None]]:
    yield lambda: None


DEFECTS: dict[str, tuple[Any, str, Any, tuple[str, ...]]] = {
    "no lock": (gate, "RLock", NoLock, ("thread",)),
    "guards that ask only for what was away when the last step ended": (
        Guarded, "fetch", fetched_when_armed, ("thread", "finalizer", "fork"),
    ),
    "signals that are not held": (gate, "held_signals", nothing_held, ("Ctrl-C",)),
    "a step that is not noticed from within": (Gate, "_busy", lambda _, work: work(), ("finalizer",)),
    "a child that does not know that it is one": (Gate, "forked", lambda _: None, ("fork in a thread",)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("defect", rest_long(DEFECTS, ["no lock"]))
def test_planted_defects_are_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, bad, who = DEFECTS[defect]
    monkeypatch.setattr(observers, "PATIENCE", 2.0)
    monkeypatch.setattr(owner, name, bad)
    for seed in range(1, 6):
        try:
            faults = explore(seed, 40, 20, observers=who).faults
        except Exception as error:  # noqa: BLE001 - what a broken step does is not foreseen
            faults = [str(error)]
        if faults:
            return
    raise AssertionError(f"{defect}: not found")


# -- signals


def test_a_handler_that_saves_sees_the_end_of_the_step_and_its_error_is_raised_then() -> None:
    pair = small()
    seen = []

    def handler(number: int, _: Any) -> None:
        seen.append((number, values(pair)))
        raise SystemExit(7)

    raised_at = iter(range(1, 1000))
    real = HostStore.write

    def write(self: HostStore, *args: Any) -> None:
        real(self, *args)
        if next(raised_at) == 3:
            signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        HostStore.write = write  # type: ignore[method-assign]
        torch.manual_seed(4)
        pair.plain(*pair.inputs)
        torch.manual_seed(4)
        with pytest.raises(SystemExit):
            pair.step(*pair.inputs)
        assert signal.getsignal(signal.SIGUSR1) is handler
    finally:
        HostStore.write = real  # type: ignore[method-assign]
        signal.signal(signal.SIGUSR1, before)
    ((number, found),) = seen
    assert number == signal.SIGUSR1
    assert same(found, expected(pair))
    assert not pair.step.is_unfinished
    pair.train()
    pair.assert_same()


def test_held_signals_are_all_delivered_and_all_handlers_are_back() -> None:
    came: list[int] = []

    def raising(number: int, _: Any) -> None:
        came.append(number)
        raise ValueError(number)

    numbers = signal.SIGUSR1, signal.SIGUSR2

    def raise_all() -> None:
        with held_signals():
            for number in (*numbers, signal.SIGUSR1):
                signal.raise_signal(number)
            assert came == []

    before = [signal.signal(n, raising) for n in numbers]
    try:
        with pytest.raises(ValueError, match=f"{signal.SIGUSR2:d}"):
            raise_all()
        assert came == [*numbers]
        assert all(signal.getsignal(n) is raising for n in numbers)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_a_handler_in_the_main_thread_waits_for_a_step_in_another() -> None:
    pair = small()
    seen: list[Values] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(values(pair)))
    stop = threading.Event()

    def steps() -> None:
        while not stop.is_set():
            pair.step(*pair.inputs)

    thread = threading.Thread(target=steps)
    try:
        thread.start()
        for _ in range(20):
            time.sleep(0.003)
            signal.raise_signal(signal.SIGUSR1)
    finally:
        stop.set()
        thread.join(20)
        signal.signal(signal.SIGUSR1, before)
    assert not thread.is_alive()
    assert len(seen) == 20
    assert not any(v.isnan().any() for found in seen for v in found.values())


# -- threads


def plain_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))


def test_threads_that_step_are_as_one_after_another_while_others_read() -> None:
    pair = Pair(plain_mlp)
    pair.step.tracker = None  # it is of one thread
    pair.train(2)
    history = [{n: v.clone() for n, v in pair.plain.model.state_dict().items()}]
    losses: list[Tensor] = []
    faults: list[str] = []
    stop = threading.Event()

    def steps() -> None:
        try:
            losses.extend(pair.step(*pair.inputs) for _ in range(8))
        except Exception as error:  # noqa: BLE001 - reported below
            faults.append(repr(error))

    def reads(read: str) -> None:
        try:
            while not stop.is_set():
                seen.extend(values(pair, read).items())
                time.sleep(0.002)
        except Exception as error:  # noqa: BLE001 - reported below
            faults.append(repr(error))

    seen: list[tuple[str, Tensor]] = []
    stepping = [threading.Thread(target=steps) for _ in range(3)]
    reading = [threading.Thread(target=reads, args=(read,)) for read in READS if read != "optimizer"]
    for thread in (*stepping, *reading):
        thread.start()
    for thread in stepping:
        thread.join(60)
    stop.set()
    for thread in reading:
        thread.join(20)
    assert faults == []
    assert not any(thread.is_alive() for thread in (*stepping, *reading))
    wanted = []
    for _ in range(24):
        wanted.append(pair.plain(*pair.inputs))
        history.append({n: v.clone() for n, v in pair.plain.model.state_dict().items()})
    assert sorted(map(float, losses)) == sorted(map(float, wanted))
    pair.assert_same()
    assert len(seen) > 20
    assert not any(value.isnan().any() for _, value in seen)


def test_no_other_thread_steps_while_one_has_paused_it() -> None:
    pair = small()
    found: list[tuple[Values, Values]] = []
    stop = threading.Event()

    def saves() -> None:
        for _ in range(5):
            with pair.step.paused():
                first = values(pair)
                time.sleep(0.01)
                weights = dict(pair.model.named_parameters())
                found.append((first, {n: v.clone() for n, v in pair.model.state_dict().items()}))
                assert not any(w.isnan().any() for w in weights.values())
        stop.set()

    thread = threading.Thread(target=saves)
    thread.start()
    while not stop.is_set():
        pair.train()
    thread.join(20)
    assert len(found) == 5
    assert all(same(first, second) for first, second in found)
    pair.assert_same()


def test_a_loop_that_another_thread_has_left_open_is_an_error_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = small()
    monkeypatch.setattr(gate, "READERS_SECONDS", 0.2)
    loops: list[Any] = []
    thread = threading.Thread(target=lambda: loops.append(next(iter([it := pair.model.parameters(), next(it)]))))
    thread.start()
    thread.join()
    with pytest.raises(RequestError, match=r"another thread .*step\.paused\(\)"):
        pair.step(*pair.inputs)
    loops.clear()
    pair.train()
    pair.assert_same()


# -- the thread that steps


def test_collections_during_a_step_cannot_see_half_of_it_and_finalizers_of_other_steps_do_not_hang() -> None:
    pair = small()
    outcomes: list[object] = []

    def look(phase: str, _: Any) -> None:
        if phase == "start" and len(outcomes) < 200:
            try:
                outcomes.append(values(pair))
            except OverspillError as error:
                outcomes.append(error)

    def dropped() -> None:
        other = small()
        circle: list[Any] = [other.step, other.model]
        circle.append(circle)

    dropped()
    thresholds = gc.get_threshold()
    gc.callbacks.append(look)
    try:
        gc.set_threshold(20, 5, 2)
        pair.seed += 1
        torch.manual_seed(pair.seed)
        loss = pair.step(*pair.inputs)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(look)
    torch.manual_seed(pair.seed)
    before = expected(pair)
    assert same_bits(pair.plain(*pair.inputs), loss)
    pair.assert_same()
    assert any(isinstance(outcome, RequestError) for outcome in outcomes)
    for outcome in outcomes:
        if isinstance(outcome, dict):
            assert same(outcome, before) or same(outcome, expected(pair))
        else:
            assert "\n" not in str(outcome)


@pytest.mark.parametrize("read", rest_long(READS, ["state_dict"]))
def test_an_unfinished_step_says_so_to_all_and_a_closed_or_dropped_one_shows_its_values(read: str) -> None:
    pair = small()
    pair.step.synchronize()  # nothing is away, and no guard would ask for that reason
    ((compiled, *_),) = pair.step._plans._compiled.values()
    instructions = compiled.program.instructions
    late = range(len(instructions) * 2 // 3, len(instructions))
    position = next(n for n in late if instructions[n].mutation is None)

    def failing(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    kept, instructions[position] = instructions[position], instructions[position]._replace(target=failing)
    pair.seed += 1
    torch.manual_seed(pair.seed)
    with pytest.raises(KeyboardInterrupt):
        pair.step(*pair.inputs)
    instructions[position] = kept
    told: list[str] = []

    def refused() -> None:
        with pytest.raises(RequestError, match="is unfinished"):
            values(pair, read)
        told.append("x")

    refused()
    thread = threading.Thread(target=refused)
    thread.start()
    thread.join()

    def in_the_child() -> bytes:
        with pytest.raises(OverspillError, match="unfinished"):
            values(pair, read)
        return b"told"

    assert in_child(in_the_child) == b"told"
    assert told == ["x", "x"]
    torch.manual_seed(pair.seed)
    pair.plain(*pair.inputs)
    pair.step.resume()
    assert same(values(pair, read), expected(pair, read))
    pair.train()
    pair.step.close()
    assert same(values(pair, read), expected(pair, read))
    pair.make_step()
    pair.train()
    del pair.step
    assert same(values(pair, read), expected(pair, read))


def test_nothing_that_observes_keeps_a_step_alive() -> None:
    pair = small()
    with pair.step.paused():
        values(pair, "torch.save")
    step: weakref.ref[TrainStep] = weakref.ref(pair.step)
    del pair.step
    assert step() is None


OWN_STEPS = pytest.mark.skipif(torch.__version__ < "2.13", reason="before, AdamW makes its steps on the default device")


@pytest.mark.short("momentum")
@pytest.mark.parametrize("optimizer", ["momentum", pytest.param("adamw", marks=OWN_STEPS), "adagrad"])
def test_the_default_device_of_the_caller_does_not_matter(optimizer: str) -> None:
    pair = Pair(Mlp, OPTIMIZERS[optimizer])
    pair.step.close()
    inputs = batch_for(pair.model)
    with torch.device("meta"):
        pair.make_step()
        losses = []
        for seed in range(3):
            torch.manual_seed(seed)
            losses.append(pair.step(*inputs))
    for seed, loss in enumerate(losses):
        torch.manual_seed(seed)
        assert same_bits(pair.plain(*inputs), loss)
    pair.assert_same()

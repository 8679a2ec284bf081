"""Steps that are looked at from outside at a chosen line of the runtime's code, by everyone who may."""

from __future__ import annotations

import io
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from tests.runtime.step.whole_steps import OPTIMIZERS, Mlp, Pair, batch_for
from torch import Tensor, nn
from torch.optim import Optimizer

import overspill.runtime.step
import overspill.runtime.transfer
from overspill.errors import OverspillError
from overspill.runtime.reachable import same_bits

WATCHED = tuple(
    str(Path(str(package.__file__)).parent) for package in (overspill.runtime.step, overspill.runtime.transfer)
)
PATIENCE = 20.0
"""Seconds after which something hangs."""

Values = dict[str, Tensor]
Where = tuple[str, int]


def of_model(state: dict[str, Tensor]) -> Values:
    return {name: value.detach().clone() for name, value in state.items()}


def of_optimizer(state: dict[str, Any]) -> Values:
    return {
        f"{number}.{key}": torch.as_tensor(v).clone() for number, of in state["state"].items() for key, v in of.items()
    }


def saved_model(model: nn.Module, _: Optimizer) -> Values:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return of_model(torch.load(file, weights_only=False).state_dict())


READS: dict[str, Callable[[nn.Module, Optimizer], Values]] = {
    "state_dict": lambda model, _: of_model(model.state_dict()),
    "parameters": lambda model, _: {name: p.detach().clone() for name, p in model.named_parameters()},
    "optimizer": lambda _, optimizer: of_optimizer(optimizer.state_dict()),
    "torch.save": saved_model,
}


class Moment:
    """Calls `act` once, before the line `where` of the runtime's code is carried out for the `nth` time."""

    def __init__(self, where: Where, nth: int, act: Callable[[], None]) -> None:
        self.where = where
        self.nth = nth
        self.act = act
        self.came = False

    def __enter__(self) -> None:
        sys.settrace(self._called)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, _event: str, _arg: Any) -> Any:
        return self._line if frame.f_code.co_filename == self.where[0] else None

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line" and frame.f_lineno == self.where[1] and not self.came:
            self.nth -= 1
            if self.nth <= 0:
                self.came = True
                self.act()
        return self._line


def lines_of(call: Callable[[], Any]) -> dict[Where, int]:
    """How often `call()` comes to each line of the runtime's code."""
    found: dict[Where, int] = {}

    def line(frame: FrameType, event: str, _arg: Any) -> Any:
        if event == "line":
            where = frame.f_code.co_filename, frame.f_lineno
            found[where] = found.get(where, 0) + 1
        return line

    sys.settrace(lambda frame, *_: line if frame.f_code.co_filename.startswith(WATCHED) else None)
    try:
        call()
    finally:
        sys.settrace(None)
    return found


def small(store: str = "host") -> Pair:
    """Two steps by each side; nearly all is in the store."""
    pair = Pair(Mlp, options={"store": store, "budget": 0.6})
    pair.train(2)
    assert pair.step._state.residency.away()
    return pair


def values(pair: Pair, read: str = "state_dict") -> Values:
    return READS[read](pair.model, pair.optimizer)


def expected(pair: Pair, read: str = "state_dict") -> Values:
    return READS[read](pair.plain.model, pair.plain.optimizer)


def same(found: Values, known: Values) -> bool:
    return found.keys() == known.keys() and all(same_bits(v, known[n]) for n, v in found.items())


@dataclass
class Seen:
    """What one observer has seen, or the error that it got."""

    values: Values | None = None
    error: BaseException | None = None

    def look(self, read: Callable[[], Values]) -> None:
        try:
            self.values = read()
        except BaseException as error:  # noqa: BLE001 - judged later
            self.error = error


@dataclass
class Observed:
    """A pair whose steps are observed; `faults` says what was wrong."""

    pair: Pair
    faults: list[str] = field(default_factory=list)
    refused: int = 0
    right: int = 0

    def __post_init__(self) -> None:
        self.pair.train(3)

    def plain_values(self, read: str) -> Values:
        return READS[read](self.pair.plain.model, self.pair.plain.optimizer)

    def step(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """A step that is called until it is finished, whatever stops it."""
        step = self.pair.step
        for _ in range(5):
            try:
                return step.resume() if step.is_unfinished else step(*inputs)
            except KeyboardInterrupt:
                sys.settrace(None)
                if not step.is_unfinished and self.pair.differences() == []:
                    return torch.tensor(float("nan"))  # it was over: only its loss is lost
        raise AssertionError("the step does not get on")

    def case(self, observer: str, read: str, moment: tuple[Where, int], inputs: tuple[Tensor, ...], label: str) -> None:
        """One step on `inputs`, which `observer` looks at."""
        pair = self.pair
        before = self.plain_values(read)
        pair.seed += 1
        torch.manual_seed(pair.seed)
        loss = pair.plain(*inputs)
        after = self.plain_values(read)
        torch.manual_seed(pair.seed)
        seen = Seen()
        look = lambda: seen.look(lambda: READS[read](pair.model, pair.optimizer))  # noqa: E731
        act, finish = OBSERVERS[observer](self, seen, look)
        here = Moment(*moment, act)
        where = f"{label}: {observer}, {read}, {Path(moment[0][0]).name}:{moment[0][1]} ({moment[1]})"
        try:
            with here:
                found = self.step(inputs)
            finish()
            if not (same_bits(found, loss) or (observer.startswith("Ctrl-C") and found.isnan())):
                self.faults.append(f"{where}: other loss")
            if differences := pair.differences():
                self.faults.append(f"{where}: other {differences}")
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - a fault, whatever it is
            finish()
            self.faults.append(f"{where}: {type(error).__name__} {error}")
        if seen.error is not None:
            self.refused += 1
            if not isinstance(seen.error, OverspillError) or "\n" in str(seen.error):
                self.faults.append(f"{where}: saw {type(seen.error).__name__} {seen.error}")
        elif seen.values is not None:
            self.right += 1
            wrong = [
                n for n, v in seen.values.items()
                if not any(n in known and same_bits(v, known[n]) for known in (before, after))
            ]  # fmt: skip
            if wrong or not (seen.values.keys() >= before.keys() or seen.values.keys() >= after.keys()):
                self.faults.append(f"{where}: saw wrong {wrong}")


Acting = tuple[Callable[[], None], Callable[[], None]]


def by_signal(_: Observed, __: Seen, look: Callable[[], None]) -> Acting:
    before = signal.signal(signal.SIGUSR1, lambda *_: look())
    return lambda: signal.raise_signal(signal.SIGUSR1), lambda: void(signal.signal(signal.SIGUSR1, before))


def by_ctrl_c(observed: Observed, seen: Seen, _: Callable[[], None], *, presses: int = 1) -> Acting:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # what starts the tests may ignore it

    def act() -> None:
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)

    return act, lambda: void(signal.signal(signal.SIGINT, before))


def by_two_ctrl_c(observed: Observed, seen: Seen, look: Callable[[], None]) -> Acting:
    return by_ctrl_c(observed, seen, look, presses=2)


def by_thread(observed: Observed, seen: Seen, look: Callable[[], None]) -> Acting:
    threads: list[threading.Thread] = []

    def act() -> None:
        threads.append(threading.Thread(target=look, daemon=True))
        threads[0].start()
        threads[0].join(0.01)  # a chance to look right now

    def finish() -> None:
        for thread in threads:
            thread.join(PATIENCE)
            if thread.is_alive():
                observed.faults.append("a thread that reads hangs")

    return act, finish


def by_finalizer(observed: Observed, seen: Seen, look: Callable[[], None]) -> Acting:
    class Dying:
        def __del__(self) -> None:
            look()

    def act() -> None:
        if not observed.pair.step._state.gate.is_tracing:  # the model itself reads then
            Dying()

    return act, void


def by_fork(observed: Observed, seen: Seen, look: Callable[[], None]) -> Acting:
    def act() -> None:
        def child() -> bytes:
            torch.set_num_threads(1)
            sys.settrace(None)
            look()
            file = io.BytesIO()
            error = None if seen.error is None else (isinstance(seen.error, OverspillError), str(seen.error))
            torch.save((seen.values, error), file)
            return file.getvalue()

        answer = in_child(child, PATIENCE)
        if answer is None:
            observed.faults.append("a forked child hangs or dies")
            return
        seen.values, error = torch.load(io.BytesIO(answer), weights_only=False)
        if error is not None:
            seen.error = OverspillError(error[1]) if error[0] else RuntimeError(error[1])

    return act, void


def by_fork_in_thread(observed: Observed, seen: Seen, look: Callable[[], None]) -> Acting:
    fork, finish = by_fork(observed, seen, look)

    def act() -> None:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    return act, finish


OBSERVERS: dict[str, Callable[[Observed, Seen, Callable[[], None]], Acting]] = {
    "signal": by_signal,
    "thread": by_thread,
    "finalizer": by_finalizer,
    "fork": by_fork,
    "fork in a thread": by_fork_in_thread,
    "Ctrl-C": by_ctrl_c,
    "Ctrl-C twice": by_two_ctrl_c,
}


def void(*_: object) -> None:
    """Nothing is to be done."""


def in_child(work: Callable[[], bytes], patience: float = PATIENCE) -> bytes | None:
    """What `work()` returns in a forked child; None if that dies or hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(patience))
            with os.fdopen(writing, "wb") as file:
                file.write(b"." + work())
        except BaseException:  # noqa: BLE001 - for who reads the test's output; nothing may leave a child
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    answer = b""
    end = time.monotonic() + patience + 5
    with os.fdopen(reading, "rb", buffering=0) as file:
        while select.select([file], [], [], max(0.0, end - time.monotonic()))[0] and (part := file.read(2**16)):
            answer += part
    os.waitpid(child, 0)
    return answer[1:] if answer else None


def explore(seed: int, cases: int, seconds: float, store: str = "host", observers: tuple[str, ...] = ()) -> Observed:
    """Steps observed at lines drawn at random, each line of the runtime as often as any other, until time is over."""
    rng = random.Random(seed)
    sys.stdout.write(f"seed {seed}, store {store}\n")
    observed = Observed(Pair(Mlp, OPTIMIZERS["adamw"], options={"store": store, "budget": 0.6}))
    pair = observed.pair
    planned = lines_of(pair.train)
    sizes = iter(range(9, 2000))
    captured = lines_of(lambda: pair.train(inputs=batch_for(pair.model, next(sizes))))
    end = time.monotonic() + seconds
    for number in range(cases):
        if time.monotonic() > end or len(observed.faults) > 3:
            break
        captures = rng.random() < 0.1
        if captures:
            where, inputs = rng.choice(list(captured)), batch_for(pair.model, next(sizes))
        else:
            where, inputs = rng.choice(list(planned)), pair.inputs
        nth = rng.randint(1, (captured if captures else planned)[where])
        observer = rng.choice(observers or list(OBSERVERS))
        if rng.random() < 0.5:
            pair.step.synchronize()
        observed.case(observer, rng.choice(list(READS)), (where, nth), inputs, f"case {number}")
    return observed

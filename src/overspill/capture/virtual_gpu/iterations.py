"""Detect a script's training iterations, and end it when enough are recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from overspill.capture.recording.recorder import Recorder
from overspill.capture.recording.recording import Recording
from overspill.core import Phase
from overspill.pytorch.patching import patched

from .gpu import optimizer_hooks

# Most steps of one optimizer in a round, before optimizers without a step are given up. The critic of a GAN takes about
# five for each of the generator.
_PATIENCE = 16
# Most forward passes of a script that never goes backward, while memory grows or an optimizer waits.
_MOST_CALLS = 2000


class Enough(BaseException):
    """Raised to end a script that has run long enough; no `except Exception` catches it."""


class Iterations:
    """Counts the iterations of a script inside `watching()`, and ends it after `wanted`.

    An iteration of training is a round in which every optimizer takes a step. The last one goes on until a model is
    called again, so that the work after the step belongs to it. Without an optimizer, an iteration is a call of the
    model. A script whose memory still grows from call to call (a cache, a list of outputs) goes on. `is_complete` is
    called once a recording exists, and again whenever the script goes on after that.
    """

    def __init__(self, recorder: Recorder, wanted: int, is_complete: Callable[[], None] = lambda: None) -> None:
        self._recorder, self._wanted, self._is_complete = recorder, wanted, is_complete
        self._depth = 0
        self._optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self._round: Counter[int] = Counter()  # steps of this round, by the optimizer's id
        self._ignored: set[int] = set()
        self._calls: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._most_calls = 0
        self._started = False
        self._live_bytes_before = -1
        self.rounds = 0
        self.steps = 0
        self.calls = 0
        self.host_steps = 0
        self.host_calls = 0
        self.optimizers: dict[str, None] = {}  # the classes that took steps, in order
        self.abandoned: dict[str, None] = {}  # those that were waited for in vain
        self.recording: Recording | None = None
        self.finished = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch models and optimizers inside a VirtualGpu; a call of one of them may raise Enough."""
        hooks = [
            module_hooks.register_module_forward_pre_hook(lambda module, _: self._enter(module)),
            module_hooks.register_module_forward_hook(lambda *_: self._leave(), always_call=True),
            optimizer_hooks.register_optimizer_step_pre_hook(self._before_step),
            optimizer_hooks.register_optimizer_step_post_hook(self._after_step),
        ]
        optimizer = torch.optim.Optimizer
        try:
            with patched([(optimizer, "__init__", self._noticing(optimizer.__init__))]):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _noticing(self, init: Callable[..., None]) -> Callable[..., None]:
        def make(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self._optimizers.add(optimizer)

        return make

    def finish(self, *, cut_short: bool = False) -> None:
        """Record the script's run, once it has ended by itself or was `cut_short`."""
        if self.recording is None and self.iterations:
            self.finished = not cut_short
            self._record()

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on the device."""
        return self._recorder.peak_bytes

    @property
    def iterations(self) -> int:
        """The number of complete iterations."""
        if self.steps:
            return self.rounds or 1
        return self._most_calls

    @property
    def trains(self) -> bool:
        """Whether the script takes optimizer steps, or at least runs backward."""
        return self.steps > 0 or any(op.phase is Phase.BACKWARD for op in reversed(self._recorder._ops))

    def _record(self) -> None:
        recording = self._recorder.recording()  # what follows the last complete iteration belongs to it
        self.recording = replace(recording, starts=recording.starts[: self.iterations])
        self._is_complete()

    def _stop(self) -> None:
        if self.recording is None:
            self._record()
        else:
            self._is_complete()
        raise Enough

    # Calls of models

    def _enter(self, module: nn.Module) -> None:
        if self.recording is not None:  # it went on, having caught everything
            self._stop()
        self._depth += 1
        if self._depth > 1 or self._recorder.phase is not Phase.FORWARD:
            return
        # Models on the host do not count, unless there is nothing else.
        parameters = list(module.parameters())
        if not parameters:  # a loss, a metric, a transform of images
            return
        if not any(parameter.is_cuda for parameter in parameters):
            self.host_calls += 1
            if self.host_calls >= _MOST_CALLS and not self._recorder.peak_bytes:
                raise Enough
            return
        # A model on the GPU: the end, the start, or one more call.
        if self.rounds >= self._wanted:
            self._stop()
        if not self._started:
            self._start()
        if not self.steps:
            self._call(module)
        self.calls += 1

    def _leave(self) -> None:
        self._depth = max(0, self._depth - 1)

    def _call(self, module: nn.Module) -> None:
        """Count a call of `module` before any optimizer step: this may be inference."""
        before = self._calls.get(module, 0)
        grows = self._recorder.live_bytes > self._live_bytes_before
        self._live_bytes_before = self._recorder.live_bytes
        if self._optimizers:
            if before >= _MOST_CALLS and not self.trains:
                self._stop()
        elif before >= self._wanted and (not grows or before >= _MOST_CALLS):
            self._stop()
        elif before and before == self._most_calls:
            self._recorder.start_iteration()
        self._calls[module] = before + 1
        self._most_calls = max(self._most_calls, before + 1)

    def _start(self) -> None:
        self._started = True
        self._recorder.start_iteration()

    # Steps of optimizers

    def _before_step(self, *_: Any) -> None:
        if self.recording is not None or self.rounds >= self._wanted:
            self._stop()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if not any(parameter.is_cuda for parameter in parameters):
            self._ignored.add(id(optimizer))
            self.host_steps += 1
            if self.host_steps >= max(self._wanted, _PATIENCE) and not self._recorder.peak_bytes:
                raise Enough
            return
        if not self._started:
            self._start()
        self.steps += 1
        self.optimizers[type(optimizer).__name__] = None
        self._round[id(optimizer)] += 1
        # A round is over when no optimizer is waited for.
        waiting = [o for o in self._optimizers if id(o) not in self._ignored and not self._round[id(o)]]
        if waiting and self._round[id(optimizer)] >= _PATIENCE:
            self.abandoned |= {type(other).__name__: None for other in waiting}
            self._ignored |= {id(other) for other in waiting}
            waiting = []
        if not waiting:
            self._round.clear()
            self.rounds += 1
            if self.rounds < self._wanted:
                self._recorder.start_iteration()

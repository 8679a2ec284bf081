"""Attach a recorder to sessions and train steps for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from overspill.core import TensorKind
from overspill.core.errors import RequestError
from overspill.runtime.compiled.weak_references import state_of
from overspill.runtime.tracker import LiveBytes

from .recorder import RunRecorder
from .sources import RecordedSource


@contextmanager
def recording(recorder: RunRecorder, sources: Sequence[RecordedSource]) -> Iterator[RunRecorder]:
    """Record all that runs by the plans of `sources` within the context.

    The recorder is finished at its end. Raises RequestError if one of the sources is being recorded already.
    """
    if any(source.recorder is not None for source in sources):
        raise RequestError("this is being recorded already; begin the next recording when that one has ended")

    def leave() -> None:
        for source in sources:
            source.tell(None)

    # Start the clock, attach, and count what is on the device already.
    with ExitStack() as end:
        end.callback(recorder.finish)
        end.callback(leave)
        recorder.on_over = leave
        recorder.plans_now = lambda: [plan for source in sources for plan in source.plans]
        device = next((d for source in sources if (d := source.device) is not None), None)
        if device is not None:
            counting = (source.tracker for source in sources)
            recorder.start(device, next((tracker for tracker in counting if isinstance(tracker, LiveBytes)), None))
        # Attach to the sources.
        for source in sources:
            source.tell(recorder)
            for kind, tensors in source.present():
                recorder.there(tensors, kind)
        end.enter_context(_steps_by_optimizers(recorder, sources))
        yield recorder


@contextmanager
def _steps_by_optimizers(recorder: RunRecorder, sources: Sequence[RecordedSource]) -> Iterator[None]:
    """End a recorded step at each step of the sources' optimizers, and count the optimizer state."""

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        if not recorder.is_over and any(source.ends_by(optimizer) for source in sources):
            recorder.optimizer_stepped()
            recorder.there(state_of(optimizer), TensorKind.OPTIMIZER_STATE)

    hook = register_optimizer_step_post_hook(stepped)
    try:
        yield
    finally:
        hook.remove()

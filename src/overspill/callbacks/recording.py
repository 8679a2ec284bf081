"""`overspill.record`: measure a few steps of a real run, in whatever loop it is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from overspill.core.errors import RequestError
from overspill.pytorch.modules import ORIGINAL
from overspill.report.recording import Recording
from overspill.runtime.recording.attach import recording
from overspill.runtime.recording.recorder import RunRecorder
from overspill.runtime.recording.sources import sources_of
from overspill.runtime.step.train_step import TrainStep

from .figures import figures_source

MOST_STEPS = 10


@contextmanager
def record(model: Any, *, steps: int = MOST_STEPS, snapshot: bool = True) -> Iterator[Recording]:
    """Record what `model` does: ops, copies, waits and memory.

    It is measured while the context lasts. For example::

        with overspill.record(model) as recording:
            for batch in itertools.islice(loader, 3):
                train(batch)
        recording.trace("run.json")       # ui.perfetto.dev
        recording.snapshot("run.pickle")  # pytorch.org/memory_viz
        recording.report("run.html")

    Losses and weights stay the same to the last bit. Calls that are already compiled are recorded from their next run
    on. Nothing is planned or compiled again.

    Args:
        model: The result of `overspill.compile` or `overspill.train_step`, a module that has one inside, or a Session.
            All models that share a session are recorded.
        steps: The most steps to record. Later steps run unrecorded.
        snapshot: On CUDA, let PyTorch record its memory meanwhile, for `snapshot()`.

    Yields:
        The Recording, complete when the context ends.

    Raises:
        RequestError: If Overspill takes no part in `model`, if it is being recorded already, or for less than one step.
    """
    if steps < 1:
        raise RequestError(f"steps={steps} is not a positive number of steps to record")
    # What to record, and what it is called.
    found = figures_source(model)
    name = "" if isinstance(found, TrainStep) and found is model else type(getattr(model, ORIGINAL, model)).__name__
    options = found.options
    recorded = Recording(f"{name or 'train step'}, policy {options.policy}, {options.backend} backend")
    recorder = RunRecorder(steps, snapshot=snapshot)
    try:
        with recording(recorder, sources_of(found)):
            yield recorded
    finally:  # what an error has stopped may be looked at
        recorded.take(recorder.record)
    if recorder.record.is_full:
        warnings.warn(
            f"the record is full after {len(recorder.record.steps)} steps, the last in part: record fewer, or smaller "
            "ones",
            stacklevel=3,
        )

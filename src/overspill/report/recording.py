"""The result of `overspill.record`, as files and a page.

It has the record of a few steps of a real run.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

from overspill.core import Verb
from overspill.core.errors import RequestError
from overspill.core.reportable import Reportable
from overspill.plans.plan import Plan
from overspill.runtime.recording.record import RunRecord

from .tracing import write_run_snapshot, write_run_trace


class Recording(Reportable):
    """A few measured steps of a real run.

    Its results are there once its context has ended. A step is a call of a train step, or ends with the `step()` of an
    optimizer. Times are seconds.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._record: RunRecord | None = None

    def take(self, record: RunRecord) -> None:
        """Set the record, once recording has ended."""
        self._record = record

    @property
    def record(self) -> RunRecord:
        """The record of the run. Raises RequestError while it is under way, or where nothing was recorded."""
        if self._record is None:
            raise RequestError("the recording is under way; ask for its results behind the `with` that it lasts for")
        if not self._record.steps:
            raise RequestError("nothing was recorded: no planned step ran while the recording lasted")
        return self._record

    @property
    def plans(self) -> list[Plan]:
        """The plans that ran."""
        return self.record.plans

    @property
    def step_seconds(self) -> list[float]:
        """Seconds of each step, the cost of recording included."""
        return [step.seconds for step in self.record.steps]

    @property
    def usual_step_seconds(self) -> float:
        """The median step time, in seconds.

        Of the steps in which nothing was planned, compiled or made ready to be recorded; of all where there are none.
        """
        usual = [
            step.seconds
            for step, facts in zip(self.record.steps, self.record.facts, strict=True)
            if facts.is_whole and not facts.plans and not facts.prepared_seconds
        ]
        return median(usual or self.step_seconds)

    @property
    def waited_seconds(self) -> list[float]:
        """Seconds that compute waited for transfers, by step."""
        waits = [thing for thing in self.record.compute if thing.is_wait]
        return [sum(w.seconds for w in self.record.within(waits, step)) for step in range(len(self.record.steps))]

    @property
    def peak_bytes(self) -> int:
        """The most bytes of storages that were live at once."""
        return self.record.peak_bytes()

    @property
    def offloaded_bytes(self) -> list[int]:
        """Bytes that went to the store, by step, of tensors that ops made."""
        return self._moved(Verb.OFFLOAD)

    @property
    def prefetched_bytes(self) -> list[int]:
        """Bytes that came back from the store, by step."""
        return self._moved(Verb.PREFETCH)

    def trace(self, path: str | Path) -> None:
        """Write a Perfetto trace of the run to `path`.

        With the plans' simulated steps for comparison. Raises RequestError.
        """
        write_run_trace(self.record, self.plans, path, self.title)

    def snapshot(self, path: str | Path) -> None:
        """Write a memory snapshot to `path`, for PyTorch's memory_viz.

        On CUDA it is PyTorch's own. Raises RequestError.
        """
        write_run_snapshot(self.record, path)

    def _moved(self, verb: Verb) -> list[int]:
        record = self.record
        labels = [[c.label for c in record.within(record.copies[verb], at)] for at in range(len(record.steps))]
        return [sum(lb.graph.tensors[lb.target].nbytes for lb in of_step if lb is not None) for of_step in labels]

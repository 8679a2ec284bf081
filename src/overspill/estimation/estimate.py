"""The answer for a user: figures, words, advice and a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from overspill.capture.recording.recording import Recording
from overspill.core.reportable import Reportable

from .advice import SHOWN, Advice, advice
from .figures import Figures
from .memory_viz import write_estimate


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(Figures, Reportable):
    """The memory that a device needs for a job, with advice.

    Its figures are those of `Figures`.
    """

    compiled_recording: Recording | None = None
    """The recording of the same job under `torch.compile`, if requested."""

    @cached_property
    def compiled(self) -> Figures | None:
        """The figures of the same job under stock `torch.compile`.

        They follow the program that Inductor writes for the CPU.
        """
        if self.compiled_recording is None:
            return None
        return Figures(
            self.name,
            self.compiled_recording,
            self.device,
            self.batch,
            self.allocator,
            self.allocator_config,
            self.software,
        )

    @cached_property
    def changes(self) -> tuple[Advice, ...]:
        """The first changes that would help the job to fit, cheapest first.

        It is empty if the job fits. `overspill.advise` returns all changes.
        """
        return () if self.fits() else tuple(islice(advice(self, quick=True), SHOWN))

    def save_snapshot(self, path: str | Path) -> None:
        """Write the simulated run as a memory snapshot, which https://pytorch.org/memory_viz shows.

        Raises RequestError if the file cannot be written.
        """
        write_estimate(path, self)

"""The figures of an estimate: bytes by category, and where they fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from overspill.capture.recording.recording import Recording
from overspill.core import Device
from overspill.costs import Interval, context_bytes, kernel_image_bytes
from overspill.costs.context import budget_bytes
from overspill.costs.engines import UNEXPLAINED
from overspill.costs.interval import NOTHING
from overspill.costs.library_ops import CUDNN
from overspill.costs.scratch import Software
from overspill.devices import device_names, load_device
from overspill.job import Parallel
from overspill.placement.allocators.result import Replay
from overspill.placement.replay import minimum_capacity

from .advice.change import Retrace
from .demand import Demand, demand_of, served, survives
from .engine_samples import EngineSamples, interval
from .peak import CATEGORIES, Peak, peak_of
from .scaling import Scaling
from .step_time import step_seconds
from .unspecified import LOADING, Unspecified, unspecified


@dataclass(frozen=True, eq=False, repr=False)
class Figures:
    """The memory that `device` needs for a recorded job.

    Each figure is computed when it is first read. Bytes are of the device unless stated otherwise.
    """

    name: str
    recording: Recording
    device: Device
    batch: int | None = None
    allocator: str = "pytorch"
    allocator_config: Any = None
    software: Software = field(default_factory=Software)
    parallel: Parallel | None = None
    """How other GPUs share the work."""
    scaling: Scaling | None = None
    """Traces the job at other batch sizes, if that is possible."""
    seconds: float = 0.0
    """The time that the estimate took."""
    retrace: Retrace | None = None
    """Traces the job with other training settings."""
    framework: str = "pytorch"
    """The framework that runs the job."""
    stages: Mapping[int, int] = field(default_factory=dict)
    """For a pipeline, peaks of requested bytes without scratch, by stage; the figures are those of the largest."""

    @property
    def titled(self) -> str:
        """The job in words, for a title."""
        if self.retrace is not None:
            return self.retrace.job.titled()
        return self.name if self.batch is None else f"{self.name}, batch {self.batch}"

    # The allocator

    @cached_property
    def demand(self) -> Demand:
        """The job's allocations, with the likeliest engine of each convolution."""
        return demand_of(self.recording, self.device, self.software)

    @cached_property
    def draws(self) -> EngineSamples:
        """The job's allocations if cuDNN takes other engines."""
        return EngineSamples(self.recording, self.device, self.demand)

    @cached_property
    def replayed(self) -> Replay:
        """The allocator's answer on this device, or on an unlimited one if the job does not survive."""
        return self._served(self.demand)

    def _served(self, demand: Demand) -> Replay:
        room = self.device.memory_bytes - self.outside_bytes
        return served(demand, room, self.allocator, self.allocator_config)

    @property
    def peak_requested_bytes(self) -> int:
        """The most bytes that were requested at once."""
        return self.replayed.peak_requested_bytes

    @property
    def peak_allocated_bytes(self) -> int:
        """The most bytes that the allocator had allocated at once, rounding included."""
        return self.replayed.peak_allocated_bytes

    @property
    def peak_reserved_bytes(self) -> int:
        """The most bytes that the allocator had reserved, cache included."""
        return self.replayed.peak_reserved_bytes

    # Time

    @property
    def unsimulated(self) -> str:
        """What of a step has no simulated time here; empty if all has."""
        if self.framework != "pytorch":
            return f"ops of {self.framework}"
        if self.parallel is not None:
            return "collectives; `overspill plan --parallel` simulates them"
        return "the update on the host" if self.recording.host_bytes else ""

    def step_seconds(self, repeats: float = 1.0) -> float | None:
        """Return the simulated seconds of a step, or None if part of it is `unsimulated`.

        Forward and backward run `repeats` times as often as recorded.
        """
        return None if self.unsimulated else step_seconds(self.recording, self.device, repeats)

    # Outside the allocator

    @cached_property
    def context(self) -> Interval:
        """Bytes of the CUDA context, kernels included."""
        cuda = self.software.cuda_version
        return context_bytes(self.device, cuda) + self.kernels

    @cached_property
    def kernels(self) -> Interval:
        """Bytes of the context that kernels take while the job runs."""
        return kernel_image_bytes(self.device, self.software.cuda_version, cudnn=self._convolves)

    @cached_property
    def _convolves(self) -> bool:
        return any(op.name in CUDNN for op in self.recording.ops)

    @cached_property
    def communication(self) -> Interval:
        """Bytes of links to other GPUs outside the allocator.

        Buckets and similar buffers are in the recording.
        """
        return NOTHING if self.parallel is None else self.parallel.communication(self.device)

    @property
    def context_bytes(self) -> int:
        """The most likely size of the CUDA context."""
        return self.context.central

    @property
    def outside_bytes(self) -> int:
        """Bytes outside the allocator: the context, and communication."""
        return self.context.central + self.communication.central

    @property
    def budget_bytes(self) -> int:
        """The budget to name for all of the device."""
        return budget_bytes(self.device, self.context + self.communication)

    @property
    def total_bytes(self) -> int:
        """Bytes that NVML would show at the job's peak: reserved memory, context and communication."""
        return self.replayed.peak_device_bytes + self.outside_bytes

    @cached_property
    def total(self) -> Interval:
        """`total_bytes` with a 90 % interval.

        It contains nine of ten jobs, over the variation of engines, context and communication.
        """
        drawn = [self._served(demand).peak_device_bytes for demand in self.draws.demands()]
        unexplained = UNEXPLAINED if self._convolves else 0.0
        found = interval(self.replayed.peak_device_bytes, drawn, self.context + self.communication, unexplained)
        if self.retrace is None or not self.retrace.job.fine_tunes:
            return found
        more, less = (self.unspecified.more, self.unspecified.less) if self.unspecified is not None else (0, 0)
        return replace(found, low=found.low - less, high=found.high + more + int(LOADING * found.central))

    @cached_property
    def unspecified(self) -> Unspecified | None:
        """The fine-tune settings that the user did not give, and how far they may move the total.

        None if all are given.
        """
        if self.retrace is None:
            return None
        return unspecified(
            self.retrace,
            self.replayed.peak_device_bytes,
            lambda other: self._served(demand_of(other, self.device, self.software)).peak_device_bytes,
        )

    # Does it fit

    @cached_property
    def minimum_capacity_bytes(self) -> int:
        """The smallest device memory, in bytes, that the job survives on.

        The allocator frees cached memory where it must.
        """
        return minimum_capacity(self.demand.events, self.allocator, self.allocator_config) + self.outside_bytes

    def fits(self, gpu: str | Device | None = None) -> bool:
        """Return whether the job survives on `gpu`.

        It is a name or a device; None is the GPU of this estimate.
        """
        if gpu is not None:
            return self.on(gpu).fits()
        return survives(self.demand, self.device, self.outside_bytes, self.allocator, self.allocator_config)

    def on(self, gpu: str | Device) -> Self:
        """Return the same job on another GPU; its scratch and context are that GPU's."""
        device = load_device(gpu) if isinstance(gpu, str) else gpu
        scaling = None if self.scaling is None else self.scaling.on(device)
        return self if device == self.device else replace(self, device=device, scaling=scaling)

    @cached_property
    def gpus(self) -> tuple[str, ...]:
        """The names of all known GPUs that the job fits on, smallest memory first."""
        known = sorted((load_device(name) for name in device_names()), key=lambda d: (d.memory_bytes, d.name))
        return tuple(device.name for device in known if device.kind == "cuda" and self.fits(device))

    @cached_property
    def largest_batch(self) -> int | None:
        """The largest batch that fits, or `scaling.most` if larger ones may; 0 if none does.

        It is verified by traces. None means that the job has no batch size.
        """
        return None if self.scaling is None else self.scaling.largest_batch(self.outside_bytes)

    @cached_property
    def expected_largest_batch(self) -> int | None:
        """About the largest batch that fits, not verified by traces; None if it is unknown."""
        return None if self.scaling is None else self.scaling.expected_largest_batch(self.outside_bytes)

    # What it is made of

    @cached_property
    def peak(self) -> Peak:
        """The moment at which most bytes are allocated, and its allocations."""
        return peak_of(self.recording, self.demand, self.replayed)

    @cached_property
    def breakdown(self) -> dict[str, int]:
        """Bytes by category at the peak; they add up to `total_bytes`.

        Categories are those of DNNMem, Table 2.
        """
        tensors = self.peak.by_category
        parts = tensors | {
            "internal_fragmentation": self.peak_allocated_bytes - self.peak.requested_bytes,
            "allocator_reservation": self.replayed.peak_device_bytes - self.peak_allocated_bytes,
            "context": self.context.central,
            "communication": tensors.get("communication", 0) + self.communication.central,
        }
        return {name: parts.get(name, 0) for name in CATEGORIES}

    @property
    def by_layer(self) -> dict[str, int]:
        """Bytes at the peak by the layer that made them, largest first.

        Weights and optimizer state are left out.
        """
        return self.peak.by_layer

"""The Device: the hardware figures that planning uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from .saved import Saved

ABSENT = -1
"""The index of a GPU that plans are made for but this machine does not have."""

CALL_SECONDS = 150e-6
"""An update of one small parameter by AdamW's fused kernel in the thread of updates: 0.14 to 0.2 ms on a Xeon."""
JOINED_SHARE = 0.3
"""The share of that which one more small parameter in the same call takes: 34 of 126 µs there."""


@dataclass(frozen=True)
class Device(Saved):
    """One processor with its memory, and its link to the store for offloaded tensors.

    An offload goes from the device to the store, a prefetch comes back.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_second: dict[str, float]
    """By dtype name."""
    memory_bytes_per_second: float
    offload_bytes_per_second: float
    """From the device to the store."""
    prefetch_bytes_per_second: float
    """From the store to the device."""
    transfer_latency_seconds: float
    op_overhead_seconds: float
    full_duplex: bool
    """Whether both directions run at full rate at once."""
    context_bytes: int
    """Bytes that the driver takes before the first tensor."""
    transfer_compute_share: float = 0.0
    """The share of compute time that a running transfer takes away.

    A copy by the CPU competes with CPU kernels; a GPU's copy engine does not.
    """
    efficiency: dict[str, float] = field(default_factory=dict)
    """The share of `flops_per_second` that each layer type reaches, by its name."""
    sources: dict[str, str] = field(default_factory=dict)
    """Where each figure comes from, by field."""
    context_low_bytes: int = 0
    """The lower bound of `context_bytes`; 0: `context_bytes` itself."""
    context_high_bytes: int = 0
    """The upper bound of `context_bytes`; 0: `context_bytes` itself."""
    compute_capability: str = ""
    """CUDA's, such as `8.6`; empty for a CPU."""
    multiprocessors: int = 0
    transfer_host_seconds: float = 0.0
    """What the processor that issues ops spends on each transfer, to start it and to await it."""
    link_bytes_per_second: float = 0.0
    """What each GPU sends to the next one of its node in a collective.

    Without a link (0), GPUs send at their prefetch rate, through the host.
    """
    link_latency_seconds: float = 0.0
    """Of one hop from a GPU to the next one."""
    network_bytes_per_second: float = 0.0
    """What a node sends to the next node in a collective; 0: as inside a node."""
    network_latency_seconds: float = 0.0
    """Of one hop from a node to the next one."""
    host_update_bytes_per_second: float = 0.0
    """What an update on the host reads and writes of gradients, weights and optimizer state; 0: unknown."""
    host_update_call_seconds: float | None = None
    """What an update of one small parameter takes on the host; None: unknown, and taken to be CALL_SECONDS."""
    unified_memory: bool = False
    """Whether its memory is the host's too, so that a tensor that moves to the host frees nothing."""
    host_bytes: int = 0
    """Host memory that stored copies may take before they go on to a disk; 0: there is no disk below the store."""
    disk_read_bytes_per_second: float = 0.0
    disk_write_bytes_per_second: float = 0.0
    """Of that disk; reads and writes share its time."""
    index: int | None = None
    """The number of the CUDA device on this machine, or ELSEWHERE for a GPU that this machine does not have.

    None if budgets do not count all memory of the GPU.
    """

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors may take: the memory without the driver's context."""
        return self.memory_bytes - self.context_bytes

    @property
    def runs_behind_host(self) -> bool:
        """Whether a host issues ops ahead of time, as for a GPU; a CPU runs them itself."""
        return self.kind != "cpu"

    def disk_read_seconds(self, nbytes: int) -> float:
        """Return the seconds to read `nbytes` from the disk below the store, with nothing else running."""
        return self.transfer_latency_seconds + nbytes / self.disk_read_bytes_per_second

    def disk_write_seconds(self, nbytes: int) -> float:
        """Return the seconds to write `nbytes` to that disk."""
        return self.transfer_latency_seconds + nbytes / self.disk_write_bytes_per_second

    def disk_seconds(self, read_bytes: int, written_bytes: int) -> float:
        """Return the least that the disk takes for these bytes, in any number of copies."""
        return read_bytes / self.disk_read_bytes_per_second + written_bytes / self.disk_write_bytes_per_second

    def link_seconds(self, offloaded_bytes: int, prefetched_bytes: int) -> float:
        """Return the least that the link is busy for with these bytes, in any number of copies: its busier direction.

        On a half-duplex link it is the link itself.
        """
        out, back = offloaded_bytes / self.offload_bytes_per_second, prefetched_bytes / self.prefetch_bytes_per_second
        return max(out, back) if self.full_duplex else out + back

    def offload_seconds(self, nbytes: int) -> float:
        """Return the seconds to move `nbytes` to the store, with nothing else running."""
        return self.transfer_latency_seconds + nbytes / self.offload_bytes_per_second

    def prefetch_seconds(self, nbytes: int) -> float:
        """Return the seconds to bring `nbytes` back, with nothing else running."""
        return self.transfer_latency_seconds + nbytes / self.prefetch_bytes_per_second

    def host_update_seconds(self, nbytes: int, *, joins: bool = False) -> float:
        """Return the seconds of an update on the host that reads and writes `nbytes`.

        It has a call of its own, or `joins` that of the update before it.
        """
        call = CALL_SECONDS if self.host_update_call_seconds is None else self.host_update_call_seconds
        return (JOINED_SHARE if joins else 1.0) * call + nbytes / self.host_update_bytes_per_second

"""The Device: the hardware figures that planning uses."""

from __future__ import annotations

from dataclasses import dataclass, field

from .saved import Saved

ABSENT = -1
"""The index of a GPU that plans are made for but this machine does not have."""


@dataclass(frozen=True)
class Device(Saved):
    """One processor with its memory, and its link to the store for offloaded tensors.

    `flops_per_second` by dtype name, `efficiency` the share of it that each layer type reaches. Offload goes from the
    device to the store, prefetch comes back; `full_duplex` says whether both directions run at full rate at once.
    `transfer_host_seconds` is what the processor that issues ops spends on each transfer, to start it and to await it.
    `transfer_compute_share` is the share of compute time that a running transfer takes away (a copy by the CPU competes
    with CPU kernels; a GPU's copy engine does not). `context_bytes` is what the driver takes before the first tensor,
    between `context_low_bytes` and `context_high_bytes`; a bound of 0 stands for the figure itself.
    `compute_capability` is CUDA's, such as `8.6`, and empty for a CPU. `sources` says where each figure comes from.
    In collectives each GPU sends `link_bytes_per_second` to the next of its node, and a node `network_bytes_per_second`
    to the next node; the latencies are of one such hop. Without a link (0) GPUs send as they prefetch, through the host;
    without a network as inside a node.
    `index` is the number of the CUDA device on this machine, or ELSEWHERE; None if budgets do not count all memory of a
    card.
    """

    name: str
    kind: str
    memory_bytes: int
    flops_per_second: dict[str, float]
    memory_bytes_per_second: float
    offload_bytes_per_second: float
    prefetch_bytes_per_second: float
    transfer_latency_seconds: float
    op_overhead_seconds: float
    full_duplex: bool
    context_bytes: int
    transfer_compute_share: float = 0.0
    efficiency: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    context_low_bytes: int = 0
    context_high_bytes: int = 0
    compute_capability: str = ""
    multiprocessors: int = 0
    transfer_host_seconds: float = 0.0
    link_bytes_per_second: float = 0.0
    link_latency_seconds: float = 0.0
    network_bytes_per_second: float = 0.0
    network_latency_seconds: float = 0.0
    index: int | None = None

    @property
    def usable_bytes(self) -> int:
        """Bytes that tensors may take: the memory without the driver's context."""
        return self.memory_bytes - self.context_bytes

    @property
    def runs_behind_host(self) -> bool:
        """Whether a host issues ops ahead of time, as for a GPU.

        A CPU runs them itself.
        """
        return self.kind != "cpu"

    def offload_seconds(self, nbytes: int) -> float:
        """Seconds to move `nbytes` to the store, with nothing else running."""
        return self.transfer_latency_seconds + nbytes / self.offload_bytes_per_second

    def prefetch_seconds(self, nbytes: int) -> float:
        """Seconds to bring `nbytes` back, with nothing else running."""
        return self.transfer_latency_seconds + nbytes / self.prefetch_bytes_per_second

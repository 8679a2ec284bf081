"""Seconds of collectives: a ring through all ranks, node after node."""

from __future__ import annotations

from overspill.core import Collective, CollectiveKind, Device

NODE_GPUS = 8
"""GPUs of a node, as in NVIDIA's DGX and HGX machines; there may be fewer ranks."""


def collective_seconds(collective: Collective, device: Device) -> float:
    """Return the seconds of a collective with nothing else running.

    Each of W ranks sends (W - 1)/W of the whole to the next, in W - 1 hops. One hop for each node but the first goes
    over the network; a reduction goes round twice. Ranks fill one node after another. This is NCCL's own model of its
    rings (src/graph/tuning.cc, ncclTopoTuneModel), with an op's overhead in place of its fixed 8.4 µs.
    """
    ranks = collective.ranks
    if ranks < 2:
        return 0.0
    nodes = -(-ranks // NODE_GPUS)
    rate, latency = device.link_bytes_per_second, device.link_latency_seconds
    if not rate:
        rate, latency = device.prefetch_bytes_per_second, device.transfer_latency_seconds
    hops = (ranks - nodes) * latency + (nodes - 1) * (device.network_latency_seconds or latency)
    if nodes > 1 and device.network_bytes_per_second:
        rate = min(rate, device.network_bytes_per_second)
    rounds = 2 if collective.kind is CollectiveKind.REDUCE else 1
    return rounds * (hops + (ranks - 1) / ranks * collective.nbytes / rate)

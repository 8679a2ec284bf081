"""A table of all devices, or one device with its figures."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overspill.core import Device
from overspill.core.units import format_bytes, format_seconds

from .listing import format_flops, listing


def devices_table(devices: Iterable[Device]) -> Table:
    """Return a table with one line for each device."""
    columns = ("name", "memory", "float32", "bandwidth", "to the store", "from the store")
    rows = [
        (
            device.name,
            format_bytes(device.memory_bytes),
            _flop_rate(device.flops_per_second["float32"]),
            _rate(device.memory_bytes_per_second),
            *(
                ("one memory", "one memory")
                if device.unified_memory
                else (_rate(device.offload_bytes_per_second), _rate(device.prefetch_bytes_per_second))
            ),
        )
        for device in devices
    ]
    return listing(columns, rows, numbers=range(1, len(columns)))


def profile_table(device: Device, note: str) -> RenderableType:
    """Return a table of all figures of `device`, with `note` below."""
    rows = [("memory", format_bytes(device.memory_bytes))]
    rows += [(f"matrix product, {dtype}", _flop_rate(rate)) for dtype, rate in device.flops_per_second.items()]
    rows += [
        (f"{layer}, share of the matrix product's rate", f"{share:.2f}") for layer, share in device.efficiency.items()
    ]
    rows += [
        # Memory, the link to the store, and fixed costs.
        ("memory bandwidth", _rate(device.memory_bytes_per_second)),
        ("store, write", _rate(device.offload_bytes_per_second)),
        ("store, read", _rate(device.prefetch_bytes_per_second)),
        ("both directions at full rate at once", "yes" if device.full_duplex else "no"),
        *([("between ranks", _rate(device.link_bytes_per_second))] if device.link_bytes_per_second else []),
        ("fixed time of a transfer", format_seconds(device.transfer_latency_seconds)),
        ("fixed time of an op", format_seconds(device.op_overhead_seconds)),
        ("host time of a transfer", format_seconds(device.transfer_host_seconds)),
        ("compute is slower during a transfer by", f"{100 * device.transfer_compute_share:.0f} %"),
    ]
    return Group(listing((device.name, "measured"), rows, numbers=(1,)), "", Text(note))


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.4g} GB/s"


def _flop_rate(flops_per_second: float) -> str:
    return f"{format_flops(flops_per_second)}/s"

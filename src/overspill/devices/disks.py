"""Rates of drives, by kind: published figures for long reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from overspill.core.errors import RequestError
from overspill.core.registry import did_you_mean
from overspill.core.units import parse_bytes


@dataclass(frozen=True)
class Disk:
    """A drive's rates in bytes a second."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    source: str


USUAL = "nvme-pcie4"
"""The drive assumed in a machine with a GPU."""
DISKS = {
    USUAL: Disk(
        6.5e9, 3.5e9, "Samsung PM9A3, U.2, for data centres: 6,5 GByte/s read, 3,5 GByte/s written (heise.de/-4720224)"
    ),
    "nvme-pcie4-consumer": Disk(
        7.45e9, 6.9e9,
        "Samsung 990 PRO: 7,450 and 6,900 MB/s, which CrystalDiskMark confirms (thefpsreview.com, 2024-05-27, page 4); "
        "it writes more slowly once its cache is full",
    ),
    "nvme-pcie3": Disk(
        3.0e9, 1.6e9, "Samsung PM981, 1 TB: up to 3000 MB/s read, 1600 written (ssdmeter.github.io, pm981-nvme-sed)"
    ),
}  # fmt: skip
"""Drives by the name of their kind."""


def rates_of(text: str) -> tuple[float, float]:
    """Return the bytes a second that are read and written: of a kind of drive, of `7GB/s`, or of `7GB/s,5GB/s`.

    Raises RequestError.
    """
    if (found := DISKS.get(text)) is not None:
        return found.read_bytes_per_second, found.write_bytes_per_second
    rates = [part.strip().removesuffix("/s") for part in text.split(",")]
    try:
        read, write = (float(parse_bytes(part)) for part in (rates * 2)[:2] if len(rates) <= 2)
    except (RequestError, ValueError):
        raise RequestError(
            f"unknown disk_bandwidth {text!r}{did_you_mean(text, DISKS)} Write 7GB/s, 7GB/s,5GB/s for reads and "
            f"writes, or a kind of drive: {', '.join(DISKS)}"
        ) from None
    return read, write

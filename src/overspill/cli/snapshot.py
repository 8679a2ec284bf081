"""`overspill snapshot`: replay a recorded memory snapshot on the simulated allocator."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.core.units import parse_bytes

from .common import AsJson, Outcome, ReportFile, check_report, of_page, optional

if TYPE_CHECKING:
    from overspill.placement.snapshot import SnapshotReplay

SnapshotFile = Annotated[
    Path,
    typer.Argument(
        metavar="FILE.pickle", help="A snapshot that torch.cuda.memory._dump_snapshot wrote.", show_default=False
    ),
]
AllocatorConfig = Annotated[
    str | None, optional("TEXT", "Settings as in PYTORCH_CUDA_ALLOC_CONF, in place of those that the snapshot holds.")
]
Capacity = Annotated[
    str | None, optional("SIZE", "The device's memory, as 80GiB; only settings that collect garbage depend on it.")
]
DeviceNumber = Annotated[
    int | None, optional("N", "Which device's events.  [default: the first that has any]", "--device", min=0)
]


def snapshot(
    file: SnapshotFile,
    allocator_config: AllocatorConfig = None,
    capacity: Capacity = None,
    device: DeviceNumber = None,
    report: ReportFile = None,
    json: AsJson = False,
) -> Outcome:
    """Replay a PyTorch memory snapshot and compare, segment by segment and block by block. Exit code 1: it differs."""
    del json  # `main` reads it from the arguments
    from overspill.placement import CachingConfig
    from overspill.placement.snapshot import otherwise, read_snapshot, replay_snapshot
    from overspill.report.snapshot import snapshot_page

    config = CachingConfig.parse(allocator_config) if allocator_config is not None else None
    capacity_bytes = parse_bytes(capacity) if capacity is not None else None
    check_report(report)
    # Replay, and compare.
    read = read_snapshot(file)
    found = replay_snapshot(read, device, config=config, capacity_bytes=capacity_bytes)
    complaint = (
        "" if found.equal else f"the simulated allocator does otherwise than the recorded one: {found.difference}"
    )
    others = otherwise(read, found.device, found.config)
    answer = {"file": str(file), "devices": list(read.devices), **_answer(found), "otherwise": asdict(others)}
    page = snapshot_page(found, read, f"{file.name}, device {found.device}", others)
    return of_page(answer, page, {"report": report}, 0 if found.equal else 1, complaint)


def _answer(found: SnapshotReplay) -> dict[str, Any]:
    """Return the fields of `found`, its settings in the syntax of PYTORCH_CUDA_ALLOC_CONF."""
    from overspill.placement.snapshot.settings import text_of

    answer = {field.name: getattr(found, field.name) for field in fields(found)}
    return {**answer, "config": text_of(found.config), "equal": found.equal}

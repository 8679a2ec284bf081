"""A campaign's lines as the tables that the docs show, in markdown. Simulated and measured figures have columns of their own."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from overspill.core.units import format_bytes, format_seconds

from . import lines
from .experiment import Figures, peak_of
from .lines import Line

Found = Mapping[str, Figures]
"""The figures of the experiments that ran to their end, by name."""
NONE = "-"


def figures_of(known: Iterable[Line]) -> dict[str, Figures]:
    """What each experiment found that ran to its end, or that compares arms one by one."""
    latest = lines.latest(known).items()
    return {name: line.figures for name, line in latest if line.status == lines.OK or "arms" in line.figures}


def named(found: Found, prefix: str) -> dict[str, Figures]:
    """The experiments whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): figures for name, figures in found.items() if name.startswith(prefix)}


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    """Markdown; None is a dash."""
    told = [tuple(NONE if cell is None else str(cell) for cell in row) for row in rows]
    if not told:
        return ""
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ("---",) * len(head), *told))


def costs(found: Found) -> str:
    """What device and host charge."""
    link, host, pinned = (found.get(f"1-{name}", {}) for name in ("bandwidth", "host-time", "pinned"))
    context = found.get("1-context", {})
    rows: list[tuple[str, str | None]] = [
        ("context after the first kernel", _bytes(context.get("first_kernel_beside_allocator_bytes"))),
        ("… and after the first convolution", _bytes(context.get("first_convolution_beside_allocator_bytes"))),
        ("device to host", _rate(link.get("offload_bytes_per_second"))),
        ("host to device", _rate(link.get("prefetch_bytes_per_second"))),
        ("both ways at once", _rate(link.get("both_ways_bytes_per_second"))),
        ("a page out, a page back", _pair(link.get("page_out_seconds"), link.get("page_back_seconds"))),
        ("device memory, read and written", _rate(link.get("device_copy_bytes_per_second"))),
        ("pinning 1 GiB: registered, cudaHostAlloc", _pair(*_pinning(pinned))),
        ("host time of a small op", _seconds(host.get("add_seconds"))),
        ("host time of a swap", _seconds(host.get("swap_seconds"))),
        ("… in small ops", _number(host.get("adds_a_swap"))),
        ("host time of AdamW on GPT-2: foreach, single", _pair(*(host.get(f"adamw_{k}_seconds") for k in ("foreach", "single")))),
    ]  # fmt: skip
    return table(("what", "measured"), [row for row in rows if row[1] is not None])


def bits(found: Found) -> str:
    """Whether every way to train gives plain training's bits."""
    rows: list[tuple[object, ...]] = []
    for model, figures in named(found, "3-bits-").items():
        for arm, told in figures["arms"].items():
            if "refused" in told:
                rows.append((model, arm, "refused", told["refused"][:80], None))
                continue
            first = told.get("first_differing")
            differs = f"{told['differing_tensors']} tensors, first {first}" if first else None
            rows.append(
                (model, arm, "yes" if told["identical"] else "no", differs, _bytes(told.get("measured_peak_bytes")))
            )
    return table(("model", "way", "identical to plain training", "what differs", "measured peak"), rows)


def peaks(found: Found) -> str:
    """What was planned, and what allocator and driver counted."""
    keys = (
        "budget", "planned_peak", "planned_allocated", "allocated_peak", "planned_reserved", "reserved_peak", "device_used",
    )  # fmt: skip
    rows = [
        (name.removeprefix("peak-"), *(_bytes(f.get(f"{key}_bytes")) for key in keys), f.get("retries"))
        for name, f in named(found, "5-").items()
        if not name.startswith("survives-")
    ]
    head = (
        "job", "budget", "planned live", "planned allocated", "allocated", "planned reserved", "reserved",
        "device in use", "retries",
    )  # fmt: skip
    return table(head, rows)


def survival(found: Found) -> str:
    """Whether a limit of the budget's size was enough for PyTorch's allocator."""
    rows = [
        (name, _bytes(f["budget_bytes"]), _bytes(f["limit_bytes"]), "yes" if f["survived"] else "no", f.get("retries"))
        for name, f in named(found, "5-survives-").items()
    ]
    return table(("job and factor", "budget", "limit of reserved bytes", "survived", "retries"), rows)


def step_times(found: Found, job: str) -> str:
    """Every way to train one job; ratios are to eager PyTorch's measured step."""
    arms = named(found, f"6-{job}-")
    base = arms.get("eager", {}).get("step_seconds")
    rows = []
    for name, f in arms.items():
        step = f.get("step_seconds")
        rows.append(
            (
                name, _seconds(step) or f.get("outcome"), f"{step / base:.2f}" if step and base else None,
                _seconds(f.get("gpu_seconds")), _seconds(f.get("host_seconds")), _bytes(f.get("allocated_peak_bytes")),
                _bytes(f.get("reserved_peak_bytes")), _bytes(f.get("budget_bytes")),
                f"{f['simulated_slowdown']:.2f}" if "simulated_slowdown" in f else None,
            )
        )  # fmt: skip
    head = (
        "way", "measured step", "over eager", "GPU time", "host time", "allocated", "reserved", "budget", "simulated slowdown",
    )  # fmt: skip
    return table(head, rows)


def profiles(found: Found) -> str:
    """What the GPU did in one step."""
    rows = [
        (
            name, _seconds(f.get("span_seconds")), _seconds(f.get("kernel_busy_seconds")),
            *(_seconds(f["copy_busy_seconds"][d]) for d in ("DtoH", "HtoD")),
            _seconds(f["copies_beside_kernels_seconds"]), _seconds(f["idle_seconds"]),
        )
        for name, f in named(found, "7-profile-").items()
        if "copy_busy_seconds" in f
    ]  # fmt: skip
    head = ("job", "step", "kernels", "copies to the host", "copies to the device", "copies beside kernels", "idle")
    return table(head, rows)


def recordings(found: Found) -> str:
    """What recordings of a step say beside PyTorch's profiler, and what they cost."""
    rows = []
    for name, f in named(found, "7-recorded-").items():
        recorded, profiled = f["recorded"], f.get("profiled", {})
        rows.append(
            (
                name, _seconds(statistics.median(f["plain_step_seconds"])), f"{f['ratio_median']:.2f}",
                *(_seconds(k.get("copies_beside_kernels_seconds")) for k in (recorded, profiled)),
                _seconds(f["waited_seconds"]), _seconds(f["host_seconds"]),
                _bytes(f.get("recorded_live_bytes")), _bytes(f.get("snapshot_requested_bytes")),
            )
        )  # fmt: skip
    head = (
        "job", "step", "recorded, times that", "copies beside ops", "… beside kernels, by the profiler", "waits", "host",
        "most live bytes", "… by PyTorch's snapshot",
    )  # fmt: skip
    return table(head, rows)


def again(found: Found) -> str:
    """Plans by the device file and by measured times."""
    rows = [
        (name, by.replace("_", " "), _seconds(f[f"{by}_simulated_seconds"]), _seconds(f[f"{by}_measured_seconds"]))
        for name, f in named(found, "8-again-").items()
        for by in ("by_device_file", "by_measured_times")
    ]
    return table(("job", "planned", "simulated step", "measured step"), rows)


def errors_of_estimates(found: Found) -> dict[str, float]:
    """Of each job how far the estimate of reserved bytes is from what PyTorch's allocator had reserved, signed."""
    return {
        name: f["estimated_reserved_bytes"] / f["reserved_peak_bytes"] - 1
        for name, f in named(found, "9-estimate-").items()
        if f.get("reserved_peak_bytes")
    }


def estimates(found: Found) -> str:
    """Estimates beside what was measured."""
    errors = errors_of_estimates(found)
    rows: list[tuple[object, ...]] = [
        (
            name, *(_bytes(f.get(k)) for k in ("estimated_allocated_bytes", "allocated_peak_bytes", "estimated_reserved_bytes", "reserved_peak_bytes")),
            f"{errors[name]:+.1%}" if name in errors else None,
        )
        for name, f in named(found, "9-estimate-").items()
    ]  # fmt: skip
    if errors:
        rows.append(("median of absolute errors", *(None,) * 4, f"{statistics.median(map(abs, errors.values())):.1%}"))
    return table(("job", "estimated allocated", "measured", "estimated reserved", "measured", "error"), rows)


def larger(found: Found) -> str:
    """The decoder of three times its budget."""
    rows = [
        (
            name, *(_bytes(f.get(f"{key}_bytes")) for key in ("state", "budget", "planned_peak", "allocated_peak", "reserved_peak")),
            _seconds(f.get("step_seconds")), ", ".join(f"{loss:.6g}" for loss in f["losses"]),
        )
        for name, f in named(found, "10-decoder-").items()
    ]  # fmt: skip
    return table(("decoder", "state", "budget", "planned", "allocated", "reserved", "measured step", "losses"), rows)


def shared(found: Found) -> str:
    """What `park` gives back between two steps."""
    rows = [
        (
            name, *(_bytes(f.get(f"{key}_bytes")) for key in ("parked", "reserved_before", "reserved_parked")),
            _seconds(f.get("park_seconds")), _seconds(f.get("unpark_seconds")), f["losses"] == f["parked_losses"],
        )
        for name, f in named(found, "12-parked-").items()
    ]  # fmt: skip
    columns = ("job", "moved", "reserved before", "reserved meanwhile", "park", "unpark", "same losses")
    return table(columns, rows)


def allocators(found: Found) -> str:
    """What plain training reserves on each allocator, in its timed steps and before."""
    rows = [
        (
            name, _bytes(f.get("requested_peak_bytes")), _bytes(peak_of(f, "reserved")), _seconds(f["step_seconds"]),
            _seconds(f["host_seconds"]), f.get("counts", {}).get("planned"),
        )
        for name, f in named(found, "13-").items()
        if "step_seconds" in f
    ]  # fmt: skip
    return table(("job and allocator", "requested", "reserved", "step", "host", "planned requests"), rows)


def unfinished(known: Iterable[Line]) -> str:
    """What did not run to its end, and why."""
    rows = [
        (line.experiment, line.status, lines.reason(line.error)[:160].replace("|", "/"))
        for line in lines.latest(known).values()
        if line.status != lines.OK
    ]
    return table(("experiment", "status", "why"), rows)


def _pinning(figures: Figures) -> tuple[Any, Any]:
    if not figures:
        return None, None
    per_gib = (1 << 30) / figures["bytes"]
    return figures["register_seconds"] * per_gib, figures["host_alloc_seconds"] * per_gib


def _bytes(value: Any) -> str | None:
    return None if value is None else format_bytes(int(value))


def _seconds(value: Any) -> str | None:
    return None if value is None else format_seconds(value)


def _rate(value: Any) -> str | None:
    return None if value is None else f"{value / 1e9:.1f} GB/s"


def _number(value: Any) -> str | None:
    return None if value is None else f"{value:.1f}"


def _pair(one: Any, other: Any) -> str | None:
    return None if one is None or other is None else f"{format_seconds(one)}, {format_seconds(other)}"

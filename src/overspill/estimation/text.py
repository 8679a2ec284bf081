"""An estimate in words: verdict, bars, peak, and advice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from overspill.core.units import format_bytes

from .advice import Advice
from .figures import Figures
from .peak import Peak
from .unspecified import Unspecified

_BAR = 32
_EIGHTHS = " ▏▎▍▌▋▊▉"
_LAYERS = 5
_SMALL = 1 << 20  # categories below this are not worth a line


def explain(estimate: Figures, changes: Sequence[Advice], compiled: Figures | None = None) -> str:
    """The whole answer in lines."""
    return "\n".join(lines(estimate, changes, compiled))


def lines(
    estimate: Figures, changes: Sequence[Advice], compiled: Figures | None = None, *besides: str
) -> Iterator[str]:
    """The whole answer, line by line, the verdict first.

    At last are the `changes` that would help. `compiled` are the figures under `torch.compile`, and `besides` further
    lines about that.
    """
    yield verdict(estimate)
    yield from trained(estimate)
    yield ""
    yield from bars(estimate)
    yield ""
    yield from moment(estimate)
    yield from figures(estimate)
    if estimate.largest_batch is not None:
        yield f"  largest batch on {estimate.device.name}: {estimate.largest_batch}"
    if compiled is not None:
        yield under_compile(estimate, compiled, asked=True)
    yield from besides
    yield from helps(estimate, changes)


def verdict(estimate: Figures) -> str:
    """Whether it fits, in one line."""
    total, device = estimate.total_bytes, estimate.device
    batch = "" if estimate.batch is None else f", batch {estimate.batch},"
    if not estimate.fits():
        short = estimate.minimum_capacity_bytes - device.memory_bytes
        return (
            f"does not fit: {estimate.name}{batch} needs {format_bytes(estimate.minimum_capacity_bytes)}, "
            f"{format_bytes(short)} more than the {format_bytes(device.memory_bytes)} of {device.name}"
            f"{_with_room(total, estimate.minimum_capacity_bytes)}"
        )
    spare = device.memory_bytes - estimate.minimum_capacity_bytes
    # So near the limit, what is uncertain decides.
    tight = spare < estimate.total.high - estimate.total.central
    return (
        f"fits{', but only just' if tight else ''}: {estimate.name}{batch} takes {format_bytes(total)} "
        f"of the {format_bytes(device.memory_bytes)} of {device.name} (it would survive on "
        f"{format_bytes(estimate.minimum_capacity_bytes)})"
    )


def trained(estimate: Figures) -> Iterator[str]:
    """How the job is trained or run, where that is known."""
    if estimate.retrace is not None:
        yield f"  {estimate.retrace.job.said()}"


def _with_room(total: int, needed: int) -> str:
    """Why the total below differs from the bytes needed, if so."""
    taken = format_bytes(total)
    return "" if taken == format_bytes(needed) else f" (given room it takes {taken}, with what its allocator keeps)"


def bars(estimate: Figures) -> Iterator[str]:
    """One line for each category with a bar, largest first.

    The bar is for its share of the total.
    """
    total = max(estimate.total_bytes, 1)
    parts = sorted(estimate.breakdown.items(), key=lambda item: -item[1])
    for name, nbytes in parts:
        if nbytes >= _SMALL or nbytes >= total // 1000:
            yield f"  {name.replace('_', ' '):24}{format_bytes(nbytes):>10}  {bar(nbytes / total):{_BAR}} {nbytes / total:4.0%}"
    yield f"  {'total':24}{format_bytes(estimate.total_bytes):>10}"


def bar(share: float) -> str:
    """A bar of at most 32 characters, in eighths of a character."""
    eighths = round(share * _BAR * 8)
    return "█" * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")


def moment(estimate: Figures) -> Iterator[str]:
    """When the peak is, and which layers hold most of it."""
    peak = estimate.peak
    if peak.op:
        where = f" of {peak.layer}" if peak.layer else ""
        yield f"  the peak is in step {peak.iteration + 1}, {peak.phase.value}{where}, in {peak.op}{line_of(peak)}"
    heaviest = [f"{layer} {format_bytes(nbytes)}" for layer, nbytes in list(peak.by_layer.items())[:_LAYERS]]
    if heaviest:
        yield f"  most of it in layers: {', '.join(heaviest)}"


def line_of(peak: Peak) -> str:
    """The source line of the op at the peak, as a suffix."""
    return f" ({peak.source.removeprefix('backward of ')})" if peak.source else ""


def figures(estimate: Figures) -> Iterator[str]:
    """The three peaks, and how certain they are."""
    yield (
        f"  requested {format_bytes(estimate.peak_requested_bytes)}, allocated {format_bytes(estimate.peak_allocated_bytes)}, "
        f"reserved {format_bytes(estimate.peak_reserved_bytes)}"
    )
    if estimate.recording.host_bytes:
        each = "" if estimate.parallel is None else " for each GPU"
        kept = format_bytes(estimate.recording.host_bytes)
        yield f"  in the memory of the host{each}: {kept} of weights, gradients and optimizer state"
    if estimate.stages and estimate.parallel is not None:
        yield stages(estimate.stages, estimate.parallel.gpus)
    total = estimate.total
    if total.low != total.high:
        yield f"  nine of ten times between {format_bytes(total.low)} and {format_bytes(total.high)}, as library workspaces and the context turn out"
    if estimate.unspecified is not None:
        yield f"  {open_settings(estimate.unspecified)}"


def open_settings(unspecified: Unspecified) -> str:
    """Settings that were not given, how far they move the figure, and that giving them helps."""
    more, less = format_bytes(unspecified.more), format_bytes(unspecified.less)
    return f"{more} more and {less} less than that may be of what is not said; this or its contrary narrows it: {', '.join(unspecified.options)}"


def stages(peaks: Mapping[int, int], count: int) -> str:
    """Which pipeline stage the figures are of, and other stages' requests.

    Stages are counted from 1.
    """
    largest = max(peaks, key=lambda stage: peaks[stage])
    asked = ", ".join(f"stage {stage + 1} {format_bytes(nbytes)}" for stage, nbytes in peaks.items())
    between = "; those between take less than stage 2" if count > len(peaks) else ""
    return f"  stage {largest + 1} of {count} of the pipeline needs most: of tensors {asked}{between}"


def under_compile(estimate: Figures, compiled: Figures, *, asked: bool) -> str:
    """The job's memory under `torch.compile`, in words.

    Where a device was `asked` for, whether it fits there then.
    """
    fits = (", which fits" if compiled.fits() else ", which does not fit") if asked else ""
    return (
        f"  with torch.compile: {format_bytes(compiled.total_bytes)}{fits} (eager: {format_bytes(estimate.total_bytes)}), "
        "by the program that Inductor writes for the CPU"
    )


def helps(estimate: Figures, changes: Sequence[Advice]) -> Iterator[str]:
    """The changes that would help, cheapest first, if it does not fit."""
    if estimate.fits():
        return
    yield ""
    yield "what would help, cheapest first:"
    for change in changes:
        verdict = "" if change.fits is None else " and fits" if change.fits else ", not enough by itself"
        needs = (
            ""
            if change.minimum_capacity_bytes is None
            else f": needs {format_bytes(change.minimum_capacity_bytes)}{verdict}"
        )
        yield f"  - {change.what}{needs} (cost: {change.cost})"

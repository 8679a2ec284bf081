"""What a user could change so that a job fits, ranked by what it costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from overspill.core.errors import OverspillError
from overspill.core.units import format_bytes
from overspill.placement.allocators.caching_config import CachingConfig

from .figures import Figures


@dataclass(frozen=True)
class Advice:
    """One thing to change: `what`, and what the job needs then, where that was worked out."""

    what: str
    minimum_capacity_bytes: int | None = None
    fits: bool | None = None


def advice(estimate: Figures) -> Iterator[Advice]:
    """Changes for a job that does not fit, those first that cost neither time nor results."""
    yield from _segments(estimate)
    saved = sum(estimate.breakdown[name] for name in ("forward_outputs", "output_gradients"))
    if estimate.framework == "pytorch":
        yield Advice(
            f"overspill.compile(model, budget=…): same batch, same numbers; up to {format_bytes(saved)} of feature maps and "
            "gradients can leave the device or be recomputed"
        )
    for what, variant in estimate.variants.items():
        try:
            changed = replace(estimate, recording=variant(), scaling=None, variants={})
        except OverspillError:
            continue
        yield Advice(what, changed.minimum_capacity_bytes, changed.fits())
    if estimate.largest_batch:
        yield Advice(
            f"batch {estimate.largest_batch} instead of {estimate.batch}, accumulating gradients over "
            f"{-(-(estimate.batch or 0) // estimate.largest_batch)} of them",
            estimate.scaling.minimum_capacity_bytes(estimate.largest_batch, estimate.outside_bytes)
            if estimate.scaling
            else None,
            True,
        )
    if estimate.gpus:
        yield Advice(f"another GPU: {', '.join(estimate.gpus[:6])}{' and more' if len(estimate.gpus) > 6 else ''}")


def _segments(estimate: Figures) -> Iterator[Advice]:
    """PyTorch's expandable segments, where fragmentation is what does not fit."""
    config = estimate.allocator_config or CachingConfig()
    if estimate.allocator != "pytorch" or not isinstance(config, CachingConfig) or config.expandable_segments:
        return
    changed = replace(estimate, allocator_config=replace(config, expandable_segments=True), scaling=None)
    if changed.minimum_capacity_bytes < estimate.minimum_capacity_bytes:
        yield Advice(
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: less fragmentation",
            changed.minimum_capacity_bytes,
            changed.fits(),
        )

"""Convert allocator settings between snapshots and the simulated allocator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from overspill.core.errors import RequestError
from overspill.placement.allocators.caching_config import DIVISION_INTERVALS, MIB, CachingConfig

from .read import Snapshot

_NO_LIMIT = 1 << 62
"""No limit: max_split_size is SIZE_MAX then, which readers take for -1 or 2**64 - 1."""


def config_of(snapshot: Snapshot) -> tuple[CachingConfig, tuple[str, ...]]:
    """Return the recorded allocator's settings, and notes on unknown ones."""
    found = snapshot.settings
    if found is None:
        return CachingConfig(), ("the snapshot does not hold the allocator's settings; the defaults are assumed",)
    notes: tuple[str, ...] = ()
    config = CachingConfig()
    try:
        config = CachingConfig.parse(found.text)
    except RequestError as error:
        notes = (f"of the settings, some are not understood and assumed to have no influence: {error}",)
    # The snapshot's own fields count above the text.
    limited = 0 <= found.max_split_size < _NO_LIMIT
    changes: dict[str, Any] = {
        "max_split_bytes": found.max_split_size if limited else None,
        "garbage_collection_threshold": found.garbage_collection_threshold,
        "expandable_segments": found.expandable_segments,
    }
    if found.roundup_power2_divisions:
        changes["roundup_power2_divisions"] = _divisions(found.roundup_power2_divisions)
    return replace(config, **changes), notes


def settings_of(config: CachingConfig) -> dict[str, Any]:
    """Return the settings as PyTorch writes them into a snapshot."""
    return {
        "PYTORCH_CUDA_ALLOC_CONF": text_of(config),
        "max_split_size": -1 if config.max_split_bytes is None else config.max_split_bytes,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {
            str(1 << interval): divisions for interval, divisions in enumerate(config.roundup_power2_divisions)
        },
    }


def text_of(config: CachingConfig) -> str:
    """Return `config` as PYTORCH_CUDA_ALLOC_CONF, without the defaults."""
    default = CachingConfig()
    parts = [
        f"{name}:{getattr(config, field) // MIB}"
        for name, field in (
            ("max_split_size_mb", "max_split_bytes"),
            ("max_non_split_rounding_mb", "max_non_split_rounding_bytes"),
            ("large_segment_size_mb", "large_segment_bytes"),
        )
        if getattr(config, field) != getattr(default, field)
    ]
    # Sizes in MiB first, then the others.
    parts += [
        f"{field}:{getattr(config, field)}"
        for field in ("garbage_collection_threshold", "expandable_segments", "per_process_memory_fraction")
        if getattr(config, field) != getattr(default, field)
    ]
    # The table of divisions last.
    divisions = config.roundup_power2_divisions
    if divisions != default.roundup_power2_divisions:
        pairs = ",".join(f"{1 << interval}:{count}" for interval, count in enumerate(divisions))
        parts.append(f"roundup_power2_divisions:[{pairs}]")
    return ",".join(parts)


def _divisions(table: dict[str, int]) -> tuple[int, ...]:
    """Return the numbers of divisions, in the order of their keys, which are the intervals' starts in MiB."""
    if len(table) != DIVISION_INTERVALS or not all(key.isascii() and key.isdecimal() and len(key) < 9 for key in table):
        raise RequestError(f"the snapshot's roundup_power2_divisions are not {DIVISION_INTERVALS} numbers by size")
    return tuple(count for _, count in sorted((int(key), count) for key, count in table.items()))

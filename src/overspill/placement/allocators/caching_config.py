"""Settings of PyTorch's caching allocator, and PYTORCH_CUDA_ALLOC_CONF."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from overspill.core.errors import RequestError
from overspill.core.registry import did_you_mean

MIB = 1 << 20
DIVISION_INTERVALS = 16
"""kRoundUpPowerOfTwoIntervals, c10/core/AllocatorConfig.cpp: one number of divisions for each power of 2 from 1 MiB."""

_IGNORED = (
    "backend", "graph_capture_record_stream_reuse", "pinned_free_catch_all", "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads", "pinned_use_cuda_host_register", "release_lock_on_cudamalloc",
    "throw_on_cudamalloc_oom",
)  # fmt: skip
"""Settings that exist (c10/cuda/CUDAAllocatorConfig.h, torch 2.13) but do not change the addresses of blocks."""


@dataclass(frozen=True)
class CachingConfig:
    """Settings that decide placement; defaults are those of torch 2.13."""

    max_split_bytes: int | None = None
    """None: blocks of any size are split."""
    max_non_split_rounding_bytes: int = 20 * MIB
    large_segment_bytes: int = 20 * MIB
    roundup_power2_divisions: tuple[int, ...] = (0,) * DIVISION_INTERVALS
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    per_process_memory_fraction: float = 1.0
    tie_break: Literal["address", "oldest", "falling"] = "address"
    """Which of free blocks of equal size is taken.

    The one at the lowest address (c10/cuda/CUDACachingAllocator.cpp), the one created first, or the lowest as if the
    driver gave later segments lower addresses.
    """

    def __post_init__(self) -> None:
        if self.large_segment_bytes % MIB or self.large_segment_bytes <= 10 * MIB:
            raise RequestError(
                f"large_segment_size_mb must be a whole number above 10, not {self.large_segment_bytes / MIB:g}"
            )
        if self.expandable_segments and self.large_segment_bytes % (2 * MIB):
            raise RequestError(
                "expandable_segments needs an even large_segment_size_mb (memory is mapped by 2 MiB), not"
                f" {self.large_segment_bytes / MIB:g}"
            )
        # Limits in relation to the segment size.
        if self.max_split_bytes is not None and self.max_split_bytes < self.large_segment_bytes:
            raise _too_small("max_split_size_mb", self.max_split_bytes, self.large_segment_bytes)
        rounding = self.max_non_split_rounding_bytes
        if rounding < self.large_segment_bytes and rounding != 20 * MIB:  # the default holds for any segment size
            raise _too_small("max_non_split_rounding_mb", rounding, self.large_segment_bytes)
        self._check_shares_and_divisions()

    def _check_shares_and_divisions(self) -> None:
        if not 0 <= self.garbage_collection_threshold < 1:
            raise RequestError(
                f"garbage_collection_threshold must be between 0 and 1, not {self.garbage_collection_threshold:g}"
            )
        if not 0 < self.per_process_memory_fraction <= 1:
            raise RequestError(
                f"per_process_memory_fraction must be above 0 and at most 1, not {self.per_process_memory_fraction:g}"
            )
        # The tie-break, and the divisions of powers of 2.
        if self.tie_break not in ("address", "oldest", "falling"):
            raise RequestError(f"tie_break is 'address', 'oldest' or 'falling', not {self.tie_break!r}")
        if len(self.roundup_power2_divisions) != DIVISION_INTERVALS:
            raise RequestError(
                f"roundup_power2_divisions needs {DIVISION_INTERVALS} numbers, not {len(self.roundup_power2_divisions)}"
            )
        for divisions in self.roundup_power2_divisions:
            if divisions and not _is_power_of_2(divisions):
                raise RequestError(f"roundup_power2_divisions takes powers of 2, not {divisions}")

    @classmethod
    def parse(cls, text: str) -> CachingConfig:
        """Return settings from text such as `max_split_size_mb:128,expandable_segments:True`.

        It is that of PYTORCH_CUDA_ALLOC_CONF. Settings that have no influence on placement are accepted and ignored.
        Raises RequestError with one line.
        """
        values: dict[str, Any] = {}
        for key, value in _pairs("".join(text.split())):
            if key in _FIELDS:
                field, read = _FIELDS[key]
                values[field] = read(key, value)
            elif key not in _IGNORED:
                known = (*_FIELDS, *_IGNORED)
                raise RequestError(
                    f"PYTORCH_CUDA_ALLOC_CONF has no setting {key!r}{did_you_mean(key, known)} Settings: "
                    f"{', '.join(known)}"
                )
        return replace(cls(), **values)


def text_of_environment() -> str:
    """Return this process's settings of PyTorch's allocator, as text."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yield the comma-separated `key:value` pairs of `text`; a value in brackets may hold commas."""
    while text:
        key, colon, rest = text.partition(":")
        if not colon or not key or not rest or rest[0] == ",":
            raise RequestError(f"PYTORCH_CUDA_ALLOC_CONF: {text.partition(',')[0]!r} is not of the form key:value")
        if rest[0] == "[":
            value, bracket, text = rest.partition("]")
            if not bracket or text[:1] not in ("", ","):
                raise RequestError(f"PYTORCH_CUDA_ALLOC_CONF: the list of {key} has no end ']'")
            value, text = value + "]", text[1:]
        else:
            value, _, text = rest.partition(",")
        yield key, value


def _mebibytes(key: str, value: str) -> int:
    return _whole_number(key, value) * MIB


def _share(key: str, value: str) -> float:
    try:
        number = float(value.encode("ascii"))
    except ValueError:
        raise RequestError(f"{key} must be a number between 0 and 1, not {value!r}") from None
    return number


def _truth(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise RequestError(f"{key} must be True or False, not {value!r}")
    return value == "True"


def _divisions(key: str, value: str) -> tuple[int, ...]:
    """Return the table of divisions: one number for all sizes, or by size in MiB, as `[256:1,512:2,>:4]`."""
    if not value.startswith("["):
        return (_power_of_2(key, value),) * DIVISION_INTERVALS
    table = [0] * DIVISION_INTERVALS
    last, first = 0, True
    for entry in value[1:-1].split(",") if value != "[]" else ():
        size, colon, count = entry.partition(":")
        if not colon:
            raise RequestError(f"{key}: {entry!r} is not of the form size:divisions")
        # `>` fills the rest of the table, the first entry also what is below its size.
        divisions = _power_of_2(key, count, or_zero=True)
        if size == ">":
            table[last:] = [divisions] * (DIVISION_INTERVALS - last)
            continue
        last = min(_power_of_2(key, size).bit_length() - 1, DIVISION_INTERVALS - 1)
        if first:
            table[:last] = [divisions] * last
            first = False
        table[last] = divisions
    return tuple(table)


def _whole_number(key: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()) or len(value) > 12:
        raise RequestError(f"{key} must be a whole number, not {value[:40]!r}")
    return int(value)


def _power_of_2(key: str, value: str, *, or_zero: bool = False) -> int:
    number = _whole_number(key, value)
    if not (_is_power_of_2(number) or (or_zero and number == 0)):
        raise RequestError(f"{key} takes powers of 2, not {number}")
    return number


def _is_power_of_2(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _too_small(setting: str, nbytes: int, least: int) -> RequestError:
    return RequestError(f"{setting} is {nbytes / MIB:g} but must be at least large_segment_size_mb, {least / MIB:g}")


_FIELDS: dict[str, tuple[str, Any]] = {
    "max_split_size_mb": ("max_split_bytes", _mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _mebibytes),
    "large_segment_size_mb": ("large_segment_bytes", _mebibytes),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _share),
    "expandable_segments": ("expandable_segments", _truth),
    "per_process_memory_fraction": ("per_process_memory_fraction", _share),
}

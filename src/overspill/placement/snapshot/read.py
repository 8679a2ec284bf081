"""Read a memory snapshot of torch.cuda.memory._snapshot() as plain data; the pickle is not trusted.

Format: torch/csrc/cuda/memory_snapshot.cpp and the docstring of torch.cuda.memory._snapshot (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from overspill.core.errors import RequestError
from overspill.core.files import read_whole

from .plain_pickle import MOST_SHOWN, ForbiddenError, load_plain

Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]
PoolId = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)
"""The default pool: neither a graph's private pool nor a MemPool."""
_MOST_FRAMES = 256
"""Most frames kept of a stack, the innermost."""


class Piece(msgspec.Struct, frozen=True):
    """A block of a segment; blocks follow each other without gaps.

    A block that waits for a stream to be freed is live.
    """

    nbytes: Size = msgspec.field(name="size")
    state: Literal["active_allocated", "active_pending_free", "active_awaiting_free", "inactive"]
    requested_bytes: Count = msgspec.field(name="requested_size", default=0)

    @property
    def live(self) -> bool:
        """Whether the allocator cannot give it out again."""
        return self.state != "inactive"


class Segment(msgspec.Struct, frozen=True):
    """Memory that the allocator held when the snapshot was taken."""

    address: Count
    nbytes: Size = msgspec.field(name="total_size")
    blocks: tuple[Piece, ...]
    device: Count = 0
    stream: int = 0
    kind: Literal["small", "large"] = msgspec.field(name="segment_type", default="large")
    pool: PoolId = msgspec.field(name="segment_pool_id", default=DEFAULT_POOL)
    is_expandable: bool = False

    def placed(self) -> Iterator[tuple[int, Piece]]:
        """Yield the blocks, each with its address."""
        address = self.address
        for block in self.blocks:
            yield address, block
            address += block.nbytes


class TraceEntry(msgspec.Struct, frozen=True):
    """One event of a device trace."""

    action: str
    nbytes: Count = msgspec.field(name="size", default=0)
    """The requested size, for an `alloc` or a `free_…`."""
    address: Count = msgspec.field(name="addr", default=0)
    stream: int = 0
    pool: PoolId | None = msgspec.field(name="pool_id", default=None)
    """None in snapshots of older releases."""
    device_free: int = 0
    """Only for `oom`."""
    frames: Any = None

    @property
    def place(self) -> str:
        """The Python line that caused the event, as message text."""
        for frame in self._known():
            text = f"{frame['filename'].rpartition('/')[2]}:{frame.get('line')} {frame['name']}"
            return "".join(c if c.isprintable() else "?" for c in text)[:MOST_SHOWN]
        return ""

    @property
    def stack(self) -> tuple[tuple[str, int, str], ...]:
        """The event's stack as (file, line, function), outermost first: its Python frames, or all if it has none."""
        innermost = self._known()[:_MOST_FRAMES]
        return tuple((f["filename"], _line(f.get("line")), f["name"]) for f in reversed(innermost))

    def _known(self) -> list[dict[str, Any]]:
        known = [f for f in self.frames if _is_frame(f)] if isinstance(self.frames, list | tuple) else []
        return [f for f in known if f["filename"].endswith(".py")] or known


class AllocatorSettings(msgspec.Struct, frozen=True):
    """The allocator's settings in the snapshot; `text` is PYTORCH_CUDA_ALLOC_CONF."""

    text: str = msgspec.field(name="PYTORCH_CUDA_ALLOC_CONF", default="")
    max_split_size: int = -1
    garbage_collection_threshold: float = 0.0
    expandable_segments: bool = False
    roundup_power2_divisions: dict[str, int] = {}


class _Content(msgspec.Struct, frozen=True):
    segments: tuple[Segment, ...]
    device_traces: tuple[tuple[TraceEntry, ...], ...] = ()
    allocator_settings: AllocatorSettings | None = None


@dataclass(frozen=True)
class Snapshot:
    """All devices' allocator state, and their latest events, oldest first.

    A trace that reached its `max_entries` begins in the middle.
    """

    segments: tuple[Segment, ...]
    traces: tuple[tuple[TraceEntry, ...], ...]
    settings: AllocatorSettings | None = None
    """None in snapshots of older releases."""

    def trace(self, device: int) -> tuple[TraceEntry, ...]:
        """Return the events of one device."""
        return self.traces[device] if device < len(self.traces) else ()

    def segments_of(self, device: int) -> tuple[Segment, ...]:
        """Return the segments of one device."""
        return tuple(segment for segment in self.segments if segment.device == device)

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices that have events."""
        return tuple(i for i, trace in enumerate(self.traces) if trace)


def read_snapshot(path: str | Path) -> Snapshot:
    """Return the snapshot in the file at `path`. Raises RequestError for anything else, and runs nothing in it."""
    return snapshot_in(read_whole(path), path)


def snapshot_in(pickled: bytes, path: str | Path) -> Snapshot:
    """Return the snapshot in the bytes of the file at `path`. Raises RequestError as `read_snapshot` does."""
    try:
        content = load_plain(pickled)
    except ForbiddenError as error:
        raise RequestError(
            f"{path} is not a memory snapshot but could run code: it asks for {error}; a snapshot holds numbers, texts"
            " and lists of them"
        ) from None
    except Exception as error:  # noqa: BLE001 - a broken pickle fails in many ways, which all mean the same
        reason = " ".join(str(error).split())[:MOST_SHOWN] or type(error).__name__
        raise RequestError(f"{path} is not a whole pickle, as _dump_snapshot writes it ({reason})") from None
    if isinstance(content, list):  # torch.cuda.memory_snapshot() gives the segments alone
        content = {"segments": content}
    # Refuse what is too large or inconsistent.
    _refuse_repetition(content, len(pickled), path)
    try:
        found = msgspec.convert(content, type=_Content)
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise RequestError(f"{path} is a pickle but not a memory snapshot: {error}") from None
    _check_segments(found.segments, path)
    return Snapshot(found.segments, found.device_traces, found.allocator_settings)


def _line(number: object) -> int:
    """Return the line number in a file's data; 0 if impossible."""
    return number if isinstance(number, int) and 0 < number < 1 << 31 else 0


def _is_frame(frame: object) -> bool:
    return isinstance(frame, dict) and isinstance(frame.get("filename"), str) and isinstance(frame.get("name"), str)


def _check_segments(segments: tuple[Segment, ...], path: str | Path) -> None:
    """Raise RequestError unless segments are full and do not overlap."""
    for segment in segments:
        if sum(block.nbytes for block in segment.blocks) != segment.nbytes:
            raise RequestError(f"{path}: the blocks of the segment at {segment.address:#x} do not add up to its size")
    for before, after in pairwise(sorted(segments, key=lambda segment: (segment.device, segment.address))):
        if before.device == after.device and before.address + before.nbytes > after.address:
            raise RequestError(f"{path}: the segments at {before.address:#x} and {after.address:#x} overlap")


def _refuse_repetition(content: object, size: int, path: str | Path) -> None:
    """Raise RequestError if few bytes stand for very many rows, by naming the same list again and again."""
    if not isinstance(content, dict):
        return
    rows = 0
    for key, inner in (("device_traces", None), ("segments", "blocks")):
        outer = content.get(key)
        for part in outer if isinstance(outer, list | tuple) else ():
            part_rows = part.get(inner) if inner is not None and isinstance(part, dict) else part
            rows += len(part_rows) if isinstance(part_rows, list | tuple) else 0
    if rows > size:
        raise RequestError(f"{path} is not a memory snapshot: it claims {rows} rows in {size} bytes")

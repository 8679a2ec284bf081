"""Files of offline placement: a trace in, a layout out as CSV.

The trace may be a CSV, a saved Trace or a memory snapshot.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from overspill.core import Layout, Trace
from overspill.core.errors import RequestError
from overspill.core.files import read_whole, write_whole
from overspill.placement.snapshot import recorded_blocks, snapshot_in

from .columns import Columns
from .table import BlockTable, parse_table, refuse_flaw, refuse_pinned_overlap, refuse_too_large

KINDS = "a CSV of blocks (id,lower,upper,size), a saved Trace (JSON) or a PyTorch memory snapshot (pickle)"
# Protocols from 2 on name themselves; 0 and 1 begin with the dict or list that a snapshot is.
_PICKLES = (b"\x80", b"(d", b"(l", b"}q", b"]q")
_JSONS = (b"{", b"[")
STANDARD_INPUT = "-"
_MOST_BLANK = 4096
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, eq=False)
class TraceFile:
    """Blocks read from `path` ("-": standard input), and the file's kind."""

    path: Path
    kind: Literal["csv", "trace", "snapshot"]
    columns: Columns
    table: BlockTable | None = None
    """The lines of a CSV."""
    known: Trace | None = None
    addresses: tuple[int, ...] = ()
    """The recorded addresses of the blocks of a snapshot, by position."""

    @cached_property
    def trace(self) -> Trace:
        """The blocks as a Trace, made on demand for a CSV."""
        return (
            self.columns.trace(self.table.names if self.table is not None else ()) if self.known is None else self.known
        )

    @property
    def lower_bound_bytes(self) -> int:
        """The most live bytes, summed over the spaces."""
        return self.trace.lower_bound_bytes

    def label(self, position: int) -> str:
        """Return a block's id as in the file, and for a snapshot who allocated it."""
        if self.table is not None:
            return self.table.names[position]
        block = self.trace.blocks[position]
        return f"{block.id}, {block.name}" if block.name else str(block.id)


def read_trace(path: str | Path, device: int | None = None) -> TraceFile:
    """Return the blocks in the file at `path` ("-": standard input).

    The kind is found from its content. `device` chooses among the devices of a snapshot (None: the first that has
    events). Raises RequestError, in one line with the file and its line.
    """
    given, path = str(path), Path(path)
    try:
        content = _standard_input() if given == STANDARD_INPUT else read_whole(path)
    except RequestError as error:
        raise RequestError(f"{error}; what can be packed is {KINDS}") from None
    # The content tells the kind of file.
    where = Path("standard input") if given == STANDARD_INPUT else path
    plain = content.removeprefix(_BYTE_ORDER_MARK)
    begins = plain[:_MOST_BLANK].lstrip() or plain.lstrip()
    if not begins:
        raise RequestError(f"{where} is empty; what can be packed is {KINDS}")
    # A snapshot, a saved trace, or a CSV.
    if content.startswith(_PICKLES):
        trace, addresses = _recorded(content, where, device)
        return TraceFile(where, "snapshot", Columns.of(trace), None, trace, addresses)
    if device is not None:
        raise RequestError(f"{where} is no memory snapshot; only those have devices to choose from")
    if begins.startswith(_JSONS):
        trace = _saved_trace(plain.lstrip(), where)
        return TraceFile(where, "trace", Columns.of(trace), None, trace)
    table, columns = parse_table(_text(content, where), where)
    return TraceFile(where, "csv", columns, table)


def write_layout(path: str | Path, read: TraceFile, layout: Layout) -> None:
    """Write the blocks of `read` to `path` as CSV with their `offset`.

    All other columns of a CSV stay as they were. For a snapshot the columns are names, streams and addresses. If
    writing fails, the file is as before, and RequestError is raised.
    """
    table = read.table or BlockTable.of(read.trace, read.addresses)
    write_whole(path, table.with_offsets(layout.offsets))


def _standard_input() -> bytes:
    try:
        return sys.stdin.buffer.read()
    except (OSError, ValueError, AttributeError) as error:  # closed, or none at all
        raise RequestError(f"cannot read standard input: {error}") from None


def _recorded(content: bytes, path: Path, device: int | None) -> tuple[Trace, tuple[int, ...]]:
    snapshot = snapshot_in(content, path)
    try:
        recorded = recorded_blocks(snapshot, device)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None
    return recorded.trace, recorded.addresses


def _saved_trace(content: bytes, path: Path) -> Trace:
    try:
        trace = Trace.from_json(content)
    except RequestError as error:
        raise RequestError(f"{path}: {error}; what can be packed is {KINDS}") from None
    # Check the blocks as those of a CSV.
    seen: set[int] = set()
    for block in trace.blocks:
        try:
            refuse_flaw(block)
        except RequestError as error:
            raise RequestError(f"{path}: block {block.id}: {error}") from None
        if block.id in seen:
            raise RequestError(f"{path}: block {block.id} is there more than once; ids must differ")
        seen.add(block.id)
    refuse_too_large(trace, path)
    refuse_pinned_overlap(trace.blocks, str(path))
    return trace


def _text(content: bytes, path: Path) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        text = ""
        line = content.count(b"\n", 0, error.start) + 1
    else:
        line = text.count("\n", 0, text.find("\0")) + 1
    if not text or "\0" in text:
        raise RequestError(f"{path}, line {line}: this is not text; what can be packed is {KINDS}")
    return text

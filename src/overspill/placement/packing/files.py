"""The files of offline placement: a trace in, of whichever kind the file is, and a layout out, as CSV."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from overspill.core import Layout, Trace
from overspill.core.errors import RequestError
from overspill.core.files import read_whole, write_whole
from overspill.placement.snapshot import read_snapshot, trace_of

from .table import Table, parse_table, refuse_flaw, refuse_pinned_overlap, refuse_too_large

KINDS = "a CSV of blocks (id,lower,upper,size), a saved Trace (JSON) or a PyTorch memory snapshot (pickle)"
# Protocols from 2 on name themselves; 0 and 1 begin with the dict or list that a snapshot is.
_PICKLES = (b"\x80", b"(d", b"(l", b"}q", b"]q")
_JSONS = (b"{", b"[")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class TraceFile:
    """A trace that was read from `path`, and the kind of file that it is; `table` has the cells of a CSV."""

    path: Path
    kind: Literal["csv", "trace", "snapshot"]
    trace: Trace
    table: Table | None = None

    def label(self, position: int) -> str:
        """The id of the block at `position` of the trace, as the file has it."""
        block = self.trace.blocks[position]
        return block.name if self.kind == "csv" else str(block.id)


def read_trace(path: str | Path, device: int | None = None) -> TraceFile:
    """The trace in the file at `path`, whose kind is found from what is in it.

    `device` chooses among the devices of a snapshot (None: the first that has events). Raises RequestError, in one line
    with the file and its line, for what is wrong.
    """
    path = Path(path)
    try:
        content = read_whole(path)
    except RequestError as error:
        raise RequestError(f"{error}; what can be packed is {KINDS}") from None
    plain = content.removeprefix(_BYTE_ORDER_MARK).lstrip()
    if not plain:
        raise RequestError(f"{path} is empty; what can be packed is {KINDS}")
    if content.startswith(_PICKLES):
        return TraceFile(path, "snapshot", _recorded_trace(path, device))
    if device is not None:
        raise RequestError(f"{path} is no memory snapshot; only those have devices to choose from")
    if plain.startswith(_JSONS):
        return TraceFile(path, "trace", _saved_trace(plain, path))
    table, trace = parse_table(_text(content, path), path)
    return TraceFile(path, "csv", trace, table)


def write_layout(path: str | Path, read: TraceFile, layout: Layout) -> None:
    """Write the blocks of `read` to `path` as CSV, each with its `offset`; all other columns of a CSV stay as they were.

    The file is there as a whole or, where writing fails, as it was before. Raises RequestError then.
    """
    table = read.table or Table.of(read.trace)
    write_whole(path, table.with_offsets(layout.offsets).text)


def _recorded_trace(path: Path, device: int | None) -> Trace:
    snapshot = read_snapshot(path)
    try:
        return trace_of(snapshot, device)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None


def _saved_trace(content: bytes, path: Path) -> Trace:
    try:
        trace = Trace.from_json(content)
    except RequestError as error:
        raise RequestError(f"{path}: {error}; what can be packed is {KINDS}") from None
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

"""Addresses for blocks whose lifetimes are known: made in Python, and read from CSV and written back."""

from pathlib import Path

from overspill.core import Block, Trace
from overspill.placement.packing.base import Limits
from overspill.placement.packing.files import read_trace, write_layout
from overspill.placement.packing.registry import solver_named

KIB = 1024
solver = solver_named("portfolio")
trace = Trace(
    (
        Block(0, start=0, end=3, nbytes=3 * KIB, name="conv1"),
        Block(1, start=0, end=2, nbytes=4 * KIB, name="workspace"),
        Block(2, start=2, end=6, nbytes=3 * KIB, name="relu1"),
        Block(3, start=4, end=6, nbytes=4 * KIB, name="conv2", alignment=512),
    )
)
solution = solver.solve(trace)
assert solution.layout is not None
for block, offset in zip(trace.blocks, solution.layout.offsets, strict=True):
    print(f"{block.name:9s} live from {block.start} to {block.end} at [{offset}, {offset + block.nbytes})")
peak, bound = solution.layout.peak_bytes, solution.bound_bytes
print(f"peak {peak} bytes; no layout is below {bound}{', so this one is optimal' if solution.optimal else ''}")

# The same blocks as `overspill pack blocks.csv --capacity 7KiB --out layout.csv` takes and writes them.
Path("blocks.csv").write_text(
    "id,lower,upper,size\nconv1,0,3,3072\nworkspace,0,2,4096\nrelu1,2,6,3072\nconv2,4,6,4096\n", encoding="utf-8"
)
read = read_trace("blocks.csv")
solution = solver.solve(read.trace, Limits(capacity_bytes=7 * KIB, time_limit_seconds=1.0))
assert solution.layout is not None
write_layout("layout.csv", read, solution.layout)
print(Path("layout.csv").read_text(encoding="utf-8"), end="")

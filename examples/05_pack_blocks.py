"""Addresses for blocks whose lifetimes are known: made in Python, and read from CSV."""

from pathlib import Path

import overspill
from overspill.core import Block, Trace

KIB = 1024
trace = Trace(
    (
        Block(0, start=0, end=3, nbytes=3 * KIB, name="conv1"),
        Block(1, start=0, end=2, nbytes=4 * KIB, name="workspace"),
        Block(2, start=2, end=6, nbytes=3 * KIB, name="relu1"),
        Block(3, start=4, end=6, nbytes=4 * KIB, name="conv2", alignment=512),
    )
)
solution = overspill.pack(trace)
assert solution.layout is not None
for block, offset in zip(trace.blocks, solution.layout.offsets, strict=True):
    print(f"{block.name:9s} live from {block.start} to {block.end} at [{offset}, {offset + block.nbytes})")
peak, bound = solution.layout.peak_bytes, solution.bound_bytes
print(f"peak {peak} bytes; no layout is below {bound}{', so this one is optimal' if solution.optimal else ''}")

# The same blocks as a file, within 7 KiB; `overspill pack blocks.csv --capacity 7KiB --out layout.csv` writes the layout.
Path("blocks.csv").write_text(
    "id,lower,upper,size\nconv1,0,3,3072\nworkspace,0,2,4096\nrelu1,2,6,3072\nconv2,4,6,4096\n", encoding="utf-8"
)
solution = overspill.pack("blocks.csv", capacity="7KiB", time_limit=1.0)
assert solution.layout is not None
print(f"from the file: {solution.layout.offsets}")

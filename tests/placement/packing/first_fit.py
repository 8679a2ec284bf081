"""A plain offline solver: what the files, the command and the pictures are tried with."""

from __future__ import annotations

from overspill.placement.packing.solvers.greedy import Greedy


class FirstFit(Greedy):
    """First fit by size, in the place of the default solver."""

    name = "portfolio"
    summary = "first fit by size"

    def __init__(self) -> None:
        super().__init__("size", "first")
        self.name = type(self).name

"""TensorFlow's graph of a step, without TensorFlow: ops, their inputs and controls, and their outputs' shapes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

ITEM_BYTES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "int32": 4,
    "int64": 8, "uint32": 4, "uint64": 8, "complex64": 8,
}  # fmt: skip
SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank"})
"""Ops whose answers are known when the graph is; Grappler folds them (MaterializeShapes)."""


class Output(NamedTuple):
    """One output of an op: the op's position, and the number of the output."""

    op: int
    number: int


@dataclass(frozen=True)
class Made:
    """The dtype and shape of one output."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes on the device; 0 for a resource's handle, for example."""
        return ITEM_BYTES.get(self.dtype, 0) * prod(self.shape)


@dataclass(frozen=True)
class GraphOp:
    """One op of the graph."""

    type: str
    name: str
    inputs: tuple[Output, ...] = ()
    controls: tuple[int, ...] = ()
    makes: tuple[Made, ...] = ()
    attrs: Mapping[str, Any] = field(default_factory=dict)
    """The attributes that affect memory: `strides`, `padding` and `data_format`."""


@dataclass(frozen=True)
class StepGraph:
    """The ops of a step, and the ones that must run.

    Ops are in the order of their definition, which need not be that of their data.
    """

    ops: tuple[GraphOp, ...]
    fetches: tuple[int, ...]
    trained: frozenset[int] = frozenset()
    """The ops that are variables with gradients; other variables are buffers or optimizer states."""
    states: frozenset[int] = frozenset()

    def pruned(self) -> StepGraph:
        """Return the graph of the ops that the fetches need, as sessions prune it.

        Shapes are constants, and read nothing.
        """
        folded = tuple(replace(op, inputs=()) if op.type in SHAPES else op for op in self.ops)
        return replace(self, ops=folded)._needed()

    def _needed(self) -> StepGraph:
        needed: set[int] = set()
        left = list(self.fetches)
        while left:
            op = left.pop()
            if op not in needed:
                needed.add(op)
                left += [*(read.op for read in self.ops[op].inputs), *self.ops[op].controls]
        # Keep the needed ops, numbered anew.
        number = {old: new for new, old in enumerate(sorted(needed))}
        ops = tuple(
            GraphOp(
                op.type, op.name, tuple(Output(number[read.op], read.number) for read in op.inputs),
                tuple(number[control] for control in op.controls), op.makes, op.attrs,
            )
            for op in (self.ops[old] for old in sorted(needed))
        )  # fmt: skip
        return StepGraph(
            ops,
            tuple(number[op] for op in self.fetches),
            frozenset(number[op] for op in self.trained if op in number),
            frozenset(number[op] for op in self.states if op in number),
        )


def stored(one: StepGraph, other: StepGraph, batches: tuple[int, int]) -> dict[str, Any]:
    """Return two traces as one JSON object for all batch sizes.

    The traces are at two `batches`. Raises ValueError if they differ in anything other than the batch.
    """
    if [op.type for op in one.ops] != [op.type for op in other.ops]:
        raise ValueError("the two graphs do not have the same ops")
    ops = [
        [
            a.type, a.name, [[*read] for read in a.inputs], [*a.controls],
            [[m.dtype, _line(m.shape, n.shape, batches)] for m, n in zip(a.makes, b.makes, strict=True)], dict(a.attrs),
        ]
        for a, b in zip(one.ops, other.ops, strict=True)
    ]  # fmt: skip
    return {"ops": ops, "fetches": [*one.fetches], "trained": sorted(one.trained), "states": sorted(one.states)}


def _line(one: Iterable[int], other: Iterable[int], batches: tuple[int, int]) -> list[int | list[int]]:
    found: list[int | list[int]] = []
    for a, b in zip(one, other, strict=True):
        slope, rest = divmod(b - a, batches[1] - batches[0])
        if rest:
            raise ValueError(f"a size of {a} at batch {batches[0]} and {b} at batch {batches[1]} is on no line")
        found.append(a if not slope else [a - slope * batches[0], slope])
    return found


def at_batch(data: Mapping[str, Any], batch: int) -> StepGraph:
    """Return the graph at a batch size, from a JSON object that `stored` made."""

    def size(dimension: int | list[int]) -> int:
        return dimension if isinstance(dimension, int) else dimension[0] + dimension[1] * batch

    ops = tuple(
        GraphOp(
            kind, name, tuple(Output(*read) for read in inputs), tuple(controls),
            tuple(Made(dtype, tuple(map(size, shape))) for dtype, shape in makes), attrs,
        )
        for kind, name, inputs, controls, makes, attrs in data["ops"]
    )  # fmt: skip
    return StepGraph(ops, tuple(data["fetches"]), frozenset(data["trained"]), frozenset(data["states"]))


def save(path: Path, data: Mapping[str, Any]) -> None:
    """Write a JSON object that `stored` made."""
    text = json.dumps(data, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def load(path: Path) -> dict[str, Any]:
    """Return the JSON object that `save` wrote."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found

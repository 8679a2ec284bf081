"""The graph of a deep model, from graphs of the same model with fewer of its repeated blocks.

A model of eighty equal blocks is captured with three and with four of them. Where the second graph has more ops or
tensors, the same are inserted again for each further block, and every number in a graph (an id, a part of a name, bytes
that add up) grows by the same amount. That is not assumed: the graph with five blocks that follows from these two must
be the one that is captured. Otherwise no graph follows.

Known limit: a model that treats a block behind the fifth otherwise, by counting blocks and not by an attribute of that
block, gets a graph without that.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from overspill.core import Graph, Op, Tensor

SHALLOW = (3, 4, 5)
"""The numbers of blocks that are captured: the first two give all others, the third proves it."""
_AHEAD = 4
"""Items behind an insertion that must be as before."""
_NUMBER, _COUNTED = re.compile(r"(\d+)"), re.compile(r"_?\d+")
_IDS = frozenset({"reads", "writes", "recompute_reads", "recompute_writes", "given"})

Row = tuple[Any, ...]
"""The fields of an op or tensor."""


class _OtherwiseError(Exception):
    """The graphs do not differ by repeated blocks alone."""


def with_blocks(graphs: Sequence[Graph], blocks: int) -> Graph | None:
    """Return the graph with so many `blocks`, or None if it does not follow from `graphs` with SHALLOW numbers."""
    first, second, third = graphs
    try:
        grows = _Growth(first, second)
        return grows.graph(blocks - SHALLOW[0]) if grows.graph(SHALLOW[2] - SHALLOW[0]) == third else None
    except _OtherwiseError:
        return None


class _Growth:
    """How a graph grows from `small` to `large`, which has one block more."""

    def __init__(self, small: Graph, large: Graph) -> None:
        self._small, self._large = small, large
        self._signs = [[_sign_of_tensor(t) for t in graph.tensors] for graph in (small, large)]
        if (small.name, small.whole_step, small.frames) != (large.name, large.whole_step, large.frames):
            raise _OtherwiseError

    def graph(self, steps: int) -> Graph:
        """Return the graph with so many blocks more than the small one. Raises _OtherwiseError."""
        small, large = self._small, self._large
        tensors = _grown((_rows(small.tensors), _rows(large.tensors)), self._signs, _line, steps)
        called = [[_sign_of_op(op) for op in graph.ops] for graph in (small, large)]
        ops = _grown((_rows(small.ops), _rows(large.ops)), called, self._op, steps)
        return Graph(
            small.name, tuple(Tensor(*row) for row in tensors), tuple(Op(*row) for row in ops),
            outputs=self._ids(small.outputs, large.outputs, steps), whole_step=small.whole_step, frames=small.frames,
        )  # fmt: skip

    def _op(self, small: Row, large: Row, steps: int) -> Row:
        return tuple(
            self._ids(a, b, steps) if field.name in _IDS else _moved(a, a, b, steps)
            for field, a, b in zip(fields(Op), small, large, strict=True)
        )

    def _ids(self, small: Row, large: Row, steps: int) -> Row:
        """Return the tensors that an op touches; they become more if it touches those of all blocks."""
        if len(small) == len(large):
            return _line(small, large, steps)
        signs = [[of[tensor] for tensor in ids] for of, ids in zip(self._signs, (small, large), strict=True)]
        found = _grown(([(t,) for t in small], [(t,) for t in large]), signs, _line, steps)
        return tuple(tensor for (tensor,) in found)


def _rows(items: Sequence[Op] | Sequence[Tensor]) -> list[Row]:
    return [tuple(vars(item).values()) for item in items]


def _sign_of_op(op: Op) -> Row:
    moved = op.moved_bytes if op.layer else 0  # an update of all parameters has no layer
    return op.name, _COUNTED.sub("", op.layer), op.phase, op.recomputable, moved, op.flops


def _sign_of_tensor(tensor: Tensor) -> Row:
    is_sum = tensor.persistent and "." not in tensor.name  # as all of the optimizer's state: it has no block
    size = 0 if is_sum else tensor.nbytes
    return _COUNTED.sub("", tensor.name), size, tensor.kind, tensor.persistent, tensor.movable


def _grown(
    rows: tuple[Sequence[Row], Sequence[Row]],
    signs: Sequence[Sequence[Row]],
    line: Callable[[Row, Row, int], Row],
    steps: int,
) -> list[Row]:
    """Return the rows after so many steps, the first of which leads from the first of `rows` to the second.

    What both have is on a `line`. In place of the one block that the second has more, there are as many as steps.
    """
    small, large = rows
    made: list[Row] = []
    at, more = 0, 0  # a place in the first, and how much further it is in the second
    for end, length, count in _insertions(*signs):
        inner = end - (count - 2) * length  # behind two blocks; counted from the front they are where they were
        if count < 2 or inner - 2 * length < at:
            raise _OtherwiseError
        made += [line(small[i], large[i + more], steps) for i in range(at, inner)]
        before, here = made[-length:], range(inner + more, inner + more + length)
        for number in range(1, steps):
            made += [_moved(b, large[i - length], large[i], number) for b, i in zip(before, here, strict=True)]
        at, more = inner - length, more + length  # the blocks behind are where they were, counted from the back
    return made + [line(small[i], large[i + more], steps) for i in range(at, len(small))]


def _insertions(small: Sequence[Row], large: Sequence[Row]) -> list[tuple[int, int, int]]:
    """Return each place of `small` at which `large` has a block more, its length, and how many equal ones end there.

    Raises _OtherwiseError if that does not make them equal.
    """
    found: list[tuple[int, int, int]] = []
    at, more = 0, 0
    while True:
        while at < len(small) and at + more < len(large) and small[at] == large[at + more]:
            at += 1
        here, ahead = at + more, small[at : at + _AHEAD]
        if at == len(small) and here == len(large):
            return found
        for length in range(1, min(here, len(large) - here) + 1):
            again, behind = large[here : here + length], here + length
            if large[here - length : here] == again and large[behind : behind + len(ahead)] == ahead:
                break
        else:
            raise _OtherwiseError
        count = 0
        while small[max(0, at - (count + 1) * length) : at - count * length] == again:
            count += 1
        # Away from both edges, where items may look alike that are not.
        begin, extra = at - count * length, 0
        while extra < min(begin, length - 1) and small[begin - extra - 1] == small[begin - extra - 1 + length]:
            extra += 1
        found.append((at - extra // 2, length, count))
        more += length


def _line(small: Row, large: Row, steps: int) -> Row:
    """Return the row after so many steps, the first of which leads from `small` to `large`."""
    found: Row = _moved(small, small, large, steps)
    return found


def _moved(base: Any, small: Any, large: Any, steps: int) -> Any:
    """Return `base` after so many steps, each as from `small` to `large`. Raises _OtherwiseError if there are none."""
    if small == large:
        return base
    kinds = {type(base), type(small), type(large)}
    if kinds == {int}:
        return base + steps * (large - small)
    if kinds == {str}:
        texts = [_NUMBER.split(text) for text in (base, small, large)]
        if len({len(text) for text in texts}) > 1:  # nodes of one name are `silu`, `silu_1`, …
            texts = [_NUMBER.split(text if text[-1:].isdecimal() else f"{text}_0") for text in (base, small, large)]
        if all(text[::2] == texts[0][::2] for text in texts):
            each = ([int(number) for number in text[1::2]] for text in texts)
            numbers = [_moved(a, b, c, steps) for a, b, c in zip(*each, strict=True)]
            words = zip_longest(texts[0][::2], numbers, fillvalue="")
            return "".join(f"{word}{number}" for word, number in words).removesuffix("_0")
    if kinds == {tuple} and len(base) == len(small) == len(large):
        return tuple(_moved(a, b, c, steps) for a, b, c in zip(base, small, large, strict=True))
    raise _OtherwiseError

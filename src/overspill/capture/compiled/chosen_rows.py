"""Capture a step in which values of parameters choose rows: experts by `nonzero()`.

Traced, such an op makes a symbolic number of rows, so that later ops have sizes that follow from it, and the trace
notes what it decides by them. Then the graph gets tensors of the bound on these rows, by which it is planned. In a run
its ops have as many rows as are chosen: sizes among their arguments are computed, and what was decided is looked at
again. With more rows than the bound, or others than the trace is valid for, the run ends before it does anything with
them; the caller captures the step anew.

Fewer than two rows decide otherwise in PyTorch, so a captured step has exactly those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor, fx

from overspill.core.errors import OverspillError
from overspill.pytorch.fake_tensors import FakeTensorMode
from overspill.pytorch.storages import storage_key
from overspill.pytorch.symbols import decisions, expression, is_symbolic, new_size, value_of
from overspill.pytorch.trees import tree_leaves

GROUPED = "torch.nn.functional.grouped_mm; in transformers, model.set_experts_implementation('grouped_mm')"
"""What experts can use instead, in a fixed graph."""
RUN_AS = "overspill_run_as"
"""Key in a node's meta: what to call in place of its target when it runs."""


class OtherRows(OverspillError):
    """Ends a run that chooses other rows than its step was captured for; `counts` are those so far."""

    def __init__(self, message: str, counts: tuple[int, ...]) -> None:
        super().__init__(message)
        self.counts = counts


class ChosenRows:
    """The ops of one captured step whose rows follow from values, in order.

    `bounds` are the most rows of each, or exactly its rows if fewer than two. `counts` are those of the run.
    """

    def __init__(self, key: Any, wanted: Sequence[int] = (), share: float = 1.0, pinned: int = 0) -> None:
        """Begin with the bounds that are `wanted`; where none is, with a `share` of all rows.

        `key` is the kind of inputs. The trace decides by just the rows that are wanted of the first `pinned` ops.
        """
        self.key = key
        self._pinned = pinned
        self._share = share
        self.bounds: list[int] = []
        self.counts: list[int] = []
        self._wanted = wanted
        self._made: list[Tensor] = []
        self._symbols: list[Any] = []
        self._decided: list[tuple[int, Any]] = []

    # -- the trace

    def begin(self) -> None:
        """Begin a pass over the step."""
        for each in (self.bounds, self._made, self._symbols):
            each.clear()

    def size(self, mode: FakeTensorMode, most: int) -> Any:
        """Return the rows of the next op, of `most` that there are."""
        number = len(self.bounds)
        bound = min(most, self._wanted[number] if number < len(self._wanted) else max(2, ceil(self._share * most)))
        self.bounds.append(bound)
        # It decides as one of the sizes in between does, which is less likely to be that of something else.
        exact = number < self._pinned
        size = bound if bound < 2 else new_size(mode, f"rows_{number}", bound if exact else max(2, 2 * bound // 3))
        self._symbols.append(None if bound < 2 else expression(size))
        return size

    def made(self, result: Any) -> None:
        """Note the result of the op whose rows were asked for last."""
        self._made.append(next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))

    def bound(self, module: fx.GraphModule, mode: FakeTensorMode) -> None:
        """Give the traced graph the sizes of the bounds, and let its ops have the rows that are chosen."""
        if not self.bounds:
            return
        numbers = {symbol: i for i, symbol in enumerate(self._symbols) if symbol is not None}
        for condition in decisions(mode):
            if numbers.keys() >= condition.free_symbols:  # else of an earlier pass, which has decided the same
                self._decided.append((max(numbers[symbol] for symbol in condition.free_symbols), condition))
        places = {storage_key(tensor): number for number, tensor in enumerate(self._made)}
        changed = set[fx.Node]()
        for node in list(module.graph.nodes):
            value = node.meta.get("val")
            if node.op != "call_function":
                continue
            if is_symbolic(value) and not isinstance(value, Tensor):
                self._computed(module.graph, node, value)
                continue
            leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
            number = places.pop(storage_key(leaves[0]), None) if leaves else None
            if number is not None:
                node.meta[RUN_AS] = _Choosing(self, number, node.target)
                node.meta["val"] = self._largest(mode, value)
                changed.add(node)
            elif any(map(is_symbolic, leaves)) or not changed.isdisjoint(node.all_input_nodes):
                args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
                with mode:
                    node.meta["val"] = node.target(*args, **kwargs)
                changed.add(node)
            node.meta.pop("tensor_meta", None) if node in changed else None
        self._made.clear()

    def _computed(self, graph: fx.Graph, node: fx.Node, value: Any) -> None:
        """Compute a number of the graph from the rows of the run."""
        with graph.inserting_before(node):
            new = graph.call_function(_Size(self, expression(value)), ())
        new.meta = {**node.meta, "val": self._at_bounds(value)}
        node.replace_all_uses_with(new)
        graph.erase_node(node)

    def _at_bounds(self, value: Any) -> Any:
        """Return a number where all rows are at their bounds."""
        bounds = dict(zip(self._symbols, self.bounds, strict=True))
        return int(value_of(expression(value), bounds)) if is_symbolic(value) else value

    def _largest(self, mode: FakeTensorMode, value: Tensor) -> Tensor:
        sizes, strides = ([self._at_bounds(n) for n in each] for each in (value.shape, value.stride()))
        with mode:
            return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)

    # -- a run

    def chose(self, number: int, count: int) -> None:
        """Note the rows of an op. Raises OtherRows where the step was captured for others."""
        self.counts[number : number + 1] = [count]
        if not self.is_within(number, count):
            raise OtherRows(
                f"the step chooses {count} rows by values, where its plan knows {self.bounds[number]}",
                tuple(self.counts[: number + 1]),
            )

    def is_within(self, number: int, count: int) -> bool:
        """Return whether the step was captured for so many rows of an op, and for those before it."""
        bound = self.bounds[number]
        if not (count == bound if bound < 2 else 2 <= count <= bound):
            return False
        return all(bool(self.value(condition)) for last, condition in self._decided if last == number)

    def accepts(self, counts: Sequence[int]) -> bool:
        """Return whether these may be the first rows of a run."""
        self.counts = []
        for number, count in enumerate(counts[: len(self.bounds)]):
            self.counts.append(count)
            if not self.is_within(number, count):
                return False
        return True

    def value(self, expr: Any) -> Any:
        """Return the value of an expression in the run."""
        return value_of(expr, dict(zip(self._symbols, self.counts, strict=False)))


class _Choosing:
    """An op whose rows follow from values, as it runs."""

    def __init__(self, rows: ChosenRows, number: int, op: Callable[..., Any]) -> None:
        self.__name__, self._rows, self._number, self._op = "chosen_rows", rows, number, op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self._op(*args, **kwargs)
        self._rows.chose(self._number, len(made))
        return made


class _Size:
    """A number that follows from the rows of a run."""

    def __init__(self, rows: ChosenRows, expr: Any) -> None:
        self.__name__, self._rows, self._expr = "size_of_rows", rows, expr

    def __call__(self) -> int:
        return int(self._rows.value(self._expr))

"""Answer a step's reads of values during tracing, if they follow from its inputs.

A model calls `mask.all()`, `x.max() > k`, `.item()`, `nonzero()`. Fake tensors have no values, but values that follow
from inputs, buffers and constants are known when the step is captured. So the mode records how each such tensor was
made (`value_graph.py`), and computes an answer from the real tensors. Random numbers of the CPU's generator are known
too: they are drawn, with all that the step draws before, and the generator is restored.

Reads become `Guards` (`guards.py`), checked before each later step. Values that follow from parameters are unknown
before the step runs; reading one is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from overspill.capture.frames import Stack, shown_path, stack_within
from overspill.capture.higher_order import fake_rule
from overspill.capture.masks import by_positions
from overspill.core.errors import UnsupportedError
from overspill.core.frames import in_package
from overspill.pytorch.dispatch import OpOverload
from overspill.pytorch.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from overspill.pytorch.schemas import argument, written_arguments
from overspill.pytorch.trees import tree_leaves, tree_map_only

from .chosen_rows import GROUPED, ChosenRows
from .guards import Guards
from .value_graph import ValueGraph, for_real

aten = torch.ops.aten
SHAPE_FOLLOWS: dict[Any, tuple[str, Any] | None] = {
    aten._ctc_loss.Tensor: ("target_lengths", aten.max.default),  # the longest target
    aten._ctc_loss.default: None,
}
"""Ops whose result shapes follow from a number: the argument it comes from and the op that computes it.

None if it comes from no tensor.
"""


class ChangesExternalTensor(UnsupportedError):
    """Raised if a step changes a tensor that is neither the model's nor an input."""

    def __init__(self, place: str = "") -> None:
        super().__init__(
            f"the step changes in place a tensor that is neither its model's nor an input{place}, and not by a call of "
            "torch that is known to; change it behind the step, register it as a buffer of the model, or use "
            "overspill.compile"
        )


class KnownValues(FakeTensorMode):
    """A fake tensor mode that answers reads of values known from inputs (`know`).

    Raises UnsupportedError for reads of any other value.
    """

    supports_higher_order_operators = True

    def __init__(self, *, eager: bool = False, rows: ChosenRows | None = None) -> None:
        """Make a mode in which no values are known yet.

        If `eager`, the step runs eager's kernels: its random numbers are known, and packed sequences are traced. With
        `rows`, unknown values may choose rows.
        """
        super().__init__(allow_non_fake_inputs=True)
        self.rows = rows
        self._eager = eager
        self._depth = 0
        self._sources: list[tuple[FakeTensor, Tensor, int]] = []
        self._own: dict[int, str] = {}
        self._without_values = False
        self.begin()

    def know(self, fake: FakeTensor, real: Tensor, position: int) -> None:
        """Note that `fake` has the values of `real`, the input at `position`.

        If `real` is fake too, the values of this and of later inputs stay unknown.
        """
        self._without_values |= isinstance(real, FakeTensor)
        if not self._without_values:
            self._sources.append((fake, real, position))
            self._graph.add_input(fake, real, position)

    def own(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `Held` if the step reads these real tensors instead of fake ones."""
        self._own.clear()
        self._own.update({id(tensor): name for name, tensor in tensors.items()})

    def begin(self) -> None:
        """Start a pass over the step, forgetting reads of an earlier one."""
        self._graph = ValueGraph(self._own, knows_draws=self._eager)
        for source in self._sources:
            self._graph.add_input(*source)
        self._noted = 0
        if self.rows is not None:
            self.rows.begin()

    @property
    def outside(self) -> list[Tensor]:
        """Real tensors that the last pass read by reference: neither the model's nor inputs."""
        return list(self._graph.constants.values())

    def guards(self) -> Guards:
        """Return guards for the reads of the last pass, in order."""
        return self._graph.guards()

    def settled(self) -> Guards:
        """Return the guards of the last pass; afterwards the mode holds no real tensors."""
        found = self.guards()
        self._sources.clear()
        rows, self.rows = self.rows, None  # which are those of the captured step from now on
        self.begin()
        self.rows = rows
        return found

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Dispatch with FakeTensorMode's rules for higher-order operators."""
        if (rule := fake_rule(func)) is not None:
            return rule(self, *args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def dispatch(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op on fake tensors, answering reads of values.

        Raises ChangesExternalTensor, and UnsupportedError for sparse tensors and unknown values.
        """
        given = kwargs or {}
        if any(isinstance(tensor, Tensor) and is_sparse(tensor) for tensor in tree_leaves((args, given))):
            raise sparse(f"the step has a sparse tensor{where(stack_within(sys._getframe()))}")
        written = tree_leaves(written_arguments(func, args, given))
        if any(self._graph.is_external(tensor) for tensor in written if isinstance(tensor, Tensor)):
            raise ChangesExternalTensor(where(stack_within(sys._getframe())))
        self._depth += 1
        try:
            made = super().dispatch(func, types, args, given)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            made = self._answer(func, types, args, given, error)
        finally:
            self._depth -= 1
        if self.rows is not None and not self._depth and len(self.rows.bounds) > self._noted:
            self._noted = len(self.rows.bounds)
            self.rows.made(made)
        if isinstance(func, OpOverload) and made is not NotImplemented:
            self._graph.note(func, args, given, made, inside=self._depth > 0)
        return made

    def create_symbolic_nested_int(self, *_: Any, **__: Any) -> Any:
        """Raise UnsupportedError for nested tensors, whose row sizes vary."""
        raise nested(f"the step makes a nested tensor{where(stack_within(sys._getframe()))}")

    # -- reads

    def _answer(
        self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
    ) -> Any:
        """Return the result of `func`, which depends on values: a number, or fake tensors of the real shape."""
        # A scalar is computed; for masks and indices a count of elements is enough.
        if func is aten._local_scalar_dense.default:
            return self._ask(self._graph.call(aten.reshape.default, (args[0], []), {}), error).item()
        if (made := _BY_COUNT.get(func)) is not None:
            return made(self, error, *args)
        if func is aten.index.Tensor:
            x, indices = args
            rows = by_positions(indices, lambda mask: self._positions(mask, error))
            return super().dispatch(func, types, (x, rows), kwargs)
        # Shapes that depend on one number, then all other ops.
        if func in SHAPE_FOLLOWS:
            if (follows := SHAPE_FOLLOWS[func]) is not None:
                name, number = follows
                self._ask(self._graph.call(number, (argument(func, args, kwargs, name),), {}), error)
            return self._shaped(func, args, kwargs)
        result = self._ask(self._graph.call(func, args, kwargs), error)
        return tree_map_only(Tensor, self._like, result)

    def _shaped(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return results of `func` with the shape that it has where unknown values are zeros."""

        def real(tensor: Tensor) -> Tensor:
            node = self._graph.node_of(tensor)
            return (
                torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                if node is None
                else self._graph.value(node)
            )

        with for_real():
            result = func(*tree_map_only(Tensor, real, tuple(args)), **tree_map_only(Tensor, real, dict(kwargs)))
        return tree_map_only(Tensor, self._like, result)

    def _nonzero(self, error: Exception, x: Tensor) -> Tensor:
        count = self._count(x, error)
        with self:
            # A symbolic count is two or more.
            strides = (1, max(count, 1) if isinstance(count, int) else count)
            return torch.empty_strided((count, x.dim()), strides, dtype=torch.int64, device=x.device)

    def _masked(self, error: Exception, x: Tensor, mask: Tensor) -> Tensor:
        with self:
            x, mask = torch.broadcast_tensors(x, mask)
        count = self._count(mask, error)
        with self:
            return x.new_empty((count,))

    def _packed(self, error: Exception, x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
        """Return a packed sequence: its fake data, and the real number of sequences at each time step.

        These numbers are a constant of the step, because recurrent layers and unpacking make as many ops of them.
        Raises UnsupportedError if Inductor compiles the step.
        """
        known = torch.stack(self._ask(self._graph.call(aten.unbind.int, (lengths,), {}), error))
        if not self._eager:
            raise UnsupportedError(
                f"the step packs sequences{where(stack_within(sys._getframe()))}, whose lengths torch.compile does not "
                "follow; use "
                'backend="eager", or overspill.compile, which plans the graphs between'
            ) from error
        with for_real():
            data, batch_sizes = aten._pack_padded_sequence(torch.empty(x.shape[:2]), known, batch_first)
        with self:
            return x.new_empty((len(data), *x.shape[2:])), batch_sizes

    def _positions(self, mask: Tensor, error: Exception) -> list[Tensor]:
        """Return as many positions as a mask selects, one tensor for each of its dimensions."""
        count = self._count(mask, error)
        with self:
            return [torch.empty((count,), dtype=torch.int64, device=mask.device) for _ in range(mask.dim())]

    def _count(self, mask: Tensor, error: Exception) -> int:
        """Return the number of nonzero elements of `mask`."""
        try:
            return int(self._ask(self._graph.call(aten.count_nonzero.default, (mask,), {}), error))
        except UnknownValue:
            if self.rows is None:
                raise
            count: int = self.rows.size(self, mask.numel())
            return count

    def _like(self, real: Tensor) -> Tensor:
        with self:
            return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)

    def _ask(self, node: fx.Node | None, error: Exception) -> Any:
        """Return the real value of `node`, recorded as a question for later steps.

        Raises UnsupportedError if it is unknown.
        """
        lines = stack_within(sys._getframe())
        place = where(lines)
        if node is None:
            if self._without_values:
                raise UnsupportedError(
                    f"the step reads values{place}, as .item() and `if` on a tensor do, and is planned here without "
                    "any; call train_step(…).plan(…) with a real batch"
                ) from error
            raise UnknownValue(place, lines) from error
        return self._graph.ask(node, place)


_BY_COUNT: dict[Any, Callable[..., Any]] = {
    aten.nonzero.default: KnownValues._nonzero,
    aten.masked_select.default: KnownValues._masked,
    aten._pack_padded_sequence.default: KnownValues._packed,
}
"""Fake results of ops whose shapes follow from values."""


class UnknownValue(UnsupportedError):
    """Raised if a step reads, at `lines`, a value that is unknown before it runs."""

    def __init__(self, place: str, lines: Stack = ()) -> None:
        super().__init__(
            f"the step reads values or makes shapes that follow from parameters{place}, as .item(), numpy(), nonzero() "
            "and `if` on a tensor do, so that it is no fixed graph; what follows from inputs and buffers alone may be "
            "read, and draws of the CPU's generator in eager. Use torch.where, for experts grouped products "
            f"({GROUPED}), and the like, or overspill.compile, which plans the graphs between"
        )
        self.lines = lines


def nested(what: str) -> UnsupportedError:
    """Return the error for a nested tensor, named by `what`."""
    return UnsupportedError(
        f"{what}, whose sizes follow from values; pad its parts and mask them (torch.nn.utils.rnn.pad_sequence)"
    )


def sparse(what: str) -> UnsupportedError:
    """Return the error for a sparse tensor, named by `what`."""
    return UnsupportedError(
        f"{what}, whose size follows from values; let it be dense, or multiply by its indices and values, with "
        "index_select and index_add"
    )


def is_sparse(tensor: Tensor) -> bool:
    """Return whether a tensor is of a sparse layout, which has no strides."""
    return str(tensor.layout).startswith("torch.sparse")


def where(lines: Stack) -> str:
    """Return the user's innermost line as ` (file, line n)`, for a message.

    If the innermost line is in a package, it is followed by the line of the user's own program that called it.
    """
    if not lines:
        return ""
    shown = [f"{shown_path(file)}, line {line}" for file, line, _ in lines if not in_package(file)][-1:]
    file, line, _ = lines[-1]
    innermost = f"{shown_path(file)}, line {line}"
    called = f", called from {shown[0]}" if shown and shown[0] != innermost else ""
    return f" ({innermost}{called})"

"""Follow a step's compiled programs on fake tensors: storages, views, and calls.

Nothing is computed. Allocations and library calls run on fake tensors; compiled kernels, which only write to arguments,
are skipped. Forward and backward share their variables here: backward's first arguments are the values that forward
saves, by position.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from overspill.capture.compiled.joint import StorageKey
from overspill.capture.flops import flops_of
from overspill.core.errors import UnsupportedError
from overspill.pytorch.dispatch import OpOverload, OpOverloadPacket, schema_of
from overspill.pytorch.fake_tensors import FakeTensorMode
from overspill.pytorch.schemas import written_arguments
from overspill.pytorch.storages import storage_key
from overspill.pytorch.trees import tree_leaves

from .failures import inductor_failures
from .program import Access, Program, Statement, StatementKind, not_understood
from .uncompiled import compiled
from .workspaces import NO_WORKSPACE, CallWorkspace, Library, workspaces

FORWARD, BACKWARD = "f_", "b_"
"""Prefixes of variables, kernels and constants of the two programs."""


@dataclass
class Call:
    """One kernel or library call, with the picks and checks of its results."""

    name: str
    lines: list[ast.stmt]
    uses: tuple[str, ...]
    """The variables among its arguments."""
    reads: tuple[StorageKey, ...]
    """The storages that it reads."""
    writes: tuple[StorageKey, ...]
    updated: tuple[StorageKey, ...]
    """Those of `writes` that were written before."""
    random: bool
    repeatable: bool
    flops: int
    moved_bytes: int
    workspace: CallWorkspace = NO_WORKSPACE
    container: str | None = None
    """The variable that holds all results, if there are several."""
    made: list[str] = field(default_factory=list)
    """The variables that it makes."""
    origins: tuple[str, ...] = ()
    """As in its Statement."""


class Effects(NamedTuple):
    """Side effects of a call."""

    name: str
    written: Mapping[str, Access]
    """The variables that it may change, and how."""
    random: bool = False
    repeatable: bool = True
    """Whether the same inputs give the same bits."""
    is_kernel: bool = False
    """Whether Inductor compiled it, so it only writes to its arguments."""


@dataclass
class Storages:
    """Variables of a step's programs and what they are; `backward` may be None."""

    forward: Program
    backward: Program | None
    num_forward_outputs: int
    values: dict[str, Any] = field(default_factory=dict)
    """Fake tensors, by variable."""
    aliases: dict[str, ast.expr] = field(default_factory=dict)
    """The expressions of variables made from others."""
    allocations: dict[str, ast.stmt] = field(default_factory=dict)
    """The statements of variables made from no other."""
    roots: dict[StorageKey, list[str]] = field(default_factory=dict)
    """Each storage's variables that are not aliases."""
    calls: tuple[list[Call], list[Call]] = field(default_factory=lambda: ([], []))
    outputs: tuple[list[Any], list[Any]] = field(default_factory=lambda: ([], []))
    constants: dict[str, Tensor] = field(default_factory=dict)

    def key_of(self, variable: str) -> StorageKey | None:
        """Return the storage of a variable, or None if it is not a tensor."""
        value = self.values.get(variable)
        return storage_key(value) if isinstance(value, Tensor) else None

    @cached_property
    def compiled_namespace(self) -> dict[str, Any]:
        """Values of all names in both programs, without their variables; compiles the kernels.

        Raises UnsupportedError.
        """
        with inductor_failures('; use backend="eager"', of=Exception):
            return compiled(self.forward.namespace | ({} if self.backward is None else self.backward.namespace))

    @cached_property
    def unwritten(self) -> frozenset[StorageKey]:
        """Storages that the programs allocate and never write: buffers without elements."""
        written = {key for part in self.calls for call in part for key in call.writes}
        return frozenset(key for name in self.allocations if (key := self.key_of(name)) is not None) - written

    @property
    def saved(self) -> list[ast.expr]:
        """The expressions that forward saves for backward."""
        return self.forward.outputs[self.num_forward_outputs :]


def follow(
    forward: Program,
    backward: Program | None,
    primals: Sequence[Any],
    tangents: Sequence[Any],
    num_forward_outputs: int,
    mode: FakeTensorMode,
) -> Storages:
    """Follow both programs on the fake `primals` and `tangents`. Raises UnsupportedError."""
    found = Storages(forward, backward, num_forward_outputs)
    follower = _Follower(found, mode)
    follower.enter(forward, primals)
    follower.run(forward, 0)
    # Backward takes what forward saves, then the gradients of the results.
    if backward is not None:
        if len(backward.inputs) != len(found.saved) + len(tangents):
            raise UnsupportedError(
                f"Inductor's backward takes {len(backward.inputs)} arguments, not the {len(found.saved)} that its "
                "forward saves "
                f'and {len(tangents)} gradients; use backend="eager"'
            )
        for name, expression in zip(backward.inputs, found.saved, strict=False):
            follower.alias(name, expression, forward)
        follower.enter_named(backward.inputs[len(found.saved) :], tangents)
        follower.run(backward, 1)
    follower.measure()
    return found


class _Follower:
    def __init__(self, found: Storages, mode: FakeTensorMode) -> None:
        self.found = found
        self.mode = mode
        self.written: set[StorageKey] = set()
        self.calls_by_variable: dict[str, Call] = {}
        self.libraries: list[tuple[Program, Call, Library]] = []

    def enter(self, program: Program, values: Sequence[Any]) -> None:
        if len(program.inputs) != len(values):
            raise UnsupportedError(
                f'Inductor\'s program takes {len(program.inputs)} arguments, not {len(values)}; use backend="eager"'
            )
        self.enter_named(program.inputs, values)
        self.found.constants.update({n: v for n, v in program.namespace.items() if isinstance(v, Tensor)})

    def enter_named(self, names: Sequence[str], values: Sequence[Any]) -> None:
        for name, value in zip(names, values, strict=True):
            self.found.values[name] = value
            if isinstance(value, Tensor):
                self._root(name, value)
                self.written.add(storage_key(value))

    def run(self, program: Program, part: int) -> None:
        for statement in program.statements:
            self._statement(program, statement, part)
        self.found.outputs[part].extend(self._value(program, e) for e in program.outputs)

    def alias(self, name: str, expression: ast.expr, program: Program) -> None:
        value = self.found.values[name] = self._value(program, expression)
        is_size = isinstance(value, (int, torch.Size))
        self.found.aliases[name] = ast.parse(repr(value), mode="eval").body if is_size else expression

    def _statement(self, program: Program, statement: Statement, part: int) -> None:
        target = statement.target
        called = statement.value.func if isinstance(statement.value, ast.Call) else None
        if target is not None and isinstance(called, ast.Name) and called.id == "get_raw_stream":
            # The device's stream, bound again for every stretch of kernels: whichever is current when the kernel runs.
            self.found.values[target] = self._value(program, statement.value)
            self.found.aliases[target] = statement.value
            return
        if target is not None and target in self.found.values:
            raise UnsupportedError(f'Inductor\'s program binds {target} twice; use backend="eager"')
        # By kind: a new buffer, another name, one of several results, a check, or a call.
        if statement.kind is StatementKind.ALLOCATE:
            assert target is not None
            value = self.found.values[target] = self._value(program, statement.value)
            self.found.allocations[target] = statement.node
            self._root(target, value)
        elif statement.kind is StatementKind.ALIAS:
            assert target is not None
            self.alias(target, statement.value, program)
        elif statement.kind is StatementKind.PICK:
            self._pick(program, statement)
        elif statement.kind is StatementKind.CHECK:
            for name in statement.uses:
                if (made := self.calls_by_variable.get(name)) is not None:
                    made.lines.append(statement.node)
        else:
            self._call(program, statement, part)

    def _pick(self, program: Program, statement: Statement) -> None:
        target, (source, *_) = statement.target, statement.uses or ("",)
        made = self.calls_by_variable.get(source)
        if target is not None and source in self.found.aliases:  # one of several views
            self.alias(target, statement.value, program)
            return
        if made is None or target is None:
            raise not_understood(statement.node)
        value = self.found.values[target] = self._value(program, statement.value)
        made.lines.append(statement.node)
        self.calls_by_variable[target] = made
        if isinstance(value, Tensor):
            self._made(made, target, value)

    def _made(self, call: Call, name: str, value: Tensor) -> None:
        key = storage_key(value)
        if key in self.found.roots and key not in call.writes:
            raise UnsupportedError(
                f'{call.name} of Inductor\'s program returns a view of its input; use backend="eager"'
            )
        call.made.append(name)
        self._root(name, value)
        if key not in call.writes:
            call.writes += (key,)
        self.written.add(key)

    def _root(self, name: str, value: Tensor) -> None:
        self.found.roots.setdefault(storage_key(value), []).append(name)

    def _call(self, program: Program, statement: Statement, part: int) -> None:
        node = statement.value
        assert isinstance(node, ast.Call)
        if statement.target is not None and self._is_view(program, node):
            self.alias(statement.target, node, program)
            return
        # Which storages it reads and writes; one that is written first is new.
        node, own_state = _drawing(node)
        name, written, random, repeatable, is_kernel = self._effects(program, node, statement)
        keys = {n: k for n in statement.uses if (k := self.found.key_of(n)) is not None}
        reads = dict.fromkeys(k for n, k in keys.items() if written.get(n) is not Access.WRITE or k in self.written)
        writes = dict.fromkeys(keys[n] for n, access in written.items() if n in keys and access is not Access.READ)
        fresh = [k for k in writes if k not in self.written]
        call = Call(
            name, [statement.node], statement.uses,
            reads=tuple(k for k in reads if k not in fresh), writes=tuple(writes),
            updated=tuple(k for k in writes if k in self.written),
            random=random and not own_state, repeatable=repeatable, flops=0, moved_bytes=0,
            # A library call is one op, the last; those before made what it reads.
            origins=statement.origins if is_kernel else statement.origins[-1:],
        )  # fmt: skip
        self.written.update(writes)
        # Its results, as tensors that it allocates.
        result = None
        if statement.target is not None:
            result = self.found.values[statement.target] = self._value(program, statement.value)
            self.calls_by_variable[statement.target] = call
            if isinstance(result, Tensor):
                self._made(call, statement.target, result)
            elif isinstance(result, (tuple, list)):
                call.container = statement.target
        self.found.calls[part].append(call)
        tensors = [self.found.values[n] for n in statement.uses] + tree_leaves(result)
        # Its cost.
        call.moved_bytes = sum(_nbytes(t) for t in tensors if isinstance(t, Tensor))
        if not is_kernel:
            plain = node is statement.value
            call.flops = self._flops(program, name, node, result) if plain else 0
            alone: list[ast.stmt] = [ast.Expr(node)]
            self.libraries.append((program, call, Library(node, call.lines if plain else alone, statement.uses)))

    def _is_view(self, program: Program, call: ast.Call) -> bool:
        """Return whether a library call only makes views of existing tensors."""
        target = self._operator(program, call.func)
        if target is None or schema_of(target).is_mutable or not any(r.alias_info for r in schema_of(target).returns):
            return False
        found = tree_leaves(self._value(program, call))
        return all(isinstance(v, Tensor) and storage_key(v) in self.found.roots for v in found)

    def _effects(self, program: Program, call: ast.Call, statement: Statement) -> Effects:
        """Return the side effects of a call. Raises UnsupportedError if they cannot be known."""
        function = call.func
        # A compiled kernel, whose parameter names tell.
        if isinstance(function, ast.Attribute) and function.attr == "run":
            function = function.value
        if isinstance(function, ast.Name) and function.id in program.kernels:
            accesses = program.kernels[function.id]
            given = [program.uses_of(a) for a in call.args][: len(accesses)]
            if len(given) != len(accesses):
                raise not_understood(statement.node)
            written = {n: access for names, access in zip(given, accesses, strict=True) for n in names}
            return Effects(function.id[2:], written, repeatable=function.id not in program.atomic, is_kernel=True)
        # A library call: by its `out`, by the operator's schema, or by its name.
        written = {n: Access.WRITE for k in call.keywords if k.arg == "out" for n in program.uses_of(k.value)}
        name = ast.unparse(function).removeprefix("torch.ops.").removesuffix(".default")
        if (target := self._operator(program, function)) is not None:
            tags = target.tags
            if schema_of(target).is_mutable and not written:
                written = self._mutated(program, target, call)
            random = torch.Tag.nondeterministic_seeded in tags
            return Effects(name, written, random, not (random or torch.Tag.nondeterministic_bitwise in tags))
        if not (written or statement.target) or not name.startswith(("extern_kernels.", "aten.")) or name.endswith("_"):
            raise not_understood(statement.node)
        return Effects(name, written)

    def _operator(self, program: Program, function: ast.expr) -> Any:
        """Return the operator that a library call runs, or None for other functions."""
        target = self._plain(program, function)
        if isinstance(target, OpOverloadPacket) and "default" in target.overloads():
            target = target.default  # `aten.index_put_(…)`, as deterministic mode has it for an embedding
        return target if isinstance(target, OpOverload) else None

    def _mutated(self, program: Program, target: Any, call: ast.Call) -> dict[str, Access]:
        named = {k.arg: k.value for k in call.keywords if k.arg}
        changed = [value for value in written_arguments(target, call.args, named) if value is not None]
        return {name: Access.UPDATE for value in changed for name in program.uses_of(value)}

    def measure(self) -> None:
        """Measure the workspaces of all library calls."""
        for program in (self.found.forward, self.found.backward):
            if program is not None:
                calls = [(call, library) for of, call, library in self.libraries if of is program]
                found = workspaces([library for _, library in calls], program.namespace, self.found.values)
                for (call, _), workspace in zip(calls, found, strict=True):
                    call.workspace = workspace

    # -- values

    def _value(self, program: Program, expression: ast.expr) -> Any:
        previous, self.mode.allow_non_fake_inputs = self.mode.allow_non_fake_inputs, True
        try:
            with self.mode, torch.no_grad():
                return self._plain(program, expression)
        finally:
            self.mode.allow_non_fake_inputs = previous

    def _plain(self, program: Program, expression: ast.expr) -> Any:
        code = compile(ast.fix_missing_locations(ast.Expression(expression)), "<Inductor's program>", "eval")
        return eval(code, {**program.namespace, **FAKES}, self.found.values)  # noqa: S307 - the user's program

    def _flops(self, program: Program, name: str, call: ast.Call, result: Any) -> int:
        """Return the FLOPs of a library call, `aten.op` or `extern_kernels.op`, by torch's formulas."""
        op = getattr(torch.ops.aten, name.split(".")[1], None)
        if op not in flop_registry:
            return 0
        out = next((k.value for k in call.keywords if k.arg == "out"), None)
        value = result if out is None else self._plain(program, out)
        if op is torch.ops.aten.convolution and call.keywords:
            shapes = [tuple(self._plain(program, a).shape) for a in call.args[:2]]
            transposed = any(k.arg == "transposed" and ast.unparse(k.value) == "True" for k in call.keywords)
            return _convolution_flops(shapes[0], shapes[1], tuple(value.shape), transposed=transposed)
        args = [self._plain(program, a) for a in call.args]
        kwargs = {k.arg: self._plain(program, k.value) for k in call.keywords if k.arg and k.arg != "out"}
        return flops_of(op, args, kwargs, value)


def _drawing(call: ast.Call) -> tuple[ast.Call, bool]:
    """Return the op that `call` runs, and whether it draws from a random state that it is given.

    A checkpoint's random ops run so: forward keeps the generator's state, and backward draws from it.
    """
    function = ast.unparse(call.func)
    if function not in _WITH_STATE:
        return call, False
    own_state = function == _WITH_STATE[1]
    op, *args = call.args[own_state:]
    return ast.copy_location(ast.Call(op, args, call.keywords), call), own_state


_WITH_STATE = tuple(f"torch.ops.higher_order.run_{name}_rng_state" for name in ("and_save", "with"))


def _convolution_flops(x: Sequence[int], weight: Sequence[int], out: Sequence[int], *, transposed: bool) -> int:
    """Return the FLOPs of a convolution: two for each product of element and filter.

    These are the elements of the output, or of the input if transposed.
    """
    places = x if transposed else out
    count = places[0]
    for size in (*places[2:], *weight):
        count *= size
    return 2 * count


def _nbytes(value: Tensor) -> int:
    return min(value.numel() * value.element_size(), int(value.untyped_storage().nbytes()))


def _empty(device: str) -> Any:
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


FAKES: Mapping[str, Any] = {
    **{f"empty_strided_{device}": _empty(device) for device in ("cpu", "cuda", "xpu")},
    "reinterpret_tensor": lambda t, size, stride, offset=0: torch.as_strided(
        t, size, stride, t.storage_offset() + offset
    ),
}
"""Versions for fake tensors of the programs' own helpers."""

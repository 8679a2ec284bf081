"""Parse the Python text of one compiled program of Inductor, statement by statement.

For every graph Inductor writes a Python function `call(args)`, a straight line of statements:

- allocations (`empty_strided_cpu(...)`)
- kernels (`cpp_fused_add_0(buf1, buf2)`)
- library calls (`extern_kernels.mm(..., out=buf3)`, or ones that allocate their results)
- aliases (`reinterpret_tensor(...)`, `buf4 = buf3`)
- checks, and `del`

It is read as text because PyTorch's compile caches keep the text: a program from a cache is read like a new one.

Relies on the text that Inductor writes: the statements above, `async_compile.cpp_pybinding(types, source)` and
`async_compile.triton(name, source)`, and the parameters' names in kernels (`in_ptr`, `out_ptr`, `in_out_ptr`). A
statement of any other kind is refused by name. Comments `Source Nodes: [a, b]` above calls are read where present: C++
kernels have none.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from torch import Tensor

from overspill.core.errors import UnsupportedError

ALLOCATES = re.compile(r"^empty_strided_(cpu|cuda|xpu)$")
_CHECKS = ("assert_size_stride", "assert_size_stride_grouped", "assert_alignment", "assert_tensor_metadata")
_PARAMETER = re.compile(r"\b(in_out_ptr|in_ptr|out_ptr)\d*\b")
_ORIGINS = re.compile(r"^\s*#.*\bSource Nodes: \[(.*?)\]")


class StatementKind(StrEnum):
    """Kinds of statements."""

    ALLOCATE = "allocate"
    ALIAS = "alias"  # another name, or another view, of the same bytes, or their size
    PICK = "pick"  # one result of a call that returns several
    CALL = "call"
    CHECK = "check"


class Access(StrEnum):
    """How a kernel uses an argument."""

    READ = "read"
    WRITE = "write"
    UPDATE = "update"


@dataclass(frozen=True)
class Statement:
    """One statement of a program."""

    node: ast.stmt
    kind: StatementKind
    target: str | None
    """The variable that it assigns, if any."""
    uses: tuple[str, ...]
    """The variables that it uses."""
    origins: tuple[str, ...] = ()
    """Names of the nodes that a call was made from, in their order, if a comment has them."""

    @property
    def value(self) -> ast.expr:
        """The expression that is assigned or called."""
        assert isinstance(self.node, (ast.Assign, ast.Expr))
        return self.node.value


@dataclass
class Program:
    """The function `call(args)`: takes `inputs`, runs `statements`, returns `outputs`."""

    inputs: list[str]
    statements: list[Statement]
    outputs: list[ast.expr]
    kernels: dict[str, tuple[Access, ...]]
    """The access of each compiled kernel to its arguments, by position."""
    atomic: set[str]
    """The kernels that add atomically."""
    namespace: dict[str, Any]
    """The values of all other names."""
    variables: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, source: str, namespace: Mapping[str, Any], prefix: str) -> Program:
        """Parse `source`; variables, kernels and constants get `prefix` in front of their names.

        `namespace` is that of its module. Raises UnsupportedError for unknown statements.
        """
        module = ast.parse(source)
        # Rename in the text whatever the two programs of a step could both define.
        texts = _kernel_texts(module)
        call = _call_of(module)
        variables = {n.id for n in ast.walk(call) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        used = {n.id for n in ast.walk(call) if isinstance(n, ast.Name)} - variables
        own = {name for name in used if name in namespace and (name in texts or isinstance(namespace[name], Tensor))}
        names = {name: prefix + name for name in variables | own}
        body = [_Renamed(names).visit(statement) for statement in _flat(call.body)]
        program = cls(
            inputs=[], statements=[], outputs=[],
            kernels={prefix + name: accesses for name, (accesses, _) in texts.items()},
            atomic={prefix + name for name, (_, text) in texts.items() if "atomic_add" in text},
            namespace={names.get(name, name): value for name, value in namespace.items()},
            variables={names[name] for name in variables},
        )  # fmt: skip
        lines = source.splitlines()
        for statement in body:
            program._take(statement, _origins(lines, statement.lineno))
        return program

    def _take(self, node: ast.stmt, origins: tuple[str, ...]) -> None:
        text = ast.unparse(node)
        # Nothing to do: frees are decided by the schedule.
        if isinstance(node, (ast.Delete, ast.Pass)) or text == "args.clear()":
            return
        # The outputs, the inputs, or an assignment of a variable.
        if isinstance(node, ast.Return):
            if not isinstance(node.value, (ast.Tuple, ast.List)):
                raise not_understood(node)
            self.outputs = list(node.value.elts)
            return
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            (target,) = node.targets
            if isinstance(node.value, ast.Name) and node.value.id == "args":
                self.inputs = [e.id for e in target.elts if isinstance(e, ast.Name)] if hasattr(target, "elts") else []
                return
            if isinstance(target, ast.Name):
                kind, uses = self._kind(node.value, node), self._uses(node.value)
                self.statements.append(Statement(node, kind, target.id, uses, origins))
                return
        # A call whose result is not used: a check, or a kernel.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            function = ast.unparse(node.value.func)
            kind = StatementKind.CHECK if function in _CHECKS else StatementKind.CALL
            self.statements.append(Statement(node, kind, None, self._uses(node.value), origins))
            return
        raise not_understood(node)

    def _kind(self, value: ast.expr, node: ast.stmt) -> StatementKind:
        if isinstance(value, ast.Name):
            return StatementKind.ALIAS
        if isinstance(value, ast.Subscript):
            return StatementKind.PICK
        if isinstance(value, ast.Call):
            function = ast.unparse(value.func)
            if ALLOCATES.match(function):
                return StatementKind.ALLOCATE
            is_size = isinstance(value.func, ast.Attribute) and value.func.attr == "size"
            return StatementKind.ALIAS if is_size or function == "reinterpret_tensor" else StatementKind.CALL
        raise not_understood(node)

    def _uses(self, value: ast.AST) -> tuple[str, ...]:
        found = (n.id for n in ast.walk(value) if isinstance(n, ast.Name) and n.id in self.variables)
        return tuple(dict.fromkeys(found))

    def uses_of(self, value: ast.expr) -> tuple[str, ...]:
        """Return the variables in an expression, in order."""
        return self._uses(value)


def not_understood(node: ast.AST) -> UnsupportedError:
    """Return the error for a statement that this file does not know."""
    text = " ".join(ast.unparse(node).split())
    return UnsupportedError(
        f"the program that Inductor wrote has a statement that Overspill does not understand: {text[:120]}; "
        'use backend="eager"'
    )


def namespace_of(compiled: Any) -> dict[str, Any]:
    """Return the names of the Python module that Inductor wrote for `compiled`, if any.

    `compiled` is the result of `compile_fx_inner`.
    """
    from overspill.pytorch.inductor import align_inputs_from_check_idxs  # noqa: PLC0415 - seconds to import

    call: Any = getattr(compiled, "current_callable", None)
    if getattr(call, "__module__", None) == align_inputs_from_check_idxs.__module__:
        call = inspect.getclosurevars(call).nonlocals["model"]  # for a GPU it is in a function that aligns inputs
    found: dict[str, Any] = getattr(getattr(call, "__func__", call), "__globals__", {})
    return found


def _call_of(module: ast.Module) -> ast.FunctionDef:
    """Return the function `call`, a method of `Runner` in newer releases."""
    places: list[ast.stmt] = [*module.body, *(s for c in module.body if isinstance(c, ast.ClassDef) for s in c.body)]
    found = [s for s in places if isinstance(s, ast.FunctionDef) and s.name == "call"]
    if len(found) != 1:
        raise UnsupportedError(f'Inductor wrote a program with {len(found)} functions `call`; use backend="eager"')
    return found[0]


def _flat(body: list[ast.stmt]) -> list[ast.stmt]:
    """Return the statements in one list, with those inside a `with` of the current device's guard."""
    found: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.With):
            if not all("_DeviceGuard" in ast.unparse(item.context_expr) for item in statement.items):
                raise not_understood(statement.items[0].context_expr)
            found.extend(_flat(statement.body))
        elif ast.unparse(statement).startswith("torch.cuda.set_device("):
            continue
        else:
            found.append(statement)
    return found


def _origins(lines: list[str], line: int) -> tuple[str, ...]:
    """Return the node names in the comments right above line number `line`."""
    for text in reversed(lines[: line - 1]):
        if not text.lstrip().startswith("#"):
            break
        if named := _ORIGINS.match(text):
            return tuple(name for name in named.group(1).split(", ") if name)
    return ()


def _kernel_texts(module: ast.Module) -> dict[str, tuple[tuple[Access, ...], str]]:
    """Return argument accesses and text of each compiled kernel, by name."""
    found = {}
    for statement in module.body:
        if not (isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)):
            continue
        function, (target,) = ast.unparse(statement.value.func), statement.targets
        if not (function.startswith("async_compile.") and isinstance(target, ast.Name)):
            continue
        text = next((a.value for a in reversed(statement.value.args) if isinstance(a, ast.Constant)), "")
        found[target.id] = (_accesses(str(text)), str(text))
    return found


def _accesses(text: str) -> tuple[Access, ...]:
    """Return the accesses that the parameter names of a kernel, a C++ or Triton function, show."""
    head = re.search(r"(?:\bkernel|\bdef \w+)\s*\(([^)]*)\)", text)
    parameters = head.group(1).split(",") if head else []
    kinds = {"in_ptr": Access.READ, "out_ptr": Access.WRITE, "in_out_ptr": Access.UPDATE}
    return tuple(kinds[m.group(1)] for p in parameters if (m := _PARAMETER.search(p)))


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.copy_location(ast.Name(self._names.get(node.id, node.id), node.ctx), node)

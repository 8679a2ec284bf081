"""MXNet's symbols: networks as nodes, and their JSON files.

The file has the format of `Symbol.save`.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from overspill.core.errors import RequestError

VARIABLE = "null"
"""The op of a node that is an argument or an auxiliary state."""


class NodeOutput(NamedTuple):
    """One output of a node."""

    node: int
    number: int


@dataclass(frozen=True)
class Node:
    """An operator or a variable of a symbol."""

    op: str
    name: str
    inputs: tuple[NodeOutput, ...] = ()
    attrs: Mapping[str, str] = field(default_factory=dict)
    controls: tuple[int, ...] = ()
    """Nodes that run before it although it reads none of their outputs."""

    @property
    def is_variable(self) -> bool:
        """Whether it is an argument or an auxiliary state."""
        return self.op == VARIABLE

    def number(self, name: str, default: int) -> int:
        """Return the integer value of attribute `name`."""
        return int(float(self.attrs.get(name, default)))

    def numbers(self, name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the integers of attribute `name`, as in `(3, 3)`; a single number gives a tuple of one."""
        text = self.attrs.get(name)
        if text is None or text in {"None", "()", "[]"}:
            return default
        value = ast.literal_eval(text)
        return tuple(int(v) for v in value) if isinstance(value, (tuple, list)) else (int(value),)

    def places(self, name: str) -> tuple[int | None, ...]:
        """Return the entries of attribute `name`, integers or None, as in `(0, None)`."""
        return tuple(None if v is None else int(v) for v in ast.literal_eval(self.attrs.get(name, "()")))

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return whether attribute `name` is true."""
        text = self.attrs.get(name)
        return default if text is None else text in {"True", "true", "1"}


@dataclass(frozen=True)
class Symbol:
    """A network: its nodes in order, and its outputs.

    Each node follows the nodes that it reads.
    """

    nodes: tuple[Node, ...]
    heads: tuple[NodeOutput, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        """The names of all arguments and auxiliary states."""
        return tuple(node.name for node in self.nodes if node.is_variable)

    def to_json(self) -> str:
        """Return the symbol as the JSON that MXNet loads: nodes, the positions of variables, and the heads."""
        nodes = [
            {"op": node.op, "name": node.name, "inputs": [[*entry, 0] for entry in node.inputs]}
            | ({"attrs": dict(node.attrs)} if node.attrs else {})
            for node in self.nodes
        ]
        variables = [i for i, node in enumerate(self.nodes) if node.is_variable]
        heads = [[*entry, 0] for entry in self.heads]
        version = {"mxnet_version": ["int", 10500]}
        return json.dumps({"nodes": nodes, "arg_nodes": variables, "heads": heads, "attrs": version}, indent=1)


def read_symbol(path: Path) -> Symbol:
    """Return the symbol in the file at `path`. Raises RequestError if it holds none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot read {path}: {error.strerror}; name a file that is there and may be read") from None
    except UnicodeDecodeError:
        raise RequestError(
            f"{path} is not a symbol file of MXNet: it is not text; give the JSON that Symbol.save writes"
        ) from None
    try:
        return symbol_of(json.loads(text))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise RequestError(
            f"{path} is not a symbol file of MXNet, the JSON that Symbol.save writes: {type(error).__name__}: {error}"
        ) from None


def symbol_of(loaded: Any) -> Symbol:
    """Return the symbol in a loaded JSON object.

    Files before MXNet 1.0 name attributes `attr` or `param`.
    """
    nodes = []
    for position, entry in enumerate(loaded["nodes"]):
        attrs = {**entry.get("param", {}), **entry.get("attr", {}), **entry.get("attrs", {})}
        inputs = tuple(NodeOutput(int(one[0]), int(one[1])) for one in entry["inputs"])
        controls = tuple(int(one) for one in entry.get("control_deps", ()))
        if any(not 0 <= before < position for before in (*(e.node for e in inputs), *controls)):
            raise ValueError(f"node {entry['name']} reads a node that does not come before it")
        nodes.append(Node(entry["op"], entry["name"], inputs, {k: str(v) for k, v in attrs.items()}, controls))
    heads = tuple(NodeOutput(int(one[0]), int(one[1])) for one in loaded["heads"])
    if not heads or any(not 0 <= head.node < len(nodes) for head in heads):
        raise ValueError("it has no heads among its nodes")
    return Symbol(tuple(nodes), heads)

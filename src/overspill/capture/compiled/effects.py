"""Turn ops that AOTAutograd orders by effect tokens into plain nodes.

An example is the check that a matrix can be inverted. In the graph of a whole step the order of nodes is kept anyway,
and no caller passes tokens.

Relies on `with_effects(token, op, *args)` returning the next token before the results of `op`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx

from overspill.pytorch.dispatch import schema_of
from overspill.pytorch.higher_order import EffectType, get_effect, register_effectful_op, with_effects
from overspill.pytorch.trees import tree_leaves

EFFECT = "overspill_effect"
"""Key in a node's meta: it has a side effect, and runs though nothing may read its results."""


@contextmanager
def checks_kept() -> Iterator[None]:
    """Make traces keep the check that a matrix could be decomposed, inside the block; PyTorch up to 2.12 drops it."""
    check = "aten::_linalg_check_errors"
    if get_effect(check) is not None:
        yield
        return
    registered = register_effectful_op(check, EffectType.ORDERED)
    try:
        yield
    finally:
        registered.destroy()


def without_tokens(graph: fx.Graph, outputs: int = 0) -> int:
    """Remove effect tokens from `graph`; return how many of the first `outputs` remain."""
    found = graph.find_nodes(op="call_function", target=with_effects)
    if not found:
        return outputs
    outputs -= sum(map(is_token, output_descs(graph)[:outputs]))
    _drop_outputs(graph)
    # Replace each call by the plain op, whose results no longer have a token in front.
    for node in reversed(found):
        _, op, *args = node.args
        picks = [user for user in node.users if user.target is operator.getitem]
        several = len(schema_of(op).returns) > 1
        with graph.inserting_before(node):
            plain = graph.call_function(op, tuple(args), dict(node.kwargs))
        values = node.meta["val"][1:]
        plain.meta = {**node.meta, "val": values if several else (values[0] if values else None), EFFECT: True}
        for pick in picks:
            if pick.args[1] and several:
                pick.args = (plain, pick.args[1] - 1)
            else:
                if pick.args[1]:
                    pick.replace_all_uses_with(plain)
                graph.erase_node(pick)
        graph.erase_node(node)
    # No token is passed in any more.
    for node in graph.find_nodes(op="placeholder"):
        if is_token(node.meta.get("desc")):
            graph.erase_node(node)
    return outputs


def output_descs(graph: fx.Graph) -> list[Any]:
    """Return AOTAutograd's descriptor of each output of `graph`, or None where it has none."""
    output = graph.find_nodes(op="output")[0]
    return tree_leaves(output.meta["desc"], is_leaf=lambda x: not isinstance(x, (list, tuple)))


def _drop_outputs(graph: fx.Graph) -> None:
    output = graph.find_nodes(op="output")[0]
    pairs = list(zip(tree_leaves(output.args), output_descs(graph), strict=True))
    kept = [(value, desc) for value, desc in pairs if not is_token(desc)]
    output.args = (tuple(value for value, _ in kept),)
    output.meta["desc"] = [desc for _, desc in kept]


def is_token(desc: Any) -> bool:
    """Return whether a descriptor of AOTAutograd is that of a token."""
    return "Token" in type(desc).__name__

"""Inputs that a graph reads and returns through one view: their gradient is summed as plain PyTorch sums it.

A graph that ends early may return a view of its input: experts by values read what their gate has read. AOTAutograd
makes such an output again outside of the graph. Then the input is given two gradients, one through this view and one by
the graph, where plain PyTorch adds both up in the view, before what others give the input. An alias of the input, made
for the call, is where both add up here.

Known limit: an input that is read in the graph in another way too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx, nn

from overspill.pytorch.storages import storage_key


def returned_as_views(module: fx.GraphModule, examples: Sequence[Any]) -> Iterator[int]:
    """Yield the positions of the inputs of Dynamo's graph that it reads through one view alone, and returns so."""
    returned = set(module.graph.output_node().all_input_nodes)
    for position, (given, example) in enumerate(zip(module.graph.find_nodes(op="placeholder"), examples, strict=True)):
        is_made = isinstance(example, Tensor) and not isinstance(example, nn.Parameter) and example.requires_grad
        if is_made and len(given.users) == 1 and returned.issuperset(given.users):
            made, base = (node.meta.get("example_value") for node in (*given.users, given))
            if isinstance(made, Tensor) and isinstance(base, Tensor) and storage_key(made) == storage_key(base):
                yield position


def with_aliases(args: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    """Return `args` with aliases of those at `positions`."""
    return [arg.view_as(arg) if position in positions else arg for position, arg in enumerate(args)]

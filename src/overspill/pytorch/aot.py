"""AOTAutograd: a joint graph of forward and backward. Its import takes a second and a half."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch._dynamo.backends.common
import torch._functorch._aot_autograd.collect_metadata_analysis
import torch._functorch._aot_autograd.graph_compile
import torch._functorch.aot_autograd
import torch._functorch.partitioners
from torch import fx

from .patching import Target, patched

_TRACE = Target(torch._functorch._aot_autograd.graph_compile, "aot_dispatch_autograd_graph")
"""Traces a module's joint graph; notes in the metadata what it finds."""

aot_autograd = torch._dynamo.backends.common.aot_autograd
"""A backend of torch.compile from compilers of forward and backward."""
aot_export_joint_with_descriptors = torch._functorch.aot_autograd.aot_export_joint_with_descriptors
"""The joint graph of a module; since 2.8."""
collect_metadata_analysis = torch._functorch._aot_autograd.collect_metadata_analysis
"""What it learns of outputs: `coerce_tangent_and_suggest_memory_format`."""
min_cut_rematerialization_partition = torch._functorch.partitioners.min_cut_rematerialization_partition
"""The partition of stock torch.compile."""


def exported_graph(exported: Any) -> fx.GraphModule:
    """Return the joint graph of what `aot_export_joint_with_descriptors` gave."""
    return exported._aot_graph_capture.graph_module


def boxed(function: Any) -> Any:
    """Mark a compiled function as one that takes its arguments in one list, which it may empty."""
    function._boxed_call = True
    return function


@contextmanager
def traced_once(kept: list[Any], copied: Callable[[fx.GraphModule], fx.GraphModule]) -> Iterator[None]:
    """Let AOTAutograd trace a joint graph only if `kept` is empty, and take a copy from there otherwise.

    Blocks with the same `kept` compile the same module for the same inputs. A graph with graphs in it is traced again:
    a copy shares these.
    """
    trace = _TRACE.now

    def traced(*args: Any, fw_metadata: Any, **kwargs: Any) -> Any:
        if not kept:
            graph, *inputs = trace(*args, fw_metadata=fw_metadata, **kwargs)
            if not any(isinstance(child, fx.GraphModule) for child in graph.children()):
                kept.extend((copied(graph), inputs, dict(vars(fw_metadata))))
            return graph, *inputs
        graph, inputs, found = kept
        vars(fw_metadata).update(found)
        return copied(graph), *inputs

    with patched([(*_TRACE, traced)]):
        yield

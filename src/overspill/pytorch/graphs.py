"""FX graphs: their text, and the meaning of their nodes."""

from __future__ import annotations

import torch.fx._lazy_graph_module
import torch.fx._symbolic_trace
from torch._functorch._aot_autograd.descriptors import (
    SavedForBackwardsAOTOutput as SavedForBackwardsAOTOutput,  # the description of an output that backward reads
)

from .patching import Target

LazyGraphModule = torch.fx._lazy_graph_module._LazyGraphModule
"""A GraphModule whose code is written when it is first called."""
IS_FX_TRACING = Target(torch.fx._symbolic_trace, "is_fx_tracing")
"""Whether FX traces."""
JitGraph = torch._C.Graph
"""A graph of TorchScript."""
PARAMETER_SOURCES = "_param_name_to_source"
"""The attribute of Dynamo's graph that says from where each parameter was read."""
SOURCE = "_dynamo_source"
"""The attribute of a tensor among its inputs that says so."""

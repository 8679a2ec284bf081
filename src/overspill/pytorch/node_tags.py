"""Keys in a node's meta by which PyTorch and torchtitan know what to save, and which nodes are of backward."""

from __future__ import annotations

RECOMPUTE = "recompute"
"""A CheckpointPolicy: what PyTorch's partitioner, its rematerialization and torchtitan's passes read."""
AC_REGION = "ac_graph_id"
"""The number of the checkpoint that a node is in."""
BACKWARD = "autograd_backward"
"""Whether autograd made the node, in a graph traced by make_fx over forward and backward."""
PARTITION = "partitioner_tag"
"""AOTAutograd's own mark of a phase."""
DESCRIPTION = "desc"
"""AOTAutograd's descriptions of inputs and outputs."""

"""Ops in terms of others, and shapes of their results."""

from __future__ import annotations

import torch._decomp
import torch._meta_registrations
import torch._prims_common
import torch._refs  # registers them

meta_table = torch._decomp.meta_table
"""Kernels for shapes alone, by op."""
mkldnn_rnn_layer = torch._meta_registrations.mkldnn_rnn_layer
"""The shapes of a recurrent layer of oneDNN."""
mkldnn_rnn_layer_backward = torch._meta_registrations.mkldnn_rnn_layer_backward
"""And of its backward."""
is_dense = torch._prims_common.is_non_overlapping_and_dense_or_false
"""Whether the elements of a tensor fill its memory."""
suggest_memory_format = torch._prims_common.suggest_memory_format
"""The format that an elementwise result has."""

"""Inductor as the compiler of the lowered graphs. Private to PyTorch (2.11 to 2.13): `compile_fx`, `CustomPartitionerFn`.

Inductor fuses by what is saved, so its last bits differ from eager's and change with the plan; the reference of a run
under Inductor is the same plan without transfers. Its order of transfers is the graph's only without its own
reordering for peak memory, and its cache knows nothing of our plans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomPartitionerFn

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


class _Partitioner(CustomPartitionerFn):
    def __init__(self, partition: Partition) -> None:
        self._partition = partition

    def __call__(
        self, module: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        kwargs.pop("compiler", None)
        return self._partition(module, inputs, **kwargs)

    def __deepcopy__(self, memo: Any) -> _Partitioner:
        """Itself: Inductor copies its configuration, and our session must stay one."""
        return self

    def uuid(self) -> None:
        """No identity: graphs that hold our plans must not come from a cache."""


def compile_with_inductor(module: fx.GraphModule, examples: Sequence[Any], partition: Partition) -> Callable[..., Any]:
    """The callable that runs Dynamo's `module`, partitioned by our plan and compiled by Inductor."""
    patches = {
        "custom_partitioner_fn": _Partitioner(partition),
        "force_disable_caches": True,
        "reorder_for_peak_memory": False,
        # A convolution's layout changed behind our back would not be the one that the transfers were planned with.
        "layout_optimization": False,
        # Random numbers as eager draws them, so that a run does not depend on how Inductor fused it.
        "fallback_random": True,
    }
    return compile_fx(module, examples, config_patches=patches)

"""`overspill.plan_graph`: the planner alone, for runtimes that take a tag of each node.

PyTorch's partitioner and torchtitan's graph trainer split a joint graph of forward and backward by tags. Here the tags
come from a plan within a budget.

Known limits: only what the graph holds is counted. Tags cannot recompute a tensor twice, nor drop it between two uses
in backward, so the smallest budget is above that of `overspill.compile`. Of collectives, only gathers are recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from overspill.capture.compiled.absent_gpu import captured_for
from overspill.capture.compiled.graph import Surroundings, capture
from overspill.capture.compiled.joint import device_of
from overspill.core import Device, Graph
from overspill.core.budget import Budget
from overspill.core.errors import RequestError, UnsupportedError
from overspill.core.units import format_bytes
from overspill.plans.fit import fit
from overspill.plans.plan import Plan, make_plan, unmanaged_peak
from overspill.policies import Policy
from overspill.policies.in_core import Liveness
from overspill.pytorch.functorch import functorch_config
from overspill.pytorch.node_tags import AC_REGION, RECOMPUTE

from .hardware import device_named
from .node_tags import Tag, TagAccount, TaggedStep, fastest_by_recomputing, tagged
from .tagged_graph import as_run_by_tags, offloadable, read_joint, tags_of_nodes

SLOWER = 1000
"""How much slower the link is for a policy whose plan must do without it."""


@dataclass(frozen=True)
class GraphPlan:
    """Tags of the nodes of a joint graph, and what a step takes that runs by them. Bytes are live ones."""

    tags: Mapping[str, Tag] = field(repr=False)
    """`save`, `recompute` or `offload` for each node of forward that backward needs, by the node's name.

    A view is made again from what it views, so its tag is `recompute`.
    """
    budget_bytes: int
    peak_bytes: int
    """The peak of the step by these tags, the graph's inputs and gradients included; it is within the budget."""
    unmanaged_peak_bytes: int
    """The peak of the same step with every activation saved."""
    saved_bytes: int
    """Bytes of activations that stay on the device from forward to backward."""
    unmanaged_saved_bytes: int
    """The same if all are saved."""
    offloaded_bytes: int
    """Bytes of activations that go to the host and come back."""
    slowdown: float
    """Simulated step time over that of the unmanaged step, if transfers overlap with compute."""
    module: fx.GraphModule = field(repr=False, compare=False)
    """The planned graph."""
    num_fwd_outputs: int = field(repr=False)

    def __str__(self) -> str:
        """Return the plan in one line."""
        saved, all_saved, peak, budget = map(
            format_bytes, (self.saved_bytes, self.unmanaged_saved_bytes, self.peak_bytes, self.budget_bytes)
        )
        offloaded = format_bytes(self.offloaded_bytes)
        return (
            f"peak {peak} of {budget}; {saved} of {all_saved} saved, {offloaded} offloaded; "
            f"simulated slowdown: {self.slowdown:.2f}"
        )

    def tag(self, module: fx.GraphModule | None = None) -> fx.GraphModule:
        """Set `node.meta["recompute"]` to a `torch.utils.checkpoint.CheckpointPolicy`, and return the graph.

        Tags of the program's own checkpoints are replaced. `MUST_SAVE`, `MUST_RECOMPUTE` and `MUST_CPU_OFFLOAD` are
        what torchtitan's passes read. PyTorch's partitioner knows the first two.

        Args:
            module: A graph with the same nodes; None: the planned one.

        Returns:
            The tagged graph.

        Raises:
            RequestError: If the graph lacks a node that has a tag.
            UnsupportedError: If this PyTorch has no policy for offloading.
        """
        target = self.module if module is None else module
        nodes = {node.name: node for node in target.graph.nodes}
        if missing := next((name for name in self.tags if name not in nodes), None):
            raise RequestError(f"the graph has no node {missing}, so it is not the one that was planned")
        policies = {name: _policy(tag) for name, tag in self.tags.items()}
        for name, node in nodes.items():
            node.meta.pop(RECOMPUTE, None)
            node.meta.pop(AC_REGION, None)
            if name in policies:
                node.meta[RECOMPUTE] = policies[name]
        return target

    def partition(self, inputs: Any = (), **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the graphs of forward and backward that PyTorch's min-cut partitioner makes by the tags.

        Args:
            inputs: The inputs of the joint graph, as a `partition_fn` gets them; the partitioner does not use them.
            **how: Further arguments that a `partition_fn` gets.

        Returns:
            The two graphs, for a `partition_fn` of AOTAutograd to return.

        Raises:
            RequestError: If a tag is `offload`: plan with `offload=False`.
            UnsupportedError: If the partitioner saves something else than the tags say.
        """
        from overspill.pytorch.aot import min_cut_rematerialization_partition  # noqa: PLC0415 - its import takes time

        if Tag.OFFLOAD in self.tags.values():
            raise RequestError("PyTorch's partitioner does not offload; plan the graph with offload=False")
        module = self.tag()
        inputs_of_graph = {node.name for node in module.graph.find_nodes(op="placeholder")}
        # Equal nodes stay apart, because a tag is one node's; and no other budget has a say.
        with functorch_config.patch(cse=False, activation_memory_budget=1.0):
            forward, backward = min_cut_rematerialization_partition(
                module, inputs, **{**how, "num_fwd_outputs": self.num_fwd_outputs}
            )
        taken = (node.name for node in backward.graph.find_nodes(op="placeholder"))
        for name in taken:
            if name not in inputs_of_graph and self.tags.get(name) is not Tag.SAVE:
                raise UnsupportedError(f"PyTorch's partitioner saves {name}, which has the tag {self.tags.get(name)}")
        return forward, backward


def plan_graph(
    joint_graph: fx.GraphModule,
    budget: str | float | Budget | None = None,
    device: str | Device | None = None,
    *,
    num_fwd_outputs: int,
    policy: str | Policy = "auto",
    offload: bool = True,
) -> GraphPlan:
    """Plan a joint graph of forward and backward within `budget`, as tags of its nodes; nothing is run or changed.

    Args:
        joint_graph: The graph that AOTAutograd passes to a `partition_fn`, or one that `make_fx` traced over a loss and
            `torch.autograd.grad`, as torchtitan's graph trainer has it. Its nodes have fake tensors as `meta["val"]`.
        budget: Live bytes of the graph's inputs (parameters among them), activations, temporaries and gradients. A size
            (`"8GiB"`, or bytes), a share of what the step takes with all activations saved (`0.5`), `"smallest"`, or
            None for all memory of the device. Subtract what is outside the graph: optimizer state, CUDA context.
        device: By name, by file, or as a Device; None: the one that the tensors are on.
        num_fwd_outputs: How many of the graph's outputs are those of forward; they come first.
        policy: A name that `overspill policies` lists, or a policy.
        offload: Whether activations may go to the host. Without it, they are saved or recomputed.

    Returns:
        The GraphPlan.

    Raises:
        InfeasibleBudgetError: With the smallest budget that works.
        RequestError: For a wrong argument.
        UnsupportedError: For a graph with dynamic shapes, on a GPU that is not here, or in which forward and backward
            alternate.
    """
    joint, names = read_joint(joint_graph, num_fwd_outputs)
    where = device_of(joint.module.graph)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "the graph's tensors are on a GPU, which this machine does not have; trace it on the CPU, and name the GPU "
            "as device"
        )
    asked = device_named(device, where)
    # Kernels' workspaces are those of the GPU, also for a graph that was traced on the CPU.
    with captured_for(asked):
        captured = capture(joint, [], Surroundings())
    graph = as_run_by_tags(captured)
    may_leave = offloadable(captured) if offload else frozenset[int]()
    account = TagAccount(asked if offload else _with_slow_link(asked), may_leave=may_leave)
    most_bytes = unmanaged_peak(graph, asked)
    make = partial(make_plan, graph, account.device, policy)
    by_recomputing = fastest_by_recomputing(account, make, most_bytes)

    def within(nbytes: int) -> Plan:
        return fit(make, account, nbytes) if offload else by_recomputing(nbytes)

    budget_bytes = account.bytes_of(Budget.parse(budget), graph, within)
    plan = within(budget_bytes)
    step = tagged(graph, plan.schedule, may_leave)
    tags = {names[node]: tag for node, tag in tags_of_nodes(captured, step).items() if node in names}
    plain = tagged(graph, Liveness().plan(graph, account.device), ())
    return GraphPlan(
        tags,
        budget_bytes=budget_bytes,
        peak_bytes=step.peak_bytes,
        unmanaged_peak_bytes=most_bytes,
        saved_bytes=_bytes_of(graph, step, Tag.SAVE),
        unmanaged_saved_bytes=_bytes_of(graph, plain, Tag.SAVE),
        offloaded_bytes=_bytes_of(graph, step, Tag.OFFLOAD),
        slowdown=plan.slowdown,
        module=joint_graph,
        num_fwd_outputs=num_fwd_outputs,
    )


def _policy(tag: Tag) -> CheckpointPolicy:
    found: CheckpointPolicy | None = getattr(
        CheckpointPolicy, {Tag.SAVE: "MUST_SAVE", Tag.RECOMPUTE: "MUST_RECOMPUTE"}.get(tag, "MUST_CPU_OFFLOAD"), None
    )
    if found is None:
        raise UnsupportedError(
            f"PyTorch {torch.__version__} has no CheckpointPolicy for offloading; plan the graph with offload=False"
        )
    return found


def _with_slow_link(device: Device) -> Device:
    """Return `device` with transfers that cost more than any recomputation, so that a policy takes them last."""
    return replace(
        device,
        offload_bytes_per_second=device.offload_bytes_per_second / SLOWER,
        prefetch_bytes_per_second=device.prefetch_bytes_per_second / SLOWER,
    )


def _bytes_of(graph: Graph, step: TaggedStep, tag: Tag) -> int:
    return sum(graph.tensors[tensor].nbytes for tensor, its in step.tags.items() if its is tag)

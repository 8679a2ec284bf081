"""Gather sharded parameters in a traced step.

A step is traced with whole parameters. Here each becomes the result of an op that gathers it from the shards of all
ranks, with the others of its group. The op runs right before the first of them is read.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from overspill.capture.sharding import GATHER, SCATTER

from .joint import JointGraph, copied

Wait = Callable[[], tuple[Tensor, ...]]
"""A function that waits for a collective that was started, and returns its results."""


@dataclass(frozen=True)
class GatheredGroup:
    """Parameters that are gathered by one op, and whose gradients are scattered by one."""

    name: str
    positions: tuple[int, ...]
    """The parameters' positions among the inputs."""
    shards: tuple[Tensor, ...]
    """Fake values of a rank's parts, each as large as the largest rank's."""
    ranks: int
    gather: Callable[..., Wait]
    """`gather(*shards, into={…})` starts to make the whole parameters, at some positions in given memory."""
    gather_workspace_bytes: int
    """Bytes that a gather takes besides its results."""
    scatter: Callable[..., Wait]
    """`scatter(*gradients, positions=…)` starts to reduce these parameters' gradients to each rank's shards."""
    scatter_workspace_bytes: Callable[[Sequence[int]], int]
    """Bytes that a scatter of the gradients at some positions takes besides its results."""
    reshards: bool
    """Whether the program itself frees the gathered parameters after forward, and gathers them again."""


class AsyncCollective(ABC):
    """The target of a collective's node: a call starts the collective and waits for it."""

    tags = ()
    __name__: str

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the collective's results."""
        return self.start(*tensors)()

    @abstractmethod
    def start(self, *tensors: Tensor) -> Wait:
        """Start the collective."""


class Gather(AsyncCollective):
    """The target of a gather's node, which takes the memory for some of its results, and the shards of all."""

    __name__ = GATHER

    def __init__(self, group: GatheredGroup, number: int, into: Sequence[int] = ()) -> None:
        self.group = group
        self.number = number
        self._into = into

    def start(self, *tensors: Tensor) -> Wait:
        memory = dict(zip(self._into, tensors, strict=False))
        return self.group.gather(*tensors[len(memory) :], into=memory)

    def given(self, into: Sequence[int]) -> Gather:
        """Return the same gather with memory for the results at the positions `into` as its first arguments."""
        return Gather(self.group, self.number, into)


class Scatter(AsyncCollective):
    """The target of a scatter's node, which takes the gradients of parameters at these positions of its group."""

    __name__ = SCATTER

    def __init__(self, group: GatheredGroup, positions: Sequence[int]) -> None:
        self._group, self._positions = group, positions

    def start(self, *gradients: Tensor) -> Wait:
        return self._group.scatter(*gradients, positions=self._positions)


class StartCollective:
    """The target of a node that starts a collective; its value goes to `wait`."""

    def __init__(self, collective: AsyncCollective) -> None:
        self._collective = collective
        self.__name__ = f"{collective.__name__}.start"

    def __call__(self, *tensors: Tensor) -> Wait:
        return self._collective.start(*tensors)


def wait(started: Wait) -> tuple[Tensor, ...]:
    """Return the results of a collective that was started."""
    return started()


def with_gathers(joint: JointGraph, groups: Sequence[GatheredGroup]) -> JointGraph:
    """Return a copy of `joint` whose inputs are the shards of the parameters in `groups`."""
    module = copied(joint.module)
    graph = module.graph
    inputs = [n for n in graph.find_nodes(op="placeholder") if "tangents" not in str(n.target)]
    order = {node: place for place, node in enumerate(graph.nodes)}
    for number, group in enumerate(groups, 1):
        wholes = [inputs[position] for position in group.positions]
        shards = []
        for whole, value in zip(wholes, group.shards, strict=True):
            with graph.inserting_before(whole):
                shards.append(graph.placeholder(f"{whole.name}_shard"))
            shards[-1].meta = {**whole.meta, "val": value}
        if readers := [user for whole in wholes for user in whole.users]:
            first = min(readers, key=order.__getitem__)
            with graph.inserting_before(first):
                gather = graph.call_function(Gather(group, number), tuple(shards))
                gather.meta = {"val": tuple(whole.meta["val"] for whole in wholes)}
                for place, whole in enumerate(wholes):
                    item = graph.call_function(operator.getitem, (gather, place))
                    item.meta = {"val": whole.meta["val"]}
                    whole.replace_all_uses_with(item)
        for whole in wholes:
            graph.erase_node(whole)
    module.recompile()
    return JointGraph(module, len(joint.forward_outputs))

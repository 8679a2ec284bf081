"""MXNet's memory plan: the entries that share a storage, and the storages' sizes.

After `src/nnvm/plan_memory.cc` (MXPlanMemory) and `src/executor/inplace_addto_detect_pass.cc`, MXNet 1.5.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from math import prod

from .backward import MxnetStep
from .operators import Pairs
from .symbol import NodeOutput

MATCH_RANGE = 16
"""NNVM_EXEC_MATCH_RANGE: a free storage serves a request of up to so many times its size, or of so small a share."""
ITEM_BYTES = 4
EXTERNAL = -2
"""The storage of an entry in an array that the user bound: an argument, a state, a gradient."""


class _Storages:
    """All storages so far, and the free ones by size; among equals, the first freed comes first."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        self._free: list[tuple[int, int, int]] = []
        self._frees = 0

    def request(self, nbytes: int) -> int:
        """Return a storage for `nbytes`, free or new.

        It is the smallest larger free one; otherwise a smaller one, which grows; otherwise a new one.
        """
        middle = bisect_left(self._free, (nbytes,))
        end = bisect_right(self._free, (nbytes * MATCH_RANGE, self._frees + 1))
        if middle < end:
            return self._take(middle, nbytes)
        if middle > bisect_left(self._free, (nbytes // MATCH_RANGE,)):
            return self._take(middle - 1, nbytes)
        self.nbytes.append(nbytes)
        return len(self.nbytes) - 1

    def release(self, storage: int) -> None:
        """Let `storage` serve other entries."""
        self._frees += 1
        insort(self._free, (self.nbytes[storage], self._frees, storage))

    def _take(self, position: int, nbytes: int) -> int:
        storage = self._free.pop(position)[2]
        self.nbytes[storage] = max(nbytes, self.nbytes[storage])
        return storage


class MemoryPlan:
    """The memory plan of a step: each entry's storage, and their sizes.

    `storage[entry]` is the storage, and `nbytes` the size of each storage in use.
    """

    def __init__(self, step: MxnetStep) -> None:
        self.step = step
        self.storage: dict[NodeOutput, int] = {}
        self._storages = _Storages()
        self._left: Counter[int] = Counter()  # by storage, the uses that are still to come
        self._uses = Counter(entry for node in step.nodes for entry in node.inputs)
        self._uses.update(step.heads)
        self._uses.update(step.gradients.values())
        # Gradients and variables lie outside the plan.
        for entry in step.gradients.values():
            self.storage[entry] = EXTERNAL
        for i, node in enumerate(step.nodes):
            if node.is_variable:
                self.storage[NodeOutput(i, 0)] = EXTERNAL
            else:
                self._place(i)
        self._add_in_place()
        # A storage is as large as the largest entry in it.
        self.nbytes: dict[int, int] = {}
        for entry, storage in self.storage.items():
            if storage >= 0:
                self.nbytes[storage] = max(self.nbytes.get(storage, 0), self._bytes(entry))

    def _place(self, i: int) -> None:
        node = self.step.nodes[i]
        outputs = [NodeOutput(i, k) for k in range(len(self.step.shapes[i]))]
        taken = self._shared(i)
        rest = [entry for entry in outputs if entry not in self.storage]
        for entry in sorted(rest, key=lambda e: (self._bytes(e), e.number), reverse=True):
            storage = self._storages.request(self._bytes(entry))
            self._left[storage] = self._uses[entry]
            self.storage[entry] = storage
        for entry in node.inputs:
            self._drop(self.storage[entry])
        for entry in outputs:
            storage = self.storage[entry]
            if storage >= 0 and entry not in taken and self._left[storage] == 0:
                self._storages.release(storage)

    def _shared(self, i: int) -> set[NodeOutput]:
        """Place outputs in inputs without later readers, where the operator allows it, and return these inputs."""
        node, taken, shared = self.step.nodes[i], set[int](), set[NodeOutput]()
        pairs, is_view = self._pairs(i)
        for source, target in pairs:
            if source >= len(node.inputs) or target >= len(self.step.shapes[i]):
                continue
            read, made = node.inputs[source], NodeOutput(i, target)
            storage = self.storage[read]
            if (
                source not in taken
                and made not in self.storage
                and storage >= 0
                and (self._left[storage] == 1 or is_view)
                and self._uses[made] > 0
                and self._bytes(read) == self._bytes(made)
            ):
                # The output takes over the input's storage.
                taken.add(source)
                shared.add(made)
                self.storage[made] = storage
                self._left[storage] += self._uses[made]
        return shared

    def _pairs(self, i: int) -> tuple[Pairs, bool]:
        """Return the inputs and outputs of node `i` that may share memory.

        Also return whether they may do so even if other nodes read the input.
        """
        operator = self.step.of[i]
        if operator is None:
            return (), False
        backward = self.step.forward[i] is not None
        return operator.backward_in_place if backward else operator.in_place, operator.is_view

    def _drop(self, storage: int) -> None:
        if storage >= 0:
            self._left[storage] -= 1
            if self._left[storage] == 0:
                self._storages.release(storage)

    def _add_in_place(self) -> None:
        """Place the summands of a chain of sums in the sum.

        Each is added as it is made, and has no storage of its own.
        """
        for i, node in enumerate(self.step.nodes):
            if node.op != "_grad_add":
                continue
            total, part = node.inputs
            sources = (self.step.nodes[total.node], self.step.nodes[part.node])
            if (
                self.storage[total] == self.storage[NodeOutput(i, 0)]
                and not any(source.is_variable for source in sources)
                and self._uses[part] == 1
                and total.node < part.node
            ):
                self.storage[part] = self.storage[total]

    def _bytes(self, entry: NodeOutput) -> int:
        return ITEM_BYTES * prod(self.step.shapes[entry.node][entry.number])

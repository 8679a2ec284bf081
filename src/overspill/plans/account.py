"""What a budget counts of a device: live bytes here; an arena, an allocator's pool or a card in `placement`.

An account counts the bytes that a plan takes. `fit` finds the plan that takes no more than a budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from overspill.core import Device, Graph
from overspill.core.budget import Budget
from overspill.core.device import ABSENT
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.core.units import format_apart

from .plan import Plan, smallest_budget, unmanaged_peak


@dataclass(frozen=True)
class Account:
    """Count live bytes: those of all tensors and workspaces, wherever they are placed."""

    device: Device
    _: KW_ONLY
    available_bytes: int | None = None
    """Bytes that the machine can give now; None: all that the device has."""
    estimated_bytes: int | None = None
    """The estimate of the card bytes that plain PyTorch takes for the job; None: those of the captured graph."""
    model_on_host: bool | None = None
    """Whether the model is in host memory before the first step; None: only if it does not fit on the device."""

    @property
    def placed_by(self) -> str | None:
        """The name of the allocator or solver that places blocks; None if live bytes count."""
        return None

    @property
    def is_steady(self) -> bool:
        """Whether a plan of fewer live bytes also takes less, or hardly more, when it is placed."""
        return True

    @property
    def is_card(self) -> bool:
        """Whether a budget is the size of a GPU's memory, the CUDA context included."""
        return False

    @property
    def has_arena(self) -> bool:
        """Whether blocks are at planned addresses in one arena."""
        return False

    @property
    def context_bytes(self) -> int:
        """Bytes of a budget that are taken before the first tensor."""
        return self.device.context_bytes if self.is_card else 0

    @property
    def of_tensors(self) -> Account:
        """The account of what a card leaves for tensors: their live bytes. Where there is no card, this one."""
        return Account(self.device) if self.is_card else self

    @property
    def of_card(self) -> Account:
        """The account of a card as a whole; where there is none, of live bytes."""
        return self if self.is_card else Account(self.device)

    @property
    def alone(self) -> Account:
        """The same without an arena, which a call that is not alone would keep whole."""
        return self

    @property
    def alternatives(self) -> tuple[Account, ...]:
        """The accounts that a search for the fastest plan tries, in order."""
        return (self,)

    @property
    def least(self) -> Account:
        """The alternative in which plans take the least; itself if none is known to."""
        return self

    @property
    def beginnings(self) -> tuple[bool, ...]:
        """Whether the model may begin in host memory: the possible answers, in the order in which plans try them."""
        return (bool(self.model_on_host),)

    # -- what a plan takes

    def placed(self, plan: Plan) -> Plan:
        """Return `plan` with its blocks placed and the bytes that they take; it may be over any budget."""
        return plan

    def with_likely(self, plan: Plan) -> Account:
        """Return the same, for plans that are much like `plan`, which was placed; that is faster."""
        del plan
        return self

    def charged(self, plan: Plan, budget_bytes: int) -> Plan:
        """Return a placed plan with the figures that this account has of it, for a budget of `budget_bytes`."""
        return plan.for_budget(budget_bytes)

    def measured(self, plan: Plan) -> Plan:
        """Return a plan, which no search has placed, with what it takes."""
        return self.charged(self.placed(plan), plan.asked_bytes)

    def unmanaged(self, graph: Graph) -> int:
        """Return the bytes that a step of `graph` takes with nothing moved or recomputed; budgets are shares of it."""
        return unmanaged_peak(graph, self.device)

    def most_unmanaged(self, graph: Graph) -> int:
        """Return the bytes that such a step takes in the worst case."""
        return self.unmanaged(graph)

    def refusal(self, budget_bytes: int, least: Plan, fewest: Plan, cause: str) -> InfeasibleBudgetError:
        """Return the error for a budget that no plan meets.

        `least` takes the fewest bytes of all plans that were placed. `fewest` has the fewest live bytes, because of
        `cause`; a card's error has more on it.
        """
        del fewest
        budget, taken = format_apart(budget_bytes, least.taken_bytes + self.context_bytes)
        return InfeasibleBudgetError(
            f"infeasible: {self.placed_by} places no plan of {least.schedule.policy} within {budget}; the least that "
            "it "
            f"took is {taken}",
            budget_bytes=budget_bytes,
            floor_bytes=least.taken_bytes + self.context_bytes,
            cause=cause,
        )

    # -- what a budget is

    @property
    def whole_bytes(self) -> int:
        """The budget where the user names none: all that the machine can give."""
        most = self.device.memory_bytes if self.is_card else self.device.usable_bytes
        return most if self.available_bytes is None else self.available_bytes

    def fixed(self, limit: Budget) -> int:
        """Return the bytes of a budget that does not depend on a step: a size, or all of the device.

        A card is never larger than the machine can give. Raises RequestError for one larger than the GPU.
        """
        asked = limit.nbytes or self.whole_bytes
        if not self.is_card:
            return asked
        if asked > self.device.memory_bytes:
            budget, has = format_apart(asked, self.device.memory_bytes)
            raise RequestError(
                f"budget={budget} is more than the {has} of {self.device.name}; leave it out, or name a larger GPU"
            )
        return min(asked, self.whole_bytes)

    def bytes_of(self, limit: Budget, graph: Graph, plan: Callable[[int], Plan]) -> int:
        """Return the bytes of any budget for a step of `graph`, which `plan` plans within a number of bytes."""
        if not limit.is_relative:
            return self.fixed(limit)
        # With all of it nothing has to move, in the worst case either.
        unmanaged = self.most_unmanaged if limit.share == 1 else self.unmanaged
        nbytes = limit.bytes_of(lambda: unmanaged(graph), 0, lambda: smallest_budget(plan))
        # A share may be more than a GPU elsewhere has: then the plan says so.
        return min(nbytes, self.whole_bytes) if self.is_card and self.device.index != ABSENT else nbytes

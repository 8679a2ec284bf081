"""Micro-batches beside one another, layer by layer: the choice, and the bits of plain accumulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.runtime.step.whole_steps import FAR, Decoder, Mlp, batch_for, beside, cross_entropy, planned_peak
from torch import nn

import overspill
from overspill.capture.compiled.whole_step import ACCUMULATE
from overspill.core import Phase, Tiers
from overspill.core.errors import StoreError
from overspill.job import Job
from overspill.models import BuiltModel
from overspill.planning.effort import at_effort
from overspill.plans.plan import Plan
from overspill.report.plan import in_python, plan_verdict, step_notes
from overspill.runtime.options import Options
from overspill.runtime.preview import preview
from overspill.runtime.transfer.host_store import HostStore


@pytest.mark.short("clipped", "updates on the host")
@pytest.mark.parametrize(
    ("count", "options"),
    [
        (3, {"clip_norm": 0.1}),
        (3, {"placement": "planned", "budget": "200KiB", "model": lambda: Decoder(width=32)}),
        (2, {"update": "host"}),
    ],
    ids=["clipped", "in an arena", "updates on the host"],
)
def test_micro_batches_beside_one_another_have_the_bits_of_plain_accumulation(
    count: int, options: dict[str, Any]
) -> None:
    with at_effort(0.05):
        pair = beside(count, **options)
        pair.train(3)
        assert pair.step.one_by_one == ""
        (plan,) = pair.step.plans
        assert plan.micro_batches == count
        assert plan.micro_batches == pair.step.plan(*pair.inputs).micro_batches
        assert pair.measured_peak() <= planned_peak(pair.step)
        # A last batch of another size has a plan of its own; one that they do not divide is refused.
        pair.train(1, tuple(x[:count] for x in pair.inputs))
        pair.train(1)
        with pytest.raises(overspill.errors.RequestError, match="equal micro-batches"):
            pair.step(*(x[: count + 1] for x in pair.inputs))
    pair.assert_same()


@pytest.mark.long
def test_too_many_run_in_rounds_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overspill.runtime.step.beside.MOST_OPS", 200)
    with at_effort(0.05):
        pair = beside(4, clip_norm=0.1, budget="54KiB")
        pair.train(3)
        last, before = pair.step.plans
        assert (last.micro_batches, last.rounds) == (2, 2)
        assert len(pair.step.plan(*pair.inputs).graph.ops) == len(last.graph.ops) > len(before.graph.ops)
        assert pair.measured_peak() <= planned_peak(pair.step)
    pair.assert_same()


class NoRoomAtFirst(HostStore):
    """Has no room for the first plan that asks."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def reserve(self, nbytes: int, tiers: Tiers | None = None) -> None:
        self.asked += 1
        if self.asked == 1:
            raise StoreError("no room")
        super().reserve(nbytes, tiers)


@pytest.mark.long
def test_without_room_in_the_store_they_run_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    store = NoRoomAtFirst()
    monkeypatch.setattr("overspill.runtime.transfer.ops.make_store", lambda *_: store)
    with at_effort(0.05):
        pair = beside(3)
        pair.train(2)
    assert pair.step.one_by_one == "no room"
    assert [plan.micro_batches for plan in pair.step.plans] == [1, 1]
    pair.assert_same()
    pair.step.close()


def test_a_weight_comes_once_for_all_micro_batches_in_forward_and_once_in_backward() -> None:
    with at_effort(0.05):
        pair = beside(3)
        plan = pair.step.plan(*pair.inputs)
    ops, tensors = plan.graph.ops, plan.graph.tensors
    (weight,) = (t.id for t in tensors if t.name == "layers.2.up.weight")
    reads = [op.id for op in ops if weight in op.reads and op.phase is not Phase.UPDATE]
    others = [op.layer for op in ops[reads[0] : reads[2]] if not op.layer.startswith("layers.2.")]
    assert len(reads) == 6
    assert others == []  # between its first reader and its last in forward
    # Each gradient is summed in the order of the micro-batches, and never leaves between two of them.
    sums = [op for op in ops if op.name == ACCUMULATE]
    made_by = {op.writes[0]: tensors[op.writes[0]] for op in sums}
    assert not any(total.persistent for total in made_by.values())
    assert len(sums) == 3 * len(made_by)


def assert_of_the_last(plan: Plan, count: int, why: str) -> None:
    """A reader sees that the plan is of the last micro-batch, why, and the line that trains so."""
    assert f"for the last of {count} micro-batches" in str(plan_verdict(plan))
    assert why in " ".join(step_notes(plan))
    assert f"accumulate={count}" in in_python(plan, inductor=False)[-1].text


def test_a_plan_of_a_job_is_that_of_all_its_micro_batches_and_says_so() -> None:
    built = BuiltModel("decoder", Decoder(), lambda size: batch_for(Decoder(), size), cross_entropy)
    with at_effort(0.05):
        job = Job(lambda: built, 2, "adamw", accumulate=3)
        plan = preview(job, Options("60KiB", device=FAR, whole_step=True))
        apart = preview(job, Options("1GiB", device=FAR, whole_step=True))
        alone = preview(replace(job, accumulate=1), Options("60KiB", device=FAR, whole_step=True))
    assert plan.micro_batches == 3
    assert alone.step_seconds < plan.step_seconds < 3 * alone.step_seconds
    assert "3 micro-batches, layer by layer" in str(plan_verdict(plan))
    assert "accumulate=3" in in_python(plan, inductor=False)[0].text
    assert_of_the_last(apart, 3, "one after another they take")


class Still(Mlp):
    """One with batch norm, and nothing random."""

    def __init__(self) -> None:
        super().__init__()
        self.drop.p = 0.0


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "draws": (lambda: Decoder(0.1), {}, "random numbers"),
    "statistics": (Still, {}, "norm.running"),
    "policy": (Decoder, {"policy": "window"}, "window"),
    "all in memory": (Decoder, {"budget": "1GiB"}, "one after another they take"),
}


@pytest.mark.parametrize(("model", "options", "why"), REFUSED.values(), ids=REFUSED)
def test_where_they_may_not_or_it_gains_nothing_they_run_one_after_another(
    model: Callable[[], nn.Module], options: dict[str, Any], why: str
) -> None:
    with at_effort(0.02):
        pair = beside(2, model, **{"budget": "smallest", **options})
        pair.train(2)
    assert why in pair.step.one_by_one
    assert len(pair.step.plans) == 2
    assert_of_the_last(pair.step.plan(*pair.inputs), 2, why)
    pair.assert_same()

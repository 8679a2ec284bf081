"""The comparison's rows and its table: figures that agree with the plans, and remarks where the table has no room."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.simulate.graphs import DEVICE, Build, Layer, network

from overspill.core import Device, Graph, LayerType, Phase, TensorKind
from overspill.core.device import ABSENT
from overspill.core.units import format_bytes
from overspill.placement.card import Card
from overspill.plans.comparison import Row, compare
from overspill.plans.plan import make_plan
from overspill.report.compare import FIGURES, compare_table, explanation, remarks, reserved_by_pytorch, row_figures
from overspill.report.page import Page, Verdict
from overspill.report.terminal import as_text

GRAPH = network([Layer(1 << 22, LayerType.CONV, flops=10**8) for _ in range(9)], 1 << 22)
CAPACITY = DEVICE.memory_bytes


def sized(memory_bytes: int) -> Device:
    return replace(DEVICE, memory_bytes=memory_bytes)


def figures(*policies: str, budget_bytes: int = CAPACITY) -> list[dict[str, Any]]:
    return [row_figures(row, sized(CAPACITY)) for row in compare(GRAPH, DEVICE, policies, budget_bytes)]


def shown(rows: list[dict[str, Any]], bound: float | None = None, device: Device = DEVICE) -> str:
    notes = (*explanation(rows, device, 1 << 30, bound), *remarks(rows, device))
    return as_text(Page("the title", Verdict("", None), (compare_table(rows),), notes))


def test_a_rows_figures_are_its_plans() -> None:
    (row,) = figures("vdnn-all")
    plan = make_plan(GRAPH, DEVICE, "vdnn-all", CAPACITY)
    assert row.keys() == {"policy", "fits", "error", "floor_bytes", "pool", "crowded", "chosen", "note", *FIGURES}
    assert (row["max_bytes"], row["offloaded_bytes"]) == (plan.peak_bytes, plan.offloaded_bytes)
    assert row["average_bytes"] == round(plan.timeline.average_bytes) <= row["max_bytes"]
    assert row["step_seconds"] == plan.step_seconds
    assert row["overlapped_seconds"] + row["exposed_transfer_seconds"] > 0
    assert sum(row["stall_seconds"].values()) == row["exposed_transfer_seconds"]
    assert row["peak_tensors"][0]["size_bytes"] == 1 << 22


def test_where_the_card_is_known_the_row_has_what_it_must_have() -> None:
    budget = (320 << 20) + 3 * GRAPH.bytes_of(TensorKind.ACTIVATION) // 4  # of it a segment of 20 MiB for handles
    gpu = replace(DEVICE, index=ABSENT, context_bytes=300 << 20)
    card = Card(gpu, (8 << 20,))
    rows = compare(GRAPH, gpu, ("auto", "in-core"), budget, account_for=lambda _: card)
    for row in rows:
        found = row_figures(row, gpu)
        assert row.plan is not None
        assert found["reserved_bytes"] == row.plan.reserved_bytes >= found["max_bytes"]
        assert found["device_bytes"] == found["reserved_bytes"] + (300 << 20)
        assert 0 < found["fragmentation"] < 1
    assert [(row.policy, row.fits) for row in rows] == [("auto", True), ("in-core", False)]
    assert rows[0].plan is not None
    assert rows[0].plan.device_bytes is not None
    assert rows[0].plan.device_bytes <= budget
    assert rows[1].least_bytes == rows[1].plan.device_bytes  # type: ignore[union-attr]
    assert rows[0].plan.peak_bytes < make_plan(GRAPH, gpu, "auto", budget - (300 << 20)).peak_bytes
    (impossible,) = compare(GRAPH, gpu, ("auto",), 301 << 20, account_for=lambda _: card)
    assert impossible.plan is None
    assert impossible.least_bytes is not None
    assert impossible.least_bytes > 301 << 20
    assert "a card of 301.0 MiB is too small" in (impossible.error or "")
    assert "Card is what the GPU must have" in " ".join(shown([row_figures(r, gpu) for r in rows], device=gpu).split())


def test_a_row_without_a_plan_has_the_same_keys() -> None:
    (row,) = figures("auto", budget_bytes=1)
    assert row.keys() == {"policy", "fits", "error", "floor_bytes", "pool", "crowded", "chosen", "note", *FIGURES}
    assert {row[name] for name in FIGURES} == {None}
    assert row["fits"] is False
    assert row["floor_bytes"] > 1


def holes() -> Graph:
    """Two blocks of 12 MiB are freed around one that stays, and then 24 MiB are needed: no hole is large enough."""
    build = Build()
    start = build.tensor(512, TensorKind.INPUT, "x", persistent=True)
    first, middle, last, large = (build.tensor(m << 20, name=f"{m} MiB") for m in (12, 13, 12, 24))
    build.op((start,), (first, middle, last))
    build.op((first, last), ())
    build.op((middle,), (large,), Phase.BACKWARD)
    build.op((large, middle), (), Phase.BACKWARD)
    return build.graph()


def test_fragmentation_is_the_share_of_what_is_reserved_that_no_tensor_needs() -> None:
    plan = make_plan(holes(), DEVICE, "liveness", CAPACITY)
    place = reserved_by_pytorch(plan, CAPACITY)
    assert place.fits
    assert plan.peak_bytes == (37 << 20) + 512
    assert place.reserved_bytes > 60 << 20
    assert place.fragmentation == 1 - plan.peak_bytes / place.reserved_bytes


def test_an_allocator_gives_back_what_it_caches_before_it_runs_out_of_memory() -> None:
    plan = make_plan(holes(), DEVICE, "liveness", CAPACITY)
    tight = reserved_by_pytorch(plan, 44 << 20)
    assert tight.fits
    assert tight.reserved_bytes <= 44 << 20
    short = reserved_by_pytorch(plan, 36 << 20)
    assert not short.fits
    assert short == replace(reserved_by_pytorch(plan, CAPACITY), fits=False, expandable_fits=False)


def leftover() -> Graph:
    """A block of 12 MiB in the place of one of 30, whose segment can not be given back; then 20 MiB are needed."""
    build = Build()
    start = build.tensor(512, TensorKind.INPUT, "x", persistent=True)
    first, second, third = (build.tensor(m << 20, name=f"{m} MiB") for m in (30, 12, 20))
    build.op((start,), (first,))
    build.op((first,), ())
    build.op((start,), (second,))
    build.op((second,), (third,), Phase.BACKWARD)
    build.op((third, second), (), Phase.BACKWARD)
    return build.graph()


def test_expandable_segments_may_do_where_a_segment_can_not_be_given_back() -> None:
    place = reserved_by_pytorch(make_plan(leftover(), DEVICE, "liveness", CAPACITY), 46 << 20)
    assert not place.fits
    assert place.expandable_fits
    assert place.reserved_bytes > 50 << 20


def test_recomputed_ops_without_flops_are_counted() -> None:
    (row,) = figures("checkpoint")
    assert row["recomputed_ops"] > 0
    assert f"{row['recomputed_ops']} ops" in shown([row | {"recomputed_flops": 0}])
    assert "FLOP" in shown([row])
    assert "FLOP" not in shown(figures("liveness"))


def test_the_table_has_every_column_in_120_characters() -> None:
    text = shown(figures("liveness", "vdnn-all", "checkpoint", "auto:m"))
    assert "…" not in text
    for word in ("policy", "slowdown", "fragm.", "recomputed", "vdnn-all", "FLOP", "the title"):
        assert word in text
    assert "Times are simulated for toy, not measured" in " ".join(text.split())
    assert format_bytes(make_plan(GRAPH, DEVICE, "liveness", CAPACITY).peak_bytes) in text


def test_a_bound_is_shown_where_there_is_one() -> None:
    rows = figures("liveness")
    said = "Lower bound by relaxation within 1.0 GiB: 1.25 s."
    assert said in " ".join(shown(rows, 1.25).split())
    assert "Lower bound" not in shown(rows)


def test_what_the_table_has_no_room_for_is_said_below() -> None:
    impossible = Row("auto", None, False, 1.0, "infeasible: below the minimum of policy [auto]", 4096)
    plan = make_plan(holes(), DEVICE, "liveness", CAPACITY)
    crowded = Row("liveness", plan, True, plan.step_seconds)
    text = " ".join(shown([row_figures(impossible, sized(CAPACITY)), row_figures(crowded, sized(36 << 20))]).split())
    assert "auto: infeasible: below the minimum of policy [auto]" in text
    assert "out of memory" in text
    assert "runs out of memory on toy under liveness; with expandable_segments:True it does too." in text

"""Which of Inductor's forward-backward partitions are made, and that kernels of the chosen one alone are compiled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import sympy
import torch
from torch import nn
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import sizevars
from torch._inductor.utils import fresh_cache
from torch.utils._sympy.functions import FloorDiv

import overspill
from overspill.capture.compiled.graph import Captured
from overspill.core import Graph
from overspill.core.errors import InfeasibleBudgetError
from overspill.core.progress import progress_to
from overspill.plans.fit import Fit
from overspill.plans.plan import Plan
from overspill.pytorch.inductor import work_kept
from overspill.runtime.compiled import partitions
from overspill.runtime.compiled.partitions import Partitioned

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


def captured(partition: float) -> Captured:
    graph = Graph("step", (), ())
    return cast("Captured", SimpleNamespace(graph=graph, partition=partition))


def fake_plan(of: Captured, seconds: float) -> Plan:
    return cast("Plan", SimpleNamespace(step_seconds=seconds, slowdown=seconds, in_core_seconds=1.0, graph=of.graph))


def fake_fit(of: Captured, plan: Callable[[], Plan], hoped: float | None, refused_below: int | None = None) -> Fit:
    return cast("Fit", SimpleNamespace(plan=plan, hoped=hoped and fake_plan(of, hoped), refused_below=refused_below))


@pytest.mark.parametrize(
    ("times", "chosen", "made"),
    [
        ([1.01, 0.5], 1.01, 1),  # good enough
        ([1.5, 1.2, 1.3, 0.1], 1.2, 3),  # as long as it gets faster
        ([None, None, 3.0, 2.0, 2.5], 2.0, 5),
        ([None, 2.0], 2.0, 2),
    ],
)
def test_other_partitions_are_made_as_long_as_they_help(
    times: list[float | None], chosen: float, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "_compared", lambda usual, plan, times: plan)
    begun = []

    def programs() -> Iterator[Captured]:
        for number in range(len(times)):
            begun.append(number)
            yield captured(float(number))

    def search(of: Captured) -> Fit:
        seconds = times[int(of.partition)]

        def plan() -> Plan:
            if seconds is None:
                raise InfeasibleBudgetError("no", budget_bytes=1, floor_bytes=10 - int(of.partition), cause="")
            return fake_plan(of, seconds)

        return fake_fit(of, plan, seconds)

    assert Partitioned(programs()).best_plan(search).step_seconds == chosen
    assert len(begun) == made


@pytest.mark.parametrize(
    ("hoped", "times", "chosen", "made"),
    [
        (1.01, [1.1, 1.0], 1.0, [0, 1]),  # worth it
        (1.5, [1.6, 1.2, 1.3], 1.2, [1, 2]),  # it waits in vain
        (1.5, [1.55, 1.6, 1.0], 1.55, [1, 0]),
        (1.5, [1.7, 1.6, 1.0], 1.6, [1, 0]),
        (1.5, [None, 1.6, 1.0], 1.6, [1, 0]),
        (1.5, [1.6, None], 1.6, [1, 0]),
        (1.5, [1.6], 1.6, [0]),
        (1.5, [1.6, None, 1.2], 1.6, [1, 0]),  # one without a plan helps no more than a slower one
        (1.5, [None, None, 1.2], 1.2, [1, 0, 2]),
        (None, [None, 1.6, 1.3], 1.3, [1, 2]),
        (None, [1.4, None], 1.4, [1, 0]),
    ],
)
def test_the_usual_plan_is_made_last_where_it_is_known_to_be_slow(
    hoped: float | None, times: list[float | None], chosen: float, made: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "_compared", lambda usual, plan, times: plan)
    worked_out = []

    def search(of: Captured) -> Fit:
        number = int(of.partition)

        def plan() -> Plan:
            worked_out.append(number)
            if (seconds := times[number]) is None:
                raise InfeasibleBudgetError("no", budget_bytes=1, floor_bytes=1, cause="")
            return fake_plan(of, seconds)

        return fake_fit(of, plan, hoped)

    captures = [captured(float(number)) for number in range(len(times))]
    assert (Partitioned(captures).best_plan(search).step_seconds, worked_out) == (chosen, made)


def test_a_partition_without_a_plan_may_have_one_where_weights_move(monkeypatch: pytest.MonkeyPatch) -> None:
    class Moving(SimpleNamespace):
        pass

    for name, kind in {"CapturedCutStep": Moving, "Captured": SimpleNamespace}.items():
        monkeypatch.setattr(partitions, name, kind)
    monkeypatch.setattr(partitions, "_compared", lambda usual, plan, times: plan)
    times: dict[int, float] = {}
    captures: list[Captured] = []
    for partition, seconds in ((1.0, 2.0), (0.75, 1.5), (0.5, 1.7)):
        staying, moving = (kind(graph=Graph("step", (), ()), partition=partition) for kind in (SimpleNamespace, Moving))
        captures += cast("list[Captured]", [staying, moving])
        times[id(moving)] = seconds  # weights that stay do not fit

    def search(of: Captured) -> Fit:
        def plan() -> Plan:
            if id(of) not in times:
                raise InfeasibleBudgetError("no", budget_bytes=1, floor_bytes=1, cause="")
            return fake_plan(of, times[id(of)])

        return fake_fit(of, plan, times.get(id(of)))

    assert Partitioned(captures).best_plan(search).step_seconds == 1.5


@pytest.mark.parametrize(("hopeless", "worked_out"), [(False, [0.3, 0.35, 0.7, 1.0]), (True, [0.3, 0.35])])
def test_where_no_partition_has_a_plan_the_least_floor_is_named(hopeless: bool, worked_out: list[float]) -> None:
    made = []

    def search(of: Captured) -> Fit:
        floor_bytes = int(100 * of.partition)

        def plan() -> Plan:
            made.append(of.partition)
            raise InfeasibleBudgetError(
                "no", budget_bytes=1, floor_bytes=floor_bytes + (10 if of.partition == 0.3 else 0), cause=""
            )

        return fake_fit(of, plan, None, floor_bytes if hopeless else None)

    said: list[tuple[str, int]] = []
    with pytest.raises(InfeasibleBudgetError) as found, progress_to(lambda now: said.append((now, len(made)))):
        Partitioned(map(captured, (1.0, 0.3, 0.7, 0.35))).best_plan(search)
    assert found.value.floor_bytes == 35, "0.3 needs 40 when it is placed"
    assert sorted(made) == worked_out
    # A bound is known before any plan, where none can fit.
    least, plans = (30, 0) if hopeless else (35, len(made))
    assert said == [(f"no plan takes less than {least} B; looking for a budget that works", plans)]


@pytest.mark.long
def test_inductor_simplifies_each_index_expression_once(monkeypatch: pytest.MonkeyPatch) -> None:
    strides = sizevars.stride_at_vec_range.__wrapped__
    variable = sympy.Symbol("x0", integer=True, nonnegative=True)
    indices = [size * FloorDiv(variable, 16) + variable for size in range(2, 152)]
    simplified, simplify = [], sympy.simplify
    monkeypatch.setattr(sympy, "simplify", lambda expression: simplified.append(expression) or simplify(expression))
    with work_kept():
        kept = [strides(index, variable, 16) for index in indices]
    begun = len(simplified)
    with work_kept():
        assert [strides(index, variable, 16) for index in indices] == kept
    assert len(simplified) == begun
    assert [strides(index, variable, 16) for index in indices[::10]] == kept[::10]
    assert len(simplified) > begun, "outside, few are kept"


@pytest.mark.long
def test_partitions_share_one_trace_and_only_kernels_of_the_one_that_runs_are_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout()) for _ in range(3)))
    traces, trace = [], graph_compile.aot_dispatch_autograd_graph
    traced = wraps(trace)(lambda *args, **kwargs: (traces.append(args), trace(*args, **kwargs))[1])
    monkeypatch.setattr(graph_compile, "aot_dispatch_autograd_graph", traced)

    def trained(partition: float | None) -> tuple[float | None, int, list[bytes]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model.zero_grad()
        traces.clear()
        with fresh_cache():
            call = overspill.compile(model, budget=0.7, backend="inductor", store="host", partition=partition)
            call(torch.randn(512, 64)).sum().backward()
            compiled = len(list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.main.cpp")))
        assert len(traces) == 1
        bits = [p.grad.numpy().tobytes() for p in model.parameters() if p.grad is not None]
        return call.overspill.partitions[0], compiled, bits

    chosen, *found = trained(None)
    assert chosen != 1.0, "the usual partition is tried before"
    assert trained(chosen) == (chosen, *found)
    assert all(found)

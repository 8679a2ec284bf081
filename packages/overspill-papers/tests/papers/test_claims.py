"""What the papers say, as data: every claim is complete, and one is computed to the end."""

from __future__ import annotations

from math import factorial

import pytest

from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill_papers.papers import PAPERS, Claim, Lab, Paper, Result, Workers, claims_of, paper_named, results

every_paper = pytest.mark.parametrize("paper", PAPERS, ids=[paper.name for paper in PAPERS])


def claim(value: float = 100.0, bound: str = "=", ours: float = 0.0, note: str = "") -> Claim:
    return Claim("p", "Table 1", "what", "quote", "1", value, "GB", lambda _: ours, note, bound)


@every_paper
def test_every_claim_is_complete_and_none_stands_twice(paper: Paper) -> None:
    claims = claims_of(paper)
    assert claims
    for one in claims:
        assert one.paper == paper.name
        assert one.value > 0
        assert one.bound in "=<>"
        assert all((one.where, one.what, one.quote, one.section, one.unit))
    assert len({(one.where, one.what) for one in claims}) == len(claims)


@pytest.mark.parametrize(
    ("value", "bound", "ours", "agrees"),
    [
        (100, "=", 100, True),
        (100, "=", 115, True),
        (100, "=", 85, True),
        (100, "=", 116, False),
        (100, "=", 84, False),
        (100, ">", 300, True),
        (100, ">", 100, True),
        (100, ">", 99, False),
        (100, "<", 10, True),
        (100, "<", 101, False),
    ],
)
def test_a_figure_agrees_within_15_percent_and_a_limit_is_kept_or_not(
    value: float, bound: str, ours: float, agrees: bool
) -> None:
    result = Result(claim(value, bound), ours)
    assert result.ratio == ours / value
    assert result.agrees is agrees


@pytest.mark.parametrize(
    ("value", "bound", "ours", "without", "counts"),
    [
        (100, "=", 100, 110, False),
        (100, "=", 100, 120, True),
        (100, "=", 120, None, True),
        (1, ">", 2, 1.5, False),
        (1, ">", 2, 1, True),
        (1, "<", 0.5, None, True),
    ],
)
def test_a_row_counts_if_it_fails_or_taking_the_mechanism_out_turns_it(
    value: float, bound: str, ours: float, without: float | None, counts: bool
) -> None:
    assert Result(claim(value, bound), ours, without=without).counts is counts


def test_a_policy_without_a_schedule_is_a_result_too() -> None:
    def compute(lab: Lab) -> float:
        raise InfeasibleBudgetError("no   room", budget_bytes=1, floor_bytes=2, cause="")

    (result,) = results((Claim("p", "T", "w", "q", "1", 1.0, "x", compute),), Lab())
    assert (result.ours, result.ratio, result.agrees, result.trouble) == (None, None, False, "no room")


@pytest.mark.long
def test_rows_come_in_order_though_processes_make_what_they_need() -> None:
    def claim_of(number: int) -> Claim:
        return Claim("p", "T", str(number), "q", "1", 1.0, "x", lambda lab: lab.workers.made("", factorial, number))

    begun: list[str] = []
    with Workers(begun.append) as workers:
        found = results(tuple(map(claim_of, (5, 4, 5))), Lab(workers=workers))
        assert [(result.claim.what, result.ours) for result in found] == [("5", 120), ("4", 24), ("5", 120)]
    assert len(begun) == 2


@pytest.mark.parametrize("name", ["vdnn", "VDNN", "micro16", "dymem", "hpdc20", "window", "adaptive-window"])
def test_a_paper_is_found_by_its_name_and_aliases(name: str) -> None:
    assert paper_named(name) in PAPERS


def test_an_unknown_paper_or_table_names_those_that_exist() -> None:
    with pytest.raises(RequestError, match=r"'vdnn'.*dymem, window"):
        paper_named("vdn")
    with pytest.raises(RequestError, match=r"Fig\. 13, .*Table 1"):
        claims_of(paper_named("dymem"), "Table 9")


@pytest.mark.parametrize("spelling", ["Fig. 11", "fig11", "figure 11", "FIG 11"])
def test_a_figure_may_be_spelled_in_several_ways(spelling: str) -> None:
    found = claims_of(paper_named("vdnn"), spelling)
    assert {one.where for one in found} == {"Fig. 11"}


def test_what_vdnn_says_of_alexnets_memory_is_found() -> None:
    lab = Lab()
    found = {r.claim.what: r for r in results(claims_of(paper_named("vdnn"), "Fig. 1")[2:3], lab)}
    assert found["AlexNet (128), baseline"].agrees

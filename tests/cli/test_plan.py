"""`overspill plan --report`: a page of the plan, and one where there is none."""

from __future__ import annotations

from pathlib import Path

from tests.cli.commands import Overspill


def test_a_page_is_written_where_the_plan_fits_and_where_none_does(overspill: Overspill) -> None:
    done = overspill("plan nets:shallow --batch 2 --report page.html")
    assert (done.code, "report saved to page.html" in done.out) == (0, True)
    text = Path("page.html").read_text(encoding="utf-8")
    assert '"text":"Fits in ' in text
    assert '"is":"Step"' in text
    done = overspill("plan nets:shallow --batch 2 --budget 1KiB --report none.html")
    assert (done.code, done.out) == (1, "")
    text = Path("none.html").read_text(encoding="utf-8")
    assert '"text":"Does not fit in 1.0 KiB"' in text
    assert '"label":"the least that works"' in text


def test_a_report_that_can_be_no_page_is_refused_before_work_begins(overspill: Overspill) -> None:
    for name, why in (("page.pdf", "must end in .html"), ("no/page.html", "there is no directory no")):
        done = overspill(f"plan nets:shallow --batch 2 --report {name}")
        assert (done.code, done.out) == (2, "")
        assert why in done.error
    assert not Path("page.pdf").exists()

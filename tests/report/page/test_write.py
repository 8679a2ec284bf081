"""A page is one file, whose content comes out of it as it went in."""

from __future__ import annotations

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from overspill.core.errors import RequestError
from overspill.plans.plan import Plan
from overspill.report.page import Column, Page, Table, Unit, Verdict, page_text, write_page
from overspill.report.page.encode import MOST_LETTERS, _column, visible
from overspill.report.page.step import step

NAMES = (
    "</script><b>",
    "<!--<script>",
    "a&amp;b",
    "\u2028\u2029",
    "right\u202eleft",
    "$title ${x}",
    "\ud800",
    "'\"\\",
    "\0",
)


def content(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="content">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found.group(1))


def table(*names: str) -> Page:
    return Page("a title", Verdict("well", good=True), (Table("names", (Column("name"),), tuple((n,) for n in names)),))


def test_names_come_out_as_they_went_in_with_what_cannot_be_seen_spelled_out() -> None:
    text = page_text(table(*NAMES))
    text.encode()
    (section,) = content(text)["sections"]  # type: ignore[misc]
    assert [row[0] for row in section["rows"]] == [visible(name) for name in NAMES]
    assert visible("a\u202eb") == "a\\u202eb"
    assert len(visible("x" * 10_000)) == MOST_LETTERS


def test_nothing_is_fetched_and_only_two_scripts_are_there() -> None:
    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, dict[str, str | None]]] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.seen.append((tag, dict(attrs)))

    parser = Tags()
    parser.feed(page_text(table(*NAMES)))
    assert [tag for tag, _ in parser.seen].count("script") == 2
    links = [value for _, attributes in parser.seen for name, value in attributes.items() if name in ("src", "href")]
    assert links == ["#report"]
    policies = [a["content"] for _, a in parser.seen if a.get("http-equiv") == "Content-Security-Policy"]
    assert str(policies[0]).startswith("default-src 'none'")


def test_short_columns_are_lists(plan: Plan) -> None:
    made = step(plan)
    (section,) = content(page_text(Page("t", Verdict("v", None), (made,))))["sections"]  # type: ignore[misc]
    assert section["runs"][0]["stall_begun"] == made.runs[0].stall_begun.tolist()


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [(np.arange(-50, 50), "i4"), (np.arange(100) << 32, "f8"), (np.linspace(0, 1, 100), "f8")],
    ids=["small", "large", "fractions"],
)
def test_long_columns_are_packed_in_the_least_that_holds_them(numbers: np.ndarray, kind: str) -> None:
    packed = _column(numbers)
    assert packed["type"] == kind
    assert np.array_equal(np.frombuffer(base64.b64decode(packed["base64"]), f"<{kind}"), numbers)


def test_numbers_that_json_does_not_have_are_unknown() -> None:
    page = Page(
        "t", Verdict("v", None), (Table("t", (Column("x", Unit.RATIO),), ((float("nan"),), (float("inf"),), (1.5,))),)
    )
    (section,) = content(page_text(page))["sections"]  # type: ignore[misc]
    assert section["rows"] == [[None], [None], [1.5]]


def test_only_a_page_is_written_and_only_where_it_can_be(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"in \.html"):
        write_page(tmp_path / "page.pdf", table())
    with pytest.raises(RequestError, match="cannot write"):
        write_page(tmp_path / "absent" / "page.html", table())
    assert list(tmp_path.iterdir()) == []

"""The docs name what there is: links lead somewhere, the site has each page, and the glossary's terms stand in their files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
INDEX = ROOT / "docs" / "index.md"
SOURCES = (ROOT / "src" / "overspill", ROOT / "packages" / "overspill-papers" / "src" / "overspill_papers")
ENTRY = re.compile(r"^- \*\*(.+?)\*\* \(`([\w./]+)`(?:, `(\w+)`)?\): ")


MOST_WORDS = 30_900
"""Of all pages of docs/, outside of code and transcripts."""
MOST_WORDS_FOR_USERS = 15_000
"""Of those below Learn, More tasks and Look up, without the glossary."""


def plain(text: str) -> str:
    """`text` without case and without what is between words."""
    return re.sub(r"[\W_]", "", text.lower())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_to_a_file_leads_there(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    assert [target for target in targets if not (page.parent / target).exists()] == []


def navigation() -> dict[str, list[Path]]:
    """The pages of the site below each caption."""
    trees = re.findall(
        r"^```{toctree}\n:caption: (.+?)\n:hidden:\n(.*?)^```$",
        INDEX.read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    return {caption: [(INDEX.parent / f"{name}.md").resolve() for name in tree.split()] for caption, tree in trees}


def test_the_navigation_has_each_page_of_the_docs_once() -> None:
    pages = [page for part in navigation().values() for page in part]
    assert len(pages) == len(set(pages))
    assert [page for page in pages if not page.exists()] == []
    assert {*(ROOT / "docs").rglob("*.md")} - {*pages} == {INDEX}


def glossary() -> list[tuple[str, str, str]]:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    entries = [ENTRY.match(line) for line in text.splitlines() if line.startswith("- ")]
    assert all(entries)
    return [(found.group(1), found.group(2), found.group(3) or found.group(1)) for found in entries if found]


def test_the_glossary_is_in_the_order_of_the_alphabet_and_has_each_term_once() -> None:
    terms = [term.lower() for term, _, _ in glossary()]
    assert terms == sorted(set(terms))


@pytest.mark.parametrize(("term", "file", "name"), glossary())
def test_a_term_of_the_glossary_stands_in_its_file(term: str, file: str, name: str) -> None:
    (path,) = filter(Path.exists, (root / file for root in (ROOT, *SOURCES)))
    assert plain(name) in plain(path.read_text(encoding="utf-8")), term


def test_the_files_that_the_glossary_names_are_there() -> None:
    named = re.findall(r"`((?:\w+/)+\w+\.(?:py|hpp))`", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"))
    missing = [name for name in named if not any((root / name).exists() for root in (ROOT, *SOURCES))]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_tests_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"\btests/[\w/]+\.py", page.read_text(encoding="utf-8"))
    assert [name for name in named if not any((root / name).exists() for root in (ROOT, SOURCES[1].parents[1]))] == []


def prose(page: Path) -> str:
    """The page's text without comments, code and pictures; a code span is one word, a link what it shows."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"^(`{3,}|:{3,}).*?^\1\s*$", "\n", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"`[^`]{0,200}`", "CODE", text)
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)


def lengths(page: Path) -> list[int]:
    """The words of each sentence of the page's paragraphs and lists."""
    text = re.sub(r"^(\||#+ ).*$", "\n", prose(page), flags=re.MULTILINE)
    found = []
    for paragraph in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s+", text.replace("**", "")):
        sentences = re.split(r'(?<=[.!?])[)"*]*\s+(?=[A-Z“"(*0-9`])', " ".join(paragraph.split()))
        found += [len(sentence.split()) for sentence in sentences if len(sentence.split()) > 1]
    return found


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_sentences_are_short(page: Path) -> None:
    """At most 17 words in the mean, 6 % of more than 30, and none of more than 45."""
    words = lengths(page)
    assert sum(words) <= 17 * len(words)
    assert sum(n > 30 for n in words) <= 0.06 * len(words)
    assert max(words) <= 45


def count(pages: Iterable[Path]) -> int:
    return sum(bool(re.search(r"\w", word)) for page in pages for word in prose(page).split())


def test_the_docs_do_not_grow() -> None:
    assert count((ROOT / "docs").rglob("*.md")) <= MOST_WORDS
    parts = navigation()
    users = {*parts["Learn"], *parts["More tasks"], *parts["Look up"]} - {ROOT / "docs" / "glossary.md"}
    assert count(users) <= MOST_WORDS_FOR_USERS

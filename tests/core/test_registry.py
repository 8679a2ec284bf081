"""The registry: names of ours, names that other packages add, and what is said of unknown ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from overspill.core.errors import RequestError
from overspill.core.registry import Registry, did_you_mean


def colours() -> Registry[int]:
    return Registry("colour", "colours", {"red": 1, "green": 2})


def test_what_is_registered_is_found_and_listed_in_order() -> None:
    registry = colours()
    registry.register("blue", 3)
    assert list(registry) == ["red", "green", "blue"]
    assert (registry.named("blue"), len(registry), "blue" in registry) == (3, 3, True)


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(RequestError, match="'red' already"):
        colours().register("red", 7)


def test_an_unknown_name_says_what_was_meant_and_what_there_is() -> None:
    with pytest.raises(RequestError, match=r"'gren'; .* 'green'\? .* red,"):
        colours().named("gren")
    with pytest.raises(RequestError, match=r"'x'\. Colours: red"):
        colours().named("x")


def test_a_name_of_overspill_papers_says_what_to_install_where_that_is_not_here() -> None:
    registry = Registry("colour", "colours", {"red": 1}, papers=("sepia", "red"))
    with pytest.raises(RequestError, match=r"'sepia' .*\[papers\]"):
        registry.named("sepia")
    assert registry.named("red") == 1
    assert "sepia" not in registry


def test_several_guesses_are_joined() -> None:
    assert (
        did_you_mean("resnet5", ["resnet50", "resnet152", "vgg16"], most=2)
        == "; did you mean 'resnet50' or 'resnet152'?"
    )
    # Of names with as few mistakes, the first.
    assert did_you_mean("Adamv", ["adamw", "adam"]) == "; did you mean 'adamw'?"
    assert did_you_mean("rtx4900", ["rtx4060", "rtx4090"]) == "; did you mean 'rtx4090'?"  # two letters are swapped


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that is installed with entry points for two colours, one of which does not exist."""
    (tmp_path / "more_colours.py").write_text("teal = 9\n")
    info = tmp_path / "more_colours-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: more-colours\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[overspill.colours]\nteal = more_colours:teal\nbad = more_colours:missing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("installed")
def test_installed_packages_add_names_through_entry_points() -> None:
    registry = colours()
    assert list(registry) == ["red", "green", "teal", "bad"]
    assert list(Registry("colour", "colours", {"red": 1}, by_name=True)) == ["bad", "red", "teal"]
    assert registry.named("teal") == 9
    with pytest.raises(RequestError, match=r"'bad' .* more-colours .* AttributeError"):
        registry.named("bad")
    with pytest.raises(RequestError, match="already"):
        registry.register("teal", 1)

"""Every noun is frozen, and survives being saved and loaded."""

from dataclasses import FrozenInstanceError, fields, is_dataclass
from enum import EnumType
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.core import Block, Device, Graph, Instruction, Layout, Schedule, Timeline, Trace, Verb
from overspill.core.errors import RequestError
from overspill.core.saved import Saved

NOUNS: tuple[type[Saved], ...] = (Graph, Device, Schedule, Trace, Layout, Timeline)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-1, 2**62),  # what a byte count may be, and no position; JSON numbers carry it exactly
    float: st.floats(0, 1e6),
    str: st.text(max_size=8),
    bool: st.booleans(),
    NoneType: st.none(),
}


@cache
def drawn(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type; of a dataclass with every field drawn, so that a new field is saved and read here too."""
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, EnumType):
        return st.sampled_from(hint)
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{field.name: drawn(hints[field.name]) for field in fields(hint)})
    kind, inner = get_origin(hint), get_args(hint)
    if kind is tuple and inner[-1] is ...:
        return st.lists(drawn(inner[0]), max_size=4).map(tuple)
    if kind is tuple:
        return st.tuples(*map(drawn, inner))
    if kind is dict:
        return st.dictionaries(*map(drawn, inner), max_size=3)
    assert kind is UnionType, f"a noun has a field of {hint}, which is not drawn here"
    return st.one_of(*map(drawn, inner))


every_noun = pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.__name__)


@every_noun
@given(data=st.data())
def test_a_noun_equals_itself_after_json(noun: type[Saved], data: st.DataObject) -> None:
    example = data.draw(drawn(noun))
    assert noun.from_json(example.to_json()) == example


few = settings(max_examples=5)


@every_noun
@few
@given(data=st.data())
def test_a_noun_is_frozen(noun: type[Saved], data: st.DataObject) -> None:
    example = data.draw(drawn(noun))
    for field in fields(example):  # type: ignore[arg-type]  # every noun is a dataclass
        with pytest.raises(FrozenInstanceError):
            setattr(example, field.name, None)


def test_a_noun_with_names_in_any_script_survives_a_file(tmp_path: Path) -> None:
    trace = Trace((Block(0, 0, 2, 10, "Schicht ß 層"),))
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json") == trace
    assert Trace.load(str(tmp_path / "trace.json")) == trace


def test_derived_views_are_not_saved() -> None:
    fresh, used = (Schedule("x", (Instruction(Verb.RUN, 0),)) for _ in range(2))
    assert used.counts[Verb.RUN] == 1
    assert used.to_json() == fresh.to_json()


@every_noun
@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"words"', "{}", "words", b"\xff\xfe", "[" * 2000])
def test_what_is_no_saved_noun_is_refused_by_name(noun: type[Saved], text: str | bytes) -> None:
    with pytest.raises(RequestError, match=f"saved {noun.__name__}"):
        noun.from_json(text)


@every_noun
@few
@given(data=st.data())
def test_a_noun_is_not_read_as_another(noun: type[Saved], data: st.DataObject) -> None:
    text = data.draw(drawn(noun)).to_json()
    for other in {*NOUNS} - {noun}:
        with pytest.raises(RequestError, match=f"saved {other.__name__}"):
            other.from_json(text)


def test_a_field_of_the_wrong_type_is_named() -> None:
    with pytest.raises(RequestError, match="peak_bytes"):
        Layout.from_json('{"solver": "x", "offsets": [], "peak_bytes": "many", "lower_bound_bytes": 0}')


def test_a_missing_file_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"cannot read .*nowhere\.json"):
        Graph.load(tmp_path / "nowhere.json")


def test_a_folder_is_refused_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot read"):
        Graph.load(tmp_path)


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot write"):
        Trace(()).save(tmp_path / "no" / "such" / "folder.json")

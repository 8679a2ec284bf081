"""Every noun is frozen, and survives being saved and loaded."""

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.core import (
    Block,
    Collective,
    CollectiveKind,
    Device,
    Event,
    Frame,
    Graph,
    Instruction,
    LayerType,
    Layout,
    Op,
    Phase,
    Schedule,
    Stall,
    Stream,
    Tensor,
    TensorKind,
    Timeline,
    Trace,
    Verb,
)
from overspill.core.errors import RequestError
from overspill.core.saved import Saved

counts = st.integers(0, 2**62)  # what a byte count may be; JSON numbers carry it exactly
ids = st.lists(st.integers(0, 1000), max_size=4).map(tuple)
seconds = st.floats(0, 1e6)
words = st.text(max_size=8)

tensors = st.builds(
    Tensor,
    id=counts,
    nbytes=counts,
    kind=st.sampled_from(TensorKind),
    name=words,
    shape=ids,
    dtype=words,
    persistent=st.booleans(),
    movable=st.booleans(),
)
ops = st.builds(
    Op,
    id=counts,
    name=words,
    layer=words,
    layer_type=st.sampled_from(LayerType),
    phase=st.sampled_from(Phase),
    reads=ids,
    writes=ids,
    workspace_bytes=counts,
    flops=counts,
    moved_bytes=counts,
    recomputable=st.booleans(),
    recompute_reads=ids,
    recompute_writes=ids,
    frames=ids,
    collective=st.none() | st.builds(Collective, kind=st.sampled_from(CollectiveKind), nbytes=counts, ranks=counts),
)
frames = st.builds(Frame, file=words, line=counts, function=words, caller=st.integers(-1, 1000), backward=st.booleans())
graphs = st.builds(
    Graph,
    name=words,
    tensors=st.lists(tensors, max_size=4).map(tuple),
    ops=st.lists(ops, max_size=4).map(tuple),
    outputs=ids,
    frames=st.lists(frames, max_size=4).map(tuple),
)
devices = st.builds(
    Device,
    name=words,
    kind=words,
    memory_bytes=counts,
    flops_per_second=st.dictionaries(words, seconds, max_size=3),
    memory_bytes_per_second=seconds,
    offload_bytes_per_second=seconds,
    prefetch_bytes_per_second=seconds,
    transfer_latency_seconds=seconds,
    op_overhead_seconds=seconds,
    full_duplex=st.booleans(),
    context_bytes=counts,
    transfer_compute_share=seconds,
    efficiency=st.dictionaries(words, seconds, max_size=3),
    sources=st.dictionaries(words, words, max_size=3),
)
instructions = st.builds(Instruction, verb=st.sampled_from(Verb), target=counts)
schedules = st.builds(
    Schedule, policy=words, instructions=st.lists(instructions, max_size=6).map(tuple), budget_bytes=st.none() | counts
)
blocks = st.builds(Block, id=counts, start=counts, end=counts, nbytes=counts, name=words)
traces = st.builds(Trace, blocks=st.lists(blocks, max_size=6).map(tuple))
layouts = st.builds(Layout, solver=words, offsets=ids, peak_bytes=counts, lower_bound_bytes=counts)
events = st.builds(
    Event,
    instruction=counts,
    verb=st.sampled_from(Verb),
    target=counts,
    stream=st.sampled_from(Stream),
    start_seconds=seconds,
    end_seconds=seconds,
)
stalls = st.builds(Stall, instruction=counts, start_seconds=seconds, end_seconds=seconds, cause=words)
timelines = st.builds(
    Timeline,
    events=st.lists(events, max_size=4).map(tuple),
    stalls=st.lists(stalls, max_size=4).map(tuple),
    live_bytes=ids,
    step_seconds=seconds,
)
NOUNS: dict[type[Saved], st.SearchStrategy[Saved]] = {
    Graph: graphs,
    Device: devices,
    Schedule: schedules,
    Trace: traces,
    Layout: layouts,
    Timeline: timelines,
}
every_noun = pytest.mark.parametrize("noun", NOUNS, ids=lambda noun: noun.__name__)


@every_noun
@given(data=st.data())
def test_a_noun_equals_itself_after_json(noun: type[Saved], data: st.DataObject) -> None:
    example = data.draw(NOUNS[noun])
    assert noun.from_json(example.to_json()) == example


few = settings(max_examples=5)


@every_noun
@few
@given(data=st.data())
def test_a_noun_is_frozen(noun: type[Saved], data: st.DataObject) -> None:
    example = data.draw(NOUNS[noun])
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
    text = data.draw(NOUNS[noun]).to_json()
    for other in NOUNS.keys() - {noun}:
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

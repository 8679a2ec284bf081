"""Derived views of the Schedule and the Timeline."""

from overspill.core import Event, Instruction, Schedule, Stall, Stream, Timeline, Verb


def event(stream: Stream, verb: Verb, start: float, end: float) -> Event:
    return Event(0, verb, 0, stream, start, end)


def test_a_schedule_counts_its_verbs_and_lists_their_targets() -> None:
    schedule = Schedule("x", (Instruction(Verb.RUN, 4), Instruction(Verb.FREE, 7), Instruction(Verb.RUN, 2)))
    assert schedule.counts == {Verb.RUN: 2, Verb.FREE: 1}
    assert schedule.targets(Verb.RUN) == (4, 2)
    assert schedule.targets(Verb.OFFLOAD) == ()


def test_a_timeline_tells_hidden_transfer_time_from_exposed() -> None:
    timeline = Timeline(
        (
            event(Stream.COMPUTE, Verb.RUN, 0.0, 2.0),
            event(Stream.OFFLOAD, Verb.OFFLOAD, 1.0, 4.0),
            event(Stream.PREFETCH, Verb.PREFETCH, 4.0, 5.0),
            event(Stream.COMPUTE, Verb.RUN, 5.0, 6.0),
        ),
        (Stall(3, 2.0, 5.0, "prefetch of t0"),),
        (10, 30, 20),
        6.0,
    )
    assert timeline.peak_bytes == 30
    assert timeline.compute_seconds == 3.0
    assert timeline.transfer_seconds == 4.0
    assert timeline.exposed_transfer_seconds == 3.0
    assert timeline.overlapped_seconds == 1.0


def test_overlap_is_never_negative() -> None:
    stalled = Timeline((event(Stream.OFFLOAD, Verb.OFFLOAD, 0.0, 1.0),), (Stall(0, 0.0, 3.0, "x"),), (), 3.0)
    assert stalled.overlapped_seconds == 0.0


def test_an_empty_timeline_is_all_zero() -> None:
    empty = Timeline((), (), (), 0.0)
    assert (empty.peak_bytes, empty.compute_seconds, empty.transfer_seconds, empty.overlapped_seconds) == (0, 0, 0, 0)

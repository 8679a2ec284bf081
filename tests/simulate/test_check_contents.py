"""The reference machine knows what is in a tensor, not only whether it is there; and it refuses targets out of range."""

from __future__ import annotations

import pytest
from tests.simulate.graphs import Build, schedule

from overspill.core import Graph, Phase, Verb
from overspill.core.errors import InvalidScheduleError
from overspill.simulate import check

RUN, AGAIN, FREE = Verb.RUN, Verb.RECOMPUTE, Verb.FREE
OUT, OUT_DONE, BACK, BACK_DONE = Verb.OFFLOAD, Verb.AWAIT_OFFLOAD, Verb.PREFETCH, Verb.AWAIT_PREFETCH


@pytest.fixture
def in_place() -> tuple[Graph, int]:
    """op0 makes a, op1 updates it in place, op2 reads it."""
    build = Build()
    a, b = build.tensor(10, name="a"), build.tensor(10, name="b")
    build.op([], [a], again=True)
    build.op([a], [a])
    build.op([a], [b], Phase.BACKWARD)
    return build.graph([b]), a


def test_a_copy_made_after_the_last_write_may_come_back(in_place: tuple[Graph, int]) -> None:
    graph, a = in_place
    check(
        graph,
        schedule(
            (RUN, 0), (RUN, 1), (OUT, a), (OUT_DONE, a), (FREE, a), (BACK, a), (BACK_DONE, a), (RUN, 2), (FREE, a)
        ),
    )


def test_a_copy_older_than_the_last_write_may_not_come_back(in_place: tuple[Graph, int]) -> None:
    graph, a = in_place
    with pytest.raises(InvalidScheduleError):
        check(
            graph,
            schedule(
                (RUN, 0), (OUT, a), (OUT_DONE, a), (RUN, 1), (FREE, a), (BACK, a), (BACK_DONE, a), (RUN, 2), (FREE, a)
            ),
        )


def test_an_old_copy_may_be_replaced_by_a_second_offload(in_place: tuple[Graph, int]) -> None:
    graph, a = in_place
    check(
        graph,
        schedule(
            (RUN, 0), (OUT, a), (OUT_DONE, a), (RUN, 1), (OUT, a), (OUT_DONE, a),
            (FREE, a), (BACK, a), (BACK_DONE, a), (RUN, 2), (FREE, a),
        ),
    )  # fmt: skip


def test_a_recomputation_does_not_bring_back_what_was_updated_in_place_since(in_place: tuple[Graph, int]) -> None:
    graph, a = in_place
    with pytest.raises(InvalidScheduleError):
        check(graph, schedule((RUN, 0), (RUN, 1), (FREE, a), (AGAIN, 0), (RUN, 2), (FREE, a)))


@pytest.mark.parametrize(("verb", "target"), [(RUN, 3), (AGAIN, 3), (FREE, 2), (OUT, 99)])
def test_a_target_that_the_graph_does_not_have_is_refused(in_place: tuple[Graph, int], verb: Verb, target: int) -> None:
    with pytest.raises(InvalidScheduleError):
        check(in_place[0], schedule((verb, target)))


def test_a_negative_target_does_not_count_from_the_end(in_place: tuple[Graph, int]) -> None:
    with pytest.raises(InvalidScheduleError):
        check(in_place[0], schedule((RUN, 0), (RUN, 1), (RUN, 2), (FREE, -2)))

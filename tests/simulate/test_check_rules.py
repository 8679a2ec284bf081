"""The reference machine refuses every schedule that breaks a rule, and says which: one test a rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.simulate.graphs import Build, schedule

from overspill.core import Algorithm, Graph, Instruction, Phase, Schedule, Tensor, TensorKind, Verb
from overspill.core.errors import InvalidScheduleError
from overspill.simulate import check

RUN, AGAIN, FREE = Verb.RUN, Verb.RECOMPUTE, Verb.FREE
OUT, OUT_DONE, BACK, BACK_DONE = Verb.OFFLOAD, Verb.AWAIT_OFFLOAD, Verb.PREFETCH, Verb.AWAIT_PREFETCH
W, A, B, D = range(4)


@pytest.fixture
def graph() -> Graph:
    """op0 makes a from w, op1 makes b from a, op2 makes d from b and a; d is the output. Sizes 1, 10, 100, 1000."""
    build = Build()
    build.tensor(1, TensorKind.PARAMETER, "w", persistent=True)
    build.tensor(10, name="a")
    build.tensor(100, name="b")
    build.tensor(1000, name="d")
    build.op([W], [A], again=True)
    build.op([A], [B])
    build.op([B, A], [D], Phase.BACKWARD)
    return build.graph([D])


def refused(graph: Graph, made: Schedule) -> str:
    """The reason that `check` gives."""
    with pytest.raises(InvalidScheduleError) as caught:
        check(graph, made)
    return str(caught.value)


def test_a_plain_run_is_valid_and_peaks_at_its_last_op(graph: Graph) -> None:
    result = check(graph, schedule((RUN, 0), (RUN, 1), (RUN, 2), (FREE, A), (FREE, B)))
    assert (result.peak_bytes, result.peak_instruction) == (1111, 2)


def test_the_tensors_at_the_peak_add_up_to_it(graph: Graph) -> None:
    result = check(graph, schedule((RUN, 0), (RUN, 1), (RUN, 2), (FREE, A), (FREE, B)))
    assert result.live_at_peak == (W, A, B, D)


def test_a_trip_to_the_store_is_valid(graph: Graph) -> None:
    check(
        graph,
        schedule(
            (RUN, 0), (OUT, A), (RUN, 1), (OUT_DONE, A), (FREE, A), (BACK, A), (BACK_DONE, A), (RUN, 2), (FREE, A), (FREE, B)
        ),
    )  # fmt: skip


def test_a_recomputation_is_valid(graph: Graph) -> None:
    check(graph, schedule((RUN, 0), (RUN, 1), (FREE, A), (AGAIN, 0), (RUN, 2), (FREE, A), (FREE, B)))


def test_the_peak_counts_workspaces() -> None:
    build = Build()
    a = build.tensor(10)
    build.op([], [a], workspace_bytes=7)
    assert check(build.graph([a]), schedule((RUN, 0))).peak_bytes == 17


def test_the_peak_counts_what_arrives_from_the_start_of_the_prefetch(graph: Graph) -> None:
    head = [(RUN, 0), (OUT, A), (RUN, 1), (OUT_DONE, A), (FREE, A)]
    result = check(graph, schedule(*head, (BACK, A), (BACK_DONE, A), (RUN, 2), (FREE, A), (FREE, B), budget_bytes=1111))
    assert result.peak_bytes == 1111


def test_a_recomputation_counts_once_more_what_is_still_there() -> None:
    build = Build()
    a, b = build.tensor(10), build.tensor(100)
    build.op([], [a, b], again=True)
    result = check(build.graph([b]), schedule((RUN, 0), (FREE, a), (AGAIN, 0), (FREE, a)))
    assert (result.peak_bytes, result.peak_instruction) == (210, 2)


def test_reading_an_absent_tensor_is_refused(graph: Graph) -> None:
    assert "reads a, which is absent" in refused(graph, schedule((RUN, 0), (FREE, A), (RUN, 1)))


def test_reading_an_arriving_tensor_is_refused(graph: Graph) -> None:
    made = schedule((RUN, 0), (OUT, A), (OUT_DONE, A), (FREE, A), (BACK, A), (RUN, 1))
    assert "reads a, which is arriving" in refused(graph, made)


def test_reading_a_leaving_tensor_is_allowed(graph: Graph) -> None:
    check(graph, schedule((RUN, 0), (OUT, A), (RUN, 1), (RUN, 2), (OUT_DONE, A), (FREE, A), (FREE, B)))


def test_freeing_a_tensor_that_is_leaving_is_refused(graph: Graph) -> None:
    assert "leaving, not present" in refused(graph, schedule((RUN, 0), (OUT, A), (FREE, A)))


def test_freeing_a_tensor_that_is_arriving_is_refused(graph: Graph) -> None:
    made = schedule((RUN, 0), (OUT, A), (OUT_DONE, A), (FREE, A), (BACK, A), (FREE, A))
    assert "arriving, not present" in refused(graph, made)


def test_freeing_twice_is_refused(graph: Graph) -> None:
    assert "absent, not present" in refused(graph, schedule((RUN, 0), (FREE, A), (FREE, A)))


def test_freeing_what_belongs_to_the_caller_is_refused(graph: Graph) -> None:
    assert "belongs to the caller" in refused(graph, schedule((FREE, W)))


def test_writing_a_tensor_that_is_leaving_is_refused() -> None:
    build = Build()
    a = build.tensor(10, name="a")
    build.op([], [a])
    build.op([a], [a])
    assert "writes a while it is in transfer" in refused(build.graph([a]), schedule((RUN, 0), (OUT, a), (RUN, 1)))


def test_prefetching_what_is_not_stored_is_refused(graph: Graph) -> None:
    assert "no copy" in refused(graph, schedule((RUN, 0), (FREE, A), (BACK, A)))


def test_prefetching_what_has_not_been_awaited_is_refused(graph: Graph) -> None:
    assert "no copy" in refused(graph, schedule((RUN, 0), (OUT, A), (BACK, A)))


def test_prefetching_what_is_there_is_refused(graph: Graph) -> None:
    assert "present, not absent" in refused(graph, schedule((RUN, 0), (OUT, A), (OUT_DONE, A), (BACK, A)))


@pytest.mark.parametrize("verb", [OUT, OUT_DONE, BACK_DONE])
def test_transferring_what_is_absent_is_refused(graph: Graph, verb: Verb) -> None:
    assert "the tensor is absent" in refused(graph, schedule((verb, A)))


def test_offloading_twice_at_once_is_refused(graph: Graph) -> None:
    assert "leaving, not present" in refused(graph, schedule((RUN, 0), (OUT, A), (OUT, A)))


def two_branches(*, in_place: bool) -> Graph:
    """op0 makes a; op1 makes b from a; op2 makes c from a, or updates a; op3 is backward."""
    build = Build()
    a, b, c = build.tensor(10), build.tensor(10), build.tensor(10)
    build.op([], [a])
    build.op([a], [b])
    build.op([a], [a if in_place else c])
    build.op([a, b], [c] if in_place else [], Phase.BACKWARD)
    return build.graph([a, b, c])


def test_ops_that_do_not_touch_may_change_places() -> None:
    assert check(two_branches(in_place=False), schedule((RUN, 0), (RUN, 2), (RUN, 1), (RUN, 3))).peak_bytes == 30


def test_an_op_that_would_see_a_later_value_is_refused() -> None:
    reason = refused(two_branches(in_place=True), schedule((RUN, 0), (RUN, 2), (RUN, 1), (RUN, 3)))
    assert "out of order: what it reads or writes is not as" in reason


def test_an_op_of_a_phase_that_is_over_is_refused() -> None:
    reason = refused(two_branches(in_place=False), schedule((RUN, 0), (RUN, 1), (RUN, 3), (RUN, 2)))
    assert "belongs to the forward phase, which is over" in reason


class TestWhatLivesInTheStore:
    """A persistent tensor that may move: read, then updated; in the store between steps."""

    @pytest.fixture
    def graph(self) -> Graph:
        build = Build()
        build.tensors.append(Tensor(0, 100, TensorKind.PARAMETER, "w", (25,), "float32", persistent=True, movable=True))
        y = build.tensor(10)
        build.op([0], [y])
        build.op([y, 0], [0], Phase.UPDATE)
        return build.graph([y])

    def stored_between_steps(self, *instructions: tuple[Verb, int]) -> Schedule:
        return replace(schedule(*instructions), stored=(0,))

    def test_it_comes_for_its_uses_and_goes_back_updated(self, graph: Graph) -> None:
        fetch, leave = ((BACK, 0), (BACK_DONE, 0)), ((OUT, 0), (OUT_DONE, 0), (FREE, 0))
        assert check(graph, self.stored_between_steps(*fetch, (RUN, 0), (RUN, 1), *leave)).peak_bytes == 110
        away = self.stored_between_steps(*fetch, (RUN, 0), (FREE, 0), *fetch, (RUN, 1), *leave)
        assert check(graph, away).peak_bytes == 110

    def test_it_can_not_be_freed_before_the_store_has_its_last_value(self, graph: Graph) -> None:
        made = self.stored_between_steps((BACK, 0), (BACK_DONE, 0), (RUN, 0), (RUN, 1), (FREE, 0))
        assert "the store does not hold it as it is now" in refused(graph, made)

    def test_it_must_end_where_it_began(self, graph: Graph) -> None:
        made = self.stored_between_steps((BACK, 0), (BACK_DONE, 0), (RUN, 0), (RUN, 1))
        assert "the store ends with w from before its last update" in refused(graph, made)
        made = self.stored_between_steps((BACK, 0), (BACK_DONE, 0), (RUN, 0), (RUN, 1), (OUT, 0), (OUT_DONE, 0))
        assert "w ends present, not absent" in refused(graph, made)

    def test_what_may_not_move_can_not_live_there(self) -> None:
        build = Build()
        build.tensor(1, TensorKind.PARAMETER, "w", persistent=True)
        assert "can not be in the store between steps" in refused(build.graph(), replace(schedule(), stored=(0,)))


def test_an_algorithm_takes_its_own_workspace_and_must_exist() -> None:
    build = Build()
    build.op([], [build.tensor(1)], workspace_bytes=50)
    graph = build.graph([0])
    menu = (Algorithm("winograd", 50), Algorithm("implicit gemm", 7, 2.0))
    graph = replace(graph, ops=(replace(graph.ops[0], algorithms=menu),))
    runs = [Schedule("by hand", (Instruction(RUN, 0, algorithm),)) for algorithm in (0, 1, 2)]
    assert [check(graph, made).peak_bytes for made in runs[:2]] == [51, 8]
    assert "the op has no algorithm 2" in refused(graph, runs[2])


def test_an_op_run_twice_is_refused(graph: Graph) -> None:
    assert "out of order" in refused(graph, schedule((RUN, 0), (RUN, 0)))


def test_recomputing_before_the_run_is_refused(graph: Graph) -> None:
    assert "has not run yet" in refused(graph, schedule((AGAIN, 0)))


def test_recomputing_what_may_not_be_is_refused(graph: Graph) -> None:
    assert "may not be recomputed" in refused(graph, schedule((RUN, 0), (RUN, 1), (AGAIN, 1)))


def test_recomputing_from_an_absent_input_is_refused() -> None:
    build = Build()
    a, b = build.tensor(10, name="a"), build.tensor(10)
    build.op([], [a])
    build.op([a], [b], again=True)
    assert "reads a, which is absent" in refused(build.graph([b]), schedule((RUN, 0), (RUN, 1), (FREE, a), (AGAIN, 1)))


def test_recomputing_after_an_input_was_written_in_place_is_refused() -> None:
    build = Build()
    w = build.tensor(1, TensorKind.PARAMETER, persistent=True)
    a = build.tensor(10)
    build.op([w], [a], again=True)
    build.op([w], [w], Phase.UPDATE)
    made = schedule((RUN, 0), (FREE, a), (RUN, 1), (AGAIN, 0))
    assert "has been updated since" in refused(build.graph(), made)


def test_an_op_that_never_ran_is_refused(graph: Graph) -> None:
    assert "op2 never ran" in refused(graph, schedule((RUN, 0), (RUN, 1)))


def test_a_tensor_left_over_is_refused(graph: Graph) -> None:
    assert "b ends present, not absent" in refused(graph, schedule((RUN, 0), (RUN, 1), (RUN, 2), (FREE, A)))


def test_what_forward_returned_can_not_be_dropped_and_made_again() -> None:
    build = Build()
    y, z = build.tensor(10, name="y"), build.tensor(10)
    build.op([], [y], again=True)
    build.op([y], [z], Phase.BACKWARD)
    graph = build.graph([y])
    made = schedule((RUN, 0), (FREE, y), (AGAIN, 0), (RUN, 1), (FREE, z))
    assert "free y: the tensor is an output, which the caller holds" in refused(graph, made)
    check(replace(graph, whole_step=True), made)


def test_a_missing_output_is_refused(graph: Graph) -> None:
    made = schedule((RUN, 0), (RUN, 1), (RUN, 2), (FREE, A), (FREE, B), (FREE, D))
    assert "d ends absent, not present" in refused(replace(graph, whole_step=True), made)


def test_a_transfer_that_is_never_awaited_is_refused(graph: Graph) -> None:
    made = schedule((RUN, 0), (RUN, 1), (RUN, 2), (FREE, A), (FREE, B), (OUT, D))
    assert "d ends leaving, not present" in refused(graph, made)


def test_a_peak_over_the_budget_is_refused_and_one_at_it_is_not(graph: Graph) -> None:
    plain = [(RUN, 0), (RUN, 1), (RUN, 2), (FREE, A), (FREE, B)]
    check(graph, schedule(*plain, budget_bytes=1111))
    assert "peak 1111 bytes is over its budget of 1110" in refused(graph, schedule(*plain, budget_bytes=1110))


def test_a_refusal_names_policy_instruction_and_target(graph: Graph) -> None:
    assert refused(graph, schedule((RUN, 0), (FREE, A), (RUN, 1))).startswith("by hand: instruction 2, run op1: ")

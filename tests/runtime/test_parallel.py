"""Data parallel training by two processes on this machine: `ranks.py` does it, and here is looked at what came out."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
import torch
from tests.simulate.graphs import DEVICE

from overspill.core import Instruction, Schedule, Verb
from overspill.core.errors import InvalidScheduleError
from overspill.policies.in_core import InCore
from overspill.runtime.collectives import lent
from overspill.simulate import check

ROOT = Path(__file__).parents[2]
XDIST = "PYTEST_XDIST_WORKER" in os.environ
SECONDS = 400
"""What all cases may take on a busy machine; a collective that waits for nobody fails after 30 (`ranks.py`)."""


COMPILED = ("compiled outside", "compiled inside", "split")
MOVING = ("moving", "moving, views")
LIKE_MOMENTUM = ("adamw", "accumulated", "buffers asked")
FSDP = ("sharded, divided", "looped", "settings", "budgets", "refusals", "full disk")
QUICK = ("momentum", "odd", "combined", "errors", "schedules", "link", "parts", "gathers", *FSDP)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found, by case."""
    return run_once(tmp_path_factory, "ranks", QUICK)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The same of cases that take longer."""
    return run_once(tmp_path_factory, "more_ranks", (*LIKE_MOMENTUM, *COMPILED, *MOVING))


def run_once(
    factory: pytest.TempPathFactory, name: str, cases: tuple[str, ...], ranks: int = 2
) -> list[dict[str, Any]]:
    """So many ranks run `cases`, once for all test files and processes: the first to come runs them, the others wait."""
    directory = (factory.getbasetemp().parent if XDIST else factory.getbasetemp()) / name
    done = directory / "done"
    try:
        directory.mkdir()
    except FileExistsError:
        begun = time.monotonic()
        while not done.exists() and time.monotonic() - begun < SECONDS:
            time.sleep(0.2)
        return found_in(directory, ranks)
    command = [sys.executable, "-m", "tests.runtime.ranks", str(ranks), directory, *cases]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            assert process.wait(SECONDS) == 0
        finally:
            with suppress(ProcessLookupError):  # all are gone
                os.killpg(process.pid, signal.SIGKILL)
    done.touch()
    return found_in(directory, ranks)


def found_in(directory: Path, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(directory / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def of(ranks: list[dict[str, Any]], case: str) -> list[Any]:
    """What both ranks found in `case`, which is a text where it failed."""
    found = [rank[case] for rank in ranks]
    assert not any(isinstance(one, str) for one in found), found
    return found


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def learned(result: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is the same on all ranks: all but losses, and statistics, of which the last forward's are each rank's own."""
    return {name: value for name, value in result.items() if "running" not in name and name != "losses"}


def test_what_is_lent_is_waited_for_until_no_thread_holds_it_from_python_either() -> None:
    held: list[torch.Tensor] = []

    def collective(tensor: torch.Tensor) -> None:
        held.append(tensor)
        Timer(0.05, held.clear).start()

    lent((torch.ones(3),), collective)
    assert not held


@pytest.mark.parametrize("case", ["momentum", "odd"])
def test_each_rank_gets_the_bits_of_ddp(ranks: list[dict[str, Any]], case: str) -> None:
    assert_bits_of_ddp(ranks, case)


@pytest.mark.long
@pytest.mark.parametrize("case", [*LIKE_MOMENTUM, *MOVING, "compiled outside", "compiled inside"])
def test_each_rank_gets_the_bits_of_ddp_by_other_ways(more: list[dict[str, Any]], case: str) -> None:
    assert_bits_of_ddp(more, case)


def assert_bits_of_ddp(ranks: list[dict[str, Any]], case: str) -> None:
    first, second = of(ranks, case)
    for ours, ddp, *_ in (first, second):
        assert_same(ours, ddp)
    assert_same(learned(first[0]), learned(second[0]))
    assert not torch.equal(first[0]["losses"], second[0]["losses"])


def test_a_gradient_that_is_the_callers_own_tensor_leaves_it_as_it_is(ranks: list[dict[str, Any]]) -> None:
    assert all(untouched for _, _, untouched in of(ranks, "odd"))


def test_two_halves_of_a_batch_train_as_the_whole_does_in_one_process(ranks: list[dict[str, Any]]) -> None:
    first, second = of(ranks, "combined")
    parallel, alone = first[0], first[1]
    assert torch.allclose((parallel["losses"] + second[0]["losses"]) / 2, alone["losses"], rtol=1e-6)
    for name, value in learned(parallel).items():
        assert torch.allclose(value, alone[name], rtol=1e-5, atol=1e-7), name


@pytest.mark.parametrize(
    ("trouble", "kind", "message"),
    [
        ("kinds", "RequestError", "differ in the kinds of their inputs"),
        ("split", "RequestError", "9 samples cannot be split into 2 equal micro-batches"),
        ("budget", "InfeasibleBudgetError", "below the minimum"),
        ("store", "RequestError", "cannot write to the store directory /nowhere"),
        ("models", "RequestError", "the ranks have different models: model.1.weight is (1"),
        ("graphs", "RequestError", "which is relu on rank 0 and gelu on rank 1"),
        ("answers", "RequestError", "the answers to what the model asks of values"),
        ("values", "RequestError", "1.weight on rank 1 differs from rank 0's: pass process_group="),
        ("parts", "UnsupportedError", "clip_norm= of a step with collectives of its own"),
        ("wrapped", "RequestError", "pass the model that is inside (model.module)"),
    ],
)
def test_one_ranks_trouble_is_an_error_on_both(
    ranks: list[dict[str, Any]], trouble: str, kind: str, message: str
) -> None:
    for heard in of(ranks, "errors"):
        assert heard[trouble].startswith(f"{kind}: ")
        assert message in heard[trouble]


def test_after_such_an_error_the_ranks_train_on(ranks: list[dict[str, Any]]) -> None:
    assert all(heard["finite"] for heard in of(ranks, "errors"))


def test_all_ranks_run_the_same_schedule_and_its_peak_is_what_is_measured(ranks: list[dict[str, Any]]) -> None:
    (*plan, planned_bytes, measured_bytes), other = of(ranks, "schedules")
    assert plan == list(other[:2])
    graph, schedule = plan
    unseen = max(op.workspace_bytes for op in graph.ops)  # what dropout takes inside its op
    assert 0.98 * planned_bytes - unseen <= measured_bytes <= planned_bytes
    assert schedule.counts[Verb.OFFLOAD] > 0


def test_ranks_with_collectives_of_their_own_agree_on_one_schedule(ranks: list[dict[str, Any]]) -> None:
    for (losses, part, budget), (losses_by_hand, part_by_hand) in of(ranks, "parts"):
        assert torch.equal(losses, losses_by_hand)
        assert torch.equal(part, part_by_hand)
        assert budget == 2**20


def test_no_bucket_holds_more_than_the_largest_gradient(ranks: list[dict[str, Any]]) -> None:
    (graph, *_), _ = of(ranks, "schedules")
    buckets = [[graph.tensors[t].nbytes for t in op.reads] for op in graph.ops if op.name == "step.reduce"]
    sizes = [nbytes for bucket in buckets for nbytes in bucket if nbytes]
    assert 1 < len(buckets) < len(sizes) == 12
    assert max(map(sum, buckets)) == max(sizes)


def test_gradients_are_averaged_where_they_are_complete(ranks: list[dict[str, Any]]) -> None:
    (graph, *_), _ = of(ranks, "schedules")
    for op in (op for op in graph.ops if op.name == "step.reduce"):
        before = max(earlier.id for earlier in graph.ops[: op.id] if set(earlier.writes) & set(op.reads))
        assert all(other.name == "step.reduce" for other in graph.ops[before + 1 : op.id])


def test_no_schedule_may_change_the_order_of_collectives(ranks: list[dict[str, Any]]) -> None:
    (graph, *_), _ = of(ranks, "schedules")
    first, second, *_ = (Instruction(Verb.RUN, op.id) for op in graph.ops if op.name == "step.reduce")
    instructions = list(InCore().plan(graph, DEVICE).instructions)
    instructions.remove(first)
    late = instructions.index(second)
    check(graph, Schedule("later", (*instructions[:late], first, *instructions[late:])))
    with pytest.raises(InvalidScheduleError, match=r"step\.reduce: .*of order"):
        check(graph, Schedule("swapped", (*instructions[: late + 1], first, *instructions[late + 1 :])))


@pytest.mark.long
@pytest.mark.parametrize("case", ["compiled outside", "compiled inside"])
def test_a_compiled_model_in_ddp_is_one_graph_whose_budget_counts_the_buckets(
    more: list[dict[str, Any]], case: str
) -> None:
    for ours, _, plans, measured_bytes in of(more, case):
        (plan,) = plans
        gradients = sum(value.nbytes for name, value in ours.items() if name != "losses")
        buckets = sum(t.nbytes for t in plan.graph.tensors if t.name == "communication elsewhere")
        assert buckets == gradients
        assert "2.weight" in {t.name for t in plan.graph.tensors}
        assert plan.peak_bytes < plan.unmanaged_peak_bytes
        assert measured_bytes + buckets <= plan.peak_bytes <= plan.budget_bytes


@pytest.mark.long
@pytest.mark.parametrize("case", MOVING)
def test_weights_and_state_of_a_compiled_model_in_ddp_move(more: list[dict[str, Any]], case: str) -> None:
    for ours, _, away, state_bytes, (plan,), measured_bytes in of(more, case):
        gradients = sum(value.nbytes for name, value in ours.items() if name != "losses")
        assert away
        assert measured_bytes + gradients <= plan.budget_bytes < 2 * gradients + state_bytes + gradients  # the buckets


@pytest.mark.long
def test_parts_of_a_model_that_dynamo_splits_are_refused(more: list[dict[str, Any]]) -> None:
    for rank in more:
        assert "torch._dynamo.config.optimize_ddp = False" in rank["split"]


def test_what_ranks_exchange_while_a_graph_is_traced_does_not_hang(ranks: list[dict[str, Any]]) -> None:
    assert [rank["gathers"] for rank in ranks] == [400, 400]


def test_all_ranks_calibrate_the_link_of_rank_0(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["link"] for rank in ranks)
    assert first.link_bytes_per_second == second.link_bytes_per_second > 0
    assert first.link_latency_seconds == second.link_latency_seconds > 0

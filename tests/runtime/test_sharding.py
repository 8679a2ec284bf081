"""Models that `fully_shard` has sharded, trained by a planned step: FSDP's losses, weights and state, on each rank."""

from typing import Any

import pytest
import torch

from .sharded_ranks import FOLLOWED, REFUSED, WITHOUT_EFFECT
from .test_parallel import of, run_once
from .test_parallel import ranks as ranks  # noqa: PLC0414 - the fixture

FOUR = (
    "sharded",
    "sharded, roomy",
    "sharded, accumulated",
    "sharded, accumulated half",
    "sharded, compiled",
    "sharded, half divided",
    "sharded, all half",
    "sharded, placed",
    "sharded, replicated",
    "sharded, replicated half",
    "sharded, replicated and divided",
    "lengths",
    "looped, roomy",
    "looped, accumulated",
    "loop refusals",
    "one rank plans",
    "drawn",
    "checkpoints",
    "fewer ranks",
    "integer",
)


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four ranks found, of whose numbers a sum depends on the order."""
    return run_once(tmp_path_factory, "four_ranks", FOUR, ranks=4)


@pytest.mark.parametrize("case", ["sharded, divided", "looped"])
def test_each_rank_gets_the_bits_of_fsdp(ranks: list[dict[str, Any]], case: str) -> None:
    assert_bits_of_fsdp(ranks, case)


@pytest.mark.long
def test_a_length_is_captured_once_or_twice_on_each_rank(more: list[dict[str, Any]]) -> None:
    assert all(4 <= captures <= 6 for *_, captures in of(more, "lengths"))


@pytest.mark.long
def test_all_ranks_plan_a_loop_again_if_one_must(more: list[dict[str, Any]]) -> None:
    for ours, fsdp, said in of(more, "one rank plans"):
        assert_same(ours, fsdp)
        assert "one plans a call of which the other has a plan" in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("parts", "no error"),
        ("one group", "UnsupportedError: a graph reads first.weight and not second.bias"),
        ("read outside", "UnsupportedError: first.weight is read where no graph is compiled"),
        ("budget", "InfeasibleBudgetError: "),
        ("together", "UnsupportedError: one backward gives words.weight gradients of several calls"),
    ],
)
def test_loops_that_graphs_of_a_sharded_model_do_not_follow_are_refused_on_all(
    more: list[dict[str, Any]], asked: str, message: str
) -> None:
    for said in of(more, "loop refusals"):
        assert said[asked].startswith(message)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in FOUR if case.startswith(("sharded", "looped", "lengths"))])
def test_each_of_four_ranks_gets_the_bits_of_fsdp(more: list[dict[str, Any]], case: str) -> None:
    assert_bits_of_fsdp(more, case)


@pytest.mark.long
def test_models_and_meshes_drawn_at_random_get_the_bits_of_fsdp(more: list[dict[str, Any]]) -> None:
    for of_rank in of(more, "drawn"):
        for ours, fsdp in of_rank:
            assert_same(ours, fsdp)


@pytest.mark.long
def test_a_checkpoint_goes_on_with_fewer_ranks(more: list[dict[str, Any]]) -> None:
    for fsdp, ours in filter(None, of(more, "fewer ranks")):
        assert_same(ours, fsdp)


def assert_same(ours: dict[str, Any], fsdp: dict[str, Any]) -> None:
    assert ours.keys() == fsdp.keys()
    assert [name for name in ours if not torch.equal(ours[name], fsdp[name])] == []


def assert_bits_of_fsdp(ranks: list[dict[str, Any]], case: str) -> None:
    found = of(ranks, case)
    for ours, fsdp, *_ in found:
        assert_same(ours, fsdp)
    assert not torch.equal(found[0][0]["losses"], found[1][0]["losses"])


def test_the_smallest_budget_is_in_force_on_all_and_the_peak_is_what_is_measured(ranks: list[dict[str, Any]]) -> None:
    for budget, planned, measured, verbs, evaluates in of(ranks, "budgets"):
        assert budget == 270_000
        assert 0.98 * planned <= measured <= planned <= budget
        assert {"recompute", "offload", "start"} <= verbs
        assert evaluates


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("tensor parallel", "UnsupportedError: 0.weight is a DTensor"),
        ("offload", "UnsupportedError: the model is sharded with a CPUOffloadPolicy; leave it out"),
        ("ignored", "UnsupportedError: 0.weight is trained and not sharded (ignored_params"),
        ("parts only", "UnsupportedError: 1.weight is trained and not sharded"),
        ("optimizer", "UnsupportedError: Adafactor is not known to treat each element by itself"),
        ("inductor", "UnsupportedError: backend='inductor' of a model that fully_shard has sharded"),
        ("group", "RequestError: the model is sharded by fully_shard over its own mesh; leave process_group out"),
        ("compiled forward", "UnsupportedError: FSDPLinear is sharded by fully_shard, and FSDP gathers its"),
        ("compiled by name", "UnsupportedError: FSDPParts is sharded by fully_shard (FSDP2), whose hooks"),
        ("compiled by inductor", "UnsupportedError: a session has one model that fully_shard has sharded"),
    ],
)
def test_what_is_not_sharded_is_refused_by_name(ranks: list[dict[str, Any]], asked: str, message: str) -> None:
    for rank in ranks:
        assert rank["refusals"][asked].startswith(message)


def test_every_setter_of_fsdp_is_followed_refused_or_without_effect_on_numbers(ranks: list[dict[str, Any]]) -> None:
    for setters, said in of(ranks, "settings"):
        assert setters <= FOLLOWED.keys() | WITHOUT_EFFECT.keys() | REFUSED.keys()
        assert said.keys() == REFUSED.keys() - {"set_symm_mem_for_comm"}
        assert all(one.startswith("UnsupportedError: the model was ") and name in one for name, one in said.items())


@pytest.mark.long
def test_parameters_that_stay_with_some_ranks_are_refused(more: list[dict[str, Any]]) -> None:
    for (said,) in (rank["integer"].values() for rank in more):
        assert "with an integer reshard_after_forward; use True" in said


@pytest.mark.long
def test_a_checkpoint_goes_on_under_fsdp_and_under_a_planned_step(more: list[dict[str, Any]]) -> None:
    for want, *found in of(more, "checkpoints"):
        for state in found:
            differ = [name for name in want if not torch.equal(want[name], state[name])]
            assert [name for name in differ if "running" not in name] == []  # saved of one rank, as FSDP's


def test_a_full_disk_on_one_rank_is_a_line_on_all_and_nobody_hangs(ranks: list[dict[str, Any]]) -> None:
    (waiting, seconds, there), (full, *_, there_too) = of(ranks, "full disk")
    assert waiting.startswith(
        "OverspillError: another rank did not come to a collective of this step: rank 1 failed (StoreError: "
    )
    assert "the store is full" in waiting
    assert full.startswith("StoreError: ")
    assert "the store is full" in full
    assert seconds < 25  # the group's timeout is 3, a collective's is 30
    assert there
    assert there_too

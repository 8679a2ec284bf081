"""`overspill compare`: its contract, the budget that every policy is held to, its pictures, and its refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import Overspill
from tests.cli.test_contract import assert_units

from overspill.policies import POLICIES
from overspill.report import picture as plotting

COMPARE = "compare nets:shallow --batch 512"
SOME = "--policies auto,in-core,liveness,vdnn-all,checkpoint"


def by_policy(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["policy"]: row for row in answer["rows"]}


def test_compare_gives_what_every_policy_takes_and_how_long_its_step_is(overspill: Overspill) -> None:
    done = overspill("compare alexnet --small --batch 16 --gpu titan-x --optimizer momentum --json")
    answer = done.answer
    assert done.code == 0
    assert_units(answer)
    assert (answer["model"], answer["batch"], answer["optimizer"], answer["gpu"]) == (
        "alexnet",
        16,
        "momentum",
        "titan-x",
    )
    assert answer["budget_bytes"] == 11_742 << 20  # the card, less what its context may take more
    assert {row["policy"] for row in answer["rows"]} == set(POLICIES)
    for row in answer["rows"]:
        assert row["fits"] is True
        assert row["error"] is None
        assert 0 < row["average_bytes"] <= row["max_bytes"] <= row["reserved_bytes"] < row["device_bytes"]
        assert row["device_bytes"] <= answer["budget_bytes"]
        assert row["compute_seconds"] + row["exposed_transfer_seconds"] == pytest.approx(row["step_seconds"])
        assert 0 <= row["fragmentation"] < 1
        assert row["allocator_fits"] is True
        assert row["stall_seconds"].keys() >= {"offload", "prefetch"}
        assert row["peak_op"]
    assert by_policy(answer)["liveness"]["slowdown"] >= 1.0 - 1e-9
    times = [row["step_seconds"] for row in answer["rows"]]
    assert times == sorted(times)


def test_the_budget_is_respected_or_the_row_says_by_how_much_it_is_not(overspill: Overspill) -> None:
    done = overspill(f"{COMPARE} {SOME} --budget 80% --json")
    answer = done.answer
    assert done.code == 0
    rows = by_policy(answer)
    assert rows["auto"]["fits"] is True
    assert rows["auto"]["offloaded_bytes"] > 0 or rows["auto"]["recomputed_ops"] > 0
    for row in answer["rows"]:
        assert row["fits"] is (row["max_bytes"] <= answer["budget_bytes"])
    assert rows["liveness"]["fits"] is False
    assert answer["budget_bytes"] == int(0.8 * rows["liveness"]["max_bytes"])
    assert answer["rows"][0]["fits"] is True
    assert 0 < answer["lower_bound_seconds"] <= answer["rows"][0]["step_seconds"]
    assert rows["in-core"]["fits"] is answer["rows"][-1]["fits"] is False


@pytest.mark.long
def test_plan_and_compare_count_a_card_alike(overspill: Overspill) -> None:
    words = "alexnet --small --batch 512 --gpu titan-x --budget 440MiB --placement pytorch --json"  # without it a row has its own pool
    (row,) = overspill(f"compare {words} --policies auto").answer["rows"]
    plan = overspill(f"plan {words}").answer
    assert plan["device_bytes"] <= plan["budget_bytes"] == 440 << 20
    assert (plan["peak_bytes"], plan["reserved_bytes"], plan["device_bytes"]) == (
        row["max_bytes"], row["reserved_bytes"], row["device_bytes"],
    )  # fmt: skip


@pytest.mark.long
def test_where_nothing_fits_the_answer_is_no_and_names_what_would_do(overspill: Overspill) -> None:
    done = overspill(f"{COMPARE} --policies auto,liveness --budget 10KiB --json")
    answer = done.answer
    assert done.code == answer["exit_code"] == 1
    assert_units(answer)
    assert "infeasible: no policy fits 10.0 KiB; auto needs the least" in done.error
    assert answer["lower_bound_seconds"] is None
    auto, liveness = answer["rows"]
    assert auto["policy"] == "auto"
    assert auto.keys() == liveness.keys()
    assert {auto[key] for key in ("max_bytes", "offloaded_bytes", "step_seconds", "slowdown", "fragmentation")} == {
        None
    }
    assert "minimum of policy auto" in auto["error"]
    assert liveness["max_bytes"] > answer["floor_bytes"] == auto["floor_bytes"]
    again = overspill(f"{COMPARE} --policies auto,liveness --budget {answer['floor_bytes']}B --json")
    assert again.code == 0


def test_a_reader_sees_the_fastest_that_fits_first_that_times_are_simulated_and_where_pictures_are(
    overspill: Overspill, tmp_path: Path
) -> None:
    done = overspill(f"{COMPARE} {SOME} --budget 80% --plot picture.png --report page.html")
    assert done.code == 0
    text = " ".join(done.out.split())
    assert "nets:shallow, batch 512, float32, sgd on cpu, unmanaged " in text
    assert ": simulated" in text
    assert "Times are simulated for cpu, not measured" in text
    assert text.endswith("overspill plan nets:shallow --batch 512 --policy auto --budget 80%")
    assert "Lower bound by relaxation within" in text
    lines = [line.split()[:2] for line in done.out.splitlines() if line[:1].isalpha()]
    verdicts = [line[1] for line in lines if len(line) == 2 and line[0] in POLICIES and line[1] in ("yes", "no")]
    assert verdicts == sorted(verdicts, reverse=True)  # yes before no
    assert len(verdicts) == 5
    assert done.err.splitlines() == [
        "capturing nets:shallow for cpu",
        *(f"planning {name}" for name in ("auto", "in-core", "liveness", "vdnn-all", "checkpoint")),
    ]
    assert "plot saved to picture.png; report saved to page.html" in text
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "proven lower bound" in page
    assert all(f'"{name}"' in page for name in ("auto", "in-core", "checkpoint"))


@pytest.mark.long
def test_a_gpu_offers_convolutions_a_choice_of_algorithms_and_a_cpu_does_not(overspill: Overspill) -> None:
    words, policies = "alexnet --small --batch 16 --json", "--policies liveness,liveness:m"
    rows = by_policy(overspill(f"compare {words} {policies} --gpu titan-x").answer)
    assert rows["liveness:m"]["step_seconds"] > rows["liveness"]["step_seconds"]
    assert rows["liveness:m"]["max_bytes"] <= rows["liveness"]["max_bytes"]
    rows = by_policy(overspill(f"compare {words} {policies}").answer)
    assert rows["liveness:m"]["step_seconds"] == rows["liveness"]["step_seconds"]


@pytest.mark.long
def test_the_whole_step_needs_less_for_parameters_and_state_move_too(overspill: Overspill) -> None:
    words = "compare alexnet --batch 2 --optimizer adam --gpu titan-x --policies auto --json --budget 1%"
    staying, moving = (overspill(f"{words}{more}").answer for more in ("", " --whole-step"))
    assert (staying["whole_step"], moving["whole_step"]) == (False, True)
    assert moving["floor_bytes"] < staying["floor_bytes"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--policies auto,lifeness", "unknown policy 'lifeness'; did you mean 'liveness'? Policies: auto, "),
        ("--policies nothing-like-it", "unknown policy 'nothing-like-it'. Policies: auto, "),
        ("--policies ,", "--policies names none. Policies: auto, "),
        (
            "--plot picture.pdf",
            "cannot plot to picture.pdf: the file must end in .png; --report FILE.html writes a page",
        ),
        ("--plot absent/picture.png", "there is no directory absent"),
        ("--report page.pdf", "cannot write a report to page.pdf: the file must end in .html"),
        ("--report absent/page.html", "there is no directory absent"),
        ("--budget 12XB", "'12XB' is not a size"),
        ("--policies window:windw=1GiB,auto", "the policy window has no parameter 'windw'; did you mean 'window'?"),
        (
            "--policies vdnn,auto",
            "no policy is called 'vdnn': vDNN's policies are vdnn-all, vdnn-conv and vdnn-dynamic",
        ),
        ("--placers profile-guided", "its heuristic is --placement skyline"),
        ("--gpu titan-z", "unknown device 'titan-z'"),
        ("--optimizer lion", "unknown optimizer 'lion'"),
        ("--seq-len 8", "--seq-len does not apply"),
        ("--batch 0", "'--batch'"),
    ],
)
def test_a_wrong_request_is_refused_before_work_begins(overspill: Overspill, options: str, said: str) -> None:
    done = overspill(f"compare alexnet --batch 2 {options} --json")
    assert done.code == 2
    assert said in done.error
    assert done.answer["exit_code"] == 2
    assert "planning" not in done.error


def test_a_missing_plotting_library_is_said_before_work_begins(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda _: None)
    done = overspill(f"{COMPARE} --plot picture.png")
    assert done.code == 2
    assert "needs matplotlib: pip install -c " in done.error
    assert "capturing" not in done.error


@pytest.mark.long
def test_placement_crosses_policies_with_allocators_and_solvers(overspill: Overspill) -> None:
    done = overspill(f"{COMPARE} --policies liveness,vdnn-all --placers pytorch,gtbm,portfolio --json")
    assert done.code == 0
    found = done.answer["placements"]
    assert {(p["policy"], p["placer"]) for p in found} == {
        (policy, placer) for policy in ("liveness", "vdnn-all") for placer in ("pytorch", "gtbm", "portfolio")
    }
    assert_units(done.answer)
    live = {row["policy"]: row["max_bytes"] for row in done.answer["rows"]}
    for placed in found:
        assert placed["peak_bytes"] >= placed["lower_bound_bytes"] == live[placed["policy"]]
        assert (placed["unusable"] is None) == (placed["placer"] == "portfolio")
    human = overspill(f"{COMPARE} --policies liveness --placers all")
    assert "mean U_f" in human.out
    assert "portfolio" in human.out


def test_an_unknown_placer_is_refused_before_anything_is_captured(overspill: Overspill) -> None:
    done = overspill(f"{COMPARE} --placers pytroch")
    assert done.code == 2
    assert "nothing that places blocks is called 'pytroch'" in done.error


def test_a_policy_is_judged_in_the_pool_of_its_paper_and_says_what_it_chose(overspill: Overspill) -> None:
    policies = "vdnn-dynamic,window:every_step,window=1MiB,liveness"
    done = overspill(f"{COMPARE} --policies {policies} --placement own --json --budget 4MiB")
    rows = by_policy(done.answer)
    assert {name: row["pool"] for name, row in rows.items()} == {
        "vdnn-dynamic": "cnmem", "window:window=1048576,every_step": "chunked", "liveness": None,
    }  # fmt: skip
    assert rows["vdnn-dynamic"]["chosen"] == {"pass": "none"}
    assert rows["vdnn-dynamic"]["device_bytes"] >= rows["vdnn-dynamic"]["max_bytes"]
    assert rows["window:window=1048576,every_step"]["note"].startswith("moves feature maps alone here")


@pytest.mark.long
def test_on_a_gpu_each_policy_has_its_own_pool_and_ours_is_never_slower(overspill: Overspill) -> None:
    asked = "--batch 64 --gpu titan-x --policies auto,vdnn-dynamic,dymem,superneurons,window,checkpoint-cost"
    done = overspill(f"compare alexnet {asked} --budget 75% --json")
    rows = by_policy(done.answer)
    assert {name: row["pool"] for name, row in rows.items()} == {
        "auto": "planned", "vdnn-dynamic": "cnmem", "dymem": "gtbm", "superneurons": "pytorch", "window": "chunked",
        "checkpoint-cost": "pytorch",
    }  # fmt: skip
    fitting = [row["step_seconds"] for row in rows.values() if row["fits"]]
    assert len(fitting) > 1
    assert rows["auto"]["fits"]
    assert rows["auto"]["step_seconds"] == min(fitting)
    # Of policies that do not fit, the advice is one that does.
    none = overspill(
        f"compare alexnet --batch 64 --gpu titan-x --budget {done.answer['budget_bytes']} --policies in-core"
    )
    assert none.code == 1
    assert "auto fits in its pool, planned, and takes" in none.error


@pytest.mark.long
def test_a_budget_above_the_card_is_refused_and_never_advised(overspill: Overspill) -> None:
    done = overspill("compare nets:shallow --batch 16 --gpu titan-x --policies auto --budget 13GiB")
    assert done.code == 2
    assert "--budget 13.0 GiB is more than the 11.9 GiB of titan-x" in done.error
    done = overspill("compare nets:shallow --batch 40000000 --gpu titan-x --policies auto,liveness")
    assert done.code == 1
    assert "more than titan-x has" in done.error
    assert "would do" not in done.error

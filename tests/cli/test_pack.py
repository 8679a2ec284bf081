"""`overspill pack`: a layout is 0, none within the capacity is 1, a wrong request is 2, each in one line."""

from __future__ import annotations

import pickle
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from tests.cli.commands import Overspill
from tests.placement.packing.first_fit import FirstFit

from overspill.core import Block, Trace
from overspill.core.registry import Registry
from overspill.placement import ALLOCATE, FREE, Events
from overspill.placement.packing import registry
from overspill.placement.packing.base import LEAST_GAIN, Limits, Packing
from overspill.placement.packing.files import read_trace
from overspill.placement.packing.problem import Problem
from overspill.placement.snapshot import snapshot_of
from overspill.report import picture as plotting

BLOCKS = "id,lower,upper,size\nx,0,4,4096\ny,2,6,8192\nz,4,8,4096\nw,0,2,2048\n"


class Hopeless(FirstFit):
    """Finds nothing, and proves that what it blames cannot lie together where there is a capacity."""

    name = "hopeless"
    summary = "finds nothing"

    def _pack(self, problem: Problem, limits: Limits) -> Packing:
        return Packing(None, problem.lower_bound_bytes, () if limits.capacity_bytes is None else (1, 2))


@pytest.fixture(autouse=True)
def solvers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Solvers whose answers are known, and `blocks.csv` in the current directory."""
    known = {solver.name: solver for solver in (FirstFit(), Hopeless())}
    monkeypatch.setattr(registry, "SOLVERS", Registry("solver", "solvers", known))
    Path("blocks.csv").write_text(BLOCKS, encoding="utf-8")


def test_a_layout_is_told_to_a_reader(overspill: Overspill) -> None:
    done = overspill("pack blocks.csv --capacity 12KiB")
    assert done.code == 0
    for words in (
        "Takes 12.0 KiB of the 12.0 KiB, optimal",
        "from a CSV",
        "first fit by size",
        "12.0 KiB (12288 bytes)",
    ):
        assert words in done.out
    assert done.err == "packing 4 blocks with portfolio\n"


def test_the_written_layout_is_valid_and_a_layout_that_is_packed_again_stays(overspill: Overspill) -> None:
    done = overspill("pack blocks.csv --out layout.csv")
    assert done.code == 0
    assert "layout saved to layout.csv" in done.out
    read = read_trace("layout.csv")
    assert all(block.pinned is not None for block in read.trace.blocks)
    assert overspill("pack layout.csv --out again.csv").code == 0
    assert Path("again.csv").read_text() == Path("layout.csv").read_text()


def test_saved_traces_and_snapshots_are_packed_too(overspill: Overspill) -> None:
    Trace((Block(5, 0, 3, 100), Block(7, 2, 3, 50))).save("trace.json")
    assert overspill("pack trace.json --json").answer["peak_bytes"] == 150
    assert "from a saved trace" in overspill("pack trace.json --out trace.csv").out
    assert Path("trace.csv").read_text() == "id,lower,upper,size,offset\n5,0,3,100,0\n7,2,3,50,100\n"
    events = Events.from_rows([(ALLOCATE, 0, 3 << 20, 0), (ALLOCATE, 1, 100, 0), (FREE, 0, 0, 0)])
    Path("run.pickle").write_bytes(pickle.dumps(snapshot_of(events)))
    assert "from a PyTorch memory snapshot, 2 aligned" in " ".join(overspill("pack run.pickle").out.split())
    assert overspill("pack run.pickle --device 0 --json").answer["peak_bytes"] == (3 << 20) + 512


def test_a_layout_above_the_capacity_is_a_no_that_says_what_would_do(overspill: Overspill) -> None:
    Path("loose.csv").write_text("id,lower,upper,size\na,0,3,3\nb,0,2,4\nc,2,6,3\nd,4,6,4\n", encoding="utf-8")
    done = overspill("pack loose.csv --capacity 7 --out layout.csv --json")
    assert done.code == 1
    assert "does not fit: no layout was found within 7 B; the layout found takes 10 B" in done.error
    assert "--capacity 10 would do; a longer --time-limit or another --solver may find one" in done.error
    answer = done.answer
    assert (answer["feasible"], answer["exit_code"], answer["error"]) == (False, 1, done.error.removeprefix("error: "))
    assert "blame" not in answer
    best = read_trace("layout.csv").columns  # the best found is kept: a search may have taken long
    assert int((best.pinned + best.nbytes).max()) == 10
    told = overspill("pack loose.csv --capacity 7 --out layout.csv").out
    assert "Does not fit: takes 10 B of the 7 B" in told
    assert "layout saved to layout.csv" in told
    assert overspill("pack loose.csv --capacity 10 --out layout.csv").code == 0


def test_an_infeasible_capacity_names_the_fewest_blocks_that_cannot_lie_together(overspill: Overspill) -> None:
    done = overspill("pack blocks.csv --capacity 10KiB --json")
    assert done.code == 1
    assert done.answer["blame"] == ["x", "y"]
    assert "blocks y (8.0 KiB), x (4.0 KiB), 12.0 KiB in all, cannot lie together" in done.error
    assert "--capacity 12288 would do" in done.error
    alone = overspill("pack blocks.csv --capacity 8000")
    assert "block y (8.0 KiB) alone is too much" in alone.error
    assert "and no layout fits" in alone.out


def test_where_there_is_no_layout_the_solvers_proof_is_told(overspill: Overspill) -> None:
    done = overspill("pack blocks.csv --solver hopeless --capacity 12KiB --json --plot map.png")
    assert done.code == 1
    assert done.answer["blame"] == ["y", "z"]
    assert (done.answer["peak_bytes"], done.answer["gap"], done.answer["optimal"]) == (None, None, False)
    assert not Path("map.png").exists()
    unknown = overspill("pack blocks.csv --solver hopeless")
    assert unknown.code == 1
    assert "no layout was found in" in unknown.error
    assert "No layout was found" in unknown.out


def test_the_solver_gets_the_limits(overspill: Overspill, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Limits] = []
    pack = FirstFit.pack
    monkeypatch.setattr(
        FirstFit, "pack", lambda self, problem, limits: given.append(limits) or pack(self, problem, limits)
    )
    overspill("pack blocks.csv --capacity 20000 --time-limit 0.5 --seed 7")
    overspill("pack blocks.csv")
    assert given == [Limits(20000, 0.5, 7), Limits(None, 10.0, 0, LEAST_GAIN)]


def test_standard_input_is_read_for_a_dash(overspill: Overspill, monkeypatch: pytest.MonkeyPatch) -> None:
    events = Events.from_rows([(ALLOCATE, 0, 3 << 20, 0), (FREE, 0, 0, 0)])
    for content, blocks in ((BLOCKS.encode(), 4), (pickle.dumps(snapshot_of(events)), 1), (b'{"blocks":[]}', 0)):
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(content)))
        done = overspill("pack - --json")
        assert (done.code, done.answer["blocks"], done.answer["file"]) == (0, blocks, "standard input")
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"id,lower\n")))
    assert "standard input, line 1: no column 'upper'" in overspill("pack -").error
    monkeypatch.setattr("sys.stdin", None)
    assert "cannot read standard input" in overspill("pack -").error


def test_what_a_snapshot_knows_of_its_blocks_is_in_the_layout(overspill: Overspill) -> None:
    rows = [(ALLOCATE, 0, 3 << 20, 0), (ALLOCATE, 1, 512, 1), (FREE, 0, 0, 0), (FREE, 1, 0, 0)]
    Path("run.pickle").write_bytes(pickle.dumps(snapshot_of(Events.from_rows(rows))))
    assert overspill("pack run.pickle --out layout.csv").code == 0
    header, *lines = (line.split(",") for line in Path("layout.csv").read_text().splitlines())
    blocks = [dict(zip(header, line, strict=True)) for line in lines]
    assert {block["stream"] for block in blocks} == {"0", "1"}
    assert len({int(block["address"]) for block in blocks}) == 2
    assert all(int(block["offset"]) >= 0 for block in blocks)


def test_columns_without_effect_and_numbers_that_are_too_large_are_told(overspill: Overspill) -> None:
    Path("hints.csv").write_text("id,lower,upper,size,hint\na,0,1,8,4\n", encoding="utf-8")
    assert "columns without effect: hint" in overspill("pack hints.csv").out
    for size in (2**62, 2**63, 10**30):
        Path("huge.csv").write_text(f"id,lower,upper,size\na,0,1,{size}\n", encoding="utf-8")
        error = overspill("pack huge.csv").error
        assert "2**62" in error
        assert "in larger units" in error


def test_an_interrupt_prints_and_writes_the_best_layout(overspill: Overspill, monkeypatch: pytest.MonkeyPatch) -> None:
    pack = FirstFit.pack

    def interrupted(self: FirstFit, problem: Problem, limits: Limits) -> Packing:
        return replace(pack(self, problem, limits), stopped="interrupted")

    monkeypatch.setattr(FirstFit, "pack", interrupted)
    done = overspill("pack blocks.csv --out layout.csv")
    assert done.code == 0
    assert "interrupted; this is the best found until then" in " ".join(done.out.split())
    assert Path("layout.csv").exists()
    assert overspill("pack blocks.csv --json").answer["stopped"] == "interrupted"


def test_what_is_piped_has_no_blanks_at_the_ends_of_lines(overspill: Overspill) -> None:
    lines = overspill("pack blocks.csv").out.splitlines()
    assert len(lines) > 5
    assert all(line == line.rstrip() for line in lines)


def test_the_address_map_is_drawn_and_is_in_the_report(overspill: Overspill) -> None:
    done = overspill("pack blocks.csv --plot map.png --report page.html")
    assert done.code == 0
    assert "plot saved to map.png" in done.out
    assert "report saved to page.html" in done.out
    assert Path("map.png").stat().st_size > 10_000
    page = Path("page.html").read_text(encoding="utf-8")
    assert "Addresses over time" in page
    assert "optimal" in page


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("", "Missing argument 'FILE'"),
        ("absent.csv", "cannot read absent.csv: No such file or directory; "),
        (".", "cannot read .: Is a directory"),
        ("nets.py", "nets.py, line 2: no column 'id'"),
        ("bad.csv", "bad.csv, line 6: size is 'much', which is not a whole number like 1048576"),
        ("blocks.csv --solver portfolo", "unknown solver 'portfolo'; did you mean 'portfolio'? Solvers: portfolio"),
        ("blocks.csv --capacity much", "'much' is not a size"),
        ("blocks.csv --capacity 0.5", "is a share, and there is nothing here to take a share of"),
        ("blocks.csv --capacity 0", "'0' is not a positive size"),
        ("blocks.csv --time-limit 0", "--time-limit 0 is no time to search in"),
        ("blocks.csv --time-limit nan", "--time-limit nan is no time to search in"),
        ("blocks.csv --time-limit inf", "--time-limit inf is no time to search in"),
        ("blocks.csv --time-limit soon", "'--time-limit'"),
        ("blocks.csv --seed -1", "'--seed'"),
        ("blocks.csv --device 0", "blocks.csv is no memory snapshot"),
        ("blocks.csv --out no/such.csv", "there is no directory no"),
        ("blocks.csv --out .", "it is a directory"),
        ("blocks.csv --plot map.pdf", "must end in .png; --report"),
        ("blocks.csv --plot no/map.png", "there is no directory no"),
        ("blocks.csv --speed 3", "No such option: --speed"),
    ],
)
def test_a_wrong_request_is_one_line_with_exit_code_2(overspill: Overspill, command: str, said: str) -> None:
    Path("bad.csv").write_text(BLOCKS + "u,0,1,much\n", encoding="utf-8")
    done = overspill(*f"pack {command} --json".split())
    assert done.code == 2
    assert said in done.error
    assert done.answer["exit_code"] == 2
    assert "packing" not in done.err


def test_a_missing_library_is_named_before_the_work(overspill: Overspill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda _: None)
    done = overspill("pack absent.csv --plot map.png")
    assert done.code == 2
    assert "needs matplotlib: pip install -c " in done.error


def test_blocks_that_never_live_are_told(overspill: Overspill) -> None:
    Path("some.csv").write_text(f"{BLOCKS}n,3,3,4096\nm,5,5,1\n", encoding="utf-8")
    assert "2 blocks are live at no time, and take no memory" in overspill("pack some.csv").out
    assert "takes no memory" not in overspill("pack blocks.csv").out


@pytest.mark.parametrize("row", ["n,3,3,4096,", "n,3,8,4096,3-8", "n,0,9,4096,0-4 4-9"])
def test_a_block_that_never_lives_takes_nothing_alone_or_among_others(overspill: Overspill, row: str) -> None:
    Path("alone.csv").write_text(f"id,lower,upper,size,gaps\n{row}\n", encoding="utf-8")
    Path("among.csv").write_text(f"id,lower,upper,size,gaps\n{row}\na,0,4,10,\n", encoding="utf-8")
    for name, peak in (("alone", 0), ("among", 10)):
        assert "1 block is live at no time, and takes no memory" in overspill(f"pack {name}.csv").out
        answer = overspill(f"pack {name}.csv --json --capacity 10").answer
        assert (answer["peak_bytes"], answer["bound_bytes"], answer["optimal"]) == (peak, peak, True)

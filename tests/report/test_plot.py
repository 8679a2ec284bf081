"""The picture: a file of its kind, every policy once, labels that keep clear of one another; and clear refusals."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from overspill.core.errors import RequestError
from overspill.report import plot as plotting
from overspill.report.plot import COLOURS, GIB, check_plot, picture, plot

PNG = b"\x89PNG\r\n\x1a\n"


def row(policy: str, gib: float | None, slowdown: float | None, *, fits: bool = True) -> dict[str, Any]:
    return {
        "policy": policy,
        "max_bytes": None if gib is None else int(gib * GIB),
        "device_bytes": None,
        "slowdown": slowdown,
        "fits": fits,
    }


ROWS = [
    row("auto", 11.6, 1.07),
    row("vdnn-all", 13.5, 1.21, fits=False),
    row("checkpoint", 13.5, 1.33, fits=False),
    row("liveness", 20.8, 1.0, fits=False),
    row("dymem", None, None, fits=False),
]


def test_a_png_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    plot(ROWS, path, "vgg16", 12 * GIB, "oracle")
    content = path.read_bytes()
    assert content.startswith(PNG)
    assert len(content) > 10_000


@pytest.mark.parametrize("rows", [[], ROWS[-1:], ROWS[:1], [row("auto", 0.0, 1.0), row("liveness", 0.0, 1.0)]])
def test_few_points_or_none_make_a_picture_too(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    path = tmp_path / "picture.PNG"
    plot(rows, path, "nothing much", 1, "oracle")
    assert path.stat().st_size > 1000


def test_every_policy_with_figures_is_one_point_inside_the_axes() -> None:
    made = picture(ROWS, "", 12 * GIB, "oracle")
    assert [p.name for p in made.points] == ["auto", "vdnn-all", "checkpoint", "liveness"]
    assert [p.fits for p in made.points] == [True, False, False, False]
    for point in made.points:
        assert made.memory_range[0] < point.gib < made.memory_range[1]
        assert made.time_range[0] < point.slowdown < made.time_range[1]
    assert made.budget_gib == 12.0


def test_of_a_gpu_the_card_that_each_needs_is_drawn() -> None:
    rows = [row("auto", 9.0, 1.2) | {"device_bytes": 11 * GIB}, row("window", 8.0, 1.1) | {"device_bytes": 10 * GIB}]
    rows += [row("dymem", None, None, fits=False)]
    made = picture(rows, "", 12 * GIB, "oracle")
    assert [(p.name, p.gib) for p in made.points] == [("window", 10.0), ("auto", 11.0)]
    assert (made.memory_axis, picture(ROWS, "", 12 * GIB, "oracle").memory_axis) == (
        "card (GiB)",
        "maximum memory (GiB)",
    )


def test_a_budget_above_all_points_is_inside_the_axes() -> None:
    assert picture(ROWS, "", 100 * GIB, "oracle").memory_range[1] > 100


def test_labels_of_points_that_lie_close_do_not_overlap() -> None:
    rows = [row(f"policy-{i}", 10 + 0.05 * i, 1 + 0.002 * i, fits=False) for i in range(4)]
    rows += [row("far", 20, 2.0)]
    made = picture(rows, "", 12 * GIB, "oracle")
    width, height = plotting._AXES_POINTS
    boxes = [
        plotting._box(
            p.place,
            p.gib / made.memory_range[1] * width,
            (p.slowdown - made.time_range[0]) / (made.time_range[1] - made.time_range[0]) * height,
            len(p.name),
        )
        for p in made.points
    ]
    for one, other in combinations(boxes, 2):
        assert not plotting._collisions(one, [other])


def test_colours_differ_as_long_as_there_are_any() -> None:
    rows = [row(f"p{i}", 1 + i, 1.0) for i in range(len(COLOURS) + 1)]
    colours = [p.colour for p in picture(rows, "", GIB, "oracle").points]
    assert len(set(colours[:-1])) == len(COLOURS)
    assert colours[-1] == colours[0]


@pytest.mark.parametrize("name", ["picture.pdf", "picture.html", "picture", "png", "picture.png.gz"])
def test_another_ending_is_refused_with_what_would_do(name: str) -> None:
    with pytest.raises(RequestError, match=r"in \.png; --report"):
        check_plot(Path(name))


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None if name == "matplotlib" else object())
    with pytest.raises(RequestError, match=r"matplotlib: .*overspill\[plot\]"):
        check_plot(Path("picture.png"))


def test_a_file_that_can_not_be_written_is_a_clear_line(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot write"):
        plot(ROWS, tmp_path / "absent" / "picture.png", "", GIB, "oracle")

"""`bench/public_figures.py`: its rows have sources and jobs that can be asked for, and the record is of them."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from overspill.job import NamedModel

BENCH = Path(__file__).parents[2] / "bench"


def test_every_figure_has_a_source_a_job_and_a_line_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    from public_figures import _UNITS, DATA, _job

    with DATA.open(newline="") as file:
        rows = list(csv.DictReader(file))
    record = json.loads((BENCH / "results" / "public_figures.json").read_text())
    assert len({row["url"] for row in rows}) >= 10
    assert len(rows) == len(record)
    for row, recorded in zip(rows, record, strict=True):
        assert row["url"].startswith("https://")
        assert row["kind"] in {"measured", "stated"}
        _job(NamedModel(row["model"]), int(row["batch"]), json.loads(row["recipe"]))
        figure = (float(row["figure"]) - float(row["context"])) * _UNITS[row["unit"]]
        assert (recorded["job"], recorded["published_bytes"]) == (row["job"], round(figure))

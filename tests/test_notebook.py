"""The example notebook: it runs as it stands, what it shows is what results say, and it is kept without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "14_in_a_notebook.ipynb"


def code(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [cell for cell in cells if cell["cell_type"] == "code"]


def test_it_is_kept_without_outputs() -> None:
    cells = code(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"])
    assert len(cells) >= 4
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


@pytest.mark.long
def test_it_runs_and_results_show_themselves(tmp_path: Path) -> None:
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [cell["outputs"][-1]["data"] for cell in code(notebook["cells"])]
    assert all("text/html" in data for data in shown[:3])
    estimate, plan, rows, files = (data.get("text/html", data["text/plain"]) for data in shown)
    assert "t4" in estimate
    assert "<" in estimate, "a picture or a table, no text alone"
    assert "<" in plan
    assert "simulated" in plan
    assert "auto" in rows
    assert "checkpoint" in rows
    assert all(name in files for name in ("plan.html", "plan.json", "plan.pickle"))

"""Running the command in this process, and models of a user's own in the current directory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.cli.commands import MODELS, Done, Overspill

from overspill.cli import main


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A directory of the test's own with `nets.py` in it, no calibrated profile, and torch's log as it was."""
    (tmp_path / "nets.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path / "cache"))
    yield
    sys.modules.pop("nets", None)
    if logging.getLogger("torch").level == logging.CRITICAL:  # a command ran; to restore it takes long
        torch._logging.set_logs()
        logging.getLogger("torch.__trace").propagate = True  # as the suite has it, and `set_logs` has not
    torch._dynamo.reset()


@pytest.fixture
def overspill(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Overspill:
    """Run `overspill` with these arguments, given as words or in one string, on a terminal of one width."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Done:
        words = arguments[0].split() if len(arguments) == 1 else list(arguments)
        capsys.readouterr()
        code = main(words)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    """An empty directory for the disk store."""
    path = tmp_path / "store"
    path.mkdir()
    return path

"""What tests of scripts share: a directory of their own, and a script that is written there."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts run, and leave what they write, in a directory of the test's own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a script there, and gives its name."""

    def write(text: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return name

    return write

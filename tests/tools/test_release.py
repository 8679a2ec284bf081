"""The release checklist: what it builds works where nothing else is, and a line that does not hold says so."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "tools" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_a_line_that_fails_is_printed_and_counted(release: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    def fails() -> str:
        raise release.Failed("why not")

    check = release.Checklist()
    assert not check("one", fails)
    assert check("two", lambda: "found")
    assert capsys.readouterr().out == "[ ] one: why not\n[x] two: found\n"
    assert check.failed == ["one"]


def test_a_command_that_fails_is_a_line_with_its_last_words(release: ModuleType) -> None:
    with pytest.raises(release.Failed, match=r"with 3: .*last"):
        release.run(sys.executable, "-c", "import sys; print('first\\nlast', file=sys.stderr); sys.exit(3)")


def test_pip_would_take_the_wheel_that_is_tried(release: ModuleType, tmp_path: Path) -> None:
    for tag in ("cp311-cp311", "cp312-abi3"):
        (tmp_path / f"overspill-1-{tag}-manylinux_2_34_x86_64.whl").touch()
    found = [release.wheel_for(version, tmp_path).name.split("-")[2] for version in ("3.11", "3.12", "3.13")]
    assert found == ["cp311", "cp312", "cp312"]


@pytest.mark.parametrize(
    ("without", "more", "said"),
    [
        ("overspill/py.typed", "", "it lacks overspill/py.typed"),
        ("overspill/devices/t4.toml", "", "it lacks overspill/devices/t4.toml"),
        ("overspill/runtime/transfer/_copies.abi3.so", "", "compiled parts"),
        ("", "tests/conftest.py", "it has tests/conftest.py"),
        ("", "", ""),
    ],
)
def test_a_wheel_has_the_package_and_nothing_else(
    release: ModuleType, tmp_path: Path, without: str, more: str, said: str
) -> None:
    names = {name.removeprefix("src/") for name in release._tracked("src/overspill")}
    names |= {name.removesuffix(".pyi") + ".abi3.so" for name in names if name.endswith(".pyi")}
    names |= {f"{release.ALLOCATOR}.so", "overspill-1.dist-info/RECORD"}
    wheel = tmp_path / "overspill.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in (names | {more}) - {without, ""}:
            archive.writestr(name, "")
    if said:
        with pytest.raises(release.Failed, match=said):
            release.check_contents(wheel)
    else:
        assert "5 compiled parts" in release.check_contents(wheel)


def test_both_packages_are_of_one_version(release: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(release.Failed, match="has no section"):  # what is looked at last
        release.check_version()
    monkeypatch.setitem(release.PROJECT["project"]["optional-dependencies"], "papers", ["overspill-papers==9"])
    with pytest.raises(release.Failed, match="overspill-papers==9"):
        release.check_version()


@pytest.mark.long
def test_the_wheel_for_this_python_is_built_without_a_network_and_works_where_nothing_else_is(tmp_path: Path) -> None:
    command = [sys.executable, "tools/release.py", "--python", HERE, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines() if line.startswith("["))
    for what in (
        "the sdist",
        "overspill-papers",
        f"CPython {HERE}, its wheel",
        f"CPython {HERE}, contents",
        f"CPython {HERE}, installed",
        "twine",
    ):
        assert f"[x] {what}" in lines, done.stdout + done.stderr
    assert "without a network" in lines["[x] the sdist"]
    assert "manylinux" in lines[f"[x] CPython {HERE}, its wheel"]
    assert "train --check, demo" in lines[f"[x] CPython {HERE}, installed"]

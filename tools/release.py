"""Whether this checkout can be released: builds the sdist and the wheels, tries each where nothing else is, prints a checklist.

    python tools/release.py                  # all of it, into build/release; the wheels are in build/release/dist
    python tools/release.py --python 3.11    # for one CPython

The sdist is built first and the wheels from it, as pip does where there is no wheel for a machine: without a network, in an
environment that has the build requirements alone. auditwheel names the oldest Linux that a wheel works on. Each wheel is then
installed, from files, into a fresh environment, and runs the smoke suite of `release_smoke.py` there. Needs a compiler, a
network for what the environments are made of, and a Python of each version: `python3.12`, or one of pyenv's; a version that
is not here is a line of the checklist that has not passed. Takes five minutes and, where PyTorch comes with CUDA, 5 GB for
each Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PAPERS = ROOT / "packages" / "overspill-papers"
CONSTRAINTS = ROOT / "constraints.txt"
SMOKE = Path(__file__).with_name("release_smoke.py")
ALLOCATOR = "overspill/runtime/transfer/liboverspill_allocator"
"""What PyTorch loads as its allocator, no module of Python's."""
PYTHONS = ("3.11", "3.12", "3.13")
ABI3_FROM = (3, 12)
"""From this CPython on one wheel, by the stable ABI, serves all."""


class Failed(Exception):
    """A line of the checklist that does not hold; the text says why."""


@dataclass
class Checklist:
    """Lines as they are tried, each printed at once, with what was found."""

    failed: list[str] = field(default_factory=list)

    def __call__(self, what: str, look: Callable[[], str]) -> bool:
        """Whether `look`, which returns what was found, did so without failing."""
        try:
            print(f"[x] {what}: {look()}", flush=True)
        except Failed as error:
            print(f"[ ] {what}: {error}", flush=True)
            self.failed.append(what)
            return False
        return True


def run(*words: str | Path, where: Path = ROOT, offline: bool = False, python_path: Path | None = None) -> str:
    """What a command printed. Raises Failed with the end of it; `offline` takes the network away, where the system lets us."""
    command = [str(word) for word in words]
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_CONSTRAINT": str(CONSTRAINTS)}
    environment["PIP_BUILD_CONSTRAINT"] = str(CONSTRAINTS)
    if python_path is not None:
        environment["PATH"] = f"{python_path}:{environment['PATH']}"
    if offline:
        environment["PIP_NO_INDEX"] = "1"
        command = [*_without_network(), *command]
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise Failed(f"{Path(command[0]).name} … ended with {done.returncode}: {' / '.join(said[-3:])}")
    return done.stdout


def _without_network() -> list[str]:
    """What to put before a command so that it has no network, or nothing where that is not allowed."""
    alone = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    if shutil.which("unshare") is None:
        return []
    return alone if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode == 0 else []


def python_named(version: str) -> Path | None:
    """An interpreter of that version, or None."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    named = shutil.which(f"python{version}")
    for found in (*([Path(named)] if named else []), *pyenv, Path(sys.executable)):
        asked = [str(found), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == version:
            return found
    return None


def environment(python: Path | str, where: Path, packages: Sequence[str]) -> Path:
    """The interpreter of an environment that has `packages`, at tested versions."""
    run(python, "-m", "venv", "--clear", where)
    run(where / "bin/python", "-m", "pip", "install", "-q", *packages)
    return where / "bin" / "python"


def check_version() -> str:
    """The version, which stands in the package alone, is that of overspill-papers, and has a place in the changelog."""
    text = (ROOT / "src/overspill/__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    if found is None or "version" not in PROJECT["project"].get("dynamic", ()):
        raise Failed("it does not stand in src/overspill/__init__.py alone")
    papers, pinned = tomllib.loads((PAPERS / "pyproject.toml").read_text(encoding="utf-8"))["project"], f"=={found[1]}"
    extras = PROJECT["project"]["optional-dependencies"].values()
    asked = {need for extra in extras for need in extra if need.startswith("overspill-papers")}
    said = f"=={papers['version']}", *papers["dependencies"], *sorted(asked)
    if said != (pinned, f"overspill{pinned}", f"overspill-papers{pinned}"):
        raise Failed(f"overspill-papers, and what one asks of the other, is not {found[1]}: {', '.join(said)}")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"## [{found[1]}]" not in changelog:
        raise Failed(f"CHANGELOG.md has no section [{found[1]}] yet; what is under Unreleased goes there")
    return found[1]


def check_metadata() -> str:
    """What an index shows of the project, other than its README."""
    shown = PROJECT["project"]
    if missing := [name for name in ("description", "keywords", "classifiers", "urls") if not shown.get(name)]:
        raise Failed(f"pyproject.toml has no project.{', '.join(missing)}")
    return f"{len(shown['urls'])} addresses, {len(shown['keywords'])} keywords, {len(shown['classifiers'])} classifiers"


def check_tree() -> str:
    """The commit that is released; all of the checkout is in it."""
    if changed := run("git", "status", "--porcelain").splitlines():
        raise Failed(f"{len(changed)} files are not committed, as {changed[0].strip()}")
    return run("git", "rev-parse", "--short", "HEAD").strip()


def build_sdist(tools: Path, dist: Path) -> str:
    """The sdist; all that git has of src and native is in it."""
    run(tools, "-m", "build", "-q", "--no-isolation", "--sdist", "-o", dist, offline=True, python_path=tools.parent)
    (made,) = dist.glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {name for name in _tracked("src", "native") if "/tests/" not in f"/{name}"}
    if missing := sorted(wanted - names):
        raise Failed(f"{made.name} lacks {', '.join(missing[:3])}")
    return f"{made.name}, {made.stat().st_size >> 10} KiB, made without a network"


def build_papers(tools: Path, dist: Path) -> str:
    """The wheel of overspill-papers, which serves all; all that git has of its package is in it."""
    run(
        tools,
        "-m",
        "build",
        "-q",
        "--no-isolation",
        "--wheel",
        "-o",
        dist,
        PAPERS,
        offline=True,
        python_path=tools.parent,
    )
    (made,) = dist.glob("overspill_papers-*-py3-none-any.whl")
    source = (PAPERS / "src").relative_to(ROOT).as_posix()
    with zipfile.ZipFile(made) as archive:
        missing = sorted({name.removeprefix(f"{source}/") for name in _tracked(source)} - {*archive.namelist()})
    if missing:
        raise Failed(f"{made.name} lacks {', '.join(missing[:3])}")
    return f"{made.name}, {made.stat().st_size >> 10} KiB, made without a network"


def build_wheel(python: Path, work: Path, dist: Path, tools: Path) -> str:
    """A wheel from the sdist for `python`, named by the oldest Linux that it works on."""
    build = environment(python, work / "build", (*PROJECT["build-system"]["requires"], "cmake", "ninja"))
    (sdist,) = dist.glob("*.tar.gz")
    raw = work / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    run(
        build, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", raw, sdist,
        offline=True, python_path=build.parent, where=work,
    )  # fmt: skip
    (made,) = raw.glob("*.whl")
    run(tools, "-m", "auditwheel", "repair", "-w", dist, made, python_path=tools.parent)
    (wheel,) = dist.glob(f"{'-'.join(made.name.split('-')[:4])}-*.whl")
    return f"{wheel.name}, {wheel.stat().st_size >> 10} KiB, made without a network"


def check_contents(wheel: Path) -> str:
    """All that git has of the package is in the wheel, and beside it compiled parts and metadata alone."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    wanted = {name.removeprefix("src/") for name in _tracked("src/overspill")}
    compiled = {name for name in names if name.endswith(".so")}
    extra = {name for name in names - wanted - compiled if not name.startswith("overspill-")}
    if missing := sorted(wanted - names):
        raise Failed(f"it lacks {', '.join(missing[:3])}")
    if extra:
        raise Failed(f"it has {', '.join(sorted(extra)[:3])}")
    stubs = {name.removesuffix(".pyi") for name in names if name.endswith(".pyi")}
    if {name.partition(".")[0] for name in compiled} != stubs | {ALLOCATOR}:
        raise Failed(f"its compiled parts are {', '.join(sorted(compiled)) or 'none'}")
    return f"{len(wanted)} files of the package, {len(compiled)} compiled parts"


def check_installed(python: Path, wheel: Path, work: Path) -> str:
    """The smoke suite in a fresh environment that was made from files, without a compiler in sight."""
    files, place, fresh = work / "deps", work / "empty", work / "fresh"
    run(python, "-m", "pip", "download", "-q", "--only-binary=:all:", "-d", files, wheel)
    run(python, "-m", "venv", "--clear", fresh)
    inside = fresh / "bin" / "python"
    run(inside, "-m", "pip", "install", "-q", "--no-index", "--find-links", files, wheel, offline=True)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    return run(inside, "-I", SMOKE, where=place, offline=True).strip()


def check_by_twine(tools: Path, dist: Path) -> str:
    """How many files an index would take."""
    made = sorted(dist.iterdir())
    run(tools, "-m", "twine", "check", "--strict", *made)
    return f"{len(made)} files would be taken by an index"


def _tracked(*folders: str) -> list[str]:
    return run("git", "ls-files", "--", *folders).splitlines()


def wheel_for(version: str, dist: Path) -> Path | None:
    """The wheel in `dist` that pip takes for that CPython."""
    number = tuple(map(int, version.split(".")))
    tag = f"cp{ABI3_FROM[0]}{ABI3_FROM[1]}-abi3" if number >= ABI3_FROM else f"cp{number[0]}{number[1]}-cp"
    return next(iter(sorted(dist.glob(f"*-{tag}*.whl"))), None)


def release(versions: Iterable[str], out: Path, *, smoke: bool) -> int:
    """The checklist; the exit code is 1 where a line of it does not hold."""
    check = Checklist()
    dist = out / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    check("the version", check_version)
    check("the metadata", check_metadata)
    check("the commit", check_tree)
    tools = environment(sys.executable, out / "tools", PROJECT["project"]["optional-dependencies"]["release"])
    if not check("the sdist", lambda: build_sdist(tools, dist)):
        return 1
    check("overspill-papers", lambda: build_papers(tools, dist))
    for version in versions:
        work = out / version
        work.mkdir(exist_ok=True)
        python = python_named(version)
        if python is None:
            check(f"CPython {version}", _not_here)
            continue
        if wheel_for(version, dist) is None:
            check(f"CPython {version}, its wheel", lambda p=python, w=work: build_wheel(p, w, dist, tools))  # type: ignore[misc]
        wheel = wheel_for(version, dist)
        if wheel is None:
            continue
        check(f"CPython {version}, contents", lambda w=wheel: check_contents(w))  # type: ignore[misc]
        if smoke:
            check(f"CPython {version}, installed", lambda p=python, f=wheel, w=work: check_installed(p, f, w))  # type: ignore[misc]
    check("twine", lambda: check_by_twine(tools, dist))
    print(f"{len(check.failed)} of the lines do not hold" if check.failed else f"all holds; upload {dist}")
    return int(bool(check.failed))


def _not_here() -> str:
    raise Failed("there is no such Python on this machine")


def main() -> int:
    """Read the arguments and print the checklist."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="VERSION", help="for these CPythons")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "release", help="where all of it goes")
    parser.add_argument("--no-smoke", action="store_true", help="build, and do not install")
    given = parser.parse_args()
    return release(given.python, given.out.absolute(), smoke=not given.no_smoke)


if __name__ == "__main__":
    sys.exit(main())

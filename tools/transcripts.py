r"""Runs the commands that README.md and the pages of docs/ show, and compares what they print with what stands there.

python tools/transcripts.py                    # names each stale block, with a diff; exit code 1 if there is one
python tools/transcripts.py --write            # writes what the stale ones print today
python tools/transcripts.py docs/cli.md --all  # one page, the slow blocks too

A transcript is a fenced block whose first line is `$ overspill …`. It may hold several commands, each on a line that
begins with `$ ` (and goes on behind a backslash), followed by what it prints: standard output, then the line of standard
error that says what was wrong, folded. The commands of a page run one after another in one empty folder, 120 columns
wide and without a calibrated profile. A line `…` stands for any lines; what is written below it begins at the
first printed line that equals the next one, or at the error.

Simulated figures must match exactly; what `MEASURED` finds is not compared, nor is padding. HTML comments before a fence say more:

    <!-- slow -->               left out without --all: minutes, or much memory
    <!-- measured -->           all numbers are measured, so none is compared
    <!-- file blocks.csv -->    no transcript but a file, for the commands of the page
    <!-- file bad.csv           the same without a fence: a file that the page does not show
    …
    -->
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = 120
LIMIT_SECONDS = 600.0
"""The most that one command may take."""
FAILURE = 3
"""From this exit code on a command failed, and what it printed is worth nothing; 1 and 2 are answers."""
ELISION = "…"
ERROR = "error: "

_TIME = r"[\d.]+ (?:s|ms|µs)"
MEASURED = tuple(
    re.compile(pattern, re.MULTILINE)
    for pattern in (
        rf"(planning took +){_TIME}",
        rf"^(usual step ){_TIME}(?= \(simulated )",  # of `train`
        rf"(; plain ){_TIME}",
        rf"(; first step ){_TIME}",
        rf"^( +searched +){_TIME}",  # of `pack`
        rf"^( +usual step +){_TIME}",  # of `train`
        rf"^( +slowdown +)[\d.]+ +measured, {_TIME}",
        rf"(no layout was found.* in ){_TIME}",
        r'("(?:plan_|reference_step_)?seconds": ?)[\d.e-]+',
        r'("(?:reference_)?step_seconds": ?)\[[^]]*\]',
        # The last digits of losses depend on the processor's instructions.
        r"^(losses )[-\d.einfa+ ]+",
        r'("(?:reference_)?losses": ?)\[[^]]*\]',
    )
)
"""What the wall clock says, and the losses of real training; what stands before it is kept."""
_TIME_COLUMN = re.compile(rf"^.*\btime\n(?:.*{_TIME}\n|─+\n)+", re.MULTILINE)
_FIGURE = re.compile(r"\d[\d.]*(?: ?(?:[kMGT]i?)?(?:B/s|B|FLOP/s)| ?[mµ]?s\b| ?%)?")


@dataclass(frozen=True)
class Command:
    """One command of a transcript as it is written, `$ ` and all, and what is written below it."""

    lines: tuple[str, ...]
    written: tuple[str, ...]

    @property
    def shell(self) -> str:
        """What a shell is given."""
        return "\n".join((self.lines[0].removeprefix("$ "), *self.lines[1:]))


@dataclass(frozen=True)
class Transcript:
    """The lines `start` to `end` of a page, counted from 0: the inside of a fence."""

    start: int
    end: int
    indent: str
    remarks: frozenset[str]
    commands: tuple[Command, ...]


@dataclass
class Page:
    """A Markdown file, its transcripts, and the files that their commands read."""

    path: Path
    lines: list[str]
    transcripts: list[Transcript] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """What the commands of a transcript print today: the block as it should be, whether it is, and why it cannot be."""

    block: tuple[str, ...]
    fresh: bool
    failure: str = ""


def read_page(path: Path) -> Page:
    """The page at `path` with all its transcripts and files."""
    page = Page(path, path.read_text(encoding="utf-8").splitlines())
    remarks: list[str] = []
    at = 0
    while at < len(page.lines):
        line = page.lines[at]
        if fence := re.match(r" *(?=```)", line):
            end = _closing(page.lines, at + 1, fence.group() + "```")
            _add_block(page, at + 1, end, fence.group(), remarks)
            at, remarks = end, []
        elif hidden := re.fullmatch(r"<!-- file (\S+)", line):
            end = _closing(page.lines, at + 1, "-->")
            page.files[hidden.group(1)] = _text(page.lines[at + 1 : end])
            at = end
        elif remark := re.fullmatch(r"<!-- (.+) -->", line.strip()):
            remarks += remark.group(1).split()
        elif line.strip():
            remarks = []
        at += 1
    return page


def _closing(lines: Sequence[str], start: int, mark: str) -> int:
    """The first line from `start` on that is `mark`; the end of the page where there is none."""
    return next((at for at in range(start, len(lines)) if lines[at].rstrip() == mark), len(lines))


def _add_block(page: Page, start: int, end: int, indent: str, remarks: Sequence[str]) -> None:
    """Put the fence whose inside is the lines `start` to `end` among the page's transcripts or files, if it is one."""
    inside = [line.removeprefix(indent) for line in page.lines[start:end]]
    if remarks[:1] == ["file"]:
        page.files[remarks[1]] = _text(inside)
    elif inside and inside[0].startswith("$ overspill"):
        page.transcripts.append(Transcript(start, end, indent, frozenset(remarks), tuple(_commands(inside))))


def _commands(lines: Sequence[str]) -> list[Command]:
    """The commands of a transcript; the first line begins one."""
    found: list[Command] = []
    starts = [at for at, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        first = next((at for at in range(start, end) if not lines[at].endswith("\\")), end - 1) + 1
        found.append(Command(tuple(lines[start:first]), tuple(lines[first:end])))
    return found


def run(transcript: Transcript, folder: Path) -> Found:
    """What the commands of `transcript` print, run in `folder`."""
    block: list[str] = []
    fresh = True
    for command in transcript.commands:
        try:
            done = subprocess.run(
                ["bash", "-c", command.shell], cwd=folder, env=_environment(folder), capture_output=True, text=True,
                check=False, timeout=LIMIT_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Found((), fresh=False, failure=f"`{command.shell}` took more than {LIMIT_SECONDS:.0f} s")
        if done.returncode >= FAILURE or done.returncode < 0:
            last = (done.stderr.splitlines() or [""])[-1]
            return Found((), fresh=False, failure=f"`{command.shell}` ended with exit code {done.returncode}: {last}")
        printed = elided(folded(done.stdout, done.stderr), command.written)
        block += (*command.lines, *printed)
        fresh &= comparable(printed, transcript.remarks) == comparable(command.written, transcript.remarks)
    return Found(tuple(block), fresh)


def _environment(folder: Path) -> dict[str, str]:
    """This process's, but for what changes what commands print."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OVERSPILL_", "PYTORCH_", "TORCH_"))}
    kept.pop("FORCE_COLOR", None)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    fixed = {"PATH": path, "COLUMNS": str(COLUMNS), "OVERSPILL_CACHE": str(folder / "no-cache"), "PYTHONUTF8": "1"}
    return kept | fixed


def folded(out: str, err: str) -> list[str]:
    """The lines of a transcript: standard output, and the line of standard error that says what was wrong."""
    lines = [line.rstrip() for line in out.splitlines()]
    for line in err.splitlines():
        if line.startswith(ERROR):
            lines += textwrap.wrap(line, COLUMNS, break_long_words=False, break_on_hyphens=False)
    while lines and not lines[-1]:
        lines.pop()
    return lines


def elided(printed: Sequence[str], written: Sequence[str]) -> list[str]:
    """`printed` with `…` in place of what `written` leaves out; all of it where they have too little in common."""
    marks = [at for at, line in enumerate(written) if line.strip() == ELISION]
    if not marks:
        return list(printed)
    found, at = [*printed[: marks[0]], written[marks[0]]], marks[0]
    for start, end in zip(marks, [*marks[1:], len(written)], strict=True):
        part = written[start + 1 : end]
        if not part:
            continue
        at = next((i for i in range(at, len(printed)) if _begins_alike(printed[i], part[0])), -1)
        if at < 0:
            return list(printed)
        last = end == len(written)
        found += printed[at:] if last else (*printed[at : at + len(part)], written[end])
        at += len(part)
    return found


def _begins_alike(printed: str, written: str) -> bool:
    """Whether what is written below a `…` may begin here: with the same line, or with what was wrong."""
    return (printed.startswith(ERROR) and written.startswith(ERROR)) or comparable([printed]) == comparable([written])


def comparable(lines: Sequence[str], remarks: frozenset[str] = frozenset()) -> list[str]:
    """`lines` as they are compared: without what is measured and without padding, an error in one line."""
    text = _text(_unfolded(lines))
    if "measured" in remarks:
        text = _FIGURE.sub("#", text)
    for pattern in MEASURED:
        text = pattern.sub(r"\1#", text)
    text = _TIME_COLUMN.sub(lambda table: re.sub(rf"{_TIME}$", "#", table.group(), flags=re.MULTILINE), text)
    # A measured figure of more digits makes its column wider.
    return re.sub("─+", "─", re.sub(r"(?<=\S) +", " ", text)).splitlines()


def _unfolded(lines: Iterable[str]) -> list[str]:
    """`lines` with each error, which goes on to the next command, in one line."""
    found: list[str] = []
    in_error = False
    for line in map(str.rstrip, lines):
        if in_error and not line.startswith("$ "):
            found[-1] += f" {line.strip()}"
            continue
        in_error = line.startswith(ERROR)
        found.append(line)
    return found


def _text(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def stale(page: Page, *, slow: bool, write: bool) -> int:
    """How many transcripts of `page` do not show what their commands print in the end; `write` puts it there."""
    failed = 0
    changes: list[tuple[Transcript, tuple[str, ...]]] = []
    with tempfile.TemporaryDirectory(prefix="transcripts-") as name:
        for file, text in page.files.items():
            (Path(name) / file).write_text(text, encoding="utf-8")
        for transcript in page.transcripts:
            where = f"{_shown(page.path)}:{transcript.start + 1}"
            if "slow" in transcript.remarks and not slow:
                print(f"{where}: slow, left out")
                continue
            begun = time.perf_counter()
            found = run(transcript, Path(name))
            verdict = "as written" if found.fresh else found.failure or ("rewritten" if write else "STALE")
            print(f"{where}: {verdict} ({time.perf_counter() - begun:.1f} s)", flush=True)
            if found.failure:
                failed += 1
            elif not found.fresh:
                changes.append((transcript, found.block))
                print(_difference(transcript, found.block), flush=True)
    if not write:
        return failed + len(changes)
    _write(page, changes)
    return failed


def _difference(transcript: Transcript, block: Sequence[str]) -> str:
    """A diff from what is written to what was printed, without what is not compared."""
    written = [line for command in transcript.commands for line in (*command.lines, *command.written)]
    left, right = (comparable(lines, transcript.remarks) for lines in (written, block))
    return "\n".join(unified_diff(left, right, "written", "printed", lineterm="", n=1))


def _write(page: Page, changes: Sequence[tuple[Transcript, Sequence[str]]]) -> None:
    """Put new blocks in the places of old ones."""
    for transcript, block in reversed(changes):
        page.lines[transcript.start : transcript.end] = [(transcript.indent + line).rstrip() for line in block]
    if changes:
        page.path.write_text(_text(page.lines), encoding="utf-8")


def _shown(path: Path) -> Path:
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 where all transcripts are as printed (or were rewritten), 1 otherwise."""
    parser = argparse.ArgumentParser(
        description="Compare the transcripts in README.md and docs/ with what commands print."
    )
    parser.add_argument("pages", nargs="*", type=Path, help="Markdown files; by default README.md and all of docs/")
    parser.add_argument("--write", action="store_true", help="rewrite stale blocks")
    parser.add_argument("--all", action="store_true", help="run the slow blocks too")
    options = parser.parse_args(arguments)
    pages = [path.resolve() for path in options.pages] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    count = sum(stale(read_page(path), slow=options.all, write=options.write) for path in pages)
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())

"""Progress messages of a command, on standard error.

They name the current task, its progress, and the time left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING

from overspill.core.forked import is_copy
from overspill.core.progress import progress_to

from .output import shown

if TYPE_CHECKING:  # rich is imported when there is something to print
    from rich.console import Console
    from rich.progress import Progress, TaskID

QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
"""Whether `--quiet` was given: a command then prints only errors on standard error."""


_CURRENT: ContextVar[Narrator | None] = ContextVar("current", default=None)


def tell_once(text: str) -> None:
    """Print `text`, which is not empty, unless it was printed before.

    Without a running command nothing is printed, nor in a copy of its process.
    """
    if (narrator := _CURRENT.get()) is not None and not is_copy():
        narrator.once(text)


class Narrator:
    """Prints progress on standard error.

    `now` shows a temporary message, `line` a permanent one. Without a terminal both are lines, and messages that are
    not `lasting` are left out. If the amount of work is known (`parts`, `at_most`), the message shows the progress and
    the time left.
    """

    def __init__(self, console: Console, progress: Progress | None) -> None:
        self._console = console
        self._progress = progress
        self._task: TaskID | None = None
        self._text = ""
        self._open = False
        self._told: set[str] = {""}
        self._begin(None)

    def now(self, text: str, *, lasting: bool = True) -> None:
        """Show the current task from here on."""
        self._text = shown(text)
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=self._text)
        elif lasting:
            self.line(text)

    def detail(self, text: str) -> None:
        """Show on a terminal what the current task does now."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=f"{self._text}: {shown(text)}")

    def parts(self, total: int | None) -> None:
        """Expect work in `total` parts of about the same time; None: their number is unknown."""
        self._open = False
        self._begin(total)

    def part(self, text: str, *, lasting: bool = True) -> None:
        """Begin the next part, which completes the one before."""
        if self._open:
            self.done()
        self._open = True
        self.now(text, lasting=lasting)

    def done(self) -> None:
        """Count a part as done."""
        self._open = False
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task)

    def at_most(self, seconds: float) -> None:
        """Expect work that ends after so many seconds at the latest."""
        self._begin(None, seconds)

    def _begin(self, total: int | None, limit: float | None = None) -> None:
        """Count from zero again.

        It is a new task, because rich keeps the old total if the new one is None.
        """
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(self._text, total=total, limit=limit)

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(shown(text), markup=False, soft_wrap=True)

    def once(self, text: str) -> None:
        """Print a line a single time, however often it comes up."""
        if text not in self._told:
            self._told.add(text)
            self.line(text)

    def be_still(self) -> None:
        """Print whole lines only, from here on: the terminal is now the script's."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


@contextmanager
def narrate(first: str = "starting PyTorch") -> Iterator[Narrator]:
    """Yield a context with a narrator that begins with `first`.

    In most commands that is the start of PyTorch, which takes seconds.
    """
    from rich.console import Console

    console = Console(stderr=True, highlight=False, quiet=QUIET.get())
    shows = console.is_terminal and not QUIET.get()
    with progress_on(console) if shows else nullcontext() as progress:
        narrator = Narrator(console, progress)
        if shows:
            narrator.now(first)
        token = _CURRENT.set(narrator)
        try:
            with progress_to(narrator.detail):
                yield narrator
        finally:
            _CURRENT.reset(token)


def progress_on(console: Console) -> Progress:
    """Return the progress line, with a bar and the time left if the amount is known."""
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.text import Text

    class AmountColumn(ProgressColumn):
        """The progress, and the time left."""

        def render(self, task: Task) -> Text:
            if (limit := task.fields.get("limit")) is not None:
                return Text(f"{_clock(limit - (task.elapsed or 0))} left at most")
            if task.total is None:
                return Text()
            left = task.time_remaining
            filled = round(20 * task.percentage / 100)
            bar = "━" * filled + "╺" + "─" * (20 - filled)
            return Text(
                f"{bar} {task.completed:.0f}/{task.total:.0f}" + ("" if left is None else f", {_clock(left)} left")
            )

    # A name may hold brackets, which are markup to rich.
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}", markup=False), AmountColumn(),
        console=console, refresh_per_second=4, transient=True,
    )  # fmt: skip


def _clock(seconds: float) -> str:
    """Return seconds as minutes and seconds."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    return f"{minutes}:{rest:02}"

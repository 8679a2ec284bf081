"""Options and outcome of all commands."""

from __future__ import annotations

import logging
import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from overspill.core.budget import Budget as Limit
from overspill.core.errors import RequestError

from . import complete
from .narrator import Narrator as Narrator  # noqa: PLC0414 - commands take all that they share from here
from .narrator import narrate as narrate  # noqa: PLC0414

if TYPE_CHECKING:  # rich is imported when there is something to print
    from rich.console import RenderableType

    from overspill.report.page import Page


def optional(metavar: str | None, text: str, *names: str, **how: Any) -> Any:
    """Return an option without a default; its help `text` states any meaning of leaving it out."""
    return typer.Option(*names, metavar=metavar, help=text, show_default=False, **how)


Budget = Annotated[
    str | None,
    optional("SIZE", "Device memory of a step: 2GiB, 500MB, or 50%.  [default: all; 98 % of a GPU not here]"),
]
Gpu = Annotated[
    str | None,
    optional(
        "NAME", "A name of `overspill devices`, or a device file.  [default: this CPU]", autocompletion=complete.device
    ),
]
PolicyName = Annotated[
    str, typer.Option(metavar="NAME", help="A name of `overspill policies`.", autocompletion=complete.policy)
]
PlacerName = Annotated[
    str | None,
    optional(
        "NAME",
        "An allocator or solver whose peak counts: pytorch, portfolio, planned (solved before the first step)."
        "  [default: on a GPU planned]",
        "--placement",
        autocompletion=complete.placer,
    ),
]
WholeStep = Annotated[
    bool, typer.Option("--whole-step", help="Weights, gradients and optimizer state may leave the device too.")
]
Update = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Where updates run: device, host (all that can), or auto (wherever the step is faster).",
        autocompletion=complete.constants("device", "host", "auto"),
    ),
]
Backend = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Whose kernels run: eager or inductor.",
        autocompletion=complete.constants("eager", "inductor"),
    ),
]
PlanFile = Annotated[Path | None, optional("FILE", "Save the plan there, as JSON.", "--out")]
ReportFile = Annotated[Path | None, optional("FILE", "Write a page to look at, as .html.", "--report")]
TraceFile = Annotated[Path | None, optional("FILE", "Save a trace, as .json, for ui.perfetto.dev.", "--trace")]
SnapshotFile = Annotated[
    Path | None, optional("FILE", "Save allocations, as .pickle, for PyTorch's memory_viz.", "--snapshot")
]
TimesFile = Annotated[Path | None, optional("FILE", "Op times to plan with, measured by `train --profile`.", "--times")]
StoreName = Annotated[
    str | None,
    optional(
        "NAME",
        "Where bytes go: disk, host or pinned; host+disk or pinned+disk.  [default: disk; on CUDA pinned]",
        autocompletion=complete.constants("disk", "host", "host+disk", "pinned", "pinned+disk"),
    ),
]
HostBudget = Annotated[
    str | None, optional("SIZE", "Host memory of the store host+disk or pinned+disk.  [default: 9/10 of what is free]")
]
DiskBandwidth = Annotated[
    str | None, optional("RATE", "Rates of its disk: 7GB/s, 7GB/s,5GB/s for reads and writes, or nvme-pcie4.")
]
StoreDir = Annotated[Path | None, optional("DIR", "Folder of the disk store.  [default: the temporary one]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


ARGUMENTS: ContextVar[Sequence[str]] = ContextVar("arguments", default=())
"""The arguments of the running command, its name first."""
_OF_THE_ANSWER = dict.fromkeys(("--json", "--verbose", "--compiled"), False) | dict.fromkeys(
    ("--budget", "--most-slowdown", "--report", "--out", "--plot", "--trace", "--snapshot", "--max"), True
)
_OF_THE_ANSWER |= dict.fromkeys(("--policies", "--placers", "--points"), True)
"""Options that are not of a job, and whether a value follows."""
_OF_A_STORE = dict.fromkeys(("--store", "--host-budget", "--disk-bandwidth"), True)
"""Such options that `advise` does not take."""


@dataclass(frozen=True)
class Outcome:
    """The result of a command, for JSON and for a reader."""

    answer: Mapping[str, Any]
    """The JSON object."""
    human: RenderableType | None
    """The same result for a reader."""
    exit_code: int = 0
    complaint: str = ""
    """The line that explains a nonzero exit code."""


def of_page(
    answer: Mapping[str, Any],
    page: Page,
    files: Mapping[str, Path | None],
    exit_code: int = 0,
    complaint: str = "",
    *,
    brief: bool = False,
) -> Outcome:
    """Return the outcome of a command whose result is `page`.

    It lists the written `files` by their content. This function writes the page to the `report` among them. If `brief`,
    a reader gets the verdict and what to do next.
    """
    from overspill.report.page import write_page
    from overspill.report.terminal import in_terminal

    if (report := files.get("report")) is not None:
        write_page(report, page)
    saved = "; ".join(f"{what} saved to {path}" for what, path in files.items() if path is not None)
    if brief:
        saved = f"{saved}; --verbose prints all figures" if saved else "--verbose prints all figures."
    return Outcome(answer, in_terminal(page, *filter(None, [saved]), brief=brief), exit_code, complaint)


def same_job(command: str, *more: str) -> str:
    """Return a line to paste: `command` on the job of the present one, with the options `more` in place of its own."""
    words = list(ARGUMENTS.get())
    script = words[words.index("--") :] if "--" in words else []
    left_out = _OF_THE_ANSWER | dict.fromkeys((word for word in more if word.startswith("--")), True)
    left_out |= _OF_A_STORE if command == "advise" else {}
    kept: list[str] = []
    ours = iter(words[1 : len(words) - len(script)])
    for word in ours:
        name, given, _ = word.partition("=")
        if name not in left_out:
            kept.append(word)
        elif left_out[name] and not given:
            next(ours, None)
    return shlex.join(["overspill", command, *kept, *more, *script])


def check_request(budget: str | None, policy: str, out: Path | None) -> Limit:
    """Return the given budget.

    Raises RequestError for plain mistakes in the arguments, before torch is imported.
    """
    from overspill.policies import policy_named

    policy_named(policy)
    limit = Limit.parse(budget)
    check_writable(out)
    return limit


def updating(policy: str, update: str) -> str:
    """Return `policy` with its updates where `update` says. Raises RequestError."""
    from overspill.policies import with_update

    return str(with_update(policy, update))


def check_report(report: Path | None) -> None:
    """Raise RequestError, before any work, if `report` cannot become a page."""
    if report is not None:
        from overspill.report.page.write import check_page

        check_page(report)
        check_writable(report)


def check_writable(out: Path | None, ending: str = "") -> None:
    """Raise RequestError if `out` cannot be written, or lacks the `ending` by which other programs recognise it."""
    if out is None:
        return
    if not out.name.lower().endswith(ending):
        raise RequestError(f"cannot write {out}: the file must end in {ending}, by which what opens it knows it")
    try:
        is_directory = stat.S_ISDIR(out.stat().st_mode)
        writable = os.access(out, os.W_OK)
    except FileNotFoundError:
        is_directory, writable = False, os.access(out.parent, os.W_OK)
        if not out.parent.is_dir():
            raise RequestError(
                f"cannot write {out}: there is no directory {out.parent}; make it, or name another file"
            ) from None
    except NotADirectoryError:
        raise RequestError(
            f"cannot write {out}: there is no directory {out.parent}; make it, or name another file"
        ) from None
    except OSError as error:  # a name too long, links in a circle
        raise RequestError(f"cannot write {out}: {error.strerror}; name another file") from None
    # What is there, or its directory, must be writable.
    if is_directory:
        raise RequestError(f"cannot write {out}: it is a directory; name a file in it")
    if not writable:
        raise RequestError(f"cannot write {out}: permission denied; name a file where you may write")


def quiet_torch() -> None:
    """Import torch, with its compiler's log off standard error.

    Important messages of the log also come as exceptions.
    """
    from overspill.pytorch.logs import set_logs

    if not os.environ.get("OVERSPILL_DEBUG") and not os.environ.get("TORCH_LOGS"):
        set_logs(all=logging.CRITICAL)

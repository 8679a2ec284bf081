"""The command line. A command is one file here; it returns an Outcome, and `main` prints it.

Nothing here imports torch before a command needs it, so that `overspill --help` and the lists answer at once.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

import overspill

from . import (
    advise,
    calibrate,
    compare,
    devices,
    doctor,
    estimate,
    models,
    pack,
    plan,
    policies,
    reproduce,
    snapshot,
    sweep,
    train,
)
from .common import Outcome
from .failures import OUTSIDE_FAILURE, Failure, explain
from .output import Stream, print_error, print_human, print_json, shown, streams

app = typer.Typer(
    name="overspill",
    help="Know what a model takes before it runs, and train it in less, with the same numbers to the last bit.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("estimate")(estimate.estimate)
app.command("advise")(advise.advise)
app.command("train")(train.train)
app.command("plan")(plan.plan)
app.command("compare")(compare.compare)
app.command("sweep")(sweep.sweep)
app.command("pack")(pack.pack)
app.command("models")(models.models)
app.command("policies")(policies.policies)
app.command("devices")(devices.devices)
app.command("doctor")(doctor.doctor)
app.command("calibrate")(calibrate.calibrate)
app.command("reproduce")(reproduce.reproduce)
app.command("snapshot")(snapshot.snapshot)

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 plus the number of SIGINT, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Any failure is one line on standard error; with `--json` also an object."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments  # the rest is a script's
    as_json = "--json" in ours
    debug = bool(os.environ.get("OVERSPILL_DEBUG"))
    with streams() as out:
        try:
            with _quiet(debug), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                outcome = app(args=arguments, prog_name="overspill", standalone_mode=False)
            return _finish(outcome, as_json, out)
        except (KeyboardInterrupt, typer.Abort):
            return _fail(Failure("interrupted", INTERRUPTED), as_json)
        except Exception as error:
            if debug:
                raise
            return _fail(explain(error), as_json)


def _finish(outcome: Outcome | int | None, as_json: bool, out: Stream) -> int:
    """Print what a command found; its exit code. `--help` and its like give a code alone."""
    if outcome == INTERRUPTED:
        return _fail(Failure("interrupted", INTERRUPTED), as_json)
    found = outcome if isinstance(outcome, Outcome) else Outcome({}, None, outcome or 0)
    if as_json and found is outcome:
        print_json(found.answer)
    elif found.human is not None:
        print_human(found.human)
    out.flush()
    if out.failure is not None and not isinstance(
        out.failure, BrokenPipeError
    ):  # there, `head` for one has seen enough
        reason = getattr(out.failure, "strerror", None) or out.failure
        return _fail(Failure(f"cannot write to standard output: {reason}", OUTSIDE_FAILURE), as_json)
    if found.complaint:
        print_error(shown(found.complaint))
    return found.exit_code


def _fail(failure: Failure, as_json: bool) -> int:
    message = shown(failure.message)
    print_error(message)
    if as_json:
        print_json({"error": message, "exit_code": failure.exit_code, **failure.details})
    return failure.exit_code


@contextlib.contextmanager
def _quiet(debug: bool) -> Iterator[None]:
    """Keep torch's warnings, which a user of the command can do nothing about, off the screen."""
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        yield


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
) -> None:
    """Know what a model takes before it runs, and train it in less, with the same numbers to the last bit."""
    if version:
        sys.stdout.write(f"overspill {overspill.__version__} ({doctor.build_facts()})\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit

"""The command line.

Each command has a file here. It returns an Outcome, and `main` prints it. Nothing here imports torch before a command
needs it, so that `overspill --help` and the lists answer at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, NoReturn

import typer

import overspill
from overspill.core.errors import RequestError
from overspill.core.forked import let_copy
from overspill.core.registry import Registry

from . import (
    advise,
    calibrate,
    compare,
    demo,
    devices,
    doctor,
    estimate,
    models,
    pack,
    plan,
    policies,
    run,
    snapshot,
    sweep,
    train,
)
from .common import ARGUMENTS, Outcome
from .failures import OUTSIDE_FAILURE, Failure, explain, in_options
from .narrator import QUIET
from .output import OutputStream, print_error, print_human, print_json, shown, streams
from .panels import COMMAND_PANELS, HELP_ALL, arrange

app = typer.Typer(
    name="overspill",
    help="Know what a model takes before it runs, and train it in less, with the same numbers to the last bit.",
    pretty_exceptions_enable=False,
)
COMMANDS: Registry[Callable[..., Outcome]] = Registry(
    "command",
    "commands",
    {
        "demo": demo.demo,
        "estimate": estimate.estimate,
        "advise": advise.advise,
        "train": train.train,
        "run": run.run,
        "plan": plan.plan,
        "compare": compare.compare,
        "sweep": sweep.sweep,
        "pack": pack.pack,
        "models": models.models,
        "policies": policies.policies,
        "devices": devices.devices,
        "doctor": doctor.doctor,
        "calibrate": calibrate.calibrate,
        "snapshot": snapshot.snapshot,
    },
    papers=("reproduce",),
)


def _add_command(name: str) -> None:
    """Add the command `name` to `app`.

    A command that is not installed or does not load is replaced by one that reports this, whatever its arguments.
    """
    try:
        panel = next((panel for panel, names in COMMAND_PANELS.items() if name in names.split()), None)
        # What stands behind a script is the script's.
        settings = {"allow_interspersed_args": False} if name == "run" else None
        app.command(name, rich_help_panel=panel, context_settings=settings)(COMMANDS.named(name))
    except RequestError as error:
        told = str(error)

        def refuse() -> NoReturn:
            raise RequestError(told)

        anything = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(name, help=told, hidden=True, context_settings=anything)(refuse)


for _name in dict.fromkeys((*COMMANDS, *COMMANDS.papers)):
    _add_command(_name)

QUIET_OPTION = "--quiet"
"""May stand anywhere before a script's arguments, for every command."""
_HELP = {"-h": "--help", HELP_ALL: "--help"}
INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 plus the number of SIGINT, as shells have it."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Any failure is one line on standard error; with `--json` also an object on standard output.
    """
    if arguments is None:  # the process is the command's own
        let_copy()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments  # the rest is a script's
    # Options of all commands.
    as_json = "--json" in ours
    QUIET.set(QUIET_OPTION in ours)
    arrange(group().commands, everything=HELP_ALL in ours)
    ours = [_HELP.get(word, word) for word in ours if word != QUIET_OPTION]
    arguments = ours + (arguments[arguments.index("--") :] if "--" in arguments else [])
    ARGUMENTS.set(arguments)
    debug = bool(os.environ.get("OVERSPILL_DEBUG"))
    # Run it; with --json nothing else goes to standard output.
    with streams() as out:
        try:
            with _quiet(debug), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
                outcome = group()(args=arguments, prog_name="overspill", standalone_mode=False)
            return _finish(outcome, as_json, out)
        except (KeyboardInterrupt, typer.Abort):
            return _fail(Failure("interrupted", INTERRUPTED), as_json)
        except Exception as error:
            if debug:
                raise
            failure = explain(error)
            return _fail(replace(failure, message=in_options(failure.message, _options_of(ours))), as_json)


@functools.cache
def group() -> typer.core.TyperGroup:
    """Return all commands with their options, created once."""
    made = typer.main.get_command(app)
    assert isinstance(made, typer.core.TyperGroup)
    return made


def _options_of(arguments: Sequence[str]) -> set[str]:
    """Return the options of the command in `arguments`, as written on the command line."""
    commands = group().commands
    named = next((commands[word] for word in arguments if word in commands), None)
    return set() if named is None else {option for parameter in named.params for option in parameter.opts}


def _finish(outcome: Outcome | int | None, as_json: bool, out: OutputStream) -> int:
    """Print the result of a command, and return its exit code.

    `--help` and similar options give an exit code alone.
    """
    if outcome == INTERRUPTED:
        return _fail(Failure("interrupted", INTERRUPTED), as_json)
    found = outcome if isinstance(outcome, Outcome) else Outcome({}, None, outcome or 0)
    if as_json and found is outcome:
        print_json(found.answer)
    elif found.human is not None:
        print_human(found.human)
    # What could not be written is a failure of its own.
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
    """Silence torch's warnings, which users of the command cannot act on."""
    with warnings.catch_warnings():
        if not debug:
            warnings.simplefilter("ignore")
        yield


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.", is_eager=True)] = False,
    quiet: Annotated[
        bool, typer.Option(QUIET_OPTION, help="With any command: say nothing on standard error but what is wrong.")
    ] = False,
) -> None:
    """Know what a model takes before it runs, and train it in less, with the same numbers to the last bit."""
    del quiet  # `main` reads it from the arguments, wherever it stands
    if version:
        sys.stdout.write(f"overspill {overspill.__version__} ({doctor.build_facts()})\n")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit

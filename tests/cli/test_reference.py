"""docs/cli.md has every command, every option and every key of the JSON objects."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.cli.commands import Overspill

from overspill.cli import group

TEXT = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
HEAD, *_PARTS = TEXT.split("\n## ")
SECTIONS = {part.partition("\n")[0]: part for part in _PARTS}
LISTS = "models, policies, devices"
COMMANDS = group().commands
ASKED = {
    "estimate": "alexnet --small --batch 4 --gpu t4",
    "plan": "alexnet --small --batch 16 --budget 100% --gpu titan-x",
    "compare": "alexnet --small --batch 16 --gpu t4 --policies in-core --placers best-fit",
    "sweep": "alexnet --small --batch 16 --gpu t4 --points 2",
    "train": "nets:shallow --batch 4 --steps 1 --store host --check",
    "pack": "blocks.csv",
    "models": "",
    "policies": "",
}


def section(command: str) -> str:
    return SECTIONS[LISTS if command in LISTS.split(", ") else command]


def options() -> Iterator[tuple[str, str]]:
    for name, command in COMMANDS.items():
        for parameter in command.params:
            yield from ((name, option) for option in parameter.opts if option.startswith("--") and option != "--help")


def keys(command: str) -> set[str]:
    """What the section says that the JSON object has."""
    told = section(command).partition("\nJSON: ")[2]
    return set(re.findall(r"`(\w+)`", told))


def test_every_command_has_a_section() -> None:
    for name in COMMANDS:
        assert section(name)
        assert f"`{name}`" in HEAD


@pytest.mark.parametrize(("command", "option"), [*options()])
def test_every_option_is_there_where_its_command_is(command: str, option: str) -> None:
    told = section(command)
    if "(#a-job)" in told:
        told += SECTIONS["What all commands share"].partition("### A job\n")[2].partition("\n###")[0]
    assert re.search(rf"{option}\b", told)


@pytest.mark.parametrize("command", ASKED)
def test_the_keys_are_those_of_the_answer(command: str, overspill: Overspill) -> None:
    Path("blocks.csv").write_text("id,lower,upper,size\na,0,4,100\nb,2,6,50\n", encoding="utf-8")
    answer = overspill(f"{command} {ASKED[command]} --json").answer
    found = set(answer)
    for inner in ("rows", "floors", "placements", "models", "policies", "peak_tensors"):
        if answer.get(inner):
            found |= set(answer[inner][0])
    told = keys(command)
    assert found - told == set()
    if command not in LISTS:
        assert told - found <= {"iterations", "trains", "notes", "blame", "stopped", "with", "placements"}

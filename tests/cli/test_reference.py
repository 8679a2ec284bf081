"""docs/cli.md has every command, the site every option, and the page every key of the JSON objects."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from tests.cli.commands import Overspill

from overspill.cli import group

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "cli.md").read_text(encoding="utf-8")
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


def keys(command: str) -> set[str]:
    """What the section says that the JSON object has."""
    told = section(command).partition("\nJSON: ")[2]
    return set(re.findall(r"`(\w+)`", told))


def test_every_command_has_a_section() -> None:
    for name in COMMANDS:
        assert section(name)
        assert f"`{name}`" in HEAD


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in {"doctor", *LISTS.split(", ")}])
def test_the_site_has_every_option_where_its_command_is(command: str) -> None:
    assert f"\n<!-- options: {command} -->\n" in section(command)
    told = runpy.run_path(str(DOCS / "conf.py"))["options"](command)
    options = [parameter for parameter in COMMANDS[command].params if parameter.param_type_name == "option"]
    assert len(told.splitlines()) == len(options) + 6
    for option in options:
        assert f"| `{option.opts[0]}`" in told
        assert option.help


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

"""What a shell offers for a word that is begun: commands, options and names, without torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from overspill.cli import complete, group
from overspill.devices import device_names
from overspill.policies import POLICIES


def offered(words: str) -> list[str]:
    """What bash is given where `words` are typed, the last of them begun."""
    environment = os.environ | {
        "COMP_WORDS": f"overspill {words}",
        "COMP_CWORD": str(len(words.split(" "))),
        "_OVERSPILL_COMPLETE": "complete_bash",
    }
    code = "import sys; from overspill.cli import main\ntry: main()\nfinally: assert not {'torch', 'numpy'} & {*sys.modules}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stderr == ""
    return done.stdout.split()


def test_a_shell_is_offered_models_and_neither_torch_nor_numpy_is_imported() -> None:
    assert offered("plan resnet1") == ["resnet18", "resnet101", "resnet152"]


@pytest.mark.parametrize(
    ("names", "begun", "found"),
    [
        (complete.device, "h1", ["h100"]),
        (complete.optimizer, "adam", ["adamw", "adamw-fused", "adam", "adamw8bit", "adam8bit"]),
        (complete.policies, "auto,win", ["auto,window"]),
        (complete.placer, "py", ["pytorch"]),
        (complete.solver, "portf", ["portfolio"]),
        (complete.allocator, "tens", ["tensorflow"]),
        (complete.model, "no such", []),
    ],
)
def test_names_are_those_that_begin_so(names: complete.Complete, begun: str, found: list[str]) -> None:
    assert names(begun) == found


def test_all_names_are_offered_where_none_is_begun() -> None:
    assert complete.device("") == [*device_names()]
    assert complete.policy("") == [*POLICIES]


def test_every_command_completes_its_models_gpus_and_policies() -> None:
    for name, command in group().commands.items():
        for parameter in command.params:
            if parameter.name in ("model", "words", "gpu", "policy", "policies", "optimizer", "placement", "store"):
                takes_value = not getattr(parameter, "is_flag", False)
                assert not takes_value or parameter._custom_shell_complete is not None, (name, parameter.name)

"""Whatever is done to model, optimizer and loss between two steps, the step trains what plain PyTorch would, or refuses."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence

import pytest
import torch
from tests.runtime.step.edits import EDITS, Job, draw
from tests.turns import rest_long
from torch import Tensor

import overspill
from overspill.core.errors import OverspillError
from overspill.runtime.reachable import same_bits
from overspill.runtime.step.python_state import PythonState

FOLLOWED = set(EDITS) - {
    "tied", "swapped", "reordered", "model.last.bias=None", "a layer less", "a layer more", "a stranger's parameter",
    "constant_", "data.zero_", "cleared", "without_group",
}  # fmt: skip
"""Those that need not be refused."""


def inputs() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return torch.randn((8, 12), generator=drawn), torch.randint(0, 5, (8,), generator=drawn)


def plain_step(job: Job) -> Tensor:
    job.optimizer.zero_grad()
    loss = job.loss(job.model, *inputs())
    loss.backward()
    job.optimizer.step()
    return loss.detach()


def values(job: Job) -> dict[str, Tensor]:
    """All that training changes, by name; of what the optimizer has let go of as well, whose state_dict() then fails."""
    found = dict(job.model.state_dict())
    for name, parameter in job.model.named_parameters():
        for key, value in job.optimizer.state.get(parameter, {}).items():
            found[f"{name}: {key}"] = torch.as_tensor(float("nan") if value is None else value)
    return found


def differences(plain: Job, managed: Job) -> list[str]:
    """The names of what is not the same to the last bit, or not in both."""
    one, other = values(plain), values(managed)
    return sorted(one.keys() ^ other.keys()) + [n for n in one if n in other and not same_bits(one[n], other[n])]


class Both:
    """A plain and a managed copy of the job."""

    def __init__(self) -> None:
        self.plain, self.managed = Job(), Job()
        self.step = overspill.train_step(
            self.managed.model, self.managed.loss, self.managed.optimizer, budget="1MiB", policy="window", store="host",
            allow_untrained=True,
        )  # fmt: skip
        self.seed = 0

    def leave(self) -> None:
        """Let all that may move be in the store, as under a tight budget."""
        state = self.step._state
        if state.engine is not None and not self.step.is_unfinished:
            state.residency.send([n for n in state.residency.residents if n not in state.sums], state.engine)
            state.arm()

    def train(self) -> str:
        """A step of both; the difference, in words, if there is one. Raises OverspillError where it is refused."""
        self.seed += 1
        torch.manual_seed(self.seed)
        loss = self.step(*inputs())
        torch.manual_seed(self.seed)
        expected = plain_step(self.plain)
        if not same_bits(loss, expected):
            return f"loss {loss.item()} instead of {expected.item()}"
        found = differences(self.plain, self.managed)
        return f"different: {found}" if found else ""

    def edit(self, names: Sequence[str]) -> bool:
        """Do this to both; whether plain PyTorch lets one do it, and train on."""
        try:
            for name in names:
                EDITS[name](self.plain)
        except Exception:  # noqa: BLE001 - the edit cannot be made, as of a layer that is not there any more
            return False
        for name in names:
            EDITS[name](self.managed)
        return True


def outcome(edits: Sequence[Sequence[str]], *, away: bool) -> str:
    """What a sequence of edits, with steps between, ends in: "followed", "refused: …", "not plain", or a difference."""
    both = Both()
    try:
        for names in ((), *edits):
            if away:
                both.leave()
            try:
                if not both.edit(names):
                    return "not plain"
                for _ in range(2):
                    if difference := both.train():
                        return difference
            except OverspillError as refusal:
                return f"refused: {refusal}" if "\n" not in str(refusal) else f"more than a line: {refusal}"
            except Exception as error:  # noqa: BLE001 - plain PyTorch's own, which must be the same
                return _as_plain(both, error)
        return "followed"
    finally:
        if not both.step.is_unfinished:
            both.step.close(bring_back=False)


def _as_plain(both: Both, error: Exception) -> str:
    try:
        plain_step(both.plain)
    except Exception as expected:  # noqa: BLE001 - whatever it is
        return "not plain" if type(expected) is type(error) else f"{error!r} instead of {expected!r}"
    return f"raises {error!r}"


QUICK = {
    "tied", "smaller_group", "model.drop.p=0.6", "forward hook", "gains.append", "data = new", "frozen or not",
}  # fmt: skip
"""Those that do not wait for the long suite, which tries all."""


@pytest.mark.parametrize("away", [pytest.param(False, marks=pytest.mark.long), True], ids=["there", "away"])
@pytest.mark.parametrize("name", rest_long(EDITS, QUICK))
def test_an_edit_is_followed_or_refused(name: str, away: bool) -> None:
    found = outcome([(name,)], away=away)
    assert found.startswith("followed" if name in FOLLOWED else ("followed", "refused")), found


def fuzz(seconds: float, seed: int) -> int:
    """Random sequences of edits for so long; how many. Fails at the first silent difference."""
    end, count = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        rng = random.Random(f"{seed}.{count}")
        sequence = [draw(rng) for _ in range(rng.randint(1, 4))]
        found = outcome(sequence, away=rng.random() < 0.5)
        assert found.startswith(("followed", "refused", "not plain")), (seed, count, sequence, found)
        count += 1
    return count


def seed() -> int:
    """A new one each time; pytest shows what a failed test has printed."""
    return int(os.environ.get("OVERSPILL_FUZZ_SEED", random.SystemRandom().randrange(2**31)))


def test_random_edits_are_followed_or_refused() -> None:
    print("seed", chosen := seed())  # noqa: T201
    assert fuzz(1, chosen) > 0


@pytest.mark.long
def test_random_edits_for_five_minutes() -> None:
    print("seed", chosen := seed())  # noqa: T201
    print(fuzz(float(os.environ.get("OVERSPILL_FUZZ_SECONDS", "300")), chosen), "sequences")  # noqa: T201


def test_the_fuzzer_finds_a_guard_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PythonState, "changed", lambda _: "")
    with pytest.raises(AssertionError, match=r"loss|different"):
        fuzz(60, 1)

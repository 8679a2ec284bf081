"""Updates on the host, as a schedule asks for them: the bits of plain PyTorch, in a thread beside the step."""

from __future__ import annotations

import pytest
from tests.runtime.schedules import on_host
from tests.runtime.step.whole_steps import OPTIMIZERS, Cnn, Lm, Mlp, Pair

from overspill.core import Verb


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer(optimizer: str) -> None:
    with on_host() as policy:
        pair = Pair(make_optimizer=OPTIMIZERS[optimizer], options={"policy": policy, "budget": "4MiB"})
        pair.train(4)
        (plan,) = pair.step.plans
        assert plan.schedule.counts[Verb.RUN_ON_HOST]
        pair.assert_same()
        pair.train(2)
        pair.step.close()
        pair.assert_same()

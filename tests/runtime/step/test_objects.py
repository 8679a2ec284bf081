"""A train step, and the model and the optimizer that it has, behave as users of PyTorch expect of such objects."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
from tests.runtime.step.whole_steps import Mlp, Pair, Plain

from overspill.runtime.step.residency import Guarded

# -- a step that is dropped


def test_a_dropped_step_brings_all_back_and_frees_what_it_had() -> None:
    pair = Pair(Mlp)
    pair.train(2)
    assert pair.step._state.residency.away()
    engine, step = weakref.ref(pair.step.engine), weakref.ref(pair.step)
    store, threads = weakref.ref(pair.step.engine.store), threading.active_count()
    del pair.step
    assert step() is None
    gc.collect()  # the plans' graphs are circles
    assert engine() is store() is None
    assert threading.active_count() < threads
    assert not any(isinstance(m._parameters, Guarded) for m in pair.model.modules())
    assert all(type(of) is dict for of in pair.optimizer.state.values())
    assert pair.optimizer._optimizer_step_pre_hooks == {}
    pair.assert_same()
    pair.step = Plain(pair.model, pair.optimizer)  # type: ignore[assignment]
    pair.train(2)
    pair.assert_same()


@pytest.mark.parametrize("closed", [False, True])
def test_a_second_step_goes_on_where_the_first_ended(closed: bool) -> None:
    pair = Pair(Mlp, options={"budget": 0.6})
    pair.train(2)
    if closed:
        pair.step.close()
    del pair.step
    pair.make_step()
    pair.train(2)
    pair.assert_same()


def test_a_step_that_is_dropped_with_its_model_and_optimizer_reads_nothing_back() -> None:
    pair = Pair(Mlp)
    pair.train(2)
    engine, model, step = pair.step.engine, weakref.ref(pair.model), pair.step
    read = engine.prefetched_bytes
    del pair
    gc.collect()
    assert model() is not None
    del step
    assert model() is None
    assert engine.prefetched_bytes == read


def test_an_unfinished_step_that_is_dropped_leaves_what_it_had_updated() -> None:
    class Failing(Exception):
        pass

    pair = Pair(Mlp)
    pair.train(1)

    def interrupted() -> Any:
        raise Failing

    (compiled,) = pair.step._plans._compiled.values()
    count = 0
    for instruction in compiled.program.instructions:
        count += 1
        if instruction.changes is not None:
            break
    position = count + 1
    node = compiled.program.instructions[position]
    compiled.program.instructions[position] = node._replace(target=lambda *_, **__: interrupted())
    with pytest.raises(Failing):
        pair.step(*pair.inputs)
    assert pair.step.is_unfinished
    del pair.step
    assert all(p.isfinite().all() for p in pair.model.parameters())
    pair.make_step()
    pair.first_step(*pair.inputs)

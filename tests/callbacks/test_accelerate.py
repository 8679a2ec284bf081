"""The plugin with which accelerate compiles for a budget: plain's bits, and no model without a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.core.errors import RequestError, UnplannedError
from overspill.plans.plan import Plan
from overspill.runtime.reachable import same_bits

pytest.importorskip("accelerate")
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from torch.utils.data import DataLoader, TensorDataset

from overspill.callbacks.accelerate import DynamoPlugin

pytestmark = pytest.mark.usefixtures("forget_compiled_code", "fresh_state")
Ran = tuple[list[float], dict[str, Tensor]]


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """Reset what accelerate keeps: the first Accelerator's settings."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def train(
    plugin: TorchDynamoPlugin | None, at_end: Callable[[], None] = lambda: None, rows: int = 512, **asked: Any
) -> Ran:
    """Four micro-batches, clipped: the losses, and the weights afterwards."""
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    blocks = (layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)))
    model = nn.Sequential(*blocks, nn.Linear(64, 4))
    accelerator = Accelerator(cpu=True, **asked, **({} if plugin is None else {"dynamo_plugin": plugin}))
    data = TensorDataset(torch.randn(4 * rows, 64), torch.randint(0, 4, (4 * rows,)))
    ready = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), DataLoader(data, rows))
    module, optimizer, loader = ready
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(module):
            loss = F.cross_entropy(module(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert accelerator.unwrap_model(module, keep_torch_compile=False) is model
    at_end()  # while the compiled model is there
    return losses, dict(model.state_dict())


@pytest.mark.short("{'mixed_precision': 'bf16', 'gradient_accumulation_steps': 2}")
@pytest.mark.parametrize("asked", [{}, {"mixed_precision": "bf16", "gradient_accumulation_steps": 2}], ids=str)
def test_accelerate_compiles_for_a_budget_with_the_bits_of_a_plain_run(asked: dict[str, Any]) -> None:
    losses, state = train(None, **asked)
    plans: list[Plan] = []
    plugin = DynamoPlugin(0.8, store="host")
    assert plugin.session is None
    within, planned = train(plugin, lambda: plans.extend(plugin.session.plans if plugin.session else ()), **asked)
    assert within == losses
    assert all(same_bits(value, planned[name]) for name, value in state.items())
    assert plans
    for plan in plans:
        assert plan.peak_bytes <= plan.budget_bytes < plan.unmanaged_peak_bytes


@pytest.mark.long
def test_weights_gradients_and_state_move() -> None:
    losses, state = train(None, rows=4)
    plugin, moved = DynamoPlugin(0.5, store="host"), []
    within, planned = train(plugin, lambda: moved.append(plugin.session and plugin.session.loop.is_in_force), rows=4)
    assert within == losses
    assert all(same_bits(value, planned[name]) for name, value in state.items())
    assert moved == [True]


def test_a_wrong_option_is_an_error_before_anything_is_prepared() -> None:
    with pytest.raises(RequestError, match="neither a share"):
        DynamoPlugin(1.5)


def test_a_model_that_dynamo_skips_does_not_train_unnoticed() -> None:
    accelerator = Accelerator(cpu=True, dynamo_plugin=DynamoPlugin("1GiB"))
    model = nn.Linear(4, 4)
    model.forward = torch.compiler.disable(model.forward)
    module, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    module(torch.randn(2, 4)).sum().backward()
    with pytest.raises(UnplannedError, match="without a plan"):
        optimizer.step()


def test_accelerates_list_of_backends_does_not_have_ours() -> None:
    """So neither TorchDynamoPlugin nor Trainer's `torch_compile_backend` can name it."""
    with pytest.raises(ValueError, match="OVERSPILL"):
        TorchDynamoPlugin(backend="overspill")

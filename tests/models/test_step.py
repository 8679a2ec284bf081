"""What is taken for a model's loss."""

from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from overspill.models.step import is_criterion, loss_in

LOSS = torch.tensor(2.0)


class Output(dict[str, Any]):
    """A dictionary that takes attributes beside its keys, as those of transformers do."""


def test_the_loss_of_an_output_is_an_attribute_or_a_key_of_it() -> None:
    late = Output(logits=torch.zeros(2))
    late.loss = LOSS
    for output in (SimpleNamespace(loss=LOSS), {"loss": LOSS}, MappingProxyType({"loss": LOSS}), late):
        assert loss_in(output) is LOSS
    for output in (torch.zeros(2), (LOSS, LOSS), {"logits": LOSS}, None):
        assert loss_in(output) is None


@pytest.mark.parametrize("loss", [nn.MSELoss(), F.cross_entropy, F.mse_loss])
def test_what_torch_has_as_a_loss_is_a_criterion(loss: Any) -> None:
    assert is_criterion(loss)
    assert not is_criterion(lambda model, x, target: loss(model(x), target))

"""What is said of errors of a user's model."""

from __future__ import annotations

import pytest
from torch import nn

from overspill.core.user_code import model_raised


class Builder:
    """As Dynamo's variable builders are: their frames are called as those of modules."""

    def _call_impl(self, then: object) -> None:
        if then is None:
            raise ValueError("no such luck")
        then(None)


def test_only_modules_are_layers() -> None:
    with pytest.raises(ValueError, match="no such luck") as raised:
        Builder()._call_impl(Builder()._call_impl)
    assert model_raised(raised.value).endswith("raised ValueError: no such luck")
    with pytest.raises(RuntimeError) as raised:
        nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 5))(nn.Linear(1, 2).weight.T)
    assert model_raised(raised.value).endswith("in layer 1 (Linear)")

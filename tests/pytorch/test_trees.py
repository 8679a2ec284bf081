"""Leaves of nested values are PyTorch's, in its order."""

from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.utils import _pytree

from overspill.pytorch.trees import tree_leaves


class Point(NamedTuple):
    x: int
    y: object


class Row(list):
    """A list of a class of its own, which is a leaf."""


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        (),
        [1, (2, [3, {}]), {"b": 4, "a": (5, None)}],
        immutable_list([1, immutable_dict({"b": 2, "a": immutable_list([3])})]),
        (Point(1, [2]), torch.Size([3, 4]), slice(1, 2), Row([1])),
        OrderedDict(b=1, a=[2, Point(3, 4)]),
        {"d": defaultdict(list, c=[1]), "q": deque([1, (2,)]), "m": torch.return_types.max((1, 2))},
    ],
    ids=repr,
)
def test_leaves_are_those_of_pytorch(value: Any) -> None:
    assert tree_leaves(value) == _pytree.tree_leaves(value)

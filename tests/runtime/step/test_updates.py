"""The optimizer's part of a whole step, by itself."""

import torch
from torch import nn

from overspill.runtime.step.updates import OptimizerUpdates


def test_a_new_group_is_known_by_its_own_settings_though_it_lies_where_a_freed_one_lay() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    updates = OptimizerUpdates(optimizer)
    kept = []
    for momentum in (0.0, 0.9) * 4:
        group = {**optimizer.param_groups[0], "momentum": momentum}
        kept.append(list(updates.state_of(parameter, group, {}).shaped))
        del group
    assert kept == [[], ["momentum_buffer"]] * 4

"""Optimizers that torch does not have: states in 8 bits, on the host, or divided among GPUs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill import models
from overspill.estimation.recipe import EIGHT_BIT, MakeOptimizer, Recipe

_SMALLEST_8BIT = 4096  # elements; smaller parameters have float32 states
_SMALLEST_PAGED = 100_000
_BLOCK = 256
SMALLEST_OFFLOADED = 4096
"""Elements of the smallest parameter that is updated on the host."""


def optimizer_of(recipe: Recipe, module: nn.Module) -> Optimizer | None:
    """The optimizer of `module` as `recipe` has it; None: there is none."""
    make = maker_of(recipe)
    if make is None:
        return None
    if recipe.offload_optimizer:
        return Offloaded(module.parameters(), make)
    if recipe.parallel is not None and recipe.parallel.shard_optimizer:
        return _sharded(module, make)
    return make(module.parameters())


def maker_of(recipe: Recipe) -> MakeOptimizer | None:
    """What makes the optimizer that `recipe` names; None: there is none."""
    if not isinstance(recipe.optimizer, str):
        return recipe.optimizer
    if recipe.optimizer in EIGHT_BIT:
        states, paged = EIGHT_BIT[recipe.optimizer]
        return partial(Blockwise8bit, states=states, paged=paged)
    return models.optimizer_named(recipe.optimizer)


def _sharded(module: nn.Module, make: MakeOptimizer) -> Optimizer:
    """ZeRO-1 as torch has it: each GPU updates some of the parameters, and sends them to the others."""
    with warnings.catch_warnings():  # torch scripts its functional optimizers when this is imported
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - slow, and for this alone

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return ZeroRedundancyOptimizer(trained, make)  # which it calls, no more


class Blockwise8bit(Optimizer):
    """An optimizer of bitsandbytes: `states` of a byte an element each, with a float32 scale for 256 elements.

    bitsandbytes/optim/optimizer.py, 0.44 and later, `Optimizer2State.init_state`. `paged` states of large parameters are
    memory that the driver moves between host and GPU (cudaMallocManaged): no allocator of PyTorch gives it, and it makes
    way for what does not fit, so none of it is counted. The kernels update in place.
    """

    def __init__(self, parameters: Iterable[Tensor], *, states: int, paged: bool) -> None:
        super().__init__(parameters, {})
        self._states, self._paged = states, paged
        self._maps: list[Tensor] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make the states of parameters that have none yet."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self._begin(parameter)
        return loss

    def _begin(self, parameter: Tensor) -> None:
        count, state = parameter.numel(), self.state[parameter]
        state["step"] = 0
        small = count < _SMALLEST_8BIT
        for number in range(1, self._states + 1):
            if not (self._paged and count >= _SMALLEST_PAGED):
                dtype = torch.float32 if small else torch.uint8
                state[f"state{number}"] = torch.zeros_like(parameter, dtype=dtype)
            if not small:
                self._quantization_maps(parameter)
                state[f"absmax{number}"] = parameter.new_zeros(-(-count // _BLOCK), dtype=torch.float32)

    def _quantization_maps(self, like: Tensor) -> None:
        """What a byte of each state means, once for all parameters."""
        if not self._maps:
            self._maps = [like.new_empty(256, dtype=torch.float32) for _ in range(self._states)]


class Offloaded(Optimizer):
    """The optimizer on the host, with a copy of the parameters there, as torchao's CPUOffloadOptimizer has it.

    torchao/optim/cpu_offload.py, without `offload_gradients`: parameters of fewer than 4096 elements are updated on the
    GPU. Gradients are copied to the host and stay until they are zeroed; updated values are copied back in place.
    """

    def __init__(self, parameters: Iterable[Tensor], make: MakeOptimizer) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        super().__init__(trained, {})
        small = [parameter for parameter in trained if parameter.numel() < SMALLEST_OFFLOADED]
        self._on_device = make(small) if small else None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what is on the device."""
        loss = None if closure is None else closure()
        if self._on_device is not None:
            self._on_device.step()
        return loss

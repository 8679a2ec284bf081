"""Stand-ins for 8-bit optimizers of bitsandbytes, for memory alone.

Their states have the right sizes, and no update is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

_SMALLEST_8BIT = 4096  # elements; smaller parameters have float32 states
_SMALLEST_PAGED = 100_000
_BLOCK = 256


class Blockwise8bit(Optimizer):
    """An 8-bit optimizer of bitsandbytes that makes no updates.

    It has `states` of one byte an element each, with a float32 scale for 256 elements. Source:
    bitsandbytes/optim/optimizer.py, 0.44 and later, `Optimizer2State.init_state`. The kernels update in place.

    `paged` states of large parameters are memory that the driver moves between host and GPU (cudaMallocManaged). No
    allocator of PyTorch allocates it, and the driver moves it out if other memory does not fit, so none of it is
    counted.
    """

    def __init__(self, parameters: Iterable[Tensor], *, states: int, paged: bool) -> None:
        super().__init__(parameters, {})
        self._states, self._paged = states, paged
        self._maps: list[Tensor] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Allocate the states of parameters that have none yet."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not self.state[parameter]:
                    self._begin(parameter)
        return loss

    def state_bytes(self, parameter: Tensor) -> int:
        """Return the bytes of the state of `parameter`, without the shared quantisation maps."""
        count = parameter.numel()
        if count < _SMALLEST_8BIT:
            return 4 * count * self._states
        held = 0 if self._paged and count >= _SMALLEST_PAGED else count
        return (held + 4 * -(-count // _BLOCK)) * self._states

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
        """Allocate the maps from bytes to values, shared by all parameters."""
        if not self._maps:
            self._maps = [like.new_empty(256, dtype=torch.float32) for _ in range(self._states)]

"""What eager users offload with today, written small: saved tensors on a side stream, and AdamW's state on the host.

`OffloadHooks` does what torchtune's and TRL's `OffloadActivations` do: each saved tensor of some size is copied to pinned
memory on a second stream, a few of the last ones stay on the device until their copies are done, and backward brings each
back on the second stream when it is asked for. `HostOptimizer` does what ZeRO-Offload and torchao's
`CPUOffloadOptimizer` do: gradients go to pinned memory as backward makes them, the optimizer steps there, and weights
come back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

LEAST_BYTES = 1024
IN_FLIGHT = 5


class OffloadHooks(torch.autograd.graph.saved_tensors_hooks):
    """A context for forward, in which saved tensors go to host memory; one object serves all steps."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._stream = torch.cuda.Stream()
        self._leaving: deque[tuple[Any, Tensor]] = deque()
        # Weights are there anyway; a view of one is saved in its place.
        self._stay = {p.untyped_storage()._cdata for p in parameters}
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._leaving.clear()
        super().__enter__()

    def _pack(self, tensor: Tensor) -> Any:
        small = tensor.nbytes < LEAST_BYTES or not tensor.is_cuda
        if small or tensor.untyped_storage()._cdata in self._stay:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        # The source stays until its copy is done: compute waits for the oldest before it lets go of it.
        self._leaving.append((done, tensor))
        if len(self._leaving) > IN_FLIGHT:
            oldest, source = self._leaving.popleft()
            torch.cuda.current_stream().wait_event(oldest)
            del source
        return host, tensor.device

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        while self._leaving:
            done, source = self._leaving.popleft()
            torch.cuda.current_stream().wait_event(done)
            del source
        host, device = packed
        # Made on the compute stream, so that its memory is reused in that stream's order, and filled on the other one.
        tensor = torch.empty_like(host, device=device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            tensor.copy_(host, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)
        return tensor


class HostOptimizer:
    """Steps on pinned copies of `parameters`, whose optimizer `make` makes; gradients leave as soon as they are complete."""

    def __init__(self, parameters: Iterable[nn.Parameter], make: Callable[[list[Tensor]], Optimizer]) -> None:
        self._owned = [p for p in parameters if p.requires_grad]
        self._stream = torch.cuda.Stream()
        self._hosts = [nn.Parameter(p.detach().to("cpu", copy=True).pin_memory()) for p in self._owned]
        for parameter, host in zip(self._owned, self._hosts, strict=True):
            host.grad = torch.empty_like(host, pin_memory=True)
            parameter.register_post_accumulate_grad_hook(self._hook(host))
        self._optimizer = make(list(self._hosts))
        for group in self._optimizer.param_groups:
            if "fused" in group:  # as those who offload it do: one pass over each weight
                group["fused"] = True

    def _hook(self, host: nn.Parameter) -> Callable[[Tensor], None]:
        def leave(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            assert host.grad is not None
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                host.grad.copy_(gradient, non_blocking=True)
            gradient.record_stream(self._stream)
            parameter.grad = None

        return leave

    def step(self) -> None:
        """Update the host's weights and bring them back."""
        self._stream.synchronize()
        self._optimizer.step()
        with torch.no_grad():
            for parameter, host in zip(self._owned, self._hosts, strict=True):
                parameter.copy_(host, non_blocking=True)
        # The next backward writes gradients that the step has read, and the next step weights that are being copied.
        torch.cuda.current_stream().synchronize()

"""Pipeline stages: consecutive blocks of a model on each GPU.

The embedding is before the first block, head and loss are after the last. The schedule is 1F1B, as in
torch.distributed.pipelining's Schedule1F1B and Megatron-LM (Narayanan et al., SC 2021, §2.2). Of N stages, the one
after s others has N - s micro-batches in progress, and then alternates between ending one and beginning the next. A
receive buffer exists from its first use to the end of its micro-batch. Where blocks do not divide evenly, the first
stages have one more each, as DeepSpeed has it (deepspeed/runtime/utils.py, `partition_uniform`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from overspill.capture.recording.recorder import Recorder
from overspill.core import TensorKind
from overspill.core.errors import RequestError
from overspill.job import Parallel
from overspill.job.prepare.checkpointing import repeated_blocks
from overspill.models.gpt2 import Gpt2
from overspill.pytorch.trees import tree_map_only

Loss = Callable[[nn.Module, Any], Tensor]


class _Sent(Exception):
    """A stage's output, which ends its forward where another stage goes on."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value


class Stage:
    """One pipeline stage, with its blocks on the device.

    It also has the layers before or after all blocks, if it is the first or the last.
    """

    def __init__(self, module: nn.Module, parallel: Parallel, recorder: Recorder, loss: Loss) -> None:
        self.module, self._loss, self._recorder = module, loss, recorder
        self._first, self._last = parallel.stage == 0, parallel.stage == parallel.gpus - 1
        self._ahead = min(parallel.gpus - parallel.stage, parallel.pieces)
        blocks = _blocks(module, parallel.gpus)
        each, more = divmod(len(blocks), parallel.gpus)
        begin, count = parallel.stage * each + min(parallel.stage, more), each + (parallel.stage < more)
        self._before, self._own = blocks[:begin], blocks[begin : begin + count]
        self._blocks = blocks
        self._in_tuples = False  # how blocks return hidden states
        self._outside = ExitStack()  # what runs on other stages, closed where this one begins
        self._moved: dict[int, Any] = {}

    @property
    def reads(self) -> bool:
        """Whether this stage reads batches.

        The first stage reads their inputs, the last one their targets.
        """
        return self._first or self._last

    def to_device(self, inputs: Any) -> None:
        """Move the stage's part of the model to the device.

        A forward of `inputs`, a micro-batch on the host, identifies that part.
        """
        before, after = self._ends(inputs)
        own = [*self._own, *(before if self._first else ()), *(after if self._last else ())]
        self.module.requires_grad_(False)
        for part in own:
            part.to("cuda").requires_grad_(True)
        for block in self._before:
            block.forward = self._passed
        if not self._first:
            for block in self._own:
                block.forward = self._entered(block.forward, first=block is self._own[0])
        if not self._last:
            self._own[-1].forward = self._sending(self._own[-1].forward)

    def _ends(self, inputs: Any) -> tuple[list[nn.Module], list[nn.Module]]:
        """Return the modules with weights that run before the blocks, and after them."""
        inside = {part for block in self._blocks for part in block.modules()}
        ends: dict[nn.Module, bool] = {}
        reached = False
        forwards = {block: block.forward for block in self._blocks}

        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal reached
            reached = True
            made = forwards[self._blocks[0]](hidden, *args, **kwargs)
            self._in_tuples = isinstance(made, tuple)
            if _hidden(made).shape != hidden.shape or _hidden(made).dtype != hidden.dtype:
                raise RequestError(
                    f"blocks of {type(self.module).__name__} make other hidden states than they read; take another "
                    "kind than pp"
                )
            return made

        def seen(part: nn.Module, _: Any) -> None:
            ends.setdefault(part, reached)

        # Run the loss once, and see which modules run before and after the blocks.
        outside = [m for m in self.module.modules() if m not in inside and _own_tensors(m)]
        handles = [part.register_forward_pre_hook(seen) for part in outside]
        try:
            for block in self._blocks:
                block.forward = self._passed
            self._blocks[0].forward = run
            with torch.no_grad(), self._elsewhere():
                self._loss(self.module, inputs)
        finally:
            for block, forward in forwards.items():
                block.forward = forward
            for handle in handles:
                handle.remove()
        # Modules that contain blocks are of no stage.
        around = {m for m in outside if not inside.isdisjoint(m.modules())}
        if any(list(m.parameters(recurse=False)) for m in outside if m in around or m not in ends):
            raise RequestError(
                f"{type(self.module).__name__} has weights that are of no stage of a pipeline; take another kind than "
                "pp"
            )
        parts = {m: late for m, late in ends.items() if m not in around}
        return [m for m, late in parts.items() if not late], [m for m, late in parts.items() if late]

    def _elsewhere(self) -> ExitStack:
        """Return a context in which nothing is allocated on this stage's device."""
        made = ExitStack()
        made.enter_context(self._recorder.placing(on_device=False))
        made.enter_context(self._recorder.fabricating())
        return made

    def step(self, micro_batches: list[Any], context: Callable[[], Any], scaler: torch.amp.GradScaler | None) -> None:
        """Run forward and backward of all `micro_batches`, scheduled as 1F1B.

        Gradients add up. Forward runs in a new `context`, and the loss is scaled by the `scaler`, if one is given.
        """
        under_way: list[Tensor] = []
        for micro_batch in micro_batches:
            if len(under_way) == self._ahead:
                self._backward(under_way.pop(0))
            with context():
                made = self._forward(micro_batch)
            if self._last:
                made = (made if scaler is None else scaler.scale(made)) / len(micro_batches)
            under_way.append(made)
            del made
        while under_way:
            self._backward(under_way.pop(0))

    def _forward(self, inputs: Any) -> Tensor:
        """Return the output to send, or the loss. Its graph keeps the received tensor alive."""
        if not self._first:
            self._outside = self._elsewhere()
            self._outside.enter_context(torch.no_grad())
        try:
            return self._loss(self.module, inputs)
        except _Sent as sent:
            return sent.value
        finally:
            self._outside.close()
            self._moved.clear()

    def _backward(self, made: Tensor) -> None:
        """Run backward of one micro-batch.

        The gradient of the received tensor is sent, and freed with that tensor.
        """
        if self._last:
            made.backward()
            return
        gradient = torch.empty_like(made)
        self._recorder.mark(gradient, TensorKind.OUTPUT_GRADIENT)
        made.backward(gradient)

    def _passed(self, hidden: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        """Return the input of a block on another GPU, as its forward."""
        return (hidden,) if self._in_tuples else hidden

    def _entered(self, forward: Callable[..., Any], *, first: bool) -> Callable[..., Any]:
        """Return `forward` on the tensor that the stage received.

        It also reads its own copies of the other tensors that other stages made.
        """

        def moved(value: Tensor) -> Tensor:
            if id(value) not in self._moved:
                self._moved[id(value)] = (value, value.to("cuda"))  # with `value`, so that its id stays its own
            copy: Tensor = self._moved[id(value)][1]
            return copy

        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            if first:
                self._outside.close()
                hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device="cuda", requires_grad=True)
                self._recorder.mark(hidden, TensorKind.ACTIVATION)
            args, kwargs = tree_map_only(Tensor, moved, (args, kwargs))
            return forward(hidden, *args, **kwargs)

        return run

    def _sending(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            raise _Sent(_hidden(forward(*args, **kwargs)))

        return run


def _hidden(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _own_tensors(module: nn.Module) -> bool:
    return any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False)))


def _blocks(module: nn.Module, stages: int) -> list[nn.Module]:
    """Return the blocks of a decoder.

    Raises RequestError if it has none, or fewer than `stages`.
    """
    blocks = list(repeated_blocks(module))
    holders = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and list(m) == blocks]
    known = isinstance(module, Gpt2) or getattr(module, "get_output_embeddings", lambda: None)() is not None
    if not holders or not known:
        raise RequestError(
            f"{type(module).__name__} is not cut in stages here, as the built-in decoders and those of transformers "
            "are; take one of them, or another kind than pp"
        )
    if len(blocks) < stages:
        raise RequestError(
            f"{type(module).__name__} has {len(blocks)} blocks, too few for {stages} stages; take at most "
            f"{len(blocks)} GPUs"
        )
    return blocks

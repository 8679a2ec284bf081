"""Check which parameters `loss.backward()` gives gradients to while a step is traced.

AOTAutograd calls `torch.autograd.grad`, which runs only the nodes that lead to a parameter, and ignores `.grad`. It
would miss the gradients of a backward that calls `backward()` itself, as a reentrant checkpoint's does, or that adds to
`.grad` in Python. So autograd's graph is walked while the step is traced. Each parameter that it reaches has to get a
gradient, and no other may have a `.grad` afterwards.

Where that does not hold, `Backward.ask` runs a plain `loss.backward()` on fake tensors. It does so too where Python
runs in a part of backward that the trace would leave out. It shows which parameters get gradients, and how often. The
step is then traced with `backward()` too, and refused if it still gives gradients to others.

A trace keeps the activations that a reentrant checkpoint would recompute, because the plan decides about recomputation.
The checkpoint stays one autograd node, whose backward accumulates into `.grad`. With Inductor it is a plain call, as
under `torch.compile`.

Relies on AOTAutograd calling `torch.autograd.grad` after the step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge
from torch.utils import checkpoint

from overspill.capture.programs.checkpoints import left_as_given
from overspill.core.errors import OverspillError, UnsupportedError
from overspill.pytorch.autograd import PUSH_SAVED_HOOKS, push_saved_hooks, top_saved_hooks
from overspill.pytorch.dispatch import disable_current_modes
from overspill.pytorch.fake_tensors import FakeTensor, FunctionalTensor, active_fake_mode
from overspill.pytorch.patching import patched
from overspill.pytorch.storages import version_of

from .casts import Casts
from .joint import JointGraph, is_random

Step = Callable[..., Any]
_GIVE_BACK = ("torch.autograd.", "torch.utils.checkpoint", "torch.distributed.")
"""Modules of PyTorch's own hooks on saved tensors. All of `torch.` would include the user's GraphModules."""
_SETTERS = ((torch, "set_rng_state"), (torch.random, "set_rng_state"), (torch, "manual_seed"))


_FAKE = (FakeTensor, FunctionalTensor)
ONE_SIZE = (
    "a planned step has tensors of one size: where only the first call does that, as observers of quantization do, "
    "call the model once first"
)


def check_saved_hooks() -> None:
    """Raise UnsupportedError if the user's hooks on saved tensors are active: a planned step saves nothing for them.

    PyTorch's own hooks (`save_on_cpu`, checkpoints) return the tensor that they were given, so they need not be called.
    """
    if (hooks := top_saved_hooks(True)) is not None:
        _check_saved(hooks[0])


def _check_saved(pack: Callable[..., Any]) -> None:
    if not getattr(pack, "__module__", "").startswith(_GIVE_BACK):
        raise UnsupportedError(
            "saved_tensors_hooks change what autograd keeps for backward, and a planned step keeps it by its plan; "
            "leave them out, or have the layer's own autograd.Function keep what it shall (in bfloat16, say)"
        )


def _push_checked(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
    _check_saved(pack)
    push_saved_hooks(pack, unpack)


class GradientPositions(NamedTuple):
    """Positions of the inputs that get a gradient, as one plain backward shows them."""

    given: frozenset[int]
    several: frozenset[int]
    """Those whose gradient is added to several times, or in Python."""


class NeedsPlainBackward(UnsupportedError):
    """Raised where only a plain backward can show which inputs get gradients."""


class Backward:
    """Follows the backward of one step, whose inputs have these `names`.

    `inlined`: checkpoints are plain calls. `several`: the step is one of several micro-batches, whose gradients add up.
    """

    def __init__(self, names: Sequence[str], *, inlined: bool = False, several: bool = False) -> None:
        self._names = names
        self._inlined = inlined
        self._several = several
        self._plain: GradientPositions | None = None
        self._expected: frozenset[int] = frozenset()
        self._positions: list[int] = []
        self._leaves: list[Tensor] = []
        self._awaited = False
        self._seeded = self._moved = False
        self._loss: Tensor | None = None
        self._copies = False
        self._kept: list[tuple[Tensor, int]] = []
        self._casts: Casts | None = None
        self._grad = torch.autograd.grad

    @contextmanager
    def followed(self, casts: Casts | None = None) -> Iterator[None]:
        """Give AOTAutograd's joint graph the gradients of `loss.backward()`, inside the block.

        Passes the traced parameters to `casts`.
        """
        self._awaited, self._casts = False, casts
        with ExitStack() as stack:
            stack.enter_context(_external_tensors_kept(self._begin_backward))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", _NO_LEAF)
            stack.enter_context(self._checkpoints())
            stack.enter_context(patch.object(torch.autograd, "grad", self._gradients))
            stack.enter_context(patched([(*PUSH_SAVED_HOOKS, _push_checked)]))
            for where, name in _SETTERS:
                stack.enter_context(patch.object(where, name, self._noted(getattr(where, name))))
            yield

    def traced(self, step: Step) -> Step:
        """Wrap `step` for AOTAutograd to trace."""

        def run(*values: Tensor) -> Any:
            self._awaited = False
            self._kept.clear()
            # Make leaves of the inputs that need gradients.
            if self._plain is not None:  # what AOTAutograd gives are no leaves
                values = tuple(v.detach().requires_grad_() if v.requires_grad else v for v in values)
            self._positions = [i for i, v in enumerate(values) if v.requires_grad]
            self._leaves = [values[i] for i in self._positions]
            if self._casts is not None:
                self._casts.begin(self._leaves)
            # Run the step, and note whether it sets random state or changes a checkpoint's result in place.
            with _random_state_kept() as moved:
                found = step(*values)
            self._moved = moved()
            self._loss = found[0] if isinstance(found, tuple) else found
            self._copies = self._copies or any(version_of(t) != version for t, version in self._kept)
            if self._kept and self._plain is None:
                raise NeedsPlainBackward(_NEEDS_PLAIN)
            self._awaited = True
            return found

        return run

    def ask(self, step: Step, values: Sequence[FakeTensor]) -> None:
        """Find out by plain autograd which inputs get gradients. Raises UnsupportedError where it cannot."""
        try:
            with _external_tensors_kept(lambda: None), self._checkpoints() if self._inlined else ExitStack():
                self._plain = plain_gradients(step, values)
        except OverspillError:
            raise
        except Exception as error:
            raise UnsupportedError(f"{_NEEDS_PLAIN}, and that fails: {str(error).splitlines()[0]}") from error
        self._expected = self._plain.given
        if self._several and self._plain.several:
            raise UnsupportedError(
                f"one backward adds to the gradient of {self._said(self._plain.several)} several times, or in Python, "
                "as reentrant checkpoints do, and a planned step adds up micro-batches only behind it; pass "
                "use_reentrant=False, or leave accumulate=1"
            )

    def check(self, joint: JointGraph, resized: Iterable[int] = ()) -> None:
        """Check that the captured step gives the same gradients as PyTorch, and resizes no input.

        `resized` are positions of inputs that the step is known to resize. Raises UnsupportedError otherwise, or if the
        step sets the state of the random generator.
        """
        if self._moved or (self._seeded and any(map(is_random, joint.module.graph.nodes))):
            raise UnsupportedError(
                "the step sets the state of torch's random generator, which a planned step would do once, and leaves "
                "it so or draws from it; seed between steps, or use torch.utils.checkpoint, whose recomputation is "
                "planned"
            )
        # Ops of quantization resize a buffer, which no trace sees; what is empty is not changed otherwise.
        empty = {i for i, n in enumerate(joint.primals) if n in joint.write_backs and not n.meta["val"].numel()}
        if resized := empty.union(resized):
            raise UnsupportedError(f"the model's forward resizes {self._said(resized)}; {ONE_SIZE}")
        given = {i for i, primal in enumerate(joint.primals) if primal in joint.gradients}
        if missing := self._expected - given:
            raise UnsupportedError(
                f"loss.backward() gives a gradient to {self._said(missing)}, and the captured step gives none; use "
                "overspill.compile"
            )
        if more := given - self._expected:
            raise UnsupportedError(
                f"loss.backward() gives no gradient to {self._said(more)}, and the captured step gives one; use "
                "overspill.compile"
            )

    def _said(self, positions: AbstractSet[int]) -> str:
        names = [self._names[i] for i in sorted(positions)]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")

    def _gradients(self, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **options: Any) -> Any:
        """Return to AOTAutograd the gradients of `backward()`, in place of `torch.autograd.grad`.

        AOTAutograd's call is the first after the step; any other call gets what autograd returns.
        """
        if not self._awaited or active_fake_mode() is None:
            return self._grad(outputs, inputs, grad_outputs, *args, **options)
        self._awaited = False
        # Parameters that forward changes are outputs here as well, and their gradients no part of the loss's.
        outputs, grad_outputs = zip(
            *(pair for pair in zip(outputs, grad_outputs, strict=True) if pair[0] is self._loss), strict=True
        )
        if self._plain is not None:
            torch.autograd.backward(outputs, grad_outputs)
            return tuple(leaf.grad for leaf in self._leaves)
        # Compare what autograd's graph reaches with what got a gradient.
        reached, left_out = _reached(outputs, inputs)
        found = self._grad(outputs, inputs, grad_outputs, *args, **options)
        given = {i for i, gradient in enumerate(found) if gradient is not None}
        self._expected = frozenset(self._positions[i] for i in given)
        if left_out or reached != given or any(leaf.grad is not None for leaf in self._leaves):
            raise NeedsPlainBackward(_NEEDS_PLAIN)
        return found

    def _begin_backward(self) -> None:
        if self._plain is None:
            raise NeedsPlainBackward(_NEEDS_PLAIN)

    def _noted(self, setter: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._seeded = self._seeded or active_fake_mode() is not None
            return setter(*args, **kwargs)

        return noted

    @contextmanager
    def _checkpoints(self) -> Iterator[None]:
        """Make reentrant checkpoints on fake tensors compute nothing twice, inside the block."""
        plain = checkpoint.CheckpointFunction

        class TracedCheckpoint:
            @staticmethod
            def apply(function: Step, preserve_rng_state: bool, *args: Any) -> Any:
                if active_fake_mode() is None:
                    return plain.apply(function, preserve_rng_state, *args)
                if self._inlined:
                    return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
                # Kept as one node, whose result is watched for in-place changes.
                apart = ExitStack() if self._casts is None else self._casts.apart()
                with apart, left_as_given(function, args):
                    found = _Kept.apply(function, self._copies, *args)
                self._kept += [(t, version_of(t)) for t in _tuple(found) if isinstance(t, Tensor)]
                return found

        with patch.object(checkpoint, "CheckpointFunction", TracedCheckpoint):
            yield


_NO_LEAF = "The .grad attribute of a Tensor that is not a leaf"
_NEEDS_PLAIN = (
    "what gets gradients only plain autograd can tell, for the step's backward runs Python that may add to .grad"
)


class _Kept(torch.autograd.Function):
    """A reentrant checkpoint whose backward uses what its forward computed, without recomputation."""

    @staticmethod
    def forward(ctx: Any, function: Step, copies: bool, *args: Any) -> Any:
        ctx.inputs = checkpoint.detach_variable(args)
        with torch.enable_grad():
            found = function(*ctx.inputs)
        ctx.outputs = _tuple(found)
        # Detached, since results of a Function may be changed in place; copied if they are.
        apart = [(o.detach().clone() if copies else o.data) if isinstance(o, Tensor) else o for o in ctx.outputs]
        return apart[0] if isinstance(found, Tensor) else tuple(apart)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        pairs = [
            (o, g) for o, g in zip(ctx.outputs, gradients, strict=True) if isinstance(o, Tensor) and o.requires_grad
        ]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return (None, None, *(i.grad if isinstance(i, Tensor) else None for i in ctx.inputs))


def _tuple(found: Any) -> tuple[Any, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def plain_gradients(step: Step, values: Sequence[FakeTensor]) -> GradientPositions:
    """Return the positions of inputs to which `step(*values)[0].backward()` gives gradients, on fake tensors.

    Nothing is computed.
    """
    mode = next(v.fake_mode for v in values)
    with mode:
        leaves = [
            # The others as they are, for something may be known of their values.
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) if v.requires_grad else v
            for v in values
        ]
        watched = {i: _Accumulations(leaf) for i, leaf in enumerate(leaves) if leaf is not values[i]}
        found = step(*leaves)
        (found[0] if isinstance(found, tuple) else found).backward()
    return GradientPositions(
        frozenset(i for i in watched if leaves[i].grad is not None),
        frozenset(i for i, one in watched.items() if one.are_several()),
    )


class _Accumulations:
    """Counts the additions to the gradient of one leaf."""

    def __init__(self, leaf: Tensor) -> None:
        self._leaf = leaf.requires_grad_()
        self._count = 0
        self._before: Tensor | None = None
        self._behind: tuple[Tensor | None, int] = None, 0
        leaf.register_hook(self._begin)
        leaf.register_post_accumulate_grad_hook(self._end)

    def _begin(self, _: Tensor) -> None:
        self._before = self._before if self._leaf.grad is None else self._leaf.grad

    def _end(self, leaf: Tensor) -> None:
        self._count += 1
        self._behind = _state(leaf.grad)

    def are_several(self) -> bool:
        """Return whether there was more than one addition, or one made in Python."""
        gradient, version = _state(self._leaf.grad)
        if gradient is None:
            return False
        (behind, then), touched = self._behind, self._before is not None
        return self._count > 1 or touched or gradient is not behind or version != then


def _state(gradient: Tensor | None) -> tuple[Tensor | None, int]:
    return gradient, 0 if gradient is None else version_of(gradient)


def _reached(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[set[int], bool]:
    """Return which `inputs` backward of `outputs` reaches, and whether Python runs in a node that reaches none."""
    position = {get_gradient_edge(leaf).node: i for i, leaf in enumerate(inputs)}
    pending = [get_gradient_edge(o).node for o in outputs]
    leads: dict[Any, bool] = {}
    reached: set[int] = set()
    # Depth-first; a node is visited again once all nodes behind it are done.
    while pending:
        node = pending[-1]
        behind = [n for n, _ in node.next_functions if n is not None]
        if node not in leads:
            leads[node] = False
            pending += [n for n in behind if n not in leads]
            continue
        pending.pop()
        number = position.get(node)
        if number is not None:
            reached.add(number)
        leads[node] = number is not None or any(leads[n] for n in behind)
    return reached, any(isinstance(node, BackwardCFunction) and not leads[node] for node in leads)


@contextmanager
def _random_state_kept() -> Iterator[Callable[[], bool]]:
    """Restore the CPU's random state after a traced step; yield a function that returns whether the step set it."""
    moved = False
    with disable_current_modes():
        before = torch.get_rng_state()
    yield lambda: moved
    with disable_current_modes():
        moved = not torch.equal(torch.get_rng_state(), before)
        torch.random.default_generator.set_state(before)


@contextmanager
def _external_tensors_kept(begin: Callable[[], None]) -> Iterator[None]:
    """Call `begin` for each `backward()` on fake tensors, and restore `.grad` of real tensors afterwards."""
    plain = torch.autograd.backward
    before: dict[int, tuple[Tensor, Tensor | None]] = {}

    # Called by the step itself, as reentrant checkpoints do.
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if active_fake_mode() is not None:
            begin()
            for leaf in _leaves(_tuple(tensors)):
                if id(leaf) not in before:
                    before[id(leaf)] = leaf, leaf.grad
                    leaf.grad = None  # else what is fake would be added to it
        plain(tensors, *args, **kwargs)

    try:
        with patch.object(torch.autograd, "backward", backward):
            yield
    finally:
        for leaf, gradient in before.values():
            leaf.grad = gradient


def _leaves(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the leaves that `outputs` follow from and that are real tensors."""
    pending: list[Any] = [get_gradient_edge(o).node for o in outputs if o.requires_grad]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if isinstance(leaf := getattr(node, "variable", None), Tensor) and not isinstance(leaf, _FAKE):
            yield leaf
        new = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= new
        pending += new

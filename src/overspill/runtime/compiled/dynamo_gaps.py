"""Cases that Dynamo traces wrongly without a warning: traced correctly here, or refused.

The patches apply while a model of `overspill.compile` is called (`PATCHES`), and `looked_at` runs for each graph:

- Identity of two objects (`self.now is self.one`): Dynamo assumes that two lists stay two, and that one tuple read
  at two places is two. Here the objects are compared, and a guard keeps the answer. Another guard checks that an
  object that forward changes in place is none of the others that it reads (pytorch #196173).
- The backward of a Function under a differentiating transform of torch.func: Dynamo replaces it by the derivative of
  its forward (pytorch #193279). Here the graph ends, and PyTorch runs it. Dynamo traces such a backward without
  gradients; if it is differentiated, the graph is refused.
- A layer that is not initialised: Dynamo initialises its weights first, and restores the random generator. Here it is
  an error.
- `requires_grad_()` on a value that forward computes, as in peft: with eager kernels the graph goes on if an output
  also depends on a parameter, whose gradient is the same.
- A loop whose sizes follow from values (experts by `nonzero()`, in the loop or before it), which Dynamo does not trace:
  it would compile what the loop calls, for each number of rows again. Here all of it runs as in plain PyTorch, and
  `plan_check.py` counts it.

Known limit: if a release has no such name, Dynamo behaves as usual.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor, fx, nn

from overspill.core.errors import OverspillError, RequestError, UnsupportedError
from overspill.pytorch.dynamo import (
    APPLY_FUNCTION,
    CHECK_LEAVES,
    DUPLICATE,
    IDENTITY,
    INITIALIZE_LAZY,
    LOG_BREAK,
    LOOP_BREAK,
    UNIMPLEMENTED,
    UNTRACED,
    BackendCompilerFailed,
    InstructionTranslator,
    OutputGraph,
    TorchDynamoException,
    install_guard,
    is_from_global_source,
    is_from_local_source,
    original_code,
    unimplemented,
    variables,
)
from overspill.pytorch.functorch import TransformType, active_transforms
from overspill.pytorch.modules import LAZY
from overspill.pytorch.patching import Patches, Target
from overspill.pytorch.trees import tree_leaves

OWN_BACKWARD = "a Function under torch.func"
"""Dynamo's message when a graph ends before one."""
BY_VALUES = r"depends on input Tensor data|Data dependent operator"
"""What it says of an op whose result's shape follows from values."""
_VALUES = (int, float, complex, str, bytes, type(None), type, Tensor)
"""Values that Dynamo guards by value, or correctly by other means."""
_HOLDERS = (
    variables.BaseListVariable, variables.ConstDictVariable, variables.SetVariable, variables.UserDefinedObjectVariable
)  # fmt: skip
_SIZES_BY_VALUES: weakref.WeakSet[CodeType] = weakref.WeakSet()
"""Functions in which a graph ended at an op whose result's shape follows from values."""
Plain = Callable[..., Any]


class Refused(BackendCompilerFailed):
    """Carries an Overspill error through Dynamo, which then raises that error instead."""

    def __init__(self, error: OverspillError) -> None:
        super().__init__(looked_at, error, None)

    def remove_dynamo_frames(self) -> Any:
        """Return the exception that Dynamo finally raises."""
        return self.inner_exception.with_traceback(None)


def looked_at(module: fx.GraphModule) -> None:
    """Guard the objects that forward changes in place. Raises UnsupportedError for a derivative that is lost."""
    effects = InstructionTranslator.current_tx().output.side_effects
    read = [v for v in effects.id_to_variable.values() if _was_there(v.source) and isinstance(v, _HOLDERS)]
    read = [v for v in read if not isinstance(v, variables.UnspecializedNNModuleVariable)]  # there are many
    for changed in filter(effects.is_modified, read):
        others = [v.source for v in read if type(v) is type(changed) and v is not changed]
        install_guard(changed.source.make_guard(partial(_guard, others=others, word="is not")))
    nodes = [node for part in module.modules() if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    twice = any(node.target is torch.autograd.grad and node.kwargs.get("create_graph") for node in nodes)
    if twice and any(node.target is torch.ops.higher_order.autograd_function_apply for node in nodes):
        raise UnsupportedError(
            "the model differentiates gradients (torch.autograd.grad with create_graph=True) and calls an "
            "autograd.Function, whose second derivative torch.compile would lose; write it as plain ops, or use "
            "overspill.train_step"
        )


def _was_there(source: Any) -> bool:
    """Return whether an object existed before the call, so that a guard can check it."""
    return source is not None and (is_from_local_source(source) or is_from_global_source(source))


def _guard(building: Any, guard: Any, others: Sequence[Any], word: str) -> None:
    """Add a guard that an object is, or is not, one of the others."""
    for other in others:
        code = f"{building.arg_ref(guard)} {word} {building.arg_ref(other.name)}"
        building.object_aliasing_guard_codes.append((code, code))


def _identity(plain: Plain, left: Any, right: Any) -> Any:
    if left is right or not _was_there(left.source) or not _was_there(right.source):
        return plain(left, right)
    one, other = map(InstructionTranslator.current_tx().output.resolve_source_value, (left.source, right.source))
    if isinstance(one, _VALUES) or isinstance(other, _VALUES):
        return plain(left, right)
    word = "is" if one is other else "is not"
    install_guard(left.source.make_guard(partial(_guard, others=[right.source], word=word)))
    return variables.ConstantVariable.create(one is other)


def _duplicate(plain: Plain, here: Any, before: Any) -> Any:
    """Return the guard on an object that was read before at another place, even if only one is global."""
    if (found := plain(here, before)) is None and _was_there(before) and _was_there(here) and before != here:
        return partial(_guard, others=[before], word="is")
    return found


def _apply(plain: Plain, function: Any, tx: Any, *args: Any) -> Any:
    if any(i.key() != TransformType.Vmap for i in active_transforms()):
        lost = f"it would lose the backward of {function.fn_cls.__name__}"
        unimplemented(gb_type=OWN_BACKWARD, context="", explanation=lost, hints=[])
    return plain(function, tx, *args)


def _initialize(plain: Plain, tx: Any, module: nn.Module, *args: Any) -> None:
    if hasattr(module, LAZY):
        name = type(module).__name__
        raise Refused(RequestError(f"{name} is not initialised yet; call the model once on an example first"))
    plain(tx, module, *args)


def _leaves(plain: Plain, graph: OutputGraph, outputs: Sequence[Any], tx: Any) -> None:
    trained: set[fx.Node] = set()
    for node in graph.graph.nodes:
        example = [v for v in tree_leaves(node.meta.get("example_value")) if isinstance(v, Tensor) and v.requires_grad]
        if example and (node.op == "placeholder" or not trained.isdisjoint(node.all_input_nodes)):
            trained.add(node)
    left = [o for o in outputs if not (isinstance(o, variables.TensorVariable) and o.as_proxy().node in trained)]
    plain(graph, left, tx)


def _breaks_here(cause: Any) -> bool:
    """Return whether a graph ends in the function itself, not in what it calls: that is traced by itself then."""
    return len(getattr(cause, "real_stack", ())) == 1


def _log_break(plain: Plain, tx: Any, *args: Any, exc: Any, **said: Any) -> None:
    if _breaks_here(exc) and re.search(BY_VALUES, str(exc)):
        _SIZES_BY_VALUES.add(original_code(tx.f_code))
    plain(tx, *args, exc=exc, **said)


def _unimplemented(plain: Plain, *args: Any, **said: Any) -> None:
    try:
        plain(*args, **said)
    except TorchDynamoException as error:
        cause = said.get("from_exc")
        if said.get("gb_type") == LOOP_BREAK and _breaks_here(cause):
            traced = original_code(InstructionTranslator.current_tx().f_code)
            if traced in _SIZES_BY_VALUES or re.search(BY_VALUES, str(cause)):
                error.frame_exec_strategy = UNTRACED
        raise


def _patch(target: Target, ours: Callable[..., Any]) -> Patches:
    plain = getattr(*target, None)
    return [] if plain is None else [(*target, lambda *args, **options: ours(plain, *args, **options))]


PATCHES = [
    *(patch for target in IDENTITY for patch in _patch(target, _identity)),
    *_patch(DUPLICATE, _duplicate),
    *_patch(APPLY_FUNCTION, _apply),
    *_patch(INITIALIZE_LAZY, _initialize),
    *_patch(LOG_BREAK, _log_break),
    *_patch(UNIMPLEMENTED, _unimplemented),
]
"""Attributes of Dynamo's modules and classes, and their values while a model is called."""
OF_EAGER = _patch(CHECK_LEAVES, _leaves)
"""Further patches with eager kernels. Stock torch.compile, which Inductor's kernels must equal, ends graphs there."""

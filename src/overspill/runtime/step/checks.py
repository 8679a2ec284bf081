"""Models, optimizers, hooks and inputs that `train_step` does not support.

Each error is one line that says what is wrong and what would work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from overspill.capture.compiled.known_values import is_sparse, nested, sparse
from overspill.core.errors import RequestError, UnsupportedError
from overspill.pytorch.autograd import accumulate_hooks_of, hooks_of
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.modules import parameters_of
from overspill.pytorch.optimizers import (
    global_step_post_hooks,
    global_step_pre_hooks,
    initialise,
    is_initialised,
    step_hooks,
)

from .inner_tensors import has_own_memory
from .residency import Guarded, Spec, readable
from .tracked_values import advances

OURS = f"{__name__.partition('.')[0]}."
"""Prefix of this package's modules, whose optimizer hooks only check for plans or notice the end of a step."""
INSTEAD = (
    "use one that updates each parameter by itself, such as AdamW or SGD, "
    "or overspill.compile, which leaves the optimizer as it is"
)

AGAIN = "close() this step, then make optimizer and train_step anew for the model as it is"


def check_model(
    step: nn.Module, parameters: Mapping[str, nn.Parameter], sharded: Collection[str] = (), *, in_a_loop: bool = False
) -> None:
    """Raise RequestError or UnsupportedError for a model that cannot be planned.

    Its parameters must be movable and updatable one by one. Those in `sharded` may be so in parts.
    """
    # The modules: not in another step, no sparse gradients.
    for path, module in step.named_modules():
        if isinstance(parameters_of(module), Guarded):
            raise RequestError("another train_step has this model; call its close() first")
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedError(
                f"{readable(path)} makes sparse gradients, which a planned step cannot hold; make it with sparse=False"
            )
    # The parameters: there are some, with values, on one device, and plain.
    if not parameters:
        raise RequestError("the model has no parameters to train")
    _check_values(step)
    if len(devices := {p.device for p in parameters.values()}) > 1:
        raise RequestError(
            f"the model's parameters are on {len(devices)} devices ({', '.join(sorted(map(str, devices)))}); "
            "a step is planned for one: move the model to it"
        )
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RequestError(f"{readable(name)} is not initialised yet; call the model once on an example first")
        if parameter.is_complex():
            raise UnsupportedError(f"{readable(name)} is complex; keep its real and imaginary parts as two parameters")
        # Fake ones are only planned.
        plain = has_own_memory(parameter) if in_a_loop else type(parameter) is nn.Parameter
        if not (plain or isinstance(parameter, FakeTensor) or name in sharded):
            raise UnsupportedError(
                f"{readable(name)} is a {type(parameter).__name__}; a planned step needs plain parameters, or those of "
                "fully_shard; overspill.compile moves frozen quantised weights"
            )


def _check_values(step: nn.Module) -> None:
    """Raise RequestError for parameters on meta, without values; UnsupportedError for sparse buffers."""
    if found := next((name for name, buffer in step.named_buffers() if is_sparse(buffer)), ""):
        raise sparse(f"{readable(found)} is a sparse tensor")
    for path, module in step.named_modules():
        hooked = hasattr(module, "_hf_hook") and module._hf_hook is not None
        if any(p.is_meta for p in module.parameters(recurse=False)) and (
            hooked or all(p.is_meta for p in step.parameters())
        ):
            why = ", and accelerate's hooks bring them (cpu_offload, device_map)" if hooked else ""
            raise RequestError(
                f"the parameters of {readable(path)} are on meta, without values{why}; load the model on one device, "
                "without offload: a planned step keeps in the store what does not fit"
            )


def check_hooks(parameters: Mapping[str, nn.Parameter], optimizers: Iterable[Optimizer]) -> None:
    """Raise UnsupportedError for parameter hooks that a planned step does not call."""
    hooked = any(hooks_of(parameter) for parameter in parameters.values())
    trained = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]} if hooked else ()
    for name, parameter in parameters.items():
        if accumulate_hooks_of(parameter):
            raise UnsupportedError(
                f"{readable(name)} has a hook behind its gradient's accumulation "
                "(register_post_accumulate_grad_hook), and a planned step keeps "
                "no .grad; use register_hook, or clip_norm, clip_value or weight_decay for what it does"
            )
        if hooks_of(parameter) and parameter.requires_grad and id(parameter) not in trained:
            raise UnsupportedError(
                f"{readable(name)} has a gradient hook, and a planned step makes gradients only of what the optimizer "
                "has; give it to the optimizer, or freeze it with requires_grad_(False)"
            )


def check_trained(
    parameters: Mapping[str, nn.Parameter], names: Mapping[int, str], owned: Collection[int], *, allow_untrained: bool
) -> None:
    """Raise RequestError for optimizer parameters outside the model, or model parameters without an optimizer.

    Untrained parameters pass with `allow_untrained`. `names` and `owned` are keyed by the id of a parameter.
    """
    if external_tensors := sum(1 for key in owned if key not in names):
        raise RequestError(
            f"the optimizer has {external_tensors} parameters that are not the model's or the loss's; "
            "make it from model.parameters() of this model"
        )
    untrained = [n for n, p in parameters.items() if p.requires_grad and id(p) not in owned]
    if untrained and not allow_untrained:
        more = f" and {len(untrained) - 1} more parameters require" if len(untrained) > 1 else " requires"
        raise RequestError(
            f"{readable(untrained[0])}{more} a gradient and no optimizer of this step trains it; give all optimizers "
            "as a list (optimizer=[muon, adamw]), freeze it with requires_grad_(False), or say allow_untrained=True"
        )


def check_optimizer(optimizer: Any) -> None:
    """Raise RequestError or UnsupportedError for an optimizer that cannot be planned."""
    if not isinstance(optimizer, Optimizer):
        raise RequestError(
            f"the optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, or a list of them"
        )
    if not is_initialised(optimizer):  # a wrapper that has not called Optimizer.__init__
        initialise(optimizer)
    # Those that evaluate the model, cannot be called alone, or look at parameters of others.
    name = type(optimizer).__name__
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for inside in (v for v in vars(optimizer).values() if isinstance(v, Optimizer)):
        if not own.issuperset(id(p) for group in inside.param_groups for p in group["params"]):
            raise UnsupportedError(
                f"{name} has another optimizer with other parameters, whose state is not there in its step; {INSTEAD}"
            )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UnsupportedError(
            f"{name} cannot be part of a planned step: it evaluates the model several times; {INSTEAD}"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UnsupportedError(f"{name} cannot be part of a planned step: its gradients are sparse; {INSTEAD}")
    _, *arguments = inspect.signature(type(optimizer).step).parameters.values()
    if needed := [
        a.name for a in arguments if a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)
    ]:
        raise UnsupportedError(f"{name}.step cannot do without an argument ({', '.join(needed)}); {INSTEAD}")
    check_optimizer_settings(optimizer)


def check_sharded(optimizer: Optimizer, elementwise: bool) -> None:
    """Raise UnsupportedError if the update of a shard is not a part of the update of the whole parameter."""
    if not elementwise:
        raise UnsupportedError(
            f"{type(optimizer).__name__} is not known to treat each element by itself, and each rank would update by "
            "its own rows alone; use one that does, such as AdamW or SGD"
        )


def check_optimizer_settings(optimizer: Optimizer, own_hooks: int = 0) -> None:
    """Raise UnsupportedError for optimizer settings that a plan cannot honour.

    They may change at any time. Raises RequestError if more than `own_hooks` of the optimizer's step pre-hooks belong
    to train steps.
    """
    name = type(optimizer).__name__
    for key in ("capturable", "differentiable"):
        if any(group.get(key) for group in optimizer.param_groups):
            raise UnsupportedError(f"{name} was made with {key}=True; a planned step needs {key}=False")
    ours = [_is_ours(hook) for hook in step_hooks(optimizer)[0].values()]
    if sum(ours) > own_hooks:
        raise RequestError("another train_step has this optimizer; call its close() first")
    if not all((*ours, *map(_is_ours, global_step_pre_hooks.values()))):
        raise UnsupportedError(
            f"{name} or all optimizers have step pre-hooks, and a planned step is never where all gradients are there; "
            "remove them, or use clip_norm, clip_value or a post-hook for what they do"
        )


def step_post_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks called after each step of `optimizer`, its own before the global ones.

    Global hooks of Overspill are left out: they need none of its state.
    """
    of_all = (hook for hook in global_step_post_hooks.values() if not _is_ours(hook))
    return [*step_hooks(optimizer)[1].values(), *of_all]


def _is_ours(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "").startswith(OURS)


def check_inputs(leaves: Iterable[Any], where: torch.device) -> None:
    """Raise RequestError or UnsupportedError for inputs that a planned step cannot take.

    RequestError: tensors on another device, or that require gradients. UnsupportedError: nested and sparse tensors,
    iterators and random generators.
    """
    for number, leaf in enumerate(leaves):
        if advances(leaf):
            raise UnsupportedError(
                f"input {number} is an iterator or a random generator, which a planned step would advance once; "
                "give the step what it gives"
            )
        if not isinstance(leaf, Tensor):
            continue
        if leaf.device != where and (leaf.dim() or leaf.device.type != "cpu"):
            raise RequestError(
                f"input {number} is on {leaf.device} and the model on {where}; move it with .to({str(where)!r})"
            )
        if leaf.is_nested:
            raise nested(f"input {number} is a nested tensor")
        if is_sparse(leaf):
            raise sparse(f"input {number} is a sparse tensor")
        if leaf.requires_grad:
            raise RequestError(
                f"input {number} requires a gradient, and a step makes those of parameters only; detach() it"
            )


def check_same_places(known: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    """Raise RequestError if a parameter is no longer at its place in the model."""
    if gone := [name for name in known if name not in now]:
        raise RequestError(f"the model has no parameter {readable(gone[0])} any more; {AGAIN}")
    for name, parameter in now.items():
        if known.get(name) is not parameter:
            at = next((readable(n) for n, p in known.items() if p is parameter), None)
            was = "a new one" if at is None else f"that of {at}"
            raise RequestError(f"{readable(name)} is not the parameter that the step was made for, but {was}; {AGAIN}")


def check_unchanged(name: str, now: Spec, known: Spec, *, in_a_loop: bool) -> None:
    """Raise RequestError if the shape, dtype or device of a parameter has changed."""
    if (now.dtype, now.device, now.size) != (known.dtype, known.device, known.size):
        changed = f"{readable(name)} was {_brief(known)} and is now {_brief(now)}"
        if in_a_loop:
            raise RequestError(
                f"{changed}, changed between a call of the compiled model and the step of its optimizer; change it "
                "after optimizer.step(), before the next call"
            )
        raise RequestError(f"{changed}; {AGAIN}")


def _brief(spec: Spec) -> str:
    return f"{str(spec.dtype).removeprefix('torch.')} {tuple(spec.size)} on {spec.device}"

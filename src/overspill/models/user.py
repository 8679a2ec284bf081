"""Load a user's own model, named as `package.module:callable`."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import OverspillError, RequestError, is_out_of_memory

from .built_model import IMAGE_SIZE, SEQ_LEN, BuiltModel
from .drawing import drawing_from
from .step import is_criterion, loss_in

_WANTED = "a module, (module, make_batch) or (module, make_batch, loss)"


def load_user(spec: str, *, image_size: int | None = None, seq_len: int | None = None) -> BuiltModel:
    """Return the model that the user's callable `spec` makes.

    It is called without arguments. It returns a module, `(module, make_batch)` or `(module, make_batch, loss)`.
    `make_batch(batch_size)` returns a tensor, a tuple of tensors or a dict of them. Without it, inputs follow from the
    module's first layer and the sizes given here. `loss(output, *batch)` returns a scalar. A loss of torch.nn is called
    on the output and the last tensor of the batch.

    Without `loss`, the module reads the whole batch. A step then minimises its output's `loss`, the output itself if it
    is a scalar, or the mean of its squares. With `loss`, the module reads what its forward requires: the first tensors
    of a tuple, or the entries of a dict that forward has names for. The rest (labels) is for the loss.
    """
    return model_of(spec, _guarded(f"{spec} raised", _resolve(spec)), image_size=image_size, seq_len=seq_len)


def model_of(spec: str, made: Any, *, image_size: int | None = None, seq_len: int | None = None) -> BuiltModel:
    """Return the model that the user's callable `spec` has `made`. Raises RequestError."""
    module, make_batch, loss = _parts(spec, made)
    assumed = ""
    if make_batch is None:
        make_batch, reads = _derived_batches(spec, module, image_size, seq_len)
        assumed = f"{spec} returns a module alone: a sample is taken to be {reads}, as its first layer reads"
        if loss is None:
            assumed += ", and the mean of its squared outputs to be the loss where it returns none"
        assumed += "; return (module, make_batch, loss) to say what they are"
    elif image_size is not None or seq_len is not None:
        option = "seq_len" if image_size is None else "image_size"
        raise RequestError(f"{option}= does not apply to {spec}: its own make_batch decides the sizes; leave it out")
    adapter = _Adapter(spec, module, make_batch, loss)
    return BuiltModel(spec, module, adapter.make_batch, adapter.loss, assumed=assumed)


def _guarded(context: str, function: Callable[..., Any], *args: object) -> Any:
    """Return the result of the user's `function`, with errors in one line.

    An exception becomes a RequestError that begins with `context`.
    """
    try:
        return function(*args)
    except OverspillError:
        raise
    except (Exception, SystemExit) as error:  # whatever user code raises is theirs to read in one line
        if is_out_of_memory(error):  # not a mistake in the request
            raise
        raise RequestError(f"{context} {type(error).__name__}: {' '.join(str(error).split())}") from error


def _resolve(spec: str) -> Callable[[], Any]:
    """Return the callable that `package.module:callable` names, found from the current directory as by `python -m`."""
    module_name, _, attributes = spec.partition(":")
    file = Path(module_name)
    if file.suffix == ".py" and file.is_file() and not file.is_absolute():
        raise RequestError(f"{spec!r} names a file; write {'.'.join(file.with_suffix('').parts)}:{attributes}")
    if not all(part.isidentifier() for text in (module_name, attributes) for part in text.split(".")):
        raise RequestError(f"{spec!r} does not name a model; write package.module:callable")
    # Import the module.
    here = os.getcwd()  # noqa: PTH109  # sys.path holds strings
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        with drawing_from(None):  # only the first import samples, and each model is to be the same
            found = _guarded(f"cannot import {module_name} of {spec}:", importlib.import_module, module_name)
    except RequestError as error:
        absent = error.__cause__
        if isinstance(absent, ModuleNotFoundError) and module_name.startswith(f"{absent.name}"):
            raise RequestError(f"{error}; name a module that is installed, or in this directory") from absent
        raise
    # Find the callable in it.
    for attribute in attributes.split("."):
        if not hasattr(found, attribute):
            raise RequestError(f"{spec}: {module_name} has no attribute {attributes}; name a function of {module_name}")
        found = getattr(found, attribute)
    if isinstance(found, nn.Module):
        raise RequestError(f"{spec} is a module already; name a callable that returns it")
    if not callable(found):
        raise RequestError(f"{spec} is a {type(found).__name__}, not a callable that returns a module; name a function")
    made: Callable[[], Any] = found
    return made


def _parts(spec: str, made: object) -> tuple[nn.Module, Callable[[int], Any] | None, Callable[..., Any] | None]:
    """Return the module, make_batch and loss that the callable returned; the last two may be absent."""
    # Each mistake has its own message.
    parts = made if isinstance(made, tuple) else (made,)
    if not 1 <= len(parts) <= 3:
        raise RequestError(f"{spec} returned a tuple of {len(parts)}; it must return {_WANTED}")
    module, make_batch, loss = (*parts, None, None)[:3]
    if not isinstance(module, nn.Module):
        where = " as first in its tuple" if isinstance(made, tuple) else ""
        raise RequestError(f"{spec} returned {type(module).__name__}{where}; it must return {_WANTED}")
    for role, part in (("make_batch", make_batch), ("loss", loss)):
        if part is not None and not callable(part):
            raise RequestError(
                f"{spec} returned {'a tensor' if isinstance(part, Tensor) else type(part).__name__} as {role}, which "
                "must be "
                f"callable; it must return {_WANTED}"
            )
    if isinstance(make_batch, nn.Module):
        raise RequestError(
            f"{spec} returned {type(make_batch).__name__} as make_batch, second in its tuple; it must return {_WANTED}"
        )
    return module, make_batch, loss


def _derived_batches(
    spec: str, module: nn.Module, image_size: int | None, seq_len: int | None
) -> tuple[Callable[[int], Tensor], str]:
    """Return a make_batch that suits the module's first layer, and a description of it in words."""
    first = next((layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None), None)
    given = {option for option, size in (("image_size", image_size), ("seq_len", seq_len)) if size is not None}
    size = 0
    # The shape of a sample, by the kind of layer.
    if isinstance(first, nn.Conv2d) and first.in_channels > 0:  # a lazy layer has 0 until it first runs
        given.discard("image_size")
        size = image_size or IMAGE_SIZE
        shape: tuple[int, ...] = (first.in_channels, size, size)
    elif isinstance(first, nn.Linear) and first.in_features > 0:
        shape = (first.in_features,)
    elif isinstance(first, nn.Embedding):
        given.discard("seq_len")
        shape = (seq_len or SEQ_LEN,)
    else:
        layer = "no layer with parameters" if first is None else f"first layer {type(first).__name__}"
        raise RequestError(
            f"{spec}: cannot tell what {type(module).__name__} reads ({layer}); return (module, make_batch), "
            "where make_batch(batch_size) returns its input tensors"
        )
    if given:
        raise RequestError(
            f"{given.pop()}= does not apply to {spec}, whose first layer is {type(first).__name__}; leave it out"
        )
    if isinstance(first, nn.Embedding):
        # Token numbers for an embedding, else normal noise.
        tokens = f"{shape[0]} numbers below {first.num_embeddings}"
        return lambda batch_size: torch.randint(first.num_embeddings, (batch_size, *shape), device="cpu"), tokens
    dtype = first.weight.dtype
    text = f"{'x'.join(map(str, shape))} of {str(dtype).removeprefix('torch.')}"
    return lambda batch_size: torch.randn(batch_size, *shape, dtype=dtype, device="cpu"), text


class _Adapter:
    """Turns the user's make_batch and loss into those of a BuiltModel, in flat tuples."""

    def __init__(
        self, spec: str, module: nn.Module, make_batch: Callable[[int], Any], loss: Callable[..., Any] | None
    ) -> None:
        self._spec = spec
        self._make_batch = make_batch
        self._criterion = loss if loss is not None and is_criterion(loss) else None
        self._loss = loss if self._criterion is None else self._of_criterion
        self._signature = inspect.signature(module.forward)
        self._keys: tuple[str, ...] = ()  # of the dict that make_batch last returned
        kinds = [parameter.kind for parameter in self._signature.parameters.values()]
        self._any_name = inspect.Parameter.VAR_KEYWORD in kinds or loss is None
        self._names = frozenset(self._signature.parameters)
        self._read: int | None = None  # how many tensors of a tuple the module reads; None for all
        if loss is not None and inspect.Parameter.VAR_POSITIONAL not in kinds:
            self._read = max(1, _required(self._signature))

    def make_batch(self, batch_size: int) -> tuple[Tensor, ...]:
        """Return the user's batch as a tuple of tensors, in the order of its dict if it is one."""
        batch = _guarded(f"make_batch of {self._spec} raised", self._make_batch, batch_size)
        self._keys = tuple(batch) if isinstance(batch, Mapping) else ()
        if isinstance(batch, Tensor):
            batch = (batch,)
        # Flatten to a tuple of tensors.
        tensors = tuple(batch.values()) if isinstance(batch, Mapping) else batch
        if not isinstance(tensors, tuple | list) or not tensors:
            raise RequestError(
                f"make_batch of {self._spec} returned {type(batch).__name__}; it must return a tensor, a tuple of "
                "tensors or a "
                "dict of them"
            )
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise RequestError(
                    f"make_batch of {self._spec} returned {type(tensor).__name__} among its tensors; leave it out, or "
                    "make it a tensor"
                )
        # The batch must suit forward and the loss.
        args, kwargs = self._arguments(tuple(tensors))
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            labelled = "" if self._loss else "; with labels among its tensors, return (module, make_batch, loss)"
            raise RequestError(
                f"the batch of {self._spec} does not suit its forward{self._signature}: {error}{labelled}"
            ) from error
        self._check_loss(tuple(tensors))
        return tuple(tensors)

    def _check_loss(self, batch: tuple[Tensor, ...]) -> None:
        """Raise RequestError if the user's loss cannot be called on the module's output and `batch`."""
        if self._loss is None:
            return
        if self._criterion is not None and len(batch) < 2:
            name = type(self._criterion).__name__
            raise RequestError(f"{name} of {self._spec} needs a target; let make_batch return (inputs, target)")
        try:
            # Bind without calling: an error now is clearer than one in the step.
            signature = inspect.signature(self._loss)
        except (TypeError, ValueError):  # unknown for a callable that is not Python
            return
        try:
            signature.bind(None, *batch)
        except TypeError as error:
            given = ", ".join(["output", *self._keys] if self._keys else ["output", *["tensor"] * len(batch)])
            raise RequestError(
                f"the loss of {self._spec} is called as loss(output, *batch), here loss({given}), and takes "
                f"{signature}: {error}; "
                "let it take the output and every tensor of the batch"
            ) from error

    def _of_criterion(self, output: Any, *batch: Tensor) -> Any:
        """Return a torch.nn loss of the output and the target."""
        assert self._criterion is not None
        return self._criterion(output, batch[-1])

    def loss(self, module: nn.Module, *batch: Tensor) -> Tensor:
        """Return the scalar loss of the module's output: the user's loss, or the default one."""
        args, kwargs = self._arguments(batch)
        output = module(*args, **kwargs)
        loss = _default_loss(output) if self._loss is None else self._loss(output, *batch)
        if loss is None:
            raise RequestError(f"{self._spec} gives no loss in its {type(output).__name__}; return a loss as well")
        if not isinstance(loss, Tensor) or loss.dim() != 0:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise RequestError(f"the loss of {self._spec} is {what}, not a scalar tensor; take its mean or sum")
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise RequestError(
                f"the loss of {self._spec} follows from no parameter that requires a gradient; leave out what detaches "
                "it"
            )
        return loss

    def _arguments(self, batch: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the positional and named arguments of the module, from `batch`."""
        if not self._keys:
            return batch[: self._read], {}
        named = dict(zip(self._keys, batch, strict=True))
        return (), {key: tensor for key, tensor in named.items() if self._any_name or key in self._names}


def _required(signature: inspect.Signature) -> int:
    """Return the number of positional arguments without a default."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in positional and p.default is p.empty for p in signature.parameters.values())


def _default_loss(output: Any) -> Tensor | None:
    """Return the output's loss if the user gave none, or None.

    It is the output's `loss`, the output itself if a scalar, or the mean of its squares.
    """
    if isinstance(output, Tensor):
        return output if output.dim() == 0 else output.float().square().mean()
    found = loss_in(output)
    return found if isinstance(found, Tensor) else None

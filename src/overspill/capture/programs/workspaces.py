"""Measure the workspaces of library calls, by running each once.

A convolution may copy its inputs into another layout, and no text shows it. So before a plan is made, each library call
of a program is run once by itself. Its inputs are zeros of the right shapes, and masks that leave nothing out; equal
calls are run once. Compiled kernels allocate nothing. Collectives are not run, because other ranks would have to run
them too: their bytes are known (`costs/gloo.py`).
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import pairwise
from math import inf, nan
from threading import Lock
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from overspill.core.errors import UnsupportedError
from overspill.costs.gloo import gloo_bytes
from overspill.pytorch.autograd import profiler_enabled
from overspill.pytorch.dispatch import disable_current_modes

from .allocations import changes_of, peak_of
from .known_shapes import values_made_up

FUNCTIONAL = "_c10d_functional"
"""Namespace of the collectives in traced graphs."""
_known: dict[str, CallWorkspace] = {}
"""Workspaces by a call's signature, for all programs of this process."""
_LOCK = Lock()
"""Plans on a card are searched for in several threads, and measuring takes the random state back."""
_NAMESPACE = {"torch": torch, "device": torch.device, "inf": inf, "nan": nan}
"""What the arguments of an op refer to as text."""
_measures = ContextVar("overspill_measures", default=True)


@contextmanager
def nothing_measured() -> Iterator[None]:
    """Run no library call inside the block: its workspace counts as 0 bytes."""
    token = _measures.set(False)
    try:
        yield
    finally:
        _measures.reset(token)


class CallWorkspace(NamedTuple):
    """The workspace of one call."""

    nbytes: int = 0
    """Peak bytes of the call beyond its results."""
    blocks: tuple[int, ...] = ()
    """Bytes of the blocks that it takes, if it takes one after the other."""


NO_WORKSPACE = CallWorkspace()


class Library(NamedTuple):
    """A library call."""

    node: ast.expr
    """Its expression."""
    lines: list[ast.stmt]
    """The statements that run it."""
    uses: Sequence[str]
    """The variables used."""


def workspaces(
    calls: Sequence[Library], namespace: Mapping[str, Any], values: Mapping[str, Any]
) -> list[CallWorkspace]:
    """Return the workspace of each library call.

    `values` are the variables as fake tensors. Raises UnsupportedError for a call that cannot be run.
    """
    signed = [(_signature(call, values), call) for call in calls]
    for signature, call in signed:
        if FUNCTIONAL in signature:
            _known[signature] = CallWorkspace(_of_collective(call, values))
    return _learned([(signature, partial(_with, call, values)) for signature, call in signed], namespace)


def workspaces_of(nodes: Sequence[fx.Node]) -> list[CallWorkspace] | None:
    """Return the workspace of each op of a graph, measured as a library call.

    Returns None where nothing is to run, or if the device has too little memory to run all of them. The memory used to
    measure is given back to the device, because no plan counts it.
    """
    if not _measures.get():
        return None
    known = len(_known)
    try:
        return _learned([(_signature_of(node), partial(_call_of, node)) for node in nodes], _NAMESPACE)
    except UnsupportedError:
        return None
    finally:
        if len(_known) > known and torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _with(call: Library, values: Mapping[str, Any]) -> tuple[Library, Mapping[str, Any]]:
    return call, values


def _learned(
    signed: Sequence[tuple[str, Callable[[], tuple[Library, Mapping[str, Any]]]]], namespace: Mapping[str, Any]
) -> list[CallWorkspace]:
    """Return the workspace of each call, given with its signature; of equal ones, one is run.

    While a profiler runs on CUDA, nothing can be measured; the user is then warned. Raises UnsupportedError.
    """
    if not _measures.get():
        return [NO_WORKSPACE for _ in signed]
    with _LOCK, disable_current_modes(), torch.no_grad(), values_made_up():
        new = {signature: made() for signature, made in signed if signature not in _known}
        if any(_is_cuda(*of) for of in new.values()) and profiler_enabled():
            warnings.warn(
                "a profiler runs while a model is compiled: what its library calls allocate for themselves is not "
                "planned for",
                stacklevel=2,
            )
        elif new:
            with torch.random.fork_rng():
                for signature, of in new.items():
                    _known[signature] = _measured(*of, namespace)
    return [_known.get(signature, NO_WORKSPACE) for signature, _ in signed]


def _call_of(node: fx.Node) -> tuple[Library, dict[str, Any]]:
    """Return an op of a graph as a library call, and the values that it reads."""
    given = ", ".join([*map(repr, node.args), *(f"{name}={value!r}" for name, value in node.kwargs.items())])
    call = ast.parse(f"result = torch.ops.{node.target}({given})", mode="exec").body
    assert isinstance(call[0], ast.Assign)
    values = {used.name: used.meta["val"] for used in node.all_input_nodes}
    return Library(call[0].value, call, list(values)), values


def _signature_of(node: fx.Node) -> str:
    given = fx.node.map_arg((node.args, dict(node.kwargs)), lambda used: _like(used.meta["val"]))
    return f"{torch.get_num_threads()} {node.target} {given}"


def _like(value: Any) -> Any:
    return (*value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value


def _is_cuda(call: Library, values: Mapping[str, Any]) -> bool:
    return any(isinstance(value := values[name], Tensor) and value.is_cuda for name in call.uses)


def _of_collective(call: Library, values: Mapping[str, Any]) -> int:
    """Return the bytes that gloo takes for a collective; NCCL's are its own (`costs/nccl.py`)."""
    given = [value for name in call.uses if isinstance(value := values[name], Tensor)]
    if any(value.device.type != "cpu" for value in given):
        return 0
    name = re.search(rf"{FUNCTIONAL}\.(\w+)", ast.unparse(call.node))
    sizes = [n.value for n in ast.walk(call.node) if isinstance(n, ast.Constant) and type(n.value) is int]
    return gloo_bytes(name[1] if name else "", sum(value.nbytes for value in given), next(iter(sizes), 1))


def _signature(call: Library, values: Mapping[str, Any]) -> str:
    names = {name: f"v{i}" for i, name in enumerate(call.uses)}
    text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), ast.unparse(call.node))
    shapes = [(v.shape, v.stride(), v.dtype, v.device) for n in call.uses if isinstance(v := values[n], Tensor)]
    return f"{torch.get_num_threads()} {text} {shapes}"


def _measured(call: Library, values: Mapping[str, Any], namespace: Mapping[str, Any]) -> CallWorkspace:
    # Zeros first; samplers and solvers refuse them, and get definite inputs. Where shapes fit one count of a mask's
    # elements only, it is some size.
    code = compile(ast.fix_missing_locations(ast.Module(call.lines, [])), "<a library call>", "exec")
    seeds = _seeds(call, values)
    for fill in (_zeros, _definite, *_counting(call, values)):
        try:
            given = {name: fill(values[name]) for name in call.uses} | seeds
        except RuntimeError as error:
            raise _not_measured(call, error) from None
        failure, changes = changes_of(partial(_failure, code, namespace, given))
        if failure is None:
            return _workspace(changes)
    raise _not_measured(call, failure)


def _workspace(changes: Sequence[int]) -> CallWorkspace:
    """Return the workspace of a call with these allocations (positive) and frees (negative), in bytes and in order."""
    most, results = peak_of(changes)
    # Blocks that it frees itself, by what lies between their allocation and that.
    blocks, live = [], list[int]()
    for at, change in enumerate(changes):
        if change > 0:
            live.append(at)
        elif begins := [begin for begin in live if changes[begin] == -change]:
            live.remove(begins[-1])
            blocks.append((begins[-1], at))
    in_turn = all(end < begin for (_, end), (begin, _) in pairwise(blocks))
    return CallWorkspace(most - max(results, 0), tuple(changes[begin] for begin, _ in blocks) if in_turn else ())


def _not_measured(call: Library, error: Exception | None) -> UnsupportedError:
    return UnsupportedError(
        f"what {ast.unparse(call.node)[:80]} of Inductor's program allocates for itself cannot be measured "
        f'({str(error).splitlines()[0]}); use backend="eager"'
    )


def _failure(code: CodeType, namespace: Mapping[str, Any], given: dict[str, Any]) -> Exception | None:
    """Run a library call, adding its results to `given`; return the error that it raised, or None."""
    try:
        exec(code, dict(namespace), given)  # noqa: S102 - the user's own compiled program
    except (AssertionError, IndexError, RuntimeError, TypeError) as error:
        return error.with_traceback(None)
    return None


def _seeds(call: Library, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return a dropout's seed and offset by name, on the host, where attention reads them.

    Fake tensors have them on the GPU.
    """
    text = ast.unparse(call.node)
    if "attention_backward" not in text or "cudnn" in text:
        return {}
    given = {name: value for name in call.uses if isinstance(value := values[name], Tensor)}
    kinds = torch.int64, torch.uint64
    return {
        n: torch.zeros((), dtype=v.dtype, device="cpu") for n, v in given.items() if not v.dim() and v.dtype in kinds
    }


def _zeros(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    elements = value.untyped_storage().nbytes() // value.element_size()
    fill = torch.ones if value.dtype is torch.bool else torch.zeros  # what a mask picks is allocated
    whole = fill(elements, dtype=value.dtype, device=value.device)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())


def _counting(call: Library, values: Mapping[str, Any]) -> Iterator[Callable[[Any], Any]]:
    """Yield functions that make zeros, and masks in which a number of elements are set.

    One for each size of an input or in the call's text.
    """
    given = [value for name in call.uses if isinstance(value := values[name], Tensor)]
    if any(value.dtype is torch.bool for value in given):
        named = {n.value for n in ast.walk(call.node) if isinstance(n, ast.Constant) and type(n.value) is int}
        for size in sorted(named.union(*(value.shape for value in given)), reverse=True):
            yield partial(_counted, size=size)


def _counted(value: Any, size: int) -> Any:
    found = _zeros(value)
    if isinstance(found, Tensor) and found.dtype is torch.bool:
        found.copy_((torch.arange(found.numel(), device=found.device) < size).view(found.shape))
    return found


def _definite(value: Any) -> Any:
    """Return positive numbers and positive definite matrices, which samplers and solvers require."""
    found = _zeros(value)
    if isinstance(found, Tensor):
        found.fill_(1)
        if found.is_floating_point() and found.dim() > 1:
            found.diagonal(dim1=-2, dim2=-1).add_(found.shape[-1])
    return found

"""Report name by name what a release of PyTorch has moved.

The names are read from this folder's own source. They are its imports from private modules, and private attributes with
the type of the object that has them. RELIED_ON adds attributes and settings of PyTorch's objects that other folders
use.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

_PRIVATE = re.compile(r"_[^_]")
_DOTTED = re.compile(r"torch(\.\w+)*\._[^_]\w*(\.\w+)*")
"""A dotted path into PyTorch with a private part."""
_ONLY_CUDA = "torch._C._cuda_", "torch._C._host_"
"""How names begin that a build without CUDA does not have."""
_SINCE = {
    "torch._C._clear_DTensor_sharding_propagator_cache": "2.11",
    "torch._dynamo.eval_frame.set_fullgraph_compiled_frame_count": "2.12",
    "torch._dynamo.variables.builtin.vt_identity_compare": "2.12",
    "torch._dynamo.variables.object_protocol": "2.13",
}
"""Names that the wall asks for before it uses them, and the first release that has them."""


class Name(NamedTuple):
    """A name of PyTorch that Overspill uses."""

    path: str  # of a module, class or function, with its dots
    attribute: str  # of that; of an instance where `path` is a class
    where: str  # the module of this folder

    def __str__(self) -> str:
        return f"{self.path}.{self.attribute}"


RELIED_ON: dict[str, tuple[str, ...]] = {
    # Settings that are read or set.
    "torch._dynamo.config": (
        "accumulated_recompile_limit", "allow_empty_graphs", "allow_rnn", "error_on_nested_fx_trace",
        "fail_on_recompile_limit_hit", "optimize_ddp", "recompile_limit", "skip_nnmodule_hook_guards",
        "skip_tensor_guards_with_matching_dict_tags", "trace_autograd_ops", "use_lamba_guard_for_object_aliasing",
        "use_numpy_random_stream",
    ),
    "torch._functorch.config": (
        "activation_memory_budget", "backward_pass_autocast", "bundled_autograd_cache", "cse", "donated_buffer",
        "enable_autograd_cache", "force_non_lazy_backward_lowering",
    ),
    "torch._inductor.config": ("fallback_random",),
    "torch._inductor.config.cpp": ("vec_isa_ok",),
    # Dynamo: a compiled module's context, why a graph ended, what a guard is made of.
    "torch._dynamo.eval_frame.OptimizedModule": ("dynamo_ctx",),
    "torch._dynamo.output_graph": ("compile_subgraph_reason", "grapharg"),
    "torch._dynamo.guards": ("arg_ref", "obj_weakref", "object_aliasing_guard_codes", "orig_guard"),
    "torch._dynamo.exc.BackendCompilerFailed": ("inner_exception",),
    # AOTAutograd: descriptions of inputs and outputs, its metadata, and the name of a compiled graph's autograd node.
    "torch._functorch._aot_autograd.graph_capture_wrappers": ("desc",),
    "torch._functorch._aot_autograd.collect_metadata_analysis": ("coerce_tangent_and_suggest_memory_format",),
    "torch._functorch._aot_autograd.schemas": (
        "bw_donated_idxs", "mutated_inp_runtime_indices", "num_forward_returns",
    ),
    "torch._functorch._aot_autograd.runtime_wrappers": ("CompiledFunction",),
    "torch._functorch._aot_autograd.graph_compile": ("saved_tensor_with_no_vc_check",),
    "torch._functorch.partitioners": ("partitioner_tag", "static_lifetime_input_indices"),
    # Inductor: what it compiles to.
    "torch._inductor.output_code.CompiledFxGraph": ("current_callable", "source_code"),
    # Ops, fake and functional tensors.
    "torch._ops.OperatorBase": ("py_kernels", "python_key_table"),
    "torch._subclasses.fake_tensor.FakeTensorMode": ("dispatch",),
    "torch._subclasses.functional_tensor.FunctionalTensor": ("commit_update", "elem", "sync"),
    # Checkpoints.
    "torch.utils.checkpoint": (
        "CheckpointFunction", "_checkpoint_without_reentrant_generator", "detach_variable", "noop_context_fn",
    ),
    "torch.autograd.function": ("BackwardCFunction",),
    # What makes a tensor an instance of nn.Parameter or nn.Buffer.
    "torch.nn.parameter": ("_is_buffer", "_is_param"),
    # FSDP2: what is read of its groups and parameters.
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup": (
        "all_reduce_grads", "force_sum_reduction_for_comms", "fsdp_params", "gradient_divide_factor", "mesh_info",
        "post_forward_mesh_info", "reduce_grads", "reshard", "reshard_after_backward",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam": (
        "fsdp_placement", "is_dtensor", "offload_to_cpu", "orig_dtype", "padded_sharded_param_size", "param_dtype",
        "reset_sharded_param", "sharded_param",
    ),
}  # fmt: skip
"""Names without an underscore that no page of PyTorch's documentation promises, by module or class."""
_TYPES = {
    "Tensor": "torch.Tensor", "UntypedStorage": "torch.UntypedStorage", "Optimizer": "torch.optim.Optimizer",
    "OpOverload": "torch._ops.OpOverload",
}  # fmt: skip


def private_names() -> Iterator[Name]:
    """Yield the names of PyTorch that this folder's modules use, each once a module, in order."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found = dict.fromkeys(_names_in(tree, path.stem))
        whole = {name.path for name in found}  # of a longer path the rest says it all
        yield from (name for name in found if str(name) not in whole)
    for path_of, names in RELIED_ON.items():
        yield from (Name(path_of, name, "names") for name in names)


def _names_in(tree: ast.Module, where: str) -> Iterator[Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            yield from (Name(str(node.module), alias.name, where) for alias in node.names)
        elif isinstance(node, ast.Attribute) and _DOTTED.fullmatch(dotted := ast.unparse(node)):
            path, _, attribute = dotted.rpartition(".")
            yield Name(path, attribute, where)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Target" and len(node.args) == 2:
            owner, name = ast.unparse(node.args[0]), node.args[1]
            if owner.startswith("torch.") and isinstance(name, ast.Constant):
                yield Name(owner, str(name.value), where)
        elif isinstance(node, ast.FunctionDef):
            yield from _attributes(node, where)


def _attributes(function: ast.FunctionDef, where: str) -> Iterator[Name]:
    """Private attributes that a function reads of its parameters, by their types."""
    types = {a.arg: ast.unparse(a.annotation) for a in function.args.args if a.annotation is not None}
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and _PRIVATE.match(node.attr):
            kind = types.get(node.value.id, "")
            if path := kind.replace("nn.", "torch.nn.") if kind.startswith("nn.") else _TYPES.get(kind):
                yield Name(path, node.attr, where)


def moved() -> list[Name]:
    """Return the names that the installed PyTorch does not have. Imports Dynamo, Inductor and torch.distributed."""
    return [name for name in private_names() if not is_there(name)]


def is_there(name: Name) -> bool:
    """Return whether the installed PyTorch has a name, or need not have it."""
    import torch  # noqa: PLC0415 - whoever asks for the names alone need not wait

    full = str(name)
    if full.startswith(_ONLY_CUDA) and not torch.backends.cuda.is_built():
        return True
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if (since := _SINCE.get(full)) is not None and release < tuple(map(int, since.split("."))):
        return True
    owner = _found(name.path)
    return owner is not None and (hasattr(owner, name.attribute) or name.attribute in _words_of(owner))


@cache
def _found(path: str) -> Any:
    """Return a module, or the object at a dotted path in it, or None."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part, None)
        return found
    return None


@cache
def _words_of(owner: Any) -> frozenset[str]:
    """Return the words in the source of a class and its bases, or of a module; instances get attributes there."""
    sources = owner.__mro__ if inspect.isclass(owner) else [owner]
    text = []
    for source in sources:
        try:
            text.append(inspect.getsource(source))
        except (OSError, TypeError):  # a class of C
            continue
    return frozenset(re.findall(r"\w+", "\n".join(text)))

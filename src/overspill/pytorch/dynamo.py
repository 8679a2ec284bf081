"""TorchDynamo, the tracer of torch.compile. Its import takes a second."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
import torch._dynamo
import torch._dynamo.callback
import torch._dynamo.config
import torch._dynamo.eval_frame
import torch._dynamo.exc
import torch._dynamo.guards
import torch._dynamo.source
import torch._dynamo.symbolic_convert
import torch._dynamo.utils
import torch._dynamo.variables
import torch._dynamo.variables.builder
import torch._dynamo.variables.builtin
import torch._dynamo.variables.nn_module
import torch._dynamo.variables.torch
from torch._dynamo.eval_frame import OptimizedModule as OptimizedModule  # what torch.compile makes of a module
from torch._dynamo.exc import (
    BackendCompilerFailed as BackendCompilerFailed,  # an error of the backend, in `inner_exception`
)
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit  # too many versions of one function
from torch._dynamo.exc import InternalTorchDynamoError as InternalTorchDynamoError  # an error inside Dynamo
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException  # what all its errors are
from torch._dynamo.exc import TorchRuntimeError as TorchRuntimeError  # an op that fails on fake tensors
from torch._dynamo.exc import Unsupported as Unsupported  # code that does not go into one graph
from torch._dynamo.output_graph import OutputGraph as OutputGraph  # the graph that is being traced
from torch._dynamo.resume_execution import ContinueExecutionCache
from torch._dynamo.symbolic_convert import InstructionTranslator as InstructionTranslator  # the interpreter that traces
from torch._dynamo.types import FrameAction, FrameExecStrategy
from torch._guards import CompileContext as CompileContext  # the compilation that runs
from torch._guards import TracingContext as TracingContext  # the trace that runs

from .patching import Target

TorchCompileWrapper = torch._TorchCompileWrapper
"""What a backend of torch.compile is wrapped in."""
dynamo_config = torch._dynamo.config
"""Its settings."""
reset_dynamo = torch._dynamo.reset
"""Forget all that was compiled."""
CALLBACK = Target(torch._dynamo.eval_frame, "_callback_from_stance")
"""What compiles a call, None for nothing."""
FULLGRAPH_COUNT = Target(torch._dynamo.eval_frame, "set_fullgraph_compiled_frame_count")
"""What counts compiled frames for `fullgraph=True`, which wants one; since 2.12."""
IS_COMPILING = Target(torch.compiler, "_is_compiling_flag")
"""What `is_compiling()` returns, in all threads; since 2.13 it is set while Dynamo compiles."""
compile_lock = torch._dynamo.convert_frame.compile_lock
"""What a thread holds while Dynamo compiles in it."""
innermost_backend = torch._dynamo.eval_frame.innermost_backend
"""The backend within the wrappers around it."""
hooks_of = operator.attrgetter("hooks")
"""What a callback adds to each compilation: its `guard_filter_fn`, above all."""
unimplemented = torch._dynamo.exc.unimplemented
"""End the graph here, and say why."""
UNIMPLEMENTED = Target(torch._dynamo.symbolic_convert, "unimplemented")
"""The same where code is interpreted."""
LOG_BREAK = Target(torch._dynamo.symbolic_convert.InstructionTranslatorBase, "log_graph_break")
"""What notes a graph break behind which the function is traced further, as one of its own."""
LOOP_BREAK = "graph break in loop"
"""What it says of a graph break in a loop, behind which a function is not traced."""
UNTRACED = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
"""Neither a function nor what it calls is traced: an error's `frame_exec_strategy`."""
install_guard = torch._dynamo.guards.install_guard
"""What is to hold before a compiled call."""
same_object = torch._dynamo.guards.GuardBuilder.ID_MATCH
"""A guard's kind: that an object is the very one that was compiled for."""


def original_code(code: CodeType) -> CodeType:
    """Return the code of the function that is traced, where `code` is what follows a graph break in it."""
    resumed = ContinueExecutionCache.generated_code_metadata.get(code)
    return code if resumed is None else resumed.code


def forget_guarded_objects(entries: Iterable[Any]) -> None:
    """Let Dynamo make guards a second time, as it does behind a filter.

    It compares the guarded objects of both times by `==`. A NumPy array is made a tensor whenever it is read, and `x.H`
    is a new tensor each time.
    """
    for entry in entries:
        entry.orig_guard.obj_weakref = None


is_from_global_source = torch._dynamo.source.is_from_global_source
"""Whether an object was read from a global."""
is_from_local_source = torch._dynamo.source.is_from_local_source
"""Whether it was read from an argument."""
count_calls = torch._dynamo.utils.count_calls
"""How many calls a graph has."""
counters = torch._dynamo.utils.counters
"""What Dynamo counts: frames, breaks, reasons."""
variables = torch._dynamo.variables
"""What it knows of each object."""
IDENTITY = (
    Target(torch._dynamo.variables.builtin, "vt_identity_compare"),
    Target(getattr(torch._dynamo.variables, "object_protocol", None), "vt_identity_compare"),
)
"""What `is` gives; since 2.12, and in the second module since 2.13."""
compilation = torch._dynamo.callback.callback_handler
"""Calls back when a compilation starts and ends."""
DUPLICATE = Target(torch._dynamo.variables.builder, "make_dupe_guard")
"""The guard on an object that is read at two places."""
APPLY_FUNCTION = Target(torch._dynamo.variables.AutogradFunctionVariable, "call_apply")
"""What traces an autograd.Function."""
INITIALIZE_LAZY = Target(torch._dynamo.variables.nn_module, "initialize_lazy_module")
"""What initialises a lazy module before it is traced."""
CHECK_LEAVES = Target(OutputGraph, "_check_requires_grad_intermediate_outputs")
"""What ends a graph whose output was given requires_grad inside it."""
tracing_state_functions = torch._dynamo.variables.torch.tracing_state_functions
"""What is_compiling() and the like answer."""
compute_overlapping_tensors = torch._C._dynamo.guards.compute_overlapping_tensors
"""Which inputs share memory in part."""

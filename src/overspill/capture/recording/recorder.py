"""Record a program's device tensors as a GPU's allocator would see them."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from overspill.capture.fake_cuda import retarget
from overspill.capture.fake_cuda.engine import called_by_engine, in_place
from overspill.capture.fake_cuda.fake import tensors_in, written_tensors
from overspill.capture.flops import flops_of_call, moved_bytes, tensors_of_call
from overspill.core import Phase, TensorKind
from overspill.costs.library_ops import MATRIX_PRODUCTS
from overspill.costs.scratch import Scratch
from overspill.pytorch.autograd import current_backward, current_node, next_sequence_number, sequence_number
from overspill.pytorch.dispatch import schema_of
from overspill.pytorch.distributed import LOCAL
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.schemas import arguments
from overspill.pytorch.storages import key_of, storage_key

from .lines import OpLines
from .recording import Allocation, RecordedOp, Recording

_LARGE = 1 << 30  # bytes that are not taken on the host for a tensor made from nothing
_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"


class _Life:
    """One allocation while it is being recorded."""

    __slots__ = (
        "dtype", "end", "frame", "freed_before", "kind", "layer", "name", "nbytes", "node", "op", "outlives", "phase",
        "scratch", "shape", "start", "stream",
    )  # fmt: skip

    def __init__(self, start: int, nbytes: int, layer: str, phase: Phase, op: int, node: int | None) -> None:
        self.start, self.end, self.nbytes = start, -1, nbytes
        self.layer, self.phase, self.op, self.node = layer, phase, op, node
        self.freed_before = -1  # the position of the op that ran next
        self.kind: TensorKind | None = None
        self.name = ""
        self.stream = 0
        self.scratch: Scratch | None = None
        self.frame = -1
        self.shape: Sequence[int] = ()
        self.dtype: torch.dtype | None = None
        self.outlives = False  # the autograd node that made it: then it is a gradient on its way, not a temporary


class Recorder:
    """Records allocations and frees of device storages, and ops with their layer and phase.

    A storage is on the device if it was made from one that is, or requested there; inside `placing`, that decides. All
    others belong to the host and are not counted. Without `lines` ops have no line of Python, which saves up to a
    twelfth of the time.
    """

    def __init__(self, *, lines: bool = True) -> None:
        self._fabricating = False
        self._lives: list[_Life] = []
        self._live: dict[int, int] = {}  # storage address -> position in _lives
        self._watch: dict[int, weakref.ref[Any]] = {}
        self._ops: list[RecordedOp] = []
        self._clock = 0
        self._placement: bool | None = None  # True: on the device, False: on the host, None: where its inputs are
        self._communicating = False
        self.stream = 0  # the CUDA stream that the program is on; 0 is the default one
        self._starts: list[int] = []
        self._updating = False
        self._modules: list[str] = []
        self._names: dict[int, str] = {}
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._boundaries: list[int] = [-1]
        self._boundary_layers: list[str] = [""]
        self._parameters: dict[tuple[int, int], str] = {}  # by storage, and where in it
        self._parameter_elements = 0
        self.host_bytes = 0  # offloaded by the program itself, as far as it reports that
        self._handles: set[tuple[str, int]] = set()
        self._lines = OpLines(wanted=lines)
        self.live_bytes = 0
        self.block_bytes = 0  # of these, as blocks of PyTorch's allocator
        self.peak_bytes = 0

    # Asked by the program

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Return whether the storage of `tensor` is on the device."""
        tensor = _local(tensor)
        return isinstance(tensor, FakeTensor) and storage_key(tensor) in self._live

    def placing(self, *, on_device: bool) -> AbstractContextManager[None]:
        """Put tensors made inside the block on the device, or on the host."""
        return self._while(_placement=on_device)

    def fabricating(self) -> AbstractContextManager[None]:
        """Make host tensors fake inside the block, so that they take no memory."""
        return self._while(_fabricating=True)

    def communicating(self) -> AbstractContextManager[None]:
        """Count tensors made inside the block as buffers of collectives.

        Floating-point ones made from no tensor are on the device too.
        """
        return self._while(_communicating=True)

    @contextmanager
    def _while(self, **state: bool) -> Iterator[None]:
        before = {name: getattr(self, name) for name in state}
        vars(self).update(state)
        try:
            yield
        finally:
            vars(self).update(before)

    @property
    def phase(self) -> Phase:
        """The phase of an op that runs now."""
        if self._updating:
            return Phase.UPDATE
        return Phase.BACKWARD if current_backward() != -1 else Phase.FORWARD

    # Reported by the fake mode

    def is_of_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return whether an op on real tensors is real work of the host, with nothing to record."""
        if self._placement is not None or self._fabricating or self._communicating or not args:
            return False
        device = kwargs.get("device")
        # What is made from nothing may be a zero of autograd's own formulas.
        return (
            (device is None or device.type == "cpu") and func.namespace == "aten" and isinstance(args[0], torch.Tensor)
        )

    def observe(self, func: Any, args: Any, kwargs: dict[str, Any], compute: Callable[..., Any]) -> Any:
        """Run an op on fake tensors, and record its allocations and frees of device memory."""
        device = kwargs.get("device")
        if device is not None and device.type == "meta":  # as torch has it: no memory, here or there
            return compute(args, kwargs)
        instead = in_place(func, args, self._made_by)
        # Which device storages it reads.
        if instead is not None:
            func, compute = instead, lambda args, _: args[0]
        inputs = tensors_in(kwargs.values(), tensors_in(args, []))
        reads: list[int] = []
        for tensor in inputs:
            if isinstance(tensor, FakeTensor):
                found = self._live.get(storage_key(tensor))
                if found is not None and found not in reads:
                    reads.append(found)
        # Whether its results are on the device.
        placed = self._placed(device, kwargs.get("dtype"), made_from_nothing=not inputs)
        if device is not None and device.type != "cpu":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        on_device = placed if placed is not None else bool(reads)
        if not on_device and placed is None and not inputs and self.phase is Phase.BACKWARD:
            on_device = True  # zeros that autograd's own formulas make
        if not on_device:
            if self._fabricating or any(isinstance(tensor, FakeTensor) for tensor in inputs) or _is_large(args, kwargs):
                return compute(args, kwargs)
            return func(*args, **kwargs)  # real work of the host: data loading, index arithmetic
        rewrite = retarget.FAKES.get(func)
        result = compute(args, kwargs) if rewrite is None else rewrite(*args, **kwargs)
        self._record(func, args, kwargs, reads, result)
        return result

    def _made_by(self, tensor: torch.Tensor) -> int | None:
        position = self._live.get(storage_key(tensor))
        return None if position is None else self._lives[position].node

    def _placed(self, device: Any, dtype: torch.dtype | None, *, made_from_nothing: bool) -> bool | None:
        """Return where an op's results are: True on the device, False on the host, None where its inputs are."""
        if self._placement is not None:
            return self._placement
        if self._communicating and made_from_nothing and _is_floating(dtype):
            return True  # a bucket that C++ asks for on the device of the parameters, which it takes for the CPU
        if device is None or device.type == "cuda":
            return None if device is None else True
        if self.phase is Phase.BACKWARD and called_by_engine():
            return None  # autograd's own formulas take all tensors for the CPU's
        return False

    def _record(self, func: Any, args: Any, kwargs: dict[str, Any], reads: list[int], result: Any) -> None:
        layer, phase, node = self._where()
        frame = self._lines.now(node, in_backward=phase is Phase.BACKWARD)
        op = len(self._ops)
        name = schema_of(func).name.partition("::")[2]
        if name in MATRIX_PRODUCTS:
            self._library_handle("gemm_handle", layer, phase, op)
        # Its results and scratch, in the order in which the kernel allocates them.
        keys = [storage_key(tensor) for tensor in written_tensors(func, args, kwargs)]
        writes = [self._live[key] for key in keys if key in self._live]
        scratch = retarget.SCRATCH.get(func)
        wanted = scratch(arguments(func, args, kwargs), result) if scratch is not None else ()
        found = tensors_in(result if isinstance(result, (list, tuple)) else (result,), [])
        outputs = [output for output in found if isinstance(output, FakeTensor)]  # others are real ones of the host
        from_host = not reads and not self._modules and bool(args) and phase is Phase.FORWARD
        for position, output in enumerate(outputs):
            known = self._output(output, layer, phase, op, node, frame, from_host=from_host)
            if known not in reads:
                writes.append(known)
            for after, request in wanted:
                if min(after, len(outputs) - 1) == position:
                    self._scratch(request, layer, phase, op)
        # A gradient read by another node than its maker's outlives that node.
        for read in reads:
            if self._lives[read].node != node:
                self._lives[read].outlives = True
        iteration = max(len(self._starts) - 1, 0)  # construction is counted to the first
        # What it costs; a view costs nothing.
        flops = flops_of_call(func, args, kwargs, result) if writes else 0
        touched = tensors_of_call(func, args, kwargs, result)
        moved = moved_bytes(t for t in touched if isinstance(t, FakeTensor)) if writes else 0
        self._ops.append(
            RecordedOp(
                name, layer, phase, iteration, tuple(reads), tuple(dict.fromkeys(writes)), frame, flops,
                0 if name == "empty" else moved,
            )
        )  # fmt: skip

    def _output(
        self, output: FakeTensor, layer: str, phase: Phase, op: int, node: int | None, frame: int, *, from_host: bool
    ) -> int:
        """Return the position of an output's storage among the allocations: a new one, or one that may have grown."""
        storage = output.untyped_storage()
        key = key_of(storage)
        if key in self._live:
            self.resized(storage)
            return self._live[key]
        made = self._birth(storage, key, storage.nbytes(), layer, phase, op, node)
        life = self._lives[made]
        life.frame, life.shape, life.dtype = frame, output.shape, output.dtype
        if from_host and life.kind is None:
            life.kind = TensorKind.INPUT
        return made

    def _where(self) -> tuple[str, Phase, int | None]:
        """Return layer, phase and autograd node of the running op."""
        phase = self.phase
        if phase is not Phase.BACKWARD:
            return self._modules[-1] if self._modules else "", phase, None
        node = current_node()
        if node is None:
            return self._modules[-1] if self._modules else "", phase, None
        if self._modules:  # a checkpointed layer, run again inside backward
            return self._modules[-1], phase, None
        # Backward: the layer whose forward made the autograd node.
        if node.name() == _ACCUMULATE_GRAD:
            name = self._parameters.get(_place(node.variable), "")
            return name.rpartition(".")[0], phase, -1
        number = sequence_number(node)
        return self._boundary_layers[bisect_right(self._boundaries, number) - 1], phase, number

    def _birth(self, storage: Any, key: int, nbytes: int, layer: str, phase: Phase, op: int, node: int | None) -> int:
        position = len(self._lives)
        life = _Life(self._tick(), nbytes, layer, phase, op, node)
        life.stream = self.stream
        if self._communicating:
            life.kind = TensorKind.COMMUNICATION
        self._lives.append(life)
        self._live[key] = position
        self._watch[position] = weakref.ref(storage, lambda _: self._death(key, position))
        self.live_bytes += nbytes
        self.block_bytes += _block_of(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return position

    def _death(self, key: int, position: int) -> None:
        life = self._lives[position]
        life.end, life.freed_before = self._tick(), len(self._ops)
        self.live_bytes -= life.nbytes
        self.block_bytes -= _block_of(life.nbytes)
        del self._watch[position]
        if self._live.get(key) == position:
            del self._live[key]

    def resized(self, storage: Any) -> None:
        """Record a new size of `storage`.

        As in c10/cuda's resize, new memory is allocated before the old is freed.
        """
        position = self._live.get(key_of(storage))
        if position is None or self._lives[position].nbytes == storage.nbytes():
            return
        before = self._lives[position]
        layer, phase, node = self._where()
        new = self._lives[self._birth(storage, key_of(storage), storage.nbytes(), layer, phase, before.op, node)]
        new.kind, new.name, new.stream = before.kind, before.name, self.stream
        new.frame = self._lines.now(node, in_backward=phase is Phase.BACKWARD)
        self._death(key_of(storage), position)

    def _scratch(self, request: Scratch, layer: str, phase: Phase, op: int) -> None:
        life = _Life(self._tick(), 0, layer, phase, op, None)
        life.stream = self.stream
        life.end = self._tick()
        life.kind, life.scratch = TensorKind.WORKSPACE, request
        self._lives.append(life)

    def _library_handle(self, family: str, layer: str, phase: Phase, op: int) -> None:
        """Record a library's own memory, allocated at its first use by each thread and kept.

        Backward is a thread of its own.
        """
        thread = 1 if phase is Phase.BACKWARD else 0
        if (family, thread) in self._handles:
            return
        self._handles.add((family, thread))
        life = _Life(self._tick(), 0, layer, phase, op, None)
        life.kind, life.scratch = TensorKind.WORKSPACE, Scratch(family, (thread,), "")
        self._lives.append(life)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock - 1

    def has_run(self, *names: str) -> bool:
        """Return whether an op with one of these names has run on the device."""
        return any(op.name in names for op in self._ops)

    # Reported by the program: iterations, modules and optimizers

    def start_iteration(self) -> None:
        """Note that the next step begins."""
        self._starts.append(self._clock)

    def enter(self, module: nn.Module) -> None:
        """Note that the forward of `module` begins."""
        name = self._names.get(id(module))
        if name is None or not self._modules:
            if module not in self._roots:
                self._adopt(module)
            name = self._names.get(id(module), "")
        self._modules.append(name)
        self._lines.enter()
        self._boundary()

    def leave(self) -> None:
        """Note that the innermost module's forward ends."""
        if self._modules:
            self._modules.pop()
            self._lines.leave()
        self._boundary()

    def _boundary(self) -> None:
        number = next_sequence_number()
        if number < self._boundaries[-1]:  # another thread's numbers
            return
        if number == self._boundaries[-1]:
            self._boundary_layers[-1] = self._modules[-1] if self._modules else ""
            return
        self._boundaries.append(number)
        self._boundary_layers.append(self._modules[-1] if self._modules else "")

    def _adopt(self, root: nn.Module) -> None:
        """Record the names of layers in `root`, and the storages of its parameters and buffers."""
        self._roots.add(root)
        for name, module in root.named_modules(remove_duplicate=False):
            self._names.setdefault(id(module), name)
        self.mark_module(root)

    def mark_module(self, root: nn.Module) -> None:
        """Give parameters and buffers of `root` their kind and name."""
        for name, parameter in root.named_parameters():
            if self.mark(parameter, TensorKind.PARAMETER, name):
                key = _place(parameter)
                if key not in self._parameters:
                    self._parameter_elements += parameter.numel()
                self._parameters[key] = name
        for name, buffer in root.named_buffers():
            self.mark(buffer, TensorKind.BUFFER, name)

    def mark(self, tensor: torch.Tensor | None, kind: TensorKind, name: str = "") -> bool:
        """Set kind and name of a tensor's storage; return False if it is not on the device."""
        tensor = _local(tensor)
        if not isinstance(tensor, FakeTensor):
            return False
        position = self._live.get(storage_key(tensor))
        if position is None:
            return False
        life = self._lives[position]
        life.kind = kind
        life.name = name or life.name
        return True

    def begin_update(self, parameters: Iterable[torch.Tensor]) -> None:
        """Note that an optimizer begins its step over `parameters`."""
        self._updating = True
        for parameter in parameters:
            name = self._parameters.get(_place(parameter), "")
            self.mark(parameter, TensorKind.PARAMETER)
            self.mark(parameter.grad, TensorKind.GRADIENT, name)

    def end_update(self, states: Iterable[Any]) -> None:
        """Note that an optimizer's step ends; `states` are the values of its state."""
        self._updating = False
        for tensor in tensors_in(states, []):
            self.mark(tensor, TensorKind.OPTIMIZER_STATE)

    def outside_update(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an optimizer's `closure` so that its ops do not belong to the update."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._updating = self._updating, False
            try:
                return closure(*args, **kwargs)
            finally:
                self._updating = before

        return run

    # The result

    def _order_frees(self) -> None:
        """Sort adjacent frees by the order of their allocations.

        Tensors freed together, such as autocast's weights at the end of its region, are freed in the order of a hash
        table, which varies. An allocator that joins free neighbours ends in the same state. So recordings of one
        program become equal.
        """
        for row in _frees_in_a_row(self._lives, set(self._starts)):
            first = row[0].end
            for tick, life in enumerate(sorted(row, key=lambda life: life.start), start=first):
                life.end = tick

    def recording(self) -> Recording:
        """Return the recording so far; allocations that are alive stay alive until its end."""
        self._order_frees()
        clock = self._clock  # the garbage collector may run meanwhile
        # Forward's tensors are activations if backward reads them.
        last_forward: dict[int, bool] = {}
        for op in self._ops:
            if op.phase is Phase.BACKWARD:
                for read in op.reads:
                    last_forward[read] = True
        # Names, kinds and lines that were not known at allocation come from its op.
        allocations = tuple(
            Allocation(
                start=life.start,
                end=min(life.end, clock) if life.end >= 0 else clock,
                nbytes=life.nbytes,
                kind=life.kind or _kind(life, read_in_backward=last_forward.get(position, False)),
                name=life.name or (self._ops[life.op].name if 0 <= life.op < len(self._ops) else ""),
                layer=life.layer,
                phase=life.phase,
                op=life.op,
                scratch=life.scratch,
                stream=life.stream,
                frame=life.frame if life.frame >= 0 or not 0 <= life.op < len(self._ops) else self._ops[life.op].frame,
                shape=tuple(life.shape),
                dtype=_dtype(life.dtype),
            )
            for position, life in enumerate(self._lives)
        )
        return Recording(
            allocations,
            tuple(self._ops),
            tuple(self._starts) or (0,),
            clock,
            self._parameter_elements,
            self._lines.found(),
            self.host_bytes,
        )


def _frees_in_a_row(lives: list[_Life], starts: set[int]) -> Iterator[list[_Life]]:
    """Yield groups of allocations whose frees are adjacent, between two ops and within one iteration."""
    row: list[_Life] = []
    for life in sorted((life for life in lives if life.end >= 0), key=lambda life: life.end):
        apart = row and (life.end != row[-1].end + 1 or life.freed_before != row[-1].freed_before)
        if apart or (row and life.end in starts):
            yield row
            row = []
        row.append(life)
    if row:
        yield row


def _block_of(nbytes: int) -> int:
    """Return the bytes of the block that PyTorch's allocator gives.

    As `MIN_BLOCK_BYTES` of placement/allocators/caching.py.
    """
    return -(-nbytes // 512) * 512


def _local(tensor: Any) -> Any:
    """Return the local shard of a DTensor; any other tensor itself."""
    return getattr(tensor, LOCAL, tensor)


def _place(tensor: Any) -> tuple[int, int]:
    """Return storage and offset of `tensor`: several parameters may share a storage."""
    tensor = _local(tensor)
    return storage_key(tensor), tensor.storage_offset()


@cache
def _dtype(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _is_large(args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether an op makes, from a size, a tensor that may be too large for host memory.

    The experts of a large model are an example.
    """
    size = args[0] if args else None
    if not isinstance(size, (list, tuple)) or not all(isinstance(length, int) for length in size):
        return False
    return math.prod(size) * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize >= _LARGE


def _is_floating(dtype: torch.dtype | None) -> bool:
    return (dtype or torch.get_default_dtype()).is_floating_point


def _kind(life: _Life, *, read_in_backward: bool) -> TensorKind:
    if life.phase is Phase.FORWARD:
        return TensorKind.ACTIVATION if read_in_backward else TensorKind.TEMPORARY
    if life.phase is Phase.BACKWARD and life.outlives:
        return TensorKind.OUTPUT_GRADIENT
    return TensorKind.TEMPORARY

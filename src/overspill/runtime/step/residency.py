"""Where parameters and optimizer state are between steps: on the device or in the store.

The user's own tensor objects stay the same objects. While the store has the bytes of one, its data is a *placeholder*:
one NaN, expanded to its shape. A read that bypasses all guards sees NaN, not plausible numbers, and a write raises an
error of PyTorch.

The guards are the dictionaries that hold the tensors: the parameters of a module, or the optimizer state of one
parameter. While any of its tensors is away, such a dictionary brings them all back when it is read. So does a read of
the tensor by any other reference (`away.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import is_
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from overspill.core.errors import StoreError
from overspill.pytorch.dispatch import disable_current_modes
from overspill.pytorch.fake_tensors import FakeTensor, current_fake_mode
from overspill.pytorch.storages import raise_on_access, storage_key
from overspill.runtime.reachable import tensors_in
from overspill.runtime.transfer.engine import TransferEngine

from .away import GUARDS, Away, hide, show, watch
from .gate import During, Gate, Reading


@dataclass(frozen=True)
class Spec:
    """Shape, strides, dtype and device of a tensor."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """Return the spec of a tensor that is on the device."""
        return cls(tensor.size(), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, which shares its storage with no other."""
        return self.size.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Return an uninitialised tensor of this spec."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)

    def within(self, memory: torch.UntypedStorage, offset: int = 0) -> Tensor:
        """Return a tensor of this spec in `memory`, `offset` elements from its start."""
        return torch.empty(0, dtype=self.dtype, device=self.device).set_(memory, offset, self.size, self.stride)

    def like(self, dtype: torch.dtype) -> Spec:
        """Return the same spec with another dtype."""
        return Spec(self.size, self.stride, dtype, self.device)

    def placeholder(self) -> Tensor:
        """Return the placeholder for such a tensor while it is away."""
        # `.data`, for a view would count writes to any other view as its own.
        return _stand_in(self.dtype, self.device).expand(self.size).data


_STAND_INS: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _stand_in(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the single element that placeholders are views of: NaN, or 0 for integers."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    if current_fake_mode() is not None:  # the model is fake, and so is this
        return torch.full((), value, dtype=dtype, device=device)
    if (dtype, device) not in _STAND_INS:
        _STAND_INS[dtype, device] = torch.full((), value, dtype=dtype, device=device)
        raise_on_access(_STAND_INS[dtype, device])
    return _STAND_INS[dtype, device]


class Alias:
    """Another tensor over the memory of a resident; it follows the resident to the store and back."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = weakref.ref(tensor)
        self._spec, self._offset = Spec.of(tensor), tensor.storage_offset()

    def shares(self, resident: Tensor) -> bool:
        """Return whether the tensor still exists, and uses the memory of `resident`."""
        tensor = self.tensor()
        return tensor is not None and storage_key(tensor) == storage_key(resident)

    def leave(self, guard: Any) -> None:
        """Give the tensor a placeholder as data; the `guard` of the resident brings it back."""
        if (tensor := self.tensor()) is not None:
            tensor.data = self._spec.placeholder()
            watch(tensor, guard)
            hide(tensor)

    def come_back(self, data: Tensor) -> None:
        """Make the tensor a view of `data`, unless it was given other data."""
        if isinstance(tensor := self.tensor(), Away):
            show(tensor)
            spec = replace(self._spec, device=data.device)
            tensor.data = spec.within(data.untyped_storage(), data.storage_offset() + self._offset)


class Resident:
    """One tensor that outlives the step, on the device or in the store.

    `handle` is that of the copy in the store while the tensor is away. A *blank* resident has no bytes yet, on the
    device or in the store: optimizer state before the first step. The tensor of one `on_host` has its bytes in host
    memory, from where the next step takes them: that of a model larger than the device.
    """

    def __init__(self, name: str, tensor: Tensor, spec: Spec | None = None) -> None:
        """Create a resident; with `spec` it is blank, and `tensor` is a placeholder."""
        self.name = name
        self.tensor = tensor
        self.spec = spec or Spec.of(tensor)
        self.handle: Tensor | None = None
        self.away = spec is not None
        """Whether the object holds only its placeholder."""
        self.hidden: Tensor | None = None
        """The device's copy of bytes that the store also has, hidden from the user so that both stay equal."""
        self.on_host = False
        """Whether the tensor object has its bytes, in host memory."""
        self.aliases: list[Alias] = []
        self.wrapper: Callable[[], Tensor | None] = lambda: None
        """The tensor subclass that has it inside, while that exists."""
        self._placeholder: Tensor | None = None

    def count_aliases(self) -> int:
        """Return how many aliases share its memory, and forget the others."""
        self.aliases = [alias for alias in self.aliases if alias.shares(self.tensor)]
        return len(self.aliases)

    def _let_go(self) -> None:
        """Give the tensor object its placeholder as data."""
        tensor = self.tensor
        guard = GUARDS.get(id(tensor))
        if guard is not None and self.count_aliases():
            for alias in self.aliases:
                alias.leave(guard)
        if current_fake_mode() is not None:
            tensor.data = self.spec.placeholder()
        else:
            if self._placeholder is None:  # made once, for this happens at every step
                self._placeholder = self.spec.placeholder()
            tensor.data = self._placeholder
            increment_version(tensor)  # graphs of autograd from before raise, as behind plain updates
        self.away, self.on_host = True, False
        hide(tensor)
        hide(self.wrapper())

    @classmethod
    def blank(cls, name: str, spec: Spec) -> Resident:
        """Return a resident without bytes."""
        return cls(name, spec.placeholder(), spec)

    @property
    def here(self) -> Tensor | None:
        """The data on the device, hidden or not; None if away or on the host."""
        return self.hidden if self.away or self.on_host else self.tensor.data

    def take(self) -> Tensor:
        """Take the data out of the tensor object and return it; it must be on the device."""
        data = self.hidden if self.away else self.tensor.data
        self.hidden = None
        assert data is not None
        if not self.away:
            self._let_go()
        return data

    def take_handle(self) -> Tensor:
        """Take out and return the handle of the copy in the store; it must exist."""
        handle, self.handle = self.handle, None
        assert handle is not None
        return handle

    def put(self, data: Tensor) -> None:
        """Give the tensor object its data; drop the copy in the store, if any."""
        show(self.tensor)
        self.tensor.data = data
        for alias in self.aliases:
            alias.come_back(data)
        self.handle = self.hidden = None
        self.away = self.on_host = False

    def arrived(self, data: Tensor, *, copied: bool) -> None:
        """Take the data that came from the store, which still has it if `copied`."""
        if copied:
            self.hidden = data
        else:
            self.put(data)

    def show(self, data: Tensor) -> None:
        """Give the tensor object its data in host memory."""
        self.put(data)
        self.on_host = True

    def blanked(self) -> None:
        """Drop the data, on the device and in the store."""
        self.handle = self.hidden = None
        if not self.away:
            self.take()

    def stored(self, handle: Tensor) -> None:
        """Drop the data on the device: from now on only the store has the bytes, as `handle`."""
        self.handle, self.hidden = handle, None
        if not self.away:
            self.take()


class Residency:
    """All tensors that a step may leave in the store, by name."""

    def __init__(self, from_host_to: torch.device | None = None) -> None:
        """Create an empty one; tensors in host memory are on their way to the device `from_host_to`, if given."""
        self.residents: dict[str, Resident] = {}
        self.from_host_to = from_host_to

    def __getitem__(self, name: str) -> Resident:
        return self.residents[name]

    def __contains__(self, name: str) -> bool:
        return name in self.residents

    def adopt(self, name: str, tensor: Tensor) -> Resident:
        """Return the resident of `tensor`; create one if the name had another tensor."""
        found = self.residents.get(name)
        if found is None or found.tensor is not tensor:
            found = self.residents[name] = self.resident_of(name, tensor)
        return found

    def resident_of(self, name: str, tensor: Tensor) -> Resident:
        """Return a new resident of `tensor`, which has its bytes."""
        made = Resident(name, tensor)
        made.spec, made.on_host = self.spec_of(tensor), self.is_on_host(tensor)
        return made

    def is_on_host(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is one that comes from host memory."""
        return self.from_host_to is not None and tensor.device.type == "cpu"

    def spec_of(self, tensor: Tensor) -> Spec:
        """Return the spec that `tensor` has on the device."""
        spec = Spec.of(tensor)
        return replace(spec, device=self.from_host_to) if self.is_on_host(tensor) else spec

    def hold(self, engine: TransferEngine) -> None:
        """Take the tensors in host memory as they are now: from here on they are in the store. Raises StoreError."""
        engine.store.let_go()
        for resident in self.residents.values():
            if resident.on_host and not resident.away:
                resident.stored(engine.hold(resident.tensor.data, resident.spec.device))

    def show(self, names: Iterable[str], engine: TransferEngine) -> None:
        """Give these residents, which are in the store, their bytes in host memory.

        Raises StoreError; residents that could not be read stay in the store.
        """
        for resident in map(self.residents.__getitem__, names):
            if resident.hidden is not None:
                resident.put(resident.hidden)
            elif resident.handle is not None:
                try:
                    data = engine.to_host(resident.handle)
                except StoreError as error:
                    raise StoreError(f"{readable(resident.name)}: {error}") from error
                resident.show(data)

    def away(self) -> list[str]:
        """Return the names of all residents whose bytes are in the store, or that are blank."""
        return [name for name, resident in self.residents.items() if resident.away]

    def take_over(self, names: Iterable[str]) -> None:
        """Take over data assigned to these residents while they were away (`w.data = new`)."""
        for resident in map(self.residents.__getitem__, names):
            if resident.away and not isinstance(resident.tensor, Away) and not _is_placeholder(resident.tensor):
                resident.put(resident.tensor.data)
                resident.on_host = self.is_on_host(resident.tensor)
            elif resident.on_host:
                resident.on_host = self.is_on_host(resident.tensor)

    def bring(
        self,
        names: Iterable[str],
        engine: TransferEngine,
        into: Mapping[str, Callable[[int], torch.UntypedStorage]] = MappingProxyType({}),
        *,
        copied: Container[str] = (),
    ) -> None:
        """Bring these residents to the device.

        For those in `into`, a function of the number of bytes returns the memory to use; others get fresh memory. Those
        `copied` stay in the store too. Raises StoreError; residents that could not be read stay in the store.
        """
        coming = []
        failure: StoreError | None = None
        # Start all reads, then wait for each.
        try:
            for resident in map(self.residents.__getitem__, names):
                if resident.hidden is not None:
                    resident.put(resident.hidden)
                    continue
                spec = resident.spec
                memory = into[resident.name](spec.nbytes) if resident.name in into else None
                if resident.handle is not None:
                    coming.append((resident, engine.prefetch(resident.handle, memory)))
                elif resident.away:
                    resident.put(spec.empty() if memory is None else spec.within(memory))
            for resident, data in coming:
                try:
                    engine.await_prefetch(data)
                except StoreError as error:
                    failure = failure or StoreError(f"{readable(resident.name)}: {error}")
                else:
                    resident.arrived(data, copied=resident.name in copied)
        finally:
            for _, data in coming:
                engine.cancel(data)
        if failure is not None:
            raise failure

    def send(self, names: Iterable[str], engine: TransferEngine) -> bool:
        """Move these residents to the store; return whether any had to be written.

        Raises StoreError; residents that could not be written stay on the device.
        """
        # Start all writes, then wait for each.
        going = []
        for resident in map(self.residents.__getitem__, names):
            resident.hidden = None
            if not resident.away:
                data = resident.tensor.data
                memory, begin = data.untyped_storage(), data.storage_offset() * data.itemsize
                if data.nbytes != memory.nbytes() and is_dense(
                    data
                ):  # a part of larger memory, of which no mode counts a view
                    with disable_current_modes():
                        data = resident.spec.within(memory[begin : begin + data.nbytes])
                going.append((resident, engine.offload(data)))
            elif resident.handle is None:
                spec = resident.spec
                resident.handle = engine.blank(spec.size, spec.stride, spec.dtype, spec.device)
        for resident, handle in going:
            engine.await_offload(handle)
            resident.stored(handle)
        return bool(going)

    def copy(self, names: Iterable[str], engine: TransferEngine) -> None:
        """Put these residents both on the device and in the store.

        Those that are so already are not moved. Raises StoreError.
        """
        lacking = [name for name in names if self.residents[name].hidden is None]
        self.bring(lacking, engine, copied=lacking)
        unwritten = [r for r in map(self.residents.__getitem__, lacking) if r.hidden is None]
        going = [(r, engine.offload(r.tensor.data)) for r in unwritten]
        for resident, handle in going:
            engine.await_offload(handle)
            resident.hidden, resident.handle = resident.take(), handle


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` have no gaps between them."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()  # of dense ones it keeps the strides


def _is_placeholder(tensor: Tensor) -> bool:
    if isinstance(tensor, FakeTensor) or not tensor.numel():  # which have no bytes to tell them by
        return True
    stand_in = _STAND_INS.get((tensor.dtype, tensor.device))
    return stand_in is not None and storage_key(tensor) == storage_key(stand_in)


def readable(name: str) -> str:
    """Return the name of a parameter or layer as the user's model has it."""
    return "" if name == "model" else name.removeprefix("model.")


def is_guarded(tensor: Tensor) -> bool:
    """Return whether a guard of any step holds this very tensor."""
    guard = GUARDS.get(id(tensor))
    return isinstance(guard, dict) and any(value is tensor for value in dict.values(guard))


def bring_for_others(tensors: Iterable[Tensor]) -> None:
    """Bring tensors to the device that another step may have in its store.

    Raises RequestError while that step runs, and StoreError.
    """
    for tensor in tensors:
        if (guard := GUARDS.get(id(tensor))) is not None:
            guard.fetch()


class Guarded(dict[str, Any]):
    """A dictionary of tensors that brings them back before they are read.

    Its copies and pickles are plain dictionaries. Every read needs permission of `gate`. A loop in a thread other than
    that of the steps delays the next step.
    """

    def __init__(self, content: Mapping[str, Any], gate: Gate) -> None:
        super().__init__(content)
        self._gate: Gate | None = gate
        self._bring: Callable[[], None] | None = None
        for value in tensors_in(dict(content)).values():
            watch(value, self)
            if type(value) is Tensor and value.numel() and _is_placeholder(value):  # state made by a step
                hide(value)

    def arm(self, bring: Callable[[], None] | None) -> None:
        """Call `bring` before the next read; None means that nothing is away."""
        self._bring = bring

    def holds(self, values: tuple[Any, ...]) -> bool:
        """Return whether the dictionary holds these very objects."""
        return len(self) == len(values) and all(map(is_, dict.values(self), values))

    def disarm(self) -> None:
        """Become an ordinary dictionary."""
        self._gate = self._bring = None
        for value in tensors_in(dict(dict.items(self))).values():
            show(value)

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def fetch(self, *, loops: bool = False) -> Reading | None:
        """Bring back the tensors for a read.

        With `loops`, the read goes on after the call, and its Reading is returned.
        """
        gate = self._gate
        if gate is None or (self._bring is None and (torch.compiler.is_compiling() or gate.is_open())):
            return None
        return gate.read(self._bring_now, loops=loops)

    def _bring_now(self) -> None:
        if self._bring is not None:
            self._bring()
            self._bring = None

    def __getitem__(self, key: str) -> Any:
        self.fetch()
        return super().__getitem__(key)

    def __iter__(self) -> Iterator[str]:  # so that dict(...) and {**...} do not pass the guards
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        self.fetch()
        return super().get(key, default)

    def items(self) -> Any:
        reading = self.fetch(loops=True)
        return super().items() if reading is None else During(super().items(), reading)

    def values(self) -> Any:
        reading = self.fetch(loops=True)
        return super().values() if reading is None else During(super().values(), reading)

    def copy(self) -> dict[str, Any]:
        self.fetch()
        return dict(super().items())

    def pop(self, *args: Any) -> Any:
        self.fetch()
        return super().pop(*args)

    def popitem(self) -> tuple[str, Any]:
        self.fetch()
        return super().popitem()

    def setdefault(self, key: str, default: Any = None) -> Any:
        self.fetch()
        return super().setdefault(key, default)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (), None, None, iter(self.items())  # a pickle or copy holds the loop until it is done

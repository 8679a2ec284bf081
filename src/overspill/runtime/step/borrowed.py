"""The residents that a program takes out of their objects, and gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from overspill.runtime.cuts import Place
from overspill.runtime.driver import Form, ProgramRun
from overspill.runtime.lower import Stretch
from overspill.runtime.transfer.engine import TransferEngine

from .residency import Residency, Resident


class Borrowed(NamedTuple):
    """The residents of one stretch, which has them from its first instruction to its last."""

    stretch: Stretch
    names: Mapping[int, str]
    """The name of each resident, by tensor."""
    residency: Residency
    stays: Callable[[str], bool] = lambda _: False
    """Whether the user's code has the memory of a resident too, which stays where it is."""

    def bring(self, engine: TransferEngine) -> None:
        """Move residents to where the stretch takes them; those that it takes from the store are there."""
        taken = [(self.names[tensor], place) for tensor, place in self.stretch.takes.items()]
        self.residency.bring((name for name, place in taken if place is Place.DEVICE), engine)
        both = (name for name, place in taken if place is Place.BOTH)
        self.residency.copy([name for name in both if not self.stays(name)], engine)

    def take(self, engine: TransferEngine | None) -> list[Any]:
        """Return the residents as tensors and handles; those that are given back are the program's from now on."""
        found: list[Any] = []
        for tensor, place in self.stretch.takes.items():
            resident = self.residency[self.names[tensor]]
            if not self._moves(tensor):
                found += _as_it_stays(resident, place, engine)
                continue
            if place is not Place.STORE:
                found.append(resident.take())
            if place is not Place.DEVICE:
                found.append(resident.take_handle())
        return found

    def give(self, values: list[Any]) -> None:
        """Give residents the tensors and handles that the program has returned; empty the list."""
        values.reverse()
        for tensor, place in self.stretch.gives.items():
            resident = self.residency[self.names[tensor]]
            given = [values.pop() for _ in range(1 + (place is Place.BOTH))]
            if self.stays(resident.name):
                continue
            if place is Place.STORE:
                resident.stored(*given)
            elif place is Place.DEVICE:
                resident.put(*given)
            else:
                resident.hidden, resident.handle = given

    def take_back(self, run: ProgramRun, engine: TransferEngine | None, *, as_copies: bool = False) -> None:
        """Give residents what a run that an error stopped has of them, or copies of what is on the device."""
        wanted = {at: self.names[tensor] for at, tensor in self.stretch.residents() if self._moves(tensor)}
        for position, (form, value) in run.give_up(wanted, engine).items():
            resident = self.residency[wanted[position]]
            if form is Form.HANDLE:
                resident.stored(value)
            else:
                resident.put(value.clone() if as_copies else value)

    def _moves(self, tensor: int) -> bool:
        """Return whether a resident leaves its object until it is given back."""
        return tensor in self.stretch.gives and not self.stays(self.names[tensor])


def _as_it_stays(resident: Resident, place: Place, engine: TransferEngine | None) -> list[Any]:
    """Return a resident as a stretch takes it, which keeps its memory."""
    data = resident.here
    assert data is not None
    if place is Place.DEVICE:
        return [data]
    assert engine is not None
    handle = engine.offload(data)
    engine.await_offload(handle, data)
    return [handle] if place is Place.STORE else [data, handle]

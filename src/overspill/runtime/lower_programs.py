"""Lowering of Inductor's programs: a Schedule becomes the text of forward and of backward, in exactly its order.

The kernels, their order and their arguments stay Inductor's. Run repeats the statements of a call, and Recompute repeats
them again; a buffer is allocated right before the first call that writes to it, and Free deletes all variables that are
views of it. Other names for the same bytes are made anew wherever they are needed. Transfers are calls of the engine.

What crosses from forward to backward (autograd's saved tensors) is what the schedule leaves on the device and backward
reads, and the handles of what is in the store. The variables of both programs have different names, so that backward can
repeat calls of forward.

Relies on AOTAutograd (2.11 to 2.14): all outputs of forward behind its own are saved, and come before the gradients
among backward's arguments; the last ones, as many as its metadata says, are not checked for changes.
"""

from __future__ import annotations

import ast
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from overspill.capture.compiled.graph import GRADIENTS, WRITE_BACK
from overspill.capture.programs.graph import CapturedPrograms
from overspill.capture.programs.storages import Call
from overspill.capture.programs.text import Text, made_by
from overspill.core import Instruction, Phase, Schedule, Verb
from overspill.core.errors import InvalidSchedule, UnsupportedError

from .arena import Arenas, Places, storage_at, tensor_at
from .halves import crossing, split
from .live.groups import NOTHING_TOLD, MadeBy, Telling, tell_groups
from .recording.programs import TELLS, LoweredPrograms
from .recording.record import Label
from .transfer import ops


class PlannedPrograms(NamedTuple):
    """Programs with their plan: the schedule, the `places` of buffers in an arena of `arenas`, and the number of the `engine`.

    `made` is what each instruction makes, for a live pool that wants to know it.
    """

    captured: CapturedPrograms
    schedule: Schedule
    places: Places
    arenas: Arenas
    engine: int
    made: MadeBy = NOTHING_TOLD


def lower_programs(planned: PlannedPrograms, unchecked: int) -> LoweredPrograms:
    """The forward and the backward that carry out what is `planned`. The last `unchecked` of what is saved may be changed."""
    captured, schedule, places = planned.captured, planned.schedule, planned.places
    programs = captured.programs
    text = _Text(captured, places, planned.made)
    text.line(f"{_unpacked(programs.forward.inputs)} = args" if programs.forward.inputs else "pass")
    text.line("args.clear()")
    text.bound.update(programs.forward.inputs)
    if places.offsets:
        text.line("arena = take_arena()")
    forward_part, backward_part = split(captured.graph, schedule)
    text.emit(forward_part, 0)
    saved, handles, loose = _crossing(text, backward_part, unchecked)
    outputs = [
        text.returned.get(i) or text.expression(e)
        for i, e in enumerate(programs.forward.outputs[: programs.num_forward_outputs])
    ]
    if places.offsets and programs.backward is not None:
        saved.append("arena")  # who has this has the memory
    text.line(f"return [{', '.join([*outputs, *saved, *handles, *loose])}]")
    source = text.function("forward")
    given = [text.tensors_of(programs.forward.inputs)]
    if programs.backward is not None:
        arguments = [name if name != _NOTHING else f"_{i}" for i, name in enumerate([*saved, *handles, *loose])]
        arguments += programs.backward.inputs[len(programs.saved) :]
        text.begin([*saved, *(n for n in loose if n != _NOTHING), *programs.backward.inputs[len(programs.saved) :]])
        text.line(f"{_unpacked(arguments)} = args" if arguments else "pass")
        text.line("args.clear()")
        if again := _no_second_time(planned):
            text.line(f"refuse_to_run_again({again!r})")
        text.emit(backward_part, len(forward_part))
        gradients = [text.gradients.get(i) or text.expression(e) for i, e in enumerate(programs.backward.outputs)]
        text.line(f"return [{', '.join(gradients)}]")
        source += text.function("backward")
        given.append(text.tensors_of(arguments))
    return LoweredPrograms(captured.graph, source, _namespace(planned), text.labels, given)


_NOTHING = "overspill_nothing"
"""Stands where backward needs nothing of what forward once saved."""


def _namespace(planned: PlannedPrograms) -> dict[str, Any]:
    programs, engine = planned.captured.programs, planned.engine
    device, arenas = _device_of(planned.captured), weakref.ref(planned.arenas)

    def take_arena() -> torch.Tensor:
        session_has = arenas()
        assert session_has is not None  # while a model of it is called
        return session_has.take(planned.places.arena_bytes, device)

    return programs.namespace | {
        "offload": lambda source: ops.engine_numbered(engine).offload(source),
        "await_offload": lambda handle, source: ops.engine_numbered(engine).await_offload(handle, source),
        "prefetch": lambda handle, into=None: ops.engine_numbered(engine).prefetch(handle, into),
        "await_prefetch": lambda arriving: ops.engine_numbered(engine).await_prefetch(arriving),
        _NOTHING: torch.empty(0, device="cpu"),
        "take_arena": take_arena,
        "storage_at": storage_at,
        "tensor_at": tensor_at,
        "tell_groups": tell_groups,
        "refuse_to_run_again": _refuse_to_run_again,
    }


def _device_of(captured: CapturedPrograms) -> torch.device:
    values = (captured.programs.values[name] for name in captured.programs.allocations)
    return next((v.device for v in values), torch.device("cpu"))


def _no_second_time(planned: PlannedPrograms) -> str:
    """What would let backward run twice, where it writes over what it has read; nothing where it does not."""
    programs = planned.captured.programs
    if planned.places.offsets:
        return 'leave placement="planned" out'
    given = {programs.key_of(name) for name in programs.forward.inputs}
    saved = {programs.key_of(n) for e in programs.saved for n in programs.forward.uses_of(e)} - given
    if any(key in saved for call in programs.calls[1] for key in call.updated):
        return "set torch._functorch.config.donated_buffer = False before the model is called, as for torch.compile"
    return ""


def _refuse_to_run_again(cure: str) -> None:
    """Raises UnsupportedError where autograd would run once more a backward that writes over what it has read."""
    if torch._C._autograd._get_current_graph_task_keep_graph():
        raise UnsupportedError(f"backward(retain_graph=True) would read what this backward writes over; {cure}")


def _unpacked(names: Sequence[str]) -> str:
    return f"({', '.join(names)},)"


def _crossing(text: _Text, backward: Iterable[Instruction], unchecked: int) -> tuple[list[str], list[str], list[str]]:
    """What forward hands over: variables, handles, and variables that autograd does not check for changes."""
    captured, programs = text.captured, text.captured.programs
    if programs.backward is None:
        return [], [], []
    read, prefetched = crossing(captured.graph, captured.calls, backward)
    keys = {captured.key_of[t]: None for t in read if t in captured.key_of}
    keys |= {
        k: None for e in programs.backward.outputs for n in programs.backward.uses_of(e) if (k := programs.key_of(n))
    }
    names = [n for k in keys for n in programs.roots.get(k, ()) if n in text.bound]
    last = programs.saved[len(programs.saved) - unchecked :]
    changing = {programs.key_of(n) for e in last for n in programs.forward.uses_of(e)}
    loose = [n for n in names if programs.key_of(n) in changing]
    if len(loose) > unchecked:
        raise InvalidSchedule(f"{len(loose)} tensors that change cross to backward, for {unchecked} places")
    handles = [handle for handle in map(_handle, prefetched) if handle in text.bound]
    return [n for n in names if n not in loose], handles, [_NOTHING] * (unchecked - len(loose)) + loose


def _handle(tensor: int) -> str:
    """The variable of the handle of what is in the store."""
    return f"handle_{tensor}"


class _Text(Text):
    """Writes one of the two functions."""

    def __init__(self, captured: CapturedPrograms, places: Places, made: MadeBy) -> None:
        super().__init__(captured.programs)
        self.captured = captured
        self.places = places
        self._telling = Telling(made)
        self.returned: dict[int, str] = {}
        self.gradients: dict[int, str] = {}
        self._tensor_of = {key: tensor for tensor, key in captured.key_of.items()}
        self.labels: list[Label] = []
        """What the lines that tell are of."""

    def tensors_of(self, names: Iterable[str]) -> list[int | None]:
        """For each variable the tensor that it is all of; None for handles and numbers."""
        keys = map(self.programs.key_of, names)
        return [None if key is None else self._tensor_of.get(key) for key in keys]

    def begin(self, bound: Iterable[str]) -> None:
        """Another function, which is given these variables."""
        kept = {n for n in self.bound if n.startswith("handle_")}
        self.bound = {*bound, *kept}
        self.lines = []
        self._telling.forget()

    def emit(self, instructions: Iterable[Instruction], first: int) -> None:
        """Emit what belongs to this function, from position `first` of the schedule on; gradients are handed out when they are complete, so what follows is dropped."""
        ops = self.captured.graph.ops
        for position, instruction in enumerate(instructions, first):
            verb, target = instruction.verb, instruction.target
            if verb is Verb.RUN and ops[target].phase is Phase.UPDATE:
                return
            if (made := self._telling.before(position, verb)) is not None:
                self.line(f"tell_groups({made!r})")
            if verb is Verb.RUN and target not in self.captured.calls:
                self._hand_out(ops[target].name)
            elif verb is Verb.FREE:
                self._free(target)
            else:
                self._tell(verb, target, position)

    def _tell(self, verb: Verb, target: int, position: int) -> None:
        """Emit an instruction between lines that tell what it is, and what it has made."""
        self.line(f"{TELLS}begin({len(self.labels)})")
        self.labels.append(Label(self.captured.graph, verb, target))
        if verb in (Verb.RUN, Verb.RECOMPUTE):
            made = self._call(self.captured.calls[target], position)
        else:
            made = self._transfer(verb, target, position)
        self.line(f"{TELLS}end({', '.join(made)})")

    def _hand_out(self, op: str) -> None:
        """What is handed out here may be freed by the schedule next: take it while it is there."""
        if op == WRITE_BACK:
            joint = self.captured.joint
            values = set(joint.write_backs.values())
            places = [i for i, n in enumerate(joint.forward_outputs) if n in values]
            self._take(self.returned, places, self.programs.forward.outputs, "returned")
        elif op == GRADIENTS and self.programs.backward is not None:
            outputs = self.programs.backward.outputs
            self._take(self.gradients, range(len(outputs)), outputs, "gradient")

    def _take(self, into: dict[int, str], places: Iterable[int], outputs: Sequence[ast.expr], name: str) -> None:
        for i in places:
            into[i] = f"{name}_{i}"
            self.line(f"{name}_{i} = {self.expression(outputs[i])}")

    def _call(self, call: Call, position: int) -> list[str]:
        """Emit a call; the variables of what it has made."""
        self.call(call, lambda root: self._allocation(root, position))
        return made_by(self.programs, call)

    def _allocation(self, root: str, position: int) -> str:
        key = self.programs.key_of(root)
        assert key is not None
        tensor = self._tensor_of[key]
        statement = self.programs.allocations[root]
        offset = self.places.offsets.get((tensor, position))
        if offset is None:
            return ast.unparse(statement)
        assert isinstance(statement, ast.Assign)
        assert isinstance(statement.value, ast.Call)
        given = ", ".join(map(ast.unparse, statement.value.args))
        return f"{root} = tensor_at(arena, {offset}, {self.captured.graph.tensors[tensor].nbytes}, {given})"

    def _free(self, tensor: int) -> None:
        key = self.captured.key_of.get(tensor)
        if key is None:
            return
        if gone := sorted(n for n in self.bound if self.programs.key_of(n) == key):
            self.line(f"del {', '.join(gone)}")
            self.bound.difference_update(gone)

    def _transfer(self, verb: Verb, tensor: int, position: int) -> list[str]:
        """Emit what moves a tensor; the variable of what that has made."""
        (root,) = self.programs.roots[self.captured.key_of[tensor]]
        handle = _handle(tensor)
        if verb is Verb.OFFLOAD:
            self.line(f"{handle} = offload({root})")
            self.bound.add(handle)
        elif verb is Verb.AWAIT_OFFLOAD:
            self.line(f"await_offload({handle}, {root})")
        elif verb is Verb.PREFETCH:
            offset = self.places.offsets.get((tensor, position))
            nbytes = self.captured.graph.tensors[tensor].nbytes
            into = "" if offset is None else f", storage_at(arena, {offset}, {nbytes})"
            self.line(f"arriving_{tensor} = prefetch({handle}{into})")
            return [f"arriving_{tensor}"]
        else:
            self.line(f"await_prefetch(arriving_{tensor})")
            self.line(f"{root} = arriving_{tensor}; del arriving_{tensor}")
            self.bound.add(root)
        return []

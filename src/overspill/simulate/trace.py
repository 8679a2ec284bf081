"""From a Schedule to the Trace of allocations that it implies."""

from __future__ import annotations

from overspill.core import Block, Graph, Schedule, Trace, Verb


def trace_of(graph: Graph, schedule: Schedule) -> Trace:
    """The blocks that `schedule` allocates on the device; positions count instructions, workspaces are blocks of their own.

    The lower bound of this trace is the peak that `check` finds.
    """
    end = len(schedule.instructions)
    open_since: dict[int, int] = {t.id: 0 for t in graph.tensors if t.persistent and t.id not in schedule.stored}
    spans: list[tuple[int, int, int, str]] = []
    for position, instruction in enumerate(schedule.instructions):
        if instruction.verb in (Verb.RUN, Verb.RECOMPUTE):
            op = graph.ops[instruction.target]
            recompute = instruction.verb is Verb.RECOMPUTE
            extra = op.workspace_of(instruction.algorithm)
            for tensor in op.recompute_writes if recompute else op.writes:
                if recompute and tensor in open_since:
                    extra += graph.tensors[tensor].nbytes
                open_since.setdefault(tensor, position)
            if extra:
                spans.append((position, position + 1, extra, f"workspace of {op.name}"))
        elif instruction.verb is Verb.PREFETCH:
            open_since[instruction.target] = position
        elif instruction.verb is Verb.FREE:
            freed = graph.tensors[instruction.target]
            spans.append((open_since.pop(freed.id), position, freed.nbytes, freed.name))
    spans += [(start, end, graph.tensors[t].nbytes, graph.tensors[t].name) for t, start in open_since.items()]
    return Trace(tuple(Block(i, *span) for i, span in enumerate(sorted(spans))))

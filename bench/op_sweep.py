"""Every op with a backward that PyTorch's own tests know, one by one: does a planned step give eager's bits?

    python bench/op_sweep.py [--samples 1] [--only NAME ...] [--go-on] [--out bench/results/op_sweep.json]
    python bench/op_sweep.py --read

Each op of `torch.testing._internal.common_methods_invocations.op_db` (private to PyTorch, and so are its OpInfo's methods)
runs on its own sample inputs on the CPU, in float32 and bfloat16, three times: in eager, through `overspill.compile`
and through `overspill.train_step`. Outputs, loss and gradients are compared bit for bit. What eager itself does not
repeat is left out. `--go-on` keeps what the file has already; results are written as they come.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import TestCase

import numpy as np
import torch
import torch._dynamo
from paired import json_record
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

import overspill
from overspill.core.errors import OverspillError
from overspill.runtime.reachable import same_bits

RESULTS = Path(__file__).parent / "results" / "op_sweep.json"
DTYPES = (torch.float32, torch.bfloat16)
DOORS = ("compile", "train_step")
IDENTICAL, REFUSED, DIFFERENT, UNPLANNED, FAILED = "identical", "refused", "different", "not planned", "failed"
BUDGET = "4GiB"
SEED = 11
LARGEST_SAMPLE = 2**20
"""Elements of all inputs together, above which another sample is taken."""


@dataclass(frozen=True)
class Case:
    """One op on one sample: its leaves, of which `trained` want gradients, and how to call it."""

    op: str
    dtype: str
    sample: int
    leaves: tuple[Any, ...]
    trained: tuple[int, ...]
    call: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Verdict:
    """What became of one case at one door, and why where it is not identical."""

    op: str
    dtype: str
    sample: int
    door: str
    outcome: str
    reason: str = ""


class OneOp(nn.Module):
    """A model of one op; its parameters are the inputs that want gradients. It returns the differentiable outputs."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.call = case.call
        self.trained = case.trained
        self.weights = nn.ParameterList(case.leaves[i].detach().clone() for i in case.trained)
        self.others = [None if isinstance(leaf, Tensor) else leaf for leaf in case.leaves]
        self.given = [i for i, leaf in enumerate(case.leaves) if isinstance(leaf, Tensor) and i not in case.trained]
        for position in self.given:
            self.register_buffer(f"given_{position}", case.leaves[position].clone())

    def forward(self) -> list[Tensor]:
        leaves = list(self.others)
        for position, weight in zip(self.trained, self.weights, strict=True):
            leaves[position] = weight
        for position in self.given:
            leaves[position] = getattr(self, f"given_{position}")
        found = self.call(leaves)
        outputs = [found] if isinstance(found, Tensor) else list(found) if isinstance(found, (list, tuple)) else []
        return [y for y in outputs if isinstance(y, Tensor) and y.requires_grad]


class OneLoss(nn.Module):
    """The sum of all outputs of `model`, each weighted differently, in float32."""

    def __init__(self, model: OneOp) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        total = torch.zeros(())
        for output in self.model():
            y = torch.view_as_real(output.resolve_conj()) if output.is_complex() else output
            weights = torch.linspace(-1.0, 2.0, y.numel()).reshape(y.shape)
            total = total + (y.float() * weights).sum()
        return total


class KeepGradients(Optimizer):
    """Puts each parameter's gradient in the place of the parameter."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: None = None) -> None:
        """Take the gradients."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.copy_(parameter.grad)


def cases(names: Sequence[str], samples: int, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Case]:
    """The cases of the named ops, or of all that have a backward."""
    for info in _op_db():
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        if names and name not in names:
            continue
        for dtype in dtypes:
            if info.supports_autograd and dtype in info.supported_backward_dtypes("cpu"):
                seed()
                yield from _cases_of(info, name, dtype, samples)


def _op_db() -> list[Any]:
    """PyTorch's descriptions of ops, which import a package of PyTorch's own tests for its class TestCase alone."""
    stand_in = ModuleType("expecttest")
    stand_in.__dict__["TestCase"] = TestCase
    sys.modules.setdefault("expecttest", stand_in)
    from torch.testing._internal import common_methods_invocations as known  # noqa: PLC0415 - takes seconds

    # That import forbids everybody to set flags of backends.
    torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
    # They set the seed themselves, which is no op, and which we do.
    known.wrapper_set_seed = lambda op, *args, **kwargs: op(*args, **kwargs)
    return list(known.op_db)


def _cases_of(info: Any, name: str, dtype: torch.dtype, samples: int) -> Iterator[Case]:
    """The first samples that are of more than one element and not large; the first of all where there is none."""
    found = []
    for number, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=True)):
        leaves, spec = tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        trained = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad)
        if not trained or any(t.layout is not torch.strided for t in tensors):
            continue
        large = sum(t.numel() for t in tensors) > LARGEST_SAMPLE
        rank = (large or min(leaves[i].numel() for i in trained) < 2, number)
        call = _caller(info.op, spec, sample.output_process_fn_grad)
        leaves = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        found.append((rank, Case(name, _brief(dtype), number, tuple(leaves), trained, call)))
    yield from (case for _, case in sorted(found, key=lambda x: x[0])[:samples])


def _caller(op: Callable[..., Any], spec: Any, process: Callable[[Any], Any]) -> Callable[[Sequence[Any]], Any]:
    def call(leaves: Sequence[Any]) -> Any:
        first, args, kwargs = tree_unflatten(list(leaves), spec)
        return process(op(first, *args, **kwargs))

    return call


def _brief(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def seed() -> None:
    """The random numbers begin anew."""
    torch.manual_seed(SEED)
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - what the samples draw from


# -- the sides that are compared


@dataclass(frozen=True)
class Numbers:
    """What one side gave."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]

    def differences(self, other: Numbers) -> str:
        """What is not the same to the last bit, with the largest difference; empty where all is."""
        found = []
        for what in ("outputs", "gradients"):
            mine, others = getattr(self, what), getattr(other, what)
            if len(mine) != len(others):
                found.append(f"{len(mine)} {what} against {len(others)}")
                continue
            pairs = [(a, b) for a, b in zip(mine, others, strict=True) if not _same(a, b)]
            if pairs:
                found.append(f"{what} by {max(_distance(a, b) for a, b in pairs):.1e}")
        return ", ".join(found)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:  # a gradient that is not there, and one of zeros
        rest = other if one is None else one
        return rest is None or not rest.any()
    return same_bits(one.resolve_conj().resolve_neg(), other.resolve_conj().resolve_neg())


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    if one is None or other is None or one.shape != other.shape or not one.numel():
        return float("inf")
    return float((one.to(torch.complex128) - other.to(torch.complex128)).abs().nan_to_num(float("inf")).max())


def by_parts(model: Callable[[], list[Tensor]], parameters: Sequence[nn.Parameter]) -> Numbers:
    """Outputs, and gradients from gradients of the outputs that are given."""
    seed()
    outputs = model()
    kept = [y.detach().clone() for y in outputs]
    # In the order in memory that the outputs have, which is what AOTAutograd brings them into.
    given = [torch.empty_like(y).copy_(torch.linspace(-1.0, 2.0, y.numel()).reshape(y.shape)) for y in kept]
    torch.autograd.backward(outputs, given)
    return Numbers(kept, [p.grad for p in parameters])


def by_loss(case: Case) -> Numbers:
    """Loss and gradients of plain training."""
    model = OneLoss(OneOp(case))
    seed()
    loss = model()
    loss.backward()
    return Numbers([loss.detach()], [p.grad for p in model.parameters()])


def by_train_step(case: Case) -> Numbers:
    """Loss and gradients of a planned step; a parameter that gets none keeps its value."""
    model = OneLoss(OneOp(case))
    before = [p.detach().clone() for p in model.parameters()]
    step = overspill.train_step(model, None, KeepGradients(model.parameters()), budget=BUDGET)
    try:
        seed()
        loss = step()
    finally:
        step.close()
    after = [p.detach() for p in model.parameters()]
    gradients = [None if same_bits(a, b) else a for a, b in zip(after, before, strict=True)]
    return Numbers([loss], gradients)


def judge(case: Case) -> Iterator[Verdict]:
    """One verdict a door; none where eager does not repeat itself."""
    plain = OneOp(case)
    again = OneOp(case)
    numbers = by_parts(plain, list(plain.parameters()))
    if not numbers.outputs or numbers.differences(by_parts(again, list(again.parameters()))):
        return
    torch._dynamo.reset()
    model = OneOp(case)

    def compiled() -> Numbers | str:
        counters["graph_break"].clear()
        call = overspill.compile(model, budget=BUDGET)
        found = by_parts(call, list(model.parameters()))
        if broken := list(counters["graph_break"]):
            return "Dynamo breaks the graph: " + " ".join(broken[0].split())
        return found if call.overspill.plans else "a view: no kernel runs"

    yield _verdict(case, "compile", numbers, compiled)
    yield _verdict(case, "train_step", by_loss(case), lambda: by_train_step(case))


def _judged(case: Case) -> list[Verdict]:
    """The verdicts; one for both doors where eager itself fails."""
    try:
        return list(judge(case))
    except Exception as error:  # noqa: BLE001 - whatever an op may raise
        return [Verdict(case.op, case.dtype, case.sample, door, FAILED, f"in eager: {error}"[:300]) for door in DOORS]


def _verdict(case: Case, door: str, plain: Numbers, run: Callable[[], Numbers | str]) -> Verdict:
    try:
        found = run()
    except OverspillError as error:
        outcome, reason = REFUSED, str(error)
    except Exception as error:  # noqa: BLE001 - whatever an op may raise is its verdict
        outcome, reason = FAILED, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
    else:
        if isinstance(found, str):
            outcome, reason = UNPLANNED, found
        else:
            reason = plain.differences(found)
            outcome = DIFFERENT if reason else IDENTICAL
    return Verdict(case.op, case.dtype, case.sample, door, outcome, reason[:300])


# -- the record


def write(path: Path, verdicts: Sequence[Verdict], samples: int) -> None:
    """All verdicts that are not `identical` by name, and the counts."""
    counts = {door: dict(Counter(v.outcome for v in verdicts if v.door == door)) for door in DOORS}
    identical = sorted({f"{v.op} {v.dtype} {v.sample} {v.door}" for v in verdicts if v.outcome == IDENTICAL})
    path.write_text(
        json_record(
            torch.device("cpu"),
            torch=torch.__version__,
            samples=samples,
            ops=len({v.op for v in verdicts}),
            counts=counts,
            others=[asdict(v) for v in verdicts if v.outcome != IDENTICAL],
            identical=identical,
        )
    )


def read(path: Path) -> list[Verdict]:
    """The verdicts of a record."""
    record = json.loads(path.read_text())
    verdicts = [Verdict(**row) for row in record["others"]]
    for line in record["identical"]:
        op, dtype, sample, door = line.rsplit(" ", 3)
        verdicts.append(Verdict(op, dtype, int(sample), door, IDENTICAL))
    return verdicts


def table(path: Path) -> str:
    """The counts of a record, and what is not identical by name."""
    record = json.loads(path.read_text())
    lines = [f"torch {record['torch']}, CPU, {record['ops']} ops, {record['samples']} sample(s) an op and dtype"]
    for door, counts in record["counts"].items():
        lines.append(f"  {door:10s} " + ", ".join(f"{n} {outcome}" for outcome, n in sorted(counts.items())))
    rows = sorted(record["others"], key=lambda row: (row["outcome"], row["op"], row["door"], row["dtype"]))
    lines += [f"{r['outcome']:12s} {r['op']:44s} {r['dtype']:9s} {r['door']:10s} {r['reason'][:110]}" for r in rows]
    return "\n".join(lines)


def main() -> None:
    """Sweep and record, or print a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--go-on", action="store_true")
    parser.add_argument("--read", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.read:
        print(table(arguments.out))
        return
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    verdicts = read(arguments.out) if arguments.go_on and arguments.out.exists() else []
    done = {(v.op, v.dtype, v.sample) for v in verdicts}
    for number, case in enumerate(cases(arguments.only, arguments.samples)):
        if (case.op, case.dtype, case.sample) in done:
            continue
        for verdict in _judged(case):
            verdicts.append(verdict)
            if verdict.outcome != IDENTICAL:
                print(f"{verdict.op} {verdict.dtype} {verdict.door}: {verdict.outcome}: {verdict.reason}", flush=True)
        if number % 20 == 0:
            write(arguments.out, verdicts, arguments.samples)
    write(arguments.out, verdicts, arguments.samples)
    print(table(arguments.out).split("\n" + DIFFERENT)[0], file=sys.stderr)


if __name__ == "__main__":
    main()

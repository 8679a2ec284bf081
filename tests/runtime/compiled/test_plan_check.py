"""No call without a plan goes unnoticed; a budget holds for all shapes, for evaluation, and for several models."""

from __future__ import annotations

import contextlib
import copy
import gc
import operator
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import overspill
from overspill.capture.programs.allocations import allocations, peak_of
from overspill.core import TensorKind
from overspill.core.units import size_enough
from overspill.errors import InfeasibleBudgetError, RequestError, UnplannedError, UnsupportedError
from overspill.runtime.compiled import backend, plan_check
from overspill.runtime.compiled.session import Session
from overspill.runtime.tracker import LiveBytes


class Net(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def train(
    call: Callable[..., Any], model: nn.Module, sizes: list[int], around: Callable[[int], Any] | None = None
) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for step, size in enumerate(sizes):
        with contextlib.nullcontext() if around is None else around(step):
            optimizer.zero_grad()
            loss = call(torch.randn(size, 8)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    first = make()
    torch.manual_seed(0)
    return first, make()


class LayerDrop(Net):
    """Random control flow, which Dynamo does not trace: it runs the whole frame eagerly."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if random.random() < 1.0:  # always: without any layer there is nothing to notice
                x = torch.relu(layer(x))
        return x


class PartlyEager(Net):
    """A part that is kept from being traced."""

    @torch.compiler.disable
    def middle(self, x: Tensor) -> Tensor:
        return torch.sigmoid(torch.exp(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.middle(self.layers[0](x)))


# -- a plan is in force


def test_a_model_that_dynamo_skips_is_an_error_that_says_why() -> None:
    model = overspill.compile(LayerDrop(8, 8, 8), budget="1GiB", store="host")
    with pytest.raises(UnplannedError, match=r"LayerDrop .*[rR]andom") as skipped:
        model(torch.randn(4, 8))
    assert "train_step" not in str(skipped.value), "which refuses such draws too"


class Signs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_non_differentiable()
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def test_where_dynamo_itself_fails_a_line_says_where() -> None:
    layer = nn.Linear(9, 8)

    def model(x: Tensor) -> Tensor:
        return Signs.apply(x)

    compiled = overspill.compile(model, budget="1GiB", store="host")
    with pytest.raises(UnsupportedError, match=r"test_plan_check\.py, line \d+"):
        compiled(torch.randn(4, 8, requires_grad=True))
    # Of a batch of the wrong size too, it is the user's line, not that of the layer in torch.
    with pytest.raises(UnplannedError, match=r"at test_plan_check\.py, line \d+"):
        overspill.compile(lambda x: layer(x), budget="1GiB", store="host")(torch.randn(4, 8))  # noqa: PLW0108


def test_what_a_part_without_a_plan_keeps_is_told_and_set_aside_from_the_second_step_on() -> None:
    plain, model = twins(lambda: PartlyEager(8, 16, 8))
    compiled = overspill.compile(model, budget="smallest", store="host")
    with pytest.warns(UserWarning, match=r"PartlyEager .*Sigmoid.* 512 B"):
        assert train(compiled, model, [4]) == train(plain, plain, [4])
    before = [plan.peak_bytes for plan in compiled.overspill.plans]
    assert train(compiled, model, [4, 4]) == train(plain, plain, [4, 4])
    assert [plan.peak_bytes - 512 for plan in compiled.overspill.plans] == before
    assert compiled.overspill.renewal.is_asked is False


class Widens(torch.autograd.Function):
    """Makes a wide tensor in its backward, and reads a weight there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.weight = weight
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].repeat(256, 1, 1).mean(0) * ctx.weight[0, 0], None  # 64 KiB


class Widening(PartlyEager):
    def __init__(self, *widths: int) -> None:
        super().__init__(*widths)
        self.frozen = nn.Parameter(torch.full((32, 32), 2.0), requires_grad=False)  # 4 KiB

    @torch.compiler.disable
    def middle(self, x: Tensor) -> Tensor:
        return Widens.apply(x, self.frozen)  # type: ignore[no-untyped-call, no-any-return]


@pytest.mark.long
def test_what_the_backward_of_such_a_part_takes_is_told_and_counts_from_the_second_step_on() -> None:
    plain, model = twins(lambda: Widening(8, 16, 8))
    compiled = overspill.compile(model, budget="32KiB", store="host")
    with pytest.warns(UserWarning, match=r"Widens.* 6\d\.\d KiB"):
        assert train(compiled, model, [4]) == train(plain, plain, [4])
    with pytest.raises(InfeasibleBudgetError):
        train(compiled, model, [4])
    torch._dynamo.reset()
    with warnings.catch_warnings(), allocations() as found:
        warnings.simplefilter("ignore")
        model = Widening(8, 16, 8)
        compiled = overspill.compile(model, budget="smallest", store="host")
        train(compiled, model, [4, 4, 4], lambda step: found.part() if step == 2 else contextlib.nullcontext())
    peak = sum(found.between_parts[0]) + peak_of(found.by_part[0])[0]
    assert 64 << 10 <= peak <= max(plan.budget_bytes for plan in compiled.overspill.plans)


class Expert(Net):
    """A class of its own, which Dynamo would trace for each number of rows."""


class PartlyRouted(PartlyEager):
    """Rows go to the experts that their values choose; those below zero go to none."""

    def __init__(self) -> None:
        super().__init__(8, 16, 8)
        self.experts = nn.ModuleList(Expert(16, 32, 16) for _ in range(3))

    def middle(self, x: Tensor) -> Tensor:
        chosen, made = (x[:, 0] * 4).clamp(-1, 2).floor(), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            made = made.index_add(0, rows, expert(x[rows]))
        return x + made


def test_experts_whose_rows_follow_from_values_are_not_traced_and_more_rows_than_ever_are_planned_for() -> None:
    plain, model = twins(PartlyRouted)
    compiled = overspill.compile(model, budget="smallest", store="host")
    first: list[int] = []  # what was said in the first step

    def around(step: int) -> Any:
        first.extend([len(told)] if step == 1 else [])
        return found.part() if step == 6 else contextlib.nullcontext()

    with warnings.catch_warnings(record=True) as told, allocations() as found:
        warnings.simplefilter("always")
        assert train(compiled, model, [64] * 7, around) == train(plain, plain, [64] * 7)
    # A quarter more than the first step chose is planned for; the sixth chooses more, and begins again.
    assert 0 < len(told) - first[0] <= 2
    assert compiled.overspill.steps_over == 1 + len(told) - first[0], "the first, and each that warned later"
    assert len(compiled.overspill.plans) == 2, "before the experts and after them"
    peak = sum(found.between_parts[0]) + peak_of(found.by_part[0])[0]
    temporary = 4 * 64 * 16  # one in forward of the part that is not traced, which nothing knows
    assert peak <= max(plan.budget_bytes for plan in compiled.overspill.plans) + temporary


class RoutedByInput(Net):
    """Rows go to the experts that the first column of the input names; a step draws, and changes buffers."""

    def __init__(self) -> None:
        super().__init__(8, 16, 8)
        self.norm = nn.BatchNorm1d(16)
        self.experts = nn.ModuleList(Expert(16, 32, 16) for _ in range(3))
        self.register_buffer("load", torch.zeros(3))

    @torch.compiler.disable
    def routed(self, x: Tensor, chosen: Tensor) -> Tensor:
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            self.load[number] += 1
            rows = (chosen == number).nonzero().squeeze(1)
            made = made.index_add(0, rows, F.dropout(expert(x[rows]), 0.1))
        return x + made

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(self.layers[0](x)), 0.1)
        return self.layers[1](self.routed(h, x[:, 0]))


def routed_batch(*rows: int, size: int = 64) -> Tensor:
    """Return a batch of which so many rows go to each expert, and the others to none."""
    batch = torch.randn(size, 8)
    chosen = [expert for expert, count in enumerate(rows) for _ in range(count)]
    batch[:, 0] = torch.tensor(chosen + [-1] * (size - len(chosen)))
    return batch


def routed_steps(
    model: nn.Module,
    call: Callable[..., Any],
    batches: list[Tensor],
    skipped: Sequence[int] = (),
    around: Callable[[], Any] = contextlib.nullcontext,
) -> Iterator[Any]:
    """Train on the batches that are not skipped; yield an error if there is one, and all that a step leaves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    drawn = torch.manual_seed(1).get_state()
    for number, batch in enumerate(batches):
        torch.set_rng_state(drawn)
        error = None
        optimizer.zero_grad()
        try:
            with around():
                if number not in skipped:
                    call(batch).square().mean().backward()
                    optimizer.step()
        except InfeasibleBudgetError as infeasible:
            error = infeasible
        drawn = torch.get_rng_state()
        yield error, {name: value.clone() for name, value in model.state_dict().items()}, drawn


@pytest.mark.short("smallest-fails0-steps_over0")
@pytest.mark.parametrize(
    ("budget", "fails", "steps_over"), [("smallest", [], [0, 0, 0, 1, 1, 2]), ("80KiB", [5], [0] * 5 + [1])]
)
def test_a_step_that_chooses_more_rows_than_ever_begins_again_by_plans_for_them_or_is_not_done(
    budget: str, fails: list[int], steps_over: list[int]
) -> None:
    few, odd, many, most = (4, 4, 4), (1, 2, 1), (20, 4, 4), (30, 30, 4)
    torch.manual_seed(0)
    batches = [routed_batch(*few), routed_batch(5, 4, 3), routed_batch(*odd, size=7), routed_batch(*many)]
    batches += [routed_batch(*many), routed_batch(*most), routed_batch(*few), routed_batch(*odd, size=7)]
    torch.manual_seed(0)
    plain = RoutedByInput()
    expected = list(routed_steps(plain, plain, batches, fails))
    over, budgets, told = [], [], []
    with warnings.catch_warnings(record=True) as warned, allocations() as found:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        model = RoutedByInput()
        compiled = overspill.compile(model, budget=budget, store="host")
        steps = routed_steps(model, compiled, batches, around=found.part)
        for number, (_, *wanted) in enumerate(expected):
            error, *left = next(steps)
            assert (error is not None) == (number in fails), error
            torch.testing.assert_close(left, wanted, rtol=0, atol=0)
            del left
            over.append(compiled.overspill.steps_over)
            budgets.append(max((plan.asked_bytes for plan in compiled.overspill.plans), default=80 << 10))
            told += [str(error)] if error is not None else []
    # The fourth batch has 20 rows of one expert, for which 80 KiB are enough; the sixth grows twice.
    assert over == [*steps_over, steps_over[-1], steps_over[-1]]
    assert sum("begins again" in str(warning.message) for warning in warned) == steps_over[-1]
    assert ["this batch chooses by values" in message for message in told] == [True for _ in fails]
    # Not even the steps that began again took more than their budget.
    live, peaks = 0, []
    for before, during, batch in zip(found.between_parts, found.by_part, batches, strict=True):
        live += sum(before)
        peaks.append(live + peak_of(during)[0] + batch.nbytes)
        live += sum(during)
    assert all(map(operator.le, peaks[2:6], budgets[2:6])), (peaks, budgets)  # others make trials of optimizers


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:this step has a part")
def test_what_is_refused_after_the_first_step_names_a_budget_that_trains() -> None:
    torch.manual_seed(0)
    batches = [routed_batch(20, 20, 20) for _ in range(4)]

    def error_within(budget: str) -> InfeasibleBudgetError | None:
        model = RoutedByInput()
        compiled = overspill.compile(model, budget=budget, store="host")
        return next((error for error, *_ in routed_steps(model, compiled, batches) if error is not None), None)

    error = error_within("60%")
    assert error is not None
    assert "2 graphs of the model wait" in str(error), error
    assert str(error).count("would do") == 1
    assert error_within(size_enough(error.floor_bytes)) is None, error


class MixtralBlocks(nn.Module):
    """Experts of transformers in plain PyTorch: `nonzero()` stands before their loop, and a branch by values in it."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.MixtralConfig(hidden_size=8, intermediate_size=16, num_local_experts=4)
        config._experts_implementation = "eager"
        block = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock
        self.layers = nn.ModuleList(block(config) for _ in range(2))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(2, -1, 8)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.long
def test_the_experts_of_transformers_train_with_the_same_bits_by_plans_that_settle_after_one_step() -> None:
    plain, model = twins(MixtralBlocks)
    compiled = overspill.compile(model, budget="smallest", store="host")
    by_step: list[list[Any]] = []

    def around(_: int) -> Any:
        by_step.append(list(compiled.overspill.plans))
        return contextlib.nullcontext()

    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert train(compiled, model, [24] * 3, around) == train(plain, plain, [24] * 3)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
    # In each layer: the gate, what is behind the experts, and what they do without gradients, which is one for both.
    assert len(by_step[2]) == 5
    assert list(map(id, compiled.overspill.plans)) == list(map(id, by_step[2]))
    assert compiled.overspill.steps_over == 1


@pytest.mark.long
def test_a_budget_without_room_for_what_such_a_part_keeps_is_refused() -> None:
    floor = overspill.compile(PartlyEager(8, 16, 8), budget="smallest", store="host")
    with pytest.warns(UserWarning, match="PartlyEager"):
        floor(torch.randn(4, 8)).sum().backward()
    nbytes = max(plan.budget_bytes for plan in floor.overspill.plans)
    model = overspill.compile(PartlyEager(8, 16, 8), budget=nbytes, store="host")
    with pytest.warns(UserWarning, match="PartlyEager"):
        model(torch.randn(4, 8)).sum().backward()
    with pytest.raises(InfeasibleBudgetError) as refused:
        model(torch.randn(4, 8))
    assert refused.value.floor_bytes > nbytes


@pytest.mark.short("options0")
@pytest.mark.parametrize("options", [{"budget": "1GiB"}, {"budget": "smallest", "reserve": "512"}])
def test_a_part_without_a_plan_that_fits_beside_the_plans_is_no_error(options: dict[str, Any]) -> None:
    plain, model = twins(lambda: PartlyEager(8, 16, 8))
    compiled = overspill.compile(model, store="host", **options)
    assert train(compiled, model, [4, 4]) == train(plain, plain, [4, 4])


def test_without_gradients_it_is_noticed_too() -> None:
    model = overspill.compile(LayerDrop(8, 8, 8), budget="1GiB", store="host")
    with torch.no_grad(), pytest.raises(UnplannedError, match="without a plan"):
        model(torch.randn(4, 8))


def test_compilation_that_is_switched_off_is_noticed() -> None:
    model = overspill.compile(Net(8, 16, 8), budget="1GiB", store="host")
    with torch.compiler.set_stance("force_eager"), pytest.raises(UnplannedError, match="without a plan"):
        model(torch.randn(4, 8))


def test_a_model_of_which_only_parts_are_called_is_noticed_and_what_calls_them_can_be_planned() -> None:
    plain, model = twins(lambda: Net(8, 16, 4))
    compiled = overspill.compile(model, budget="1GiB")
    with pytest.raises(UnplannedError, match=r"a row .*compile\(loss_fn\)"):
        train(compiled.layers[0], model, [4] * 3)
    plain, model = twins(lambda: Net(8, 16, 4))

    def part(x: Tensor) -> Tensor:
        return model.layers[0](x)

    call = overspill.compile(part, budget="1GiB")
    assert train(call, model, [4] * 3) == train(plain.layers[0], plain, [4] * 3)
    assert call.overspill.plans


def test_who_wants_no_error_is_warned_once_and_trains_on() -> None:
    plain, model = twins(lambda: LayerDrop(8, 8, 8))
    compiled = overspill.compile(model, budget="1GiB", store="host", on_unplanned="warn")
    random.seed(0)
    expected = train(plain, plain, [4, 4, 4])
    random.seed(0)
    with pytest.warns(UserWarning, match="without a plan") as warned:
        assert train(compiled, model, [4, 4, 4]) == expected
    assert sum("ran without a plan" in str(w.message) for w in warned) == 1


def test_another_word_for_it_is_refused() -> None:
    with pytest.raises(RequestError, match="on_unplanned='ignore'"):
        overspill.compile(Net(8, 8), on_unplanned="ignore")


def test_a_model_that_only_hands_on_what_it_is_given_is_no_error() -> None:
    x = torch.randn(4, 8)
    assert overspill.compile(nn.Identity(), budget="1GiB", store="host")(x) is x


def test_ops_after_a_break_that_are_planned_are_no_error() -> None:
    class Asks(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.layers[0](x))
            return self.layers[1](x * x if x.sum() > 0 else x)

    plain, model = twins(lambda: Asks(8, 16, 8))
    compiled = overspill.compile(model, budget="1GiB", store="host")
    assert train(compiled, model, [4, 4]) == train(plain, plain, [4, 4])


# -- any number of shapes


@pytest.mark.long
def test_more_shapes_than_dynamo_takes_have_a_plan_each() -> None:
    sizes = [*range(2, 12), 5]
    plain, model = twins(lambda: Net(8, 16, 8))
    compiled = overspill.compile(model, budget="1GiB", store="host")
    assert train(compiled, model, sizes) == train(plain, plain, sizes)
    assert len(inputs_of(compiled.overspill)) == 10


def test_by_name_each_shape_has_a_plan_although_dynamo_leaves_sizes_open() -> None:
    sizes = [4, 4, 3, 5, 3]  # the third is the last batch of an epoch
    plain, model = twins(lambda: Net(8, 16, 8))
    compiled = torch.compile(model, backend="overspill", options={"budget": "1GiB", "store": "host"})
    assert train(compiled, model, sizes) == train(plain, plain, sizes)
    *_, (_, held) = backend._SESSIONS.values()
    session = held()
    assert session is not None
    assert len(inputs_of(session)) == 3


def inputs_of(session: Session) -> set[int]:
    return {plan.graph.bytes_of(TensorKind.INPUT) for plan in session.plans}


def test_more_kinds_of_inputs_than_plans_are_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan_check.SETTINGS, "recompile_limit", 3)
    model = Net(8, 16, 8)
    compiled = overspill.compile(model, budget="1GiB", store="host")
    with pytest.raises(UnplannedError, match="more than 512"):
        train(compiled, model, list(range(2, 9)))


@pytest.mark.long
def test_by_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "MOST_PLANS", 2)
    model = Net(8, 16, 8)
    compiled = torch.compile(model, backend="overspill", options={"budget": "1GiB", "store": "host"})
    with pytest.raises(UnplannedError, match="few lengths"):
        train(compiled, model, list(range(2, 9)))


@pytest.mark.long
def test_by_name_an_error_before_a_call_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(Net(8, 16, 8), backend="overspill", options={"budget": "1GiB", "store": "host"})
    compiled(torch.randn(4, 8))

    def begin_call(*_: Any) -> None:
        raise InfeasibleBudgetError("infeasible: said before", budget_bytes=0, floor_bytes=1, cause="")

    with monkeypatch.context() as during:
        during.setattr(Session, "begin_call", begin_call)
        with pytest.raises(InfeasibleBudgetError, match="said before"):
            compiled(torch.randn(4, 8))
    compiled(torch.randn(4, 8))


# -- one budget


def budgets(session: Session) -> set[int]:
    return {plan.budget_bytes for plan in session.plans}


@pytest.mark.long
def test_a_share_is_of_the_largest_step_and_smaller_ones_are_planned_again() -> None:
    plain, model = twins(lambda: Net(8, *[64] * 3, 8))
    compiled = overspill.compile(model, budget=0.9, store="host")
    sizes = [256, 1024, 256, 1024, 256, 512, 1024]
    assert train(compiled, model, sizes) == train(plain, plain, sizes)
    session = compiled.overspill
    largest = max(session.plans, key=lambda plan: plan.unmanaged_peak_bytes)
    assert budgets(session) == {int(0.9 * largest.unmanaged_peak_bytes)}
    assert len(session.plans) == 3
    assert not session.renewal.is_asked
    assert all(p.peak_bytes == p.unmanaged_peak_bytes for p in session.plans if p is not largest), "these fit now"


@pytest.mark.long
def test_growing_steps_each_raise_a_share() -> None:
    plain, model = twins(lambda: Net(8, *[64] * 2, 8))
    compiled = overspill.compile(model, budget=0.9, store="host")
    sizes = [256, 320, 384, 448, 512, 576, 640, 704]  # more renewals than there may be for calls that do not settle
    assert train(compiled, model, sizes) == train(plain, plain, sizes)
    plan = compiled.overspill.plans[-1]
    assert plan.budget_bytes == int(0.9 * plan.unmanaged_peak_bytes)


@pytest.mark.long
def test_steps_of_one_size_are_planned_once_for_a_share() -> None:
    _, model = twins(lambda: Net(8, *[64] * 6, 8))
    compiled = overspill.compile(model, budget=0.9, store="host")
    found: list[Any] = []

    def around(_: int) -> Any:
        found.append([*compiled.overspill.plans])
        return contextlib.nullcontext()

    train(compiled, model, [64] * 3 + [16] * 2, around)
    (plan,) = found[2]  # from the second step on with the optimizer's update in it
    assert found[-1][0] is plan
    assert budgets(compiled.overspill) == {plan.budget_bytes}


def test_a_share_is_fixed_by_the_first_training_step_and_holds_for_evaluation_and_a_partial_batch() -> None:
    plain, model = twins(lambda: Net(8, *[64] * 3, 8))
    compiled = overspill.compile(model, budget=0.95, store="host")
    assert train(compiled, model, [64, 64]) == train(plain, plain, [64, 64])
    fixed = budgets(compiled.overspill)
    assert len(fixed) == 1
    with torch.no_grad():
        assert torch.equal(compiled(torch.ones(64, 8)), plain(torch.ones(64, 8)))
    assert train(compiled, model, [3]) == train(plain, plain, [3])
    assert budgets(compiled.overspill) == fixed
    assert len(compiled.overspill.plans) == 3


@pytest.mark.long
def test_evaluation_before_training_is_not_held_to_a_share_of_itself() -> None:
    model = Net(8, *[64] * 3, 8)
    compiled = overspill.compile(model, budget=0.95, store="host")
    with torch.no_grad():
        compiled(torch.ones(64, 8))
    train(compiled, model, [64])
    evaluation, training = compiled.overspill.plans
    assert evaluation.peak_bytes == evaluation.unmanaged_peak_bytes
    assert training.budget_bytes == int(0.95 * training.unmanaged_peak_bytes)


@pytest.mark.long
def test_two_kinds_of_evaluation_before_training_are_not_held_to_each_other() -> None:
    model = Net(8, *[64] * 3, 8)
    compiled = overspill.compile(model, budget=0.95, store="host")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(torch.ones(64, 8))
        compiled(torch.ones(3, 8))
    assert not compiled.overspill.renewal.is_asked
    assert len(compiled.overspill.plans) == 2


@pytest.mark.long
def test_several_functions_evaluate_before_they_train() -> None:
    plain, model = twins(lambda: Net(8, *[64] * 3, 8))
    session = overspill.Session(budget=0.95, store="host")
    evaluate = overspill.compile(lambda x: model(x).square().mean(), session=session)
    compiled = overspill.compile(model, session=session)
    with torch.no_grad():
        evaluate(torch.ones(4096, 8))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "this step keeps what several models need")
        losses = train(compiled, model, [64, 64])
    assert losses == train(plain, plain, [64, 64])


@pytest.mark.long
def test_a_compiled_method_notices_kept_gradients() -> None:
    plain, model = twins(lambda: Net(8, *[64] * 3, 8))
    model.forward = overspill.compile(model.forward, budget="1GiB", store="host")
    for net in (plain, model):
        for scale in (1.0, 2.0):
            net(scale * torch.ones(64, 8)).sum().backward()
    assert model.forward.overspill.accumulates
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))


def test_a_compiled_method_called_by_what_is_compiled_is_a_part_of_its_plan() -> None:
    model = Net(8, *[64] * 3, 8)
    model.forward = overspill.compile(model.forward, budget="1GiB", store="host")
    step = overspill.compile(lambda x: model(x).square().mean(), budget="1GiB", store="host")
    step(torch.ones(64, 8)).backward()
    assert len(step.overspill.plans) == 1
    assert model.forward.overspill.plans == []


@pytest.mark.long
def test_a_trainer_that_takes_a_compiled_module_apart_gets_steps_that_are_looked_after() -> None:
    # Lightning compiles a module's steps with the `dynamo_ctx` of the compiled one, and calls these alone.
    model = Net(8, *[64] * 3, 8)
    compiled = overspill.compile(model, budget="1GiB", store="host")
    step = compiled.dynamo_ctx(model.forward)
    with torch.compiler.set_stance("force_eager"), pytest.raises(UnplannedError, match="without a plan"):
        step(torch.ones(64, 8)).sum().backward()
    step(torch.ones(64, 8)).sum().backward()
    assert len(compiled.overspill.plans) == 1


def test_the_smallest_budget_is_the_floor() -> None:
    plain, model = twins(lambda: Net(8, *[64] * 3, 8))
    compiled = overspill.compile(model, budget="smallest", store="host")
    assert train(compiled, model, [64, 64]) == train(plain, plain, [64, 64])
    (plan,) = compiled.overspill.plans
    other = Net(8, *[64] * 3, 8)
    below = overspill.compile(other, budget=plan.budget_bytes - 1, store="host")
    with pytest.raises(InfeasibleBudgetError) as error:
        train(below, other, [64])
    assert plan.budget_bytes <= error.value.floor_bytes <= 1.05 * plan.budget_bytes  # of a search that has less time


@pytest.mark.long
def test_the_smallest_budget_grows_with_what_needs_more(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = twins(lambda: Net(8, *[64] * 3, 8))
    compiled = overspill.compile(model, budget="smallest", store="host")
    caplog.set_level("INFO", logger="overspill")
    assert train(compiled, model, [16, 1024, 32]) == train(plain, plain, [16, 1024, 32])
    *_, last = (plan.budget_bytes for plan in compiled.overspill.plans)
    _, other = twins(lambda: Net(8, *[64] * 3, 8))
    small = overspill.compile(other, budget="smallest", store="host")
    train(small, other, [16])
    assert small.overspill.plans[0].budget_bytes <= last
    assert caplog.text.count("the smallest budget is") <= 1


class Gan:
    """Two models, two optimizers, three forwards a step; from step 3 on live bytes are counted."""

    def __init__(self, compile_both: Callable[[nn.Module, nn.Module], tuple[Any, Any]]) -> None:
        torch.manual_seed(0)
        self.nets = Net(16, 64, 64, 64, 32), Net(32, 64, 64, 64, 1)
        self.optimizers = [torch.optim.Adam(net.parameters()) for net in self.nets]
        self.calls = compile_both(*self.nets)
        self.peak_bytes = 0

    def train(self, session: Session | None = None, steps: int = 5) -> list[float]:
        return [loss for step in range(steps) for loss in self._step(step, session if step >= 3 else None)]

    def _step(self, step: int, session: Session | None) -> tuple[float, float, float]:
        torch.manual_seed(step)
        real, noise = torch.randn(256, 32), torch.randn(256, 16)
        generator, critic = self.calls
        tracker = LiveBytes(torch.device("cpu"))
        tracker.add([real, noise, *(t for net in self.nets for p in net.parameters() for t in (p, p.grad))])
        tracker.add(v for o in self.optimizers for state in o.state.values() for v in state.values())
        counted: Callable[[], Any] = contextlib.nullcontext
        if session is not None:
            session.tracker, counted = tracker, lambda: tracker
        self.optimizers[1].zero_grad()
        first = F.softplus(-critic(real)).mean()
        with counted():
            first.backward()
        fake = generator(noise)
        second = F.softplus(critic(fake.detach())).mean()
        with counted():
            second.backward()
            self.optimizers[1].step()
        self.optimizers[0].zero_grad()
        third = F.softplus(-critic(fake)).mean()
        with counted():
            third.backward()
            self.optimizers[0].step()
        if session is not None:
            session.tracker = None
            self.peak_bytes = max(self.peak_bytes, tracker.peak_bytes)
        return first.item(), second.item(), third.item()


@pytest.mark.parametrize("budget", ["900KiB", *(pytest.param(b, marks=pytest.mark.long) for b in (0.9, "smallest"))])
@pytest.mark.filterwarnings("ignore:this step keeps what several models need")
def test_two_models_share_one_budget_and_keep_it_together(budget: str | float) -> None:
    plain = Gan(lambda *nets: nets).train()
    session = overspill.Session(budget=budget, store="host")
    gan = Gan(lambda *nets: tuple(overspill.compile(net, session=session) for net in nets))  # type: ignore[arg-type]
    assert gan.train(session) == plain
    assert gan.peak_bytes <= max(budgets(session))
    assert all(plan.peak_bytes <= plan.budget_bytes for plan in session.plans)


def test_a_session_has_its_own_options() -> None:
    session = overspill.Session(budget="1GiB")
    with pytest.raises(RequestError, match="own budget"):
        overspill.compile(Net(8, 8), session=session, budget="2GiB")


@pytest.mark.long
def test_sessions_that_exceed_the_device_together_are_told_of_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Net(8, 64, 64, 8) for _ in range(2)]
    compiled = [overspill.compile(model, budget="1MiB", store="host") for model in models]
    train(compiled[0], models[0], [8])
    monkeypatch.setattr("overspill.runtime.compiled.session.usable_bytes", lambda _: 100_000)
    with pytest.warns(UserWarning, match=r"several sessions .*Session\(budget="):
        train(compiled[1], models[1], [8])
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(compiled[1], models[1], [9])


# -- by name, where Dynamo never calls the backend


def by_name(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend="overspill", options={"budget": "1GiB", "store": "host", **options})


@pytest.mark.parametrize("in_place", [False, True])
def test_by_name_a_skipped_model_is_noticed_before_its_first_update(in_place: bool) -> None:
    model = LayerDrop(8, 8, 8)
    if in_place:
        model.compile(backend="overspill", options={"budget": "1GiB", "store": "host"})
    compiled = model if in_place else by_name(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(UnplannedError, match=r"LayerDrop .*overspill\.compile"):
        train(compiled, model, [4, 4])
    assert all(map(torch.equal, before, model.parameters()))


def test_by_name_who_wants_no_error_is_warned_once() -> None:
    plain, model = twins(lambda: LayerDrop(8, 8, 8))
    random.seed(0)
    expected = train(plain, plain, [4, 4, 4])
    random.seed(0)
    with pytest.warns(UserWarning, match="without a plan") as warned:
        assert train(by_name(model, on_unplanned="warn"), model, [4, 4, 4]) == expected
    assert sum("trains without a plan" in str(w.message) for w in warned) == 1


def test_by_name_new_optimizers_search_for_models_only_after_one_was_compiled_or_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def searched() -> list[int]:
        looks.append(1)
        return objects()

    looks, objects = list[int](), gc.get_objects
    plain = Net(8, 8)
    kept = by_name(LayerDrop(8, 8))
    kept(torch.ones(4, 8))
    train(plain, plain, [4])
    monkeypatch.setattr(gc, "get_objects", searched)
    for _ in range(3):
        train(plain, plain, [4])
    assert not looks
    for skipped in (by_name(LayerDrop(8, 8)), copy.deepcopy(kept)):
        for _ in range(2):
            with pytest.raises(UnplannedError, match="trains without"):
                train(skipped, skipped, [4])
    del skipped, kept
    train(plain, plain, [4])  # what the errors kept is gone
    looks.clear()
    train(plain, plain, [4])
    assert not looks


def test_by_name_other_models_their_hooks_and_train_step_are_left_alone() -> None:
    idle, other, planned = by_name(Net(8, 16, 8)), Net(8, 16, 8), Net(8, 16, 8)
    optimizer, steps = torch.optim.SGD(other.parameters(), lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: steps.append("pre"))
    optimizer.register_step_post_hook(lambda *_: steps.append("post"))
    other(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    assert steps == ["pre", "post"]
    train(by_name(planned), planned, [4, 4])
    last = Net(8, 4)
    optimizer = torch.optim.SGD(last.parameters())
    step = overspill.train_step(last, nn.MSELoss(), optimizer, budget="1GiB", store="host")
    assert step(torch.ones(2, 8), torch.ones(2, 4)) > 0
    assert not hasattr(idle, "overspill")


def test_the_log_says_whose_kernels_run_by_which_plan(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    with caplog.at_level("INFO", logger="overspill"):
        overspill.compile(model, budget="1MiB")(torch.randn(2, 4))
    (said,) = [record.getMessage() for record in caplog.records if record.name == "overspill"]
    assert said.startswith("training graph with eager's kernels, planned and compiled in ")
    assert " of 1.0 MiB, unmanaged " in said


class Routed(nn.Module):
    """A loop over experts, which get the rows that are theirs by value."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            x = x.index_add(0, rows, expert(x[rows]))
        return x


def test_a_loop_over_experts_is_told_where_it_stands_and_is_not_sent_to_what_refuses_it_too() -> None:
    model = overspill.compile(Routed(), budget="1GiB")
    with pytest.raises(UnplannedError, match=r"nonzero.*line \d+\).*grouped_mm") as raised:
        model(torch.randn(8, 4))
    assert "train_step" not in str(raised.value)

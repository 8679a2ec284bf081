"""What recorded memory is for, whose it is, and how long it lives."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.capture.recording.recorded_models import BATCH, SMALLEST, Meeting, Twice, mlp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overspill.capture.recording.recorder import Recorder
from overspill.capture.recording.recording import Allocation, Recording
from overspill.capture.virtual_gpu.record import record
from overspill.core import Phase, TensorKind

optim = torch.optim

# --- Kinds ------------------------------------------------------------------------------------------------------------


def of_kind(recording: Recording, kind: TensorKind) -> list[Allocation]:
    return [a for a in recording.allocations if a.kind is kind and a.nbytes]


def nbytes(recording: Recording, kind: TensorKind) -> int:
    return sum(a.nbytes for a in of_kind(recording, kind))


@pytest.fixture(scope="module")
def training() -> Recording:
    """Two steps of linear, batch norm, ReLU and linear, on 16 rows, with Adam."""

    def program(recorder: Recorder) -> None:
        model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 32)).cuda()
        optimizer = optim.Adam(model.parameters())
        for _ in range(2):
            recorder.start_iteration()
            optimizer.zero_grad()
            model(torch.rand(BATCH, 64).cuda()).square().mean().backward()
            optimizer.step()

    return record(program)


PARAMETERS = 4 * (64 * 128 + 128 + 128 + 128 + 128 * 32 + 32)


def test_parameters_gradients_and_optimizer_state_have_their_bytes(training: Recording) -> None:
    assert nbytes(training, TensorKind.PARAMETER) == PARAMETERS
    assert nbytes(training, TensorKind.GRADIENT) == 2 * PARAMETERS  # made anew in each of two steps
    assert nbytes(training, TensorKind.OPTIMIZER_STATE) == 2 * PARAMETERS
    assert nbytes(training, TensorKind.BUFFER) == 4 * 128 * 2 + 8
    assert nbytes(training, TensorKind.INPUT) == 2 * 4 * BATCH * 64


def test_activations_are_what_backward_reads(training: Recording) -> None:
    made = [a for a in of_kind(training, TensorKind.ACTIVATION) if a.start >= training.starts[1]]
    sizes = sorted((a.layer, a.nbytes) for a in made if a.nbytes > SMALLEST)
    rows = 4 * BATCH
    # The outputs of the linear layers, the batch's mean and deviation, and the outputs of batch norm, ReLU and loss.
    assert sizes == sorted([
        ("0", rows * 128), ("1", 4 * 128), ("1", 4 * 128), ("2", rows * 128), ("3", rows * 32),
    ])  # fmt: skip


def test_gradients_on_their_way_are_told_from_temporaries(training: Recording) -> None:
    made = [a for a in of_kind(training, TensorKind.OUTPUT_GRADIENT) if a.start >= training.starts[1]]
    rows = 4 * BATCH
    assert sorted(a.nbytes for a in made if a.nbytes > 64) == sorted([rows * 32] * 2 + [rows * 128] * 3)


def test_gradients_of_one_step_die_before_those_of_the_next_are_made(training: Recording) -> None:
    early = [a for a in of_kind(training, TensorKind.GRADIENT) if a.start < training.starts[1]]
    late = [a for a in of_kind(training, TensorKind.GRADIENT) if a.start >= training.starts[1]]
    assert len(early) == len(late) == 6
    assert max(a.end for a in early) <= min(a.start for a in late)
    assert all(a.end > training.allocations[-1].start for a in late)


def test_names_are_the_modules_own(training: Recording) -> None:
    names = ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]
    assert [a.name for a in of_kind(training, TensorKind.PARAMETER)] == names
    assert sorted({a.name for a in of_kind(training, TensorKind.GRADIENT)}) == sorted(names)
    assert training.parameters == PARAMETERS // 4


def test_the_peak_is_what_the_recorder_counted() -> None:
    peaks = []

    def program(recorder: Recorder) -> None:
        model = mlp().cuda()
        for _ in range(2):
            recorder.start_iteration()
            model(torch.rand(BATCH, 64).cuda()).sum().backward()
        peaks.append(recorder.peak_bytes)

    assert [record(program).peak_requested_bytes] == peaks


# --- Layers and phases ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Net(nn.Module):
    def __init__(self, wrap: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Conv2d(3, 4, 3), nn.ModuleList([Block(), Block()]), nn.Linear(4, 5)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) if self.wrap is None else self.wrap(block, x)
        return self.head(x.mean((2, 3)))


def layers_of(program_of: Callable[[], Any], name: str) -> list[tuple[str, Phase]]:
    """Layer and phase of each op called `name`, in order."""
    return [(op.layer, op.phase) for op in record(lambda _: program_of()).ops if op.name == name]


def step(model: nn.Module, *size: int) -> None:
    model.cuda()(torch.rand(*size).cuda()).sum().backward()


FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
CONVOLUTIONS = ["stem", "blocks.0.conv", "blocks.1.conv"]


def test_forward_and_backward_ops_belong_to_the_layer_that_called_them() -> None:
    def program() -> None:
        step(Net(), 2, 3, 9, 9)

    assert layers_of(program, "convolution") == [(layer, FORWARD) for layer in CONVOLUTIONS]
    assert layers_of(program, "convolution_backward") == [(layer, BACKWARD) for layer in reversed(CONVOLUTIONS)]
    assert layers_of(program, "native_batch_norm_backward") == [
        ("blocks.1.norm", BACKWARD), ("blocks.0.norm", BACKWARD)
    ]  # fmt: skip
    assert layers_of(program, "threshold_backward") == [("blocks.1", BACKWARD), ("blocks.0", BACKWARD)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_layer_runs_again_in_backward_under_its_own_name(reentrant: bool) -> None:
    def program() -> None:
        model = Net(lambda block, x: checkpoint(block, x, use_reentrant=reentrant)).cuda()
        model(torch.rand(2, 3, 9, 9).cuda()).sum().backward()

    again = [("blocks.1.conv", BACKWARD), ("blocks.0.conv", BACKWARD)]
    assert layers_of(program, "convolution") == [(layer, FORWARD) for layer in CONVOLUTIONS] + again
    assert layers_of(program, "convolution_backward") == [(layer, BACKWARD) for layer in reversed(CONVOLUTIONS)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_only_the_inputs_of_blocks(reentrant: bool) -> None:
    def forward_bytes(wrap: Any) -> int:
        seen = []

        def program(recorder: Recorder) -> None:
            model, x = Net(wrap).cuda(), torch.rand(2, 3, 9, 9).cuda()
            before = recorder.live_bytes
            out = model(x)
            seen.append(recorder.live_bytes - before)
            out.sum().backward()

        record(program)
        return seen[0]

    plain = forward_bytes(None)
    kept = forward_bytes(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    block = 2 * 4 * 7 * 7 * 4
    assert plain - kept == 2 * (2 * block + 2 * 4 * 4)  # outputs of conv and ReLU, and the batch's two statistics


def test_a_layer_used_twice_has_both_backwards() -> None:
    assert layers_of(lambda: step(Twice(), BATCH, 64), "threshold_backward") == [("", BACKWARD)] * 2
    products = layers_of(lambda: step(Twice(), BATCH, 64), "mm")
    weights = [layer for layer, phase in products if phase is BACKWARD]
    assert weights == ["last", "last", "inner", "inner", "inner"]  # the very first input needs no gradient


def test_a_tied_weight_is_one_parameter_with_one_gradient() -> None:
    recording = record(lambda _: step(Twice(), BATCH, 64))
    assert nbytes(recording, TensorKind.PARAMETER) == 4 * (64 * 64 + 64)
    assert recording.parameters == 64 * 64 + 64


def test_the_update_is_a_phase_and_what_a_closure_runs_is_not() -> None:
    def program() -> None:
        model = mlp().cuda()
        optimizer, x = optim.SGD(model.parameters(), lr=0.1), torch.rand(BATCH, 64).cuda()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    ops = record(lambda _: program()).ops
    phases = [op.phase for op in ops]
    assert {op.phase for op in ops if op.name in {"addmm", "relu"}} == {FORWARD}
    assert {op.phase for op in ops if op.name == "threshold_backward"} == {BACKWARD}
    assert phases[-1] is Phase.UPDATE


def test_an_error_inside_a_layer_leaves_its_name() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with contextlib.suppress(RuntimeError):
                self.inner(x[:, :2])
            return x * 2

    assert layers_of(lambda: Odd().cuda()(torch.rand(3, 4).cuda()), "mul") == [("", FORWARD)]


# --- Storages ---------------------------------------------------------------------------------------------------------


def live(program: Callable[[], Any]) -> list[int]:
    """Live bytes after each thing that `program` yields."""
    seen = []

    def run(recorder: Recorder) -> None:
        seen.extend(recorder.live_bytes for _ in program())

    record(run)
    return seen


def test_a_view_keeps_the_whole_storage() -> None:
    def program() -> Iterator[Any]:
        x = torch.zeros(100, device="cuda")
        yield x
        y = x[:10]
        del x
        yield y
        del y
        yield None

    assert live(program) == [400, 400, 0]


def test_cycles_are_freed_when_they_are_collected() -> None:
    def program() -> Iterator[Any]:
        box: list[Any] = [torch.zeros(100, device="cuda")]
        box.append(box)
        del box
        yield None
        gc.collect()
        yield None

    assert live(program) == [400, 0]


def test_a_tensor_that_is_resized_has_its_new_size() -> None:
    def program() -> Iterator[Any]:
        x = torch.zeros(10, device="cuda")
        yield x.resize_(100)
        yield x.resize_(5)  # torch keeps the larger storage
        yield x.untyped_storage().resize_(0)
        yield x.untyped_storage().resize_(20)

    assert live(program) == [400, 400, 0, 20]


def test_an_output_argument_grows() -> None:
    def program() -> Iterator[Any]:
        a, out = torch.zeros(8, 8, device="cuda"), torch.empty(0, device="cuda")
        yield torch.mm(a, a, out=out)

    assert live(program) == [2 * 256]


def test_a_gradient_kept_for_a_second_backward_is_added_to_in_place() -> None:
    def program() -> Iterator[Any]:
        x = torch.zeros(100, device="cuda", requires_grad=True)
        (x * 2).sum().backward()
        yield None
        (x * 2).sum().backward()
        yield None

    assert live(program) == [800, 800]


def test_gradients_that_meet_are_added_in_place() -> None:
    ops = record(lambda _: step(Meeting(), BATCH, 64)).ops
    assert [op.name for op in ops if op.name.startswith("add") and op.phase is BACKWARD] == ["add_", "add_"]


def test_values_are_put_by_index_in_place_on_fresh_zeros() -> None:
    def program() -> None:
        x = torch.zeros(100, 4, device="cuda", requires_grad=True)
        x[torch.tensor([1, 2], device="cuda")].sum().backward()

    names = [op.name for op in record(lambda _: program()).ops if op.phase is BACKWARD]
    assert "index_put_" in names
    assert "index_put" not in names


def test_a_shared_gradient_is_not_written_into() -> None:
    """`y` gets one gradient tensor from two sides: torch may not add in place to what something else still holds."""
    ops = record(lambda _: _shared()).ops
    assert [op.name for op in ops if op.name.startswith("add") and op.phase is BACKWARD] == ["add"]


def _shared() -> None:
    x = torch.zeros(100, device="cuda", requires_grad=True)
    y = x * 2
    (y + y).sum().backward()


@pytest.mark.parametrize("kind", ["hook", "function"])
def test_sums_in_hooks_and_own_functions_are_not_taken_for_the_engines(kind: str) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad + grad * 1

    def program() -> None:
        x = torch.zeros(100, device="cuda", requires_grad=True)
        y = x * 2
        if kind == "hook":
            y.register_hook(lambda grad: grad + y)
        (Double.apply(y) if kind == "function" else y * 3).square().sum().backward()

    names = [op.name for op in record(lambda _: program()).ops if op.phase is BACKWARD]
    assert "add" in names
    assert "add_" not in names

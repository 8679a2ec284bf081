"""What users do with a compiled model besides one clean step: each either works, with eager PyTorch's numbers, or says why not."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.compiled.either_way import same_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.core import TensorKind
from overspill.core.errors import InfeasibleBudgetError, RequestError, UnsupportedError
from overspill.runtime.reachable import same_bits
from overspill.runtime.tracker import LiveBytes

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


class Net(nn.Module):
    """Convolutions, batch norm, dropout and a residual: every kind of state and saved tensor."""

    def __init__(self, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, 10)

    def features(self, x):
        x = torch.relu(self.norm(self.first(x)))
        return torch.relu(self.second(x)) + x

    def forward(self, x):
        return self.head(self.drop(self.features(x).mean((2, 3))))


class BrokenNet(Net):
    """A graph break in the middle."""

    def forward(self, x):
        x = self.features(x)
        torch._dynamo.graph_break()
        return self.head(self.drop(torch.relu(self.second(x)).mean((2, 3))))


def batch(size: int = 4, side: int = 16):
    torch.manual_seed(3)
    return torch.randn(size, 3, side, side), torch.randint(0, 10, (size,))


def train(model, call, x, y, steps: int = 3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(7)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {k: v.clone() for k, v in model.state_dict().items()}


def same(one, other) -> bool:
    return one[0] == other[0] and all(same_bits(v, other[1][k]) for k, v in one[1].items())


@pytest.fixture
def twins():
    torch.manual_seed(0)
    model = Net()
    return model, copy.deepcopy(model)


def lean(model, **options):
    """Compiled so that all that can leave does: every pattern is then tried with transfers."""
    return overspill.compile(model, budget=1 << 40, policy="vdnn-all", store="host", **options)


def test_a_model_with_its_loss_outside_trains_identically(twins) -> None:
    plain, managed = twins
    compiled = lean(managed)
    assert same(train(plain, plain, *batch()), train(managed, compiled, *batch()))
    assert compiled.overspill.engine.offloaded_bytes > 0


def test_a_function_can_be_compiled_as_well(twins) -> None:
    plain, managed = twins
    step = overspill.compile(
        lambda x, y: F.cross_entropy(managed(x), y), budget="1GiB", policy="vdnn-all", store="host"
    )
    x, y = batch()
    torch.manual_seed(1)
    expected = F.cross_entropy(plain(x), y)
    expected.backward()
    torch.manual_seed(1)
    loss = step(x, y)
    loss.backward()
    assert same_bits(loss.detach(), expected.detach())
    assert same_gradients(managed, plain)


@pytest.mark.long
def test_a_graph_break_keeps_the_numbers_and_the_whole_budget() -> None:
    torch.manual_seed(0)
    plain = BrokenNet(dropout=0.0)
    managed = copy.deepcopy(plain)
    x, y = batch(8, 32)
    expected = train(plain, plain, x, y)
    free = overspill.compile(copy.deepcopy(plain), budget="1GiB", store="host")
    measured_train(free, x, y)
    budget = int(0.92 * max(p.unmanaged_peak_bytes for p in free.overspill.plans))
    torch._dynamo.reset()
    compiled = overspill.compile(managed, budget=budget, store="host")
    assert same(expected, train(managed, compiled, x, y))
    assert len(compiled.overspill.plans) == 2
    assert compiled.overspill.engine.offloaded_bytes > 0
    assert measured_train(compiled, x, y) <= budget


def measured_train(compiled, x, y) -> int:
    """The peak of one more training step, everything counted, loss outside included."""
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.05, momentum=0.9)
    tracker = LiveBytes(torch.device("cpu"))
    for step in range(2):
        optimizer.zero_grad()
        if step == 1:
            tracker.add([*compiled.parameters(), *compiled.buffers(), x, y])
            tracker.add(v for p in compiled.parameters() for v in optimizer.state[p].values())
            compiled.overspill.tracker = tracker
        out = compiled(x)
        if step == 0:
            F.cross_entropy(out, y).backward()
            optimizer.step()
            continue
        with tracker:
            F.cross_entropy(out, y).backward()
            optimizer.step()
    compiled.overspill.tracker = None
    return tracker.peak_bytes


def test_dynamic_shapes_are_refused_with_what_to_do(twins) -> None:
    compiled = torch.compile(twins[1], backend="overspill", options={"budget": "1GiB"}, dynamic=True)
    with pytest.raises(Exception, match="dynamic=False"):
        compiled(batch()[0]).sum().backward()


def test_a_forward_without_backward_leaves_nothing_in_the_store_and_updates_buffers(twins) -> None:
    plain, managed = twins
    compiled = lean(managed)
    x, _ = batch()
    for _ in range(3):
        torch.manual_seed(5)
        plain(x)
        torch.manual_seed(5)
        compiled(x)
    gc.collect()
    assert compiled.overspill.engine.stored_count == 0
    assert all(same_bits(a, b) for a, b in zip(plain.buffers(), managed.buffers(), strict=True))


@pytest.mark.long
def test_gradient_accumulation_over_several_batches(twins) -> None:
    plain, managed = twins
    compiled = lean(managed)

    def accumulate(model, call):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(4)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            for scale in (1.0, 0.5, 2.0):
                x, y = batch()
                loss = F.cross_entropy(call(scale * x), y)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
        return losses, {k: v.clone() for k, v in model.state_dict().items()}

    assert same(accumulate(plain, plain), accumulate(managed, compiled))
    assert compiled.overspill.accumulates, "kept gradients were noticed and planned for"


def test_kept_gradients_count_in_the_budget(twins) -> None:
    _, managed = twins
    compiled = overspill.compile(managed, budget="1GiB", store="host")
    x, y = batch()
    F.cross_entropy(compiled(x), y).backward()
    fresh = compiled.overspill.peak_bytes
    F.cross_entropy(compiled(x), y).backward()
    assert compiled.overspill.peak_bytes >= fresh + sum(p.grad.nbytes for p in managed.parameters())


def test_state_of_weights_that_are_frozen_again_counts_in_the_budget() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    compiled = overspill.compile(model, budget="1GiB", store="host")
    optimizer = torch.optim.AdamW(model.parameters())
    for turn in (0, 1, 2, 0):
        for layer in model:
            layer.requires_grad_(layer is model[turn])
        optimizer.zero_grad()
        compiled(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    state = sum(v.nbytes for of in optimizer.state.values() for v in of.values())
    for plan in compiled.overspill.plans:
        assert plan.graph.bytes_of(TensorKind.OPTIMIZER_STATE) >= state


def test_backward_twice_with_retain_graph(twins) -> None:
    plain, managed = twins
    compiled = lean(managed)
    for model, call in ((plain, plain), (managed, compiled)):
        torch.manual_seed(2)
        loss = F.cross_entropy(call(batch()[0]), batch()[1])
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
        assert all(p.grad is not None for p in model.parameters())
    assert same_gradients(managed, plain)
    gc.collect()
    assert compiled.overspill.engine.stored_count == 0


@pytest.mark.long
def test_backward_twice_without_retain_graph_is_torchs_own_error(twins) -> None:
    loss = lean(twins[1])(batch()[0]).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.long
def test_channels_last_tensors_keep_their_layout_and_bits(twins) -> None:
    plain, managed = (m.to(memory_format=torch.channels_last) for m in twins)
    x, y = batch()
    x = x.to(memory_format=torch.channels_last)
    compiled = lean(managed)
    assert same(train(plain, plain, x, y), train(managed, compiled, x, y))
    assert compiled.overspill.engine.offloaded_bytes > 0


def test_a_frozen_layer_and_an_input_that_needs_a_gradient(twins) -> None:
    plain, managed = twins
    for model in twins:
        model.first.requires_grad_(False)
    compiled = lean(managed)
    grads = []
    for call in (plain, compiled):
        x = batch()[0].requires_grad_()
        torch.manual_seed(2)
        call(x).square().sum().backward()
        grads.append(x.grad)
    assert same_bits(*grads)
    assert all(p.grad is None for p in managed.first.parameters())


class ReadsThenUpdates(nn.Module):
    """Backward needs the value that the buffer had before it was updated (stock AOTAutograd gets this wrong)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.linspace(0, 1, 4096).reshape(64, 64))
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x):
        read = torch.sin(self.state) * self.weight + torch.cos(self.state.t()) * self.weight
        self.state.add_(1)
        return (read @ x).sum()


@pytest.mark.parametrize("policy", ["liveness", "vdnn-all", "checkpoint", "in-core"])
def test_a_buffer_that_is_read_and_then_updated(policy: str) -> None:
    plain, managed = ReadsThenUpdates(), ReadsThenUpdates()
    compiled = overspill.compile(managed, budget="1GiB", policy=policy, store="host")
    x = torch.ones(64, 8)
    for _ in range(2):
        for model, call in ((plain, plain), (managed, compiled)):
            model.zero_grad()
            call(x).backward()
        assert same_bits(plain.weight.grad, managed.weight.grad)
        assert same_bits(plain.state, managed.state)


def test_outputs_that_are_views_of_each_other_and_of_inputs() -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x):
            one = torch.relu(self.linear(x))
            left, right = one.chunk(2, dim=1)
            return one.t(), left * 2, right.reshape(-1), x[1:]

    torch.manual_seed(0)
    plain = Views()
    managed = copy.deepcopy(plain)
    compiled = lean(managed)
    x = torch.randn(32, 64)
    for call in (plain, compiled):
        outs = call(x)
        sum(o.square().sum() for o in outs).backward()
    assert all(same_bits(a, b) for a, b in zip(plain(x), compiled(x), strict=True))
    assert same_gradients(managed, plain)


def test_sparse_gradients_are_refused_with_what_to_do() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(100, 8, sparse=True)

        def forward(self, tokens):
            return self.embedding(tokens).sum()

    with pytest.raises((UnsupportedError, RuntimeError), match="sparse"):
        overspill.compile(Sparse(), budget="1GiB", store="host")(torch.arange(10)).backward()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"budget": "12XB"}, "not a size"),
        ({"budget": "1GiB", "policy": "vdn-all"}, "'vdnn-all'"),
        ({"budget": "1GiB", "backend": "tvm"}, "unknown backend"),
        ({"budget": "1GiB", "reserve": "much"}, "not a size"),
    ],
)
def test_wrong_arguments_are_refused_when_they_are_given(twins, options, text) -> None:
    with pytest.raises(RequestError, match=text):
        overspill.compile(twins[1], **options)


def test_a_batch_of_a_wrong_shape_is_told_in_two_lines() -> None:
    compiled = overspill.compile(nn.Linear(4, 3), budget="1MiB", store="host")
    with pytest.raises(RuntimeError, match="Linear does not") as caught:
        compiled(torch.randn(8, 5))
    problem, remedy = str(caught.value).split("\n")
    assert "[8, 5]" in problem
    assert "shapes" in remedy
    assert "Dynamo failed" in str(caught.value.__cause__)


def test_a_store_that_does_not_fit_the_device_is_refused(twins) -> None:
    compiled = overspill.compile(twins[1], budget="1GiB", store="pinned")
    with pytest.raises(RequestError, match="pinned"):
        compiled(batch()[0])


@pytest.mark.long
def test_torchs_own_checkpointing_inside_the_model_is_planned_over() -> None:
    class Checkpointed(Net):
        def forward(self, x):
            x = torch.utils.checkpoint.checkpoint(self.features, x, use_reentrant=False)
            return self.head(self.drop(x.mean((2, 3))))

    torch.manual_seed(0)
    plain = Checkpointed()
    managed = copy.deepcopy(plain)
    # Plain PyTorch runs the region twice and so updates batch norm's statistics once more; compare with one run.
    reference = Net()
    reference.load_state_dict(plain.state_dict())
    compiled = lean(managed)
    assert same(train(reference, reference, *batch()), train(managed, compiled, *batch()))


class FrozenStart(nn.Module):
    """Frozen words, whose output is told to require gradients, as peft's models are for checkpoints, and a trained layer."""

    def __init__(self, *, returns_leaf: bool = False) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(16, 32).requires_grad_(False), nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.words.register_forward_hook(lambda *given: given[-1].requires_grad_(True))
        self.returns_leaf = returns_leaf

    def forward(self, x):
        start = self.words(x)
        loss = self.layer(checkpoint(self.frozen, start, use_reentrant=False).sin()).square().mean()
        return (loss, start) if self.returns_leaf else loss


def frozen_start_trained(compiled: bool, **options):
    torch.manual_seed(0)
    model = FrozenStart(**options)
    call = overspill.compile(model, budget=1.0, store="host") if compiled else model
    optimizer = torch.optim.SGD(model.layer.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        found = call(torch.arange(12).reshape(3, 4))
        loss, *leaf = found if isinstance(found, tuple) else (found,)
        (loss + sum(t.sum() for t in leaf)).backward()
        optimizer.step()
    leaves = [t.grad for t in leaf]
    return [loss.detach(), *leaves, *(p.detach() for p in model.parameters())], call


@pytest.mark.short("True")
@pytest.mark.parametrize("returns_leaf", [False, True])
def test_a_frozen_start_that_is_told_to_require_gradients_ends_no_graph(returns_leaf: bool) -> None:
    expected, _ = frozen_start_trained(compiled=False, returns_leaf=returns_leaf)
    found, call = frozen_start_trained(compiled=True, returns_leaf=returns_leaf)
    assert len(expected) == len(found)
    assert all(map(same_bits, found, expected))
    assert len(call.overspill.plans) == 1 or returns_leaf


def test_where_the_update_does_not_fit_parameters_and_state_move() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    x, y = torch.randn(8, 64), torch.randn(8, 8)
    with pytest.raises(InfeasibleBudgetError, match="minimum of policy") as error:
        overspill.compile(model, budget="64KiB", store="host")(x)
    assert "overspill.train_step" not in str(error.value)
    enough = int(1.05 * error.value.floor_bytes)  # the target is on the device too
    compiled = overspill.compile(model, budget=enough, store="host")
    F.mse_loss(compiled(x), y).backward()
    optimizer.step()
    assert compiled.overspill.loop.is_in_force
    assert compiled.overspill.peak_bytes <= enough < 4.5 * sum(p.nbytes for p in model.parameters())


@pytest.mark.long
def test_attention_that_leaves_under_inductor_comes_back_in_the_order_it_is_read_in() -> None:
    from functools import partial

    from overspill.job import Job
    from overspill.models import load
    from overspill.runtime.options import Options
    from overspill.runtime.training import train, train_plain

    job = Job(partial(load, "gpt2", small=True), 4)
    options = Options(budget=0.8, store="host", backend="inductor", partition=1.0)
    run = train(job, options, steps=2)
    assert run.offloaded_bytes > 0
    assert run.losses == train_plain(job, options, steps=2).losses


def test_batch_norm_over_a_transposed_input_in_evaluation() -> None:
    """The kernel gives another layout than PyTorch's fake one; a view of it would fail."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.out(self.norm(x.transpose(1, 2)).transpose(1, 2))

    model, x = Transposed().eval(), torch.randn(4, 5, 6)
    with torch.no_grad():
        assert torch.equal(overspill.compile(model, budget="1GiB")(x), model(x))

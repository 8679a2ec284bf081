"""What a whole step refuses, with one line that says what was wrong and what would work; and it leaves no trace then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import OPTIMIZERS, Mlp, Pair, Plain, batch_for, cross_entropy, made
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.prune import l1_unstructured

import overspill
from overspill.core.errors import OverspillError, RequestError, UnsupportedError
from overspill.runtime.reachable import same_bits
from overspill.runtime.step.residency import Guarded
from overspill.runtime.step.train_step import TrainStep
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.host_store import HostStore


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


def step_for(model: nn.Module, optimizer: Any = None, loss_fn: Any = cross_entropy, **options: Any) -> TrainStep:
    return overspill.train_step(model, loss_fn, optimizer or OPTIMIZERS["sgd"](model.parameters()), **options)


OPTIMIZERS_REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "LBFGS": (torch.optim.LBFGS, "LBFGS.*as AdamW"),
    "SparseAdam": (torch.optim.SparseAdam, "SparseAdam.*sparse; use"),
    "closure": (lambda p: NeedsClosure(p, 0.1), r"NeedsClosure\.step .*\(closure\)"),
    "capturable": (lambda p: torch.optim.Adam(p, capturable=True), "needs capturable=False"),
    "differentiable": (lambda p: torch.optim.Adam(p, differentiable=True), "needs differentiable=False"),
    "no optimizer": (list, r"Parameter; .*torch\.optim\.Optimizer"),
    "some are left out": (lambda p: torch.optim.SGD([*p][:2], 0.1), "no optimizer.*allow_untrained"),
    "one is in two": (lambda p: [torch.optim.SGD(p, 0.1), torch.optim.SGD([p[0]], 0.1)], "two optimizers"),
}


@pytest.mark.parametrize(("make", "message"), OPTIMIZERS_REFUSED.values(), ids=OPTIMIZERS_REFUSED)
def test_an_optimizer_that_cannot_be_cut_into_updates_is_named(make: Callable[[Any], Any], message: str) -> None:
    model = made()
    with pytest.raises(OverspillError, match=message):
        step_for(model, make([*model.parameters()]))
    assert not any(isinstance(m._parameters, Guarded) for m in model.modules())


class Centred(nn.Module):
    """A loss with a running centre, assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(3))

    def forward(self, y: Tensor) -> Tensor:
        loss = (y - self.centre).square().mean()
        self.centre = 0.9 * self.centre + 0.1 * y.detach().mean(0)
        return loss


def test_a_buffer_beside_the_model_that_is_assigned_anew_is_as_before() -> None:
    criterion, model = Centred(), nn.Linear(6, 3)
    step = step_for(model, loss_fn=lambda model, x: criterion(model(x)))
    with pytest.raises(UnsupportedError, match="copy_"):
        step(torch.randn(4, 6))
    assert torch.equal(criterion.centre, torch.zeros(3))


def test_muon_is_whole_tensors_at_a_time() -> None:
    class Matrices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(12, 16, bias=False), nn.Tanh(), nn.Linear(16, 5, bias=False))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    pair = Pair(Matrices, lambda p: torch.optim.Muon(p, 0.01))
    pair.train(3)
    pair.assert_same()


def hooked(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def test_step_pre_hooks_are_refused() -> None:
    model = made()
    with pytest.raises(UnsupportedError, match=r"step pre-hooks.*clip_norm"):
        step_for(model, hooked(OPTIMIZERS["sgd"](model.parameters())))


def test_parameters_of_another_model_are_refused() -> None:
    model = made()
    with pytest.raises(RequestError, match="9 parameters"):
        step_for(model, OPTIMIZERS["sgd"](made().parameters()))


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4, sparse=True)


class SparseBuffer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("adjacency", torch.eye(2).to_sparse())


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Packed(nn.Parameter):
    """A parameter of a subclass with memory of its own, as bitsandbytes' quantised ones."""


def packed() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = Packed(model.weight.detach(), requires_grad=False)
    return model


def offloaded(model: nn.Module) -> nn.Module:
    """As accelerate's `cpu_offload` leaves a model."""
    model._hf_hook = object()  # type: ignore[assignment]
    return nn.Sequential(model.to("meta"), nn.Linear(2, 2))


MODELS_REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse gradients": (Sparse, "embed .*sparse=False"),
    "sparse buffer": (SparseBuffer, "adjacency .*index_add"),
    "complex": (Complex, "weight is complex"),
    "of a subclass": (packed, "a Packed.*overspill.compile"),
    "not initialised": (lambda: nn.LazyLinear(3), "not initialised"),
    "no values": (lambda: nn.Linear(2, 2, device="meta"), "on meta, .*load"),
    "values that hooks bring": (lambda: offloaded(nn.Linear(2, 2)), "on meta, .*accelerate's"),
    "two devices": (lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")), "2 devices.*cpu, meta"),
    "no parameters": (nn.ReLU, "no parameters"),
}


@pytest.mark.parametrize(("make", "message"), MODELS_REFUSED.values(), ids=MODELS_REFUSED)
def test_a_model_whose_parameters_cannot_move_is_refused(make: Callable[[], nn.Module], message: str) -> None:
    model = make()
    other = torch.optim.SGD(made().parameters(), 0.1)
    with pytest.raises(OverspillError, match=message):
        step_for(model, other)


def test_a_second_step_of_the_same_model_is_refused_until_the_first_is_closed() -> None:
    model = made()
    first = step_for(model)
    with pytest.raises(RequestError, match=r"close\(\) first"):
        step_for(model)
    first.close()
    step_for(model).close()


def vector_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def item_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = cross_entropy(model, x, y)
    return loss * loss.item()


def branching_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model, x, y) if model(x).sum() > 0 else model(x).sum()


def unique_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x)[model(x).argmax(1).unique()].sum()


def numpy_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model, x, y) * float(x.detach().numpy().sum())


OTHER = nn.BatchNorm1d(12)


def stranger_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    OTHER.running_mean[:4].mul_(0.9)
    return cross_entropy(model, OTHER(x).detach(), y)


ADJACENCY = torch.eye(12).to_sparse_csr()


def sparse_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model, torch.sparse.mm(ADJACENCY, x.T).T, y)


LOSSES_REFUSED: dict[str, tuple[Any, str]] = {
    "not scalar": (vector_loss, r"shape \(8,\)"),
    "no tensor": (lambda model, x, y: 3.0, "loss is float"),
    "of no parameter": (lambda model, x, y: x.sum(), "no parameter|depends on"),
    "item()": (item_loss, r"\.item\(\).*torch\.where.*overspill\.compile"),
    "if": (branching_loss, r"reads .*torch\.where.*overspill\.compile"),
    "unique": (unique_loss, r"shapes .*\(.*line \d+\)"),
    "numpy": (numpy_loss, r"numpy\(\)"),
    "another model's state": (stranger_loss, "as a buffer"),
    "sparse": (sparse_loss, r"sparse tensor \(.*index_add"),
    "no loss": (None, "no loss|loss is"),
}


@pytest.mark.parametrize(("loss", "message"), LOSSES_REFUSED.values(), ids=LOSSES_REFUSED)
def test_a_loss_that_cannot_be_captured_is_one_clear_error(loss: Any, message: str) -> None:
    model = made()
    step = step_for(model, None, loss)
    inputs = batch_for(model)[: 1 if loss is None else 2]
    with pytest.raises(OverspillError, match=message) as raised:
        step(*inputs)
    assert "\n" not in str(raised.value)
    assert not step.is_unfinished
    step.close()
    assert model(inputs[0]).isfinite().all()


def test_inputs_that_cannot_be_right_are_refused() -> None:
    model = made()
    step = step_for(model)
    x, y = batch_for(model)
    with pytest.raises(RequestError, match=r"input 0 .*\.to\('cpu'\)"):
        step(x.to("meta"), y)
    with pytest.raises(RequestError, match=r"input 0 .*detach\(\)"):
        step(x.requires_grad_(), y)
    with pytest.raises(RequestError, match="3 equal micro-batches"):
        step_for(made(), accumulate=3)(x.detach(), y)


@pytest.mark.long
def test_an_input_that_is_changed_lies_in_no_others_memory() -> None:
    """A step captured for inputs apart would read what another one was before."""
    model = made()
    (x, _), (other, y) = batch_for(model), batch_for(model)
    step = step_for(model, None, lambda model, x, other, y: cross_entropy(model, x.mul_(0.5), y) + model(other).sum())
    assert step(x, other, y).isfinite()
    before = x.clone()
    with pytest.raises(UnsupportedError, match=r"tensor 0 .*clone\(\)"):
        step(x, x, y)
    assert torch.equal(x, before)
    assert not step.is_unfinished
    assert step(x, x.clone(), y).isfinite()


def rounded() -> torch.autograd.graph.saved_tensors_hooks:
    return torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float())


def rounding_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with rounded():
        return cross_entropy(model, x, y)


def test_hooks_that_change_what_autograd_keeps_are_refused() -> None:
    """Around a step and within it; PyTorch's own give the same numbers."""
    model = made()
    step = step_for(model)
    inputs = batch_for(model)
    with rounded(), pytest.raises(UnsupportedError, match="saved_tensors_hooks"):
        step(*inputs)
    with torch.autograd.graph.save_on_cpu():
        assert step(*inputs).isfinite()
    with pytest.raises(UnsupportedError, match="saved_tensors_hooks"):
        step_for(made(), None, rounding_loss)(*inputs)


def test_a_plain_mistake_in_the_model_is_shown_as_it_is() -> None:
    model = made()
    with pytest.raises(RuntimeError, match=r"reduction dim|mat1"):
        step_for(model)(torch.randn(8, 13), torch.randint(0, 5, (8,)))


def test_an_error_of_the_loss_function_leaves_all_as_it_was_and_says_so() -> None:
    def picky(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model, x, y)
        if x[0, 0] > 5:
            raise ValueError("too large")
        return loss

    pair = Pair(Mlp, loss_fn=picky)
    pair.train(2)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="too large") as error:
        pair.step(pair.inputs[0] + 9, pair.inputs[1])
    assert "nothing has run" in error.value.__notes__[0]
    assert torch.equal(torch.get_rng_state(), before)
    pair.train()
    pair.assert_same()


def sized() -> nn.Module:
    model = nn.Linear(12, 5)
    model.register_buffer("mean", torch.zeros(1))
    model.register_forward_pre_hook(lambda m, given: (m.mean.resize_(12).copy_(given[0].mean(0)), given)[1])
    return model


def quantized(**version: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 5))
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm", **version)
    return torch.ao.quantization.prepare_qat(model)


@pytest.mark.short("quantized", "sized")
@pytest.mark.parametrize("make", [sized, quantized, lambda: quantized(version=0)])
def test_a_model_that_sizes_its_buffers_at_the_first_call_is_refused_until_then(make: Callable[[], nn.Module]) -> None:
    pair = Pair(make, options={"budget": "1MiB"})
    with pytest.raises(UnsupportedError, match="resizes"):
        pair.step(*pair.inputs)
    for model in (pair.plain.model, pair.model):
        model(pair.inputs[0])
    pair.train(2)
    pair.assert_same()


@pytest.mark.long
def test_a_pruned_model_is_pruned_again_behind_a_call() -> None:
    def trained(*, planned: bool) -> list[Tensor]:
        model, losses = made(), []
        l1_unstructured(model.last, "weight", 0.3)
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        step = step_for(model, optimizer) if planned else Plain(model, optimizer)
        for seed in range(4):
            torch.manual_seed(seed)
            losses.append(step(*batch_for(model)))
            if seed == 1:
                model.eval()(batch_for(model)[0])
                l1_unstructured(model.train().last, "weight", 0.3)
        return [*losses, *model.state_dict().values()]

    assert all(map(same_bits, trained(planned=True), trained(planned=False)))


def test_a_parameter_that_was_replaced_is_noticed() -> None:
    pair = Pair(Mlp)
    pair.train(2)
    pair.model.last.weight = nn.Parameter(torch.zeros(5, 32))
    with pytest.raises(RequestError, match=r"last\.weight .*close\(\).*anew"):
        pair.step(*pair.inputs)
    pair.step.close()


def test_weights_assigned_by_load_state_dict_are_noticed() -> None:
    pair = Pair(Mlp)
    pair.train(2)
    pair.model.load_state_dict(made().state_dict(), assign=True)
    with pytest.raises(RequestError, match="not the parameter"):
        pair.step(*pair.inputs)


def test_a_model_of_another_dtype_is_noticed() -> None:
    pair = Pair(Mlp)
    pair.train(2)
    pair.model.double()
    with pytest.raises(RequestError, match=r"first\.weight .*float64.*anew"):
        pair.step(pair.inputs[0].double(), pair.inputs[1])


def test_hooks_on_modules_are_part_of_the_step() -> None:
    def doubled(_module: nn.Module, _args: Any, result: Tensor) -> Tensor:
        return 2 * result

    def hooked_model() -> nn.Module:
        model = Mlp()
        model.last.register_forward_hook(doubled)
        return model

    pair = Pair(hooked_model)
    pair.train(2)
    pair.assert_same()


def test_a_buffer_that_is_assigned_anew_is_refused() -> None:
    class Counting(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen = self.seen + 1
            return super().forward(x)

    model = made(Counting)
    with pytest.raises(UnsupportedError, match=r"seen anew .*copy_\(\)"):
        step_for(model)(*batch_for(model))


def test_checksums_are_for_the_cpu() -> None:
    with pytest.raises(RequestError, match="checksum=True"):
        make_engine(HostStore(), torch.device("cuda"), checksum=True)


@pytest.mark.parametrize(("options", "message"), [
    ({"accumulate": 0}, "accumulate=0"),
    ({"clip_norm": -1.0}, "clip_norm=-1.0"),
    ({"policy": "best"}, "unknown policy"),
    ({"store": "tape"}, "unknown store"),
])  # fmt: skip
def test_impossible_options_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    model = made()
    with pytest.raises(RequestError, match=message):
        step_for(model, **options)
    assert not any(isinstance(m._parameters, Guarded) for m in model.modules())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_nested_tensors_are_refused(backend: str) -> None:
    def pads(model: nn.Module, one: Tensor, other: Tensor) -> Tensor:
        rows = torch.nested.nested_tensor([one, other], layout=torch.jagged)
        return torch.nested.to_padded_tensor(model(rows), 0.0).square().mean()

    model, parts = nn.Linear(4, 4), (torch.randn(3, 4), torch.randn(5, 4))
    step = step_for(model, loss_fn=pads, budget="1GiB", backend=backend)
    with pytest.raises(UnsupportedError, match=r"nested tensor \(.*line \d+"):
        step(*parts)
    with pytest.raises(UnsupportedError, match=r"input 0 .*nested"):
        step(torch.nested.nested_tensor([*parts], layout=torch.jagged), parts[0])
    torch._dynamo.reset()
    compiled = overspill.compile(nn.Linear(4, 4), budget="1GiB", backend=backend)
    with pytest.raises(UnsupportedError, match=r"model .*nested tensor"):
        compiled(torch.nested.nested_tensor([*parts], layout=torch.jagged))


def test_data_that_forward_assigns_is_refused() -> None:
    def clips(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        weight = model.get_parameter("first.weight")
        weight.data = weight.data.clamp(-0.1, 0.1)
        return cross_entropy(model, x, y)

    model = made()
    with pytest.raises(UnsupportedError, match=r"the data .*line \d+"):
        step_for(model, loss_fn=clips, budget="1GiB")(*batch_for(model))

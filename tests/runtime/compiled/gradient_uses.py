"""What programs do with gradients, by name: each use gives what is compared with that of plain gradients."""

import contextlib
import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.runtime.transfer.engines import CPU
from torch import Tensor, nn
from torch.nn import utils

from overspill.runtime.compiled.stored_gradient import StoredGradient
from overspill.runtime.transfer.engine import TransferEngine


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sends(engine: TransferEngine) -> Callable[[Tensor], None]:
    def send(parameter: Tensor) -> None:
        if not isinstance(parameter.grad, StoredGradient):
            with contextlib.suppress(ValueError):  # of buckets, and of `create_graph`
                parameter.grad = StoredGradient.of(parameter.grad, engine)

    return send


def trained(engine: TransferEngine | None, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    """A model after backward; its gradients are in the store of `engine`, if given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8)).to(dtype)
    if engine is not None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(sends(engine))
    x = torch.randn(16, 64).to(dtype)
    model(x).square().mean().backward()
    return model, x


def value(gradient: Tensor | None) -> Tensor | None:
    return copy.deepcopy(gradient) if isinstance(gradient, StoredGradient) else gradient


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        one, other = value(one.detach()), value(other.detach())
        return type(one) is type(other) is Tensor and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


USES: dict[str, Callable[[nn.Module, Tensor], Any]] = {}
STAY = {"flat", "view_write", "index_write", "numpy_sum", "numpy_write", "data_ptr", "storage", "dlpack", "numpy_array", "transpose_", "map_", "apply_", "numpy_dlpack", "data_set", "item", "to_double"}  # fmt: skip
"""Uses after which a gradient is on the device for good."""


def use(function: Callable[[nn.Module, Tensor], Any]) -> Callable[[nn.Module, Tensor], Any]:
    USES[function.__name__] = function
    return function


@use
def accumulate(m, x):
    m(x * 2).sum().backward()


@use
def clip(m, x):
    return utils.clip_grad_norm_(m.parameters(), 0.1)


@use
def clip_foreach(m, x):
    return utils.clip_grad_norm_(m.parameters(), 0.1, foreach=True)


@use
def clip_loop(m, x):
    return utils.clip_grad_norm_(m.parameters(), 0.1, foreach=False)


@use
def clip_inf(m, x):
    return utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=float("inf"))


@use
def clip_twice_and_scale(m, x):
    norms = [utils.clip_grad_norm_(m.parameters(), limit) for limit in (0.3, 0.1)]
    for p in m.parameters():
        p.grad.mul_(0.3).mul_(torch.tensor(1.7)).mul_(3)
    return norms


@use
def clip_value(m, x):
    return utils.clip_grad_value_(m.parameters(), 0.001)


@use
def clip_value_loop(m, x):
    return utils.clip_grad_value_(m.parameters(), 0.001, foreach=False)


@use
def total_norm(m, x):
    return utils.get_total_norm(gradients(m))


@use
def vector_norm(m, x):
    return [torch.linalg.vector_norm(g) for g in gradients(m)]


@use
def unscale(m, x):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    return scaler._found_inf_per_device(optimizer)[CPU]


@use
def scaler_step(m, x):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    optimizer.zero_grad()
    scaler.scale(m(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return [*m.parameters()]


@use
def scaler_step_of_fused_optimizer(m, x):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)
    optimizer.zero_grad()
    scaler.scale(m(x).sum()).backward()
    scaler.step(optimizer)
    return [*m.parameters()]


@use
def zero_keep(m, x):
    m.zero_grad(set_to_none=False)


@use
def zero_none(m, x):
    m.zero_grad()


@use
def optimizer_zero_keep(m, x):
    torch.optim.SGD(m.parameters(), lr=0.1).zero_grad(set_to_none=False)


@use
def foreach_zero(m, x):
    torch._foreach_zero_(gradients(m))


@use
def data_norm(m, x):
    return torch.stack([g.data.norm(2) for g in gradients(m)])


@use
def hist(m, x):
    return m[0].weight.grad.histc(10)


@use
def numpy_sum(m, x):
    return m[0].weight.grad.cpu().numpy().sum()


@use
def numpy_write(m, x):
    m[0].weight.grad.numpy()[:] = 3


@use
def numpy_array(m, x):
    return [np.asarray(g).sum() for g in gradients(m)]


@use
def detach_clone(m, x):
    return [g.detach().clone() for g in gradients(m)]


@use
def clone(m, x):
    copies = [g.clone() for g in gradients(m)]
    copies[0].zero_()
    return copies


@use
def div_(m, x):
    for g in gradients(m):
        g.div_(4)


@use
def div_data(m, x):
    for g in gradients(m):
        g.data.div_(4)


@use
def detach_write(m, x):
    for g in gradients(m):
        g.detach().add_(1)


@use
def iadd(m, x):
    for p in m.parameters():
        p.grad += 0.01 * p


@use
def assign(m, x):
    for p in m.parameters():
        p.grad = p.grad * 0.5


@use
def nan_to_num(m, x):
    for g in gradients(m):
        torch.nan_to_num_(g)


@use
def isfinite(m, x):
    return all(torch.isfinite(g).all().item() for g in gradients(m))


@use
def flat(m, x):
    return torch.cat([g.flatten() for g in gradients(m)])


@use
def vector(m, x):
    return torch.stack([g for g in gradients(m) if g.dim() == 1][:1])


@use
def view_write(m, x):
    for g in gradients(m):
        g.view(-1)[:4].zero_()


@use
def index_write(m, x):
    m[0].weight.grad[3] = 0


@use
def out(m, x):
    for g in gradients(m):
        assert torch.mul(torch.full_like(g, 2.0), 3.0, out=g) is g


@use
def swap_contents(m, x):
    for g in gradients(m):
        g.copy_(g.clone().flip(0))


@use
def copy_itself(m, x):
    for g in gradients(m):
        g.copy_(g)


@use
def add_itself(m, x):
    for g in gradients(m):
        g.add_(g)


@use
def foreach_with_itself(m, x):
    g = m[0].weight.grad
    torch._foreach_add_([g, g, m[2].bias.grad], [g, m[0].weight, m[2].bias])
    return torch._foreach_norm([g, g.detach()])


@use
def foreach_scalars(m, x):
    lists = gradients(m), [*m.parameters()]
    with torch.no_grad():
        torch._foreach_addcmul_(*lists, lists[1], torch.tensor([1.0, 2.0, 3.0, 4.0]))
        torch._foreach_addcdiv_(*lists, lists[1], [1.0, 2.0, 3.0, 4.0])
        torch._foreach_mul_(lists[0], [1.0, 2.0, 3.0, 4.0])
        torch._foreach_mul_(lists[0], [*lists[1]])
        torch._foreach_copy_(lists[1], lists[0])
        return [*torch._foreach_pow(2.0, lists[0]), *torch._foreach_abs(lists[0]), *torch._foreach_max(lists[0])]


@use
def noise(m, x):
    torch.manual_seed(3)
    for g in gradients(m):
        g.add_(torch.randn_like(g))


@use
def empty_like_strides(m, x):
    return [(torch.empty_like(g).stride(), g.new_zeros(3).sum()) for g in gradients(m)]


@use
def deepcopy_model(m, x):
    return copy.deepcopy(m)[0].weight.grad


@use
def deepcopy_is_independent(m, x):
    copied = copy.deepcopy(gradients(m))
    copied[0].zero_()
    return copied


@use
def save(m, x):
    file = io.BytesIO()
    torch.save(gradients(m), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@use
def pickled(m, x):
    return pickle.loads(pickle.dumps(gradients(m)))


@use
def printed(m, x):
    return [f"{m[2].bias.grad}", repr(m[0].weight.grad), f"{m[2].bias.grad.sum():.3f}"]


@use
def item(m, x):
    return m[2].bias.grad[0].item()


@use
def tolist(m, x):
    return m[2].bias.grad.tolist()


@use
def iterate(m, x):
    return [float(element) for element in m[2].bias.grad.clone()]


@use
def make_tensor(m, x):
    return torch.as_tensor(m[2].bias.grad).sum()


@use
def compare(m, x):
    return [bool((g == g).all()) for g in gradients(m)] + [torch.equal(g, g) for g in gradients(m)]


@use
def compiled_clip(m, x):
    return torch.compile(utils.clip_grad_norm_, backend="eager")([*m.parameters()], 0.1)


@use
def autograd_grad(m, x):
    return torch.autograd.grad(m(x).sum(), [*m.parameters()])


@use
def create_graph(m, x):
    m.zero_grad()
    m(x).square().mean().backward(create_graph=True)


@use
def create_graph_on_top(m, x):
    m(x).square().mean().backward(create_graph=True)
    penalty = sum(p.grad.square().sum() for p in m.parameters())
    return torch.autograd.grad(penalty, [*m.parameters()])


@use
def part_of_a_loss(m, x):
    weight = m[0].weight
    return torch.autograd.grad((weight * weight.grad).sum().square(), [weight])


@use
def data_ptr(m, x):
    return [g.data_ptr() == g.untyped_storage().data_ptr() != 0 for g in gradients(m)]


@use
def storage(m, x):
    return [(g.untyped_storage().nbytes(), g.storage()[0]) for g in gradients(m)]


@use
def dlpack(m, x):
    return torch.from_dlpack(m[0].weight.grad)


@use
def numpy_dlpack(m, x):
    return torch.from_numpy(np.from_dlpack(m[0].weight.grad).copy())


@use
def map_(m, x):
    return m[2].bias.grad.map_(m[2].bias.detach(), lambda a, b: a + 2 * b)


@use
def apply_(m, x):
    return m[2].bias.grad.apply_(lambda a: a + 1)


@use
def transpose_(m, x):
    g = m[2].weight.grad
    view = g.detach()
    return g.t_().shape, g.stride(), view.shape, g.add_(1), view


@use
def data_set(m, x):
    g = m[0].weight.grad
    kept = g.detach()
    g.data = torch.ones(64, 64)
    return g.add_(1), kept


@use
def inference(m, x):
    with torch.inference_mode():
        return [g.sum().item() for g in gradients(m)]


@use
def tensor_of_it(m, x):
    with warnings.catch_warnings(action="ignore"):
        return torch.tensor(m[0].weight.grad), torch.Tensor(m[2].bias.grad)


@use
def to_the_same_device(m, x):
    return m.to("cpu")[0].weight.grad


@use
def to_double(m, x):
    m.double()
    return [p.grad + 1 for p in m.parameters()]


@use
def lightning_grad_norm(m, x):
    norms = {name: p.grad.data.norm(2) for name, p in m.named_parameters()}
    return [*norms.values(), torch.tensor([*norms.values()]).norm(2)]


@use
def vmapped(m, x):
    return torch.vmap(lambda row: row.sin().sum())(m[0].weight.grad)


@use
def compiled_function(m, x):
    return torch.compile(lambda g: (g * 2).sum(), backend="aot_eager")(m[0].weight.grad)


@use
def hooks(m, x):
    seen = []
    m[0].weight.register_hook(lambda g: seen.append(float(g.sum())) or g * 2)
    m[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(float(p.grad.sum())))
    m(x).square().mean().backward()
    return seen


def _stepping(name: str, **settings: Any) -> None:
    def step(m, x):
        optimizer = getattr(torch.optim, name)(m.parameters(), **settings)
        for _ in range(2):
            optimizer.step()
            m(x).square().mean().backward()
        state = [v for p in m.parameters() for v in optimizer.state[p].values() if isinstance(v, Tensor)]
        return [*m.parameters(), *state]

    USES[f"{name}{sorted(settings.items())}"] = step


for name, settings in {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1}, "Adam": {"amsgrad": True}, "AdamW": {}, "Adagrad": {}, "NAdam": {},
    "RMSprop": {"momentum": 0.9, "centered": True}, "Adadelta": {}, "Adamax": {}, "RAdam": {}, "ASGD": {}, "Rprop": {},
    "Adafactor": {},
}.items():  # fmt: skip
    for foreach in (False, True):
        _stepping(name, **settings, foreach=foreach)
    if name in ("SGD", "Adam", "AdamW", "Adagrad"):
        _stepping(name, **settings, fused=True)

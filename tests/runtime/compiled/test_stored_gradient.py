"""Whatever a program does with a gradient in the store, it gets the bits of a plain gradient."""

import copy
import gc
import math
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import pytest
import torch
from tests.runtime.compiled.gradient_uses import STAY, USES, gradients, numbers, same, trained
from tests.runtime.transfer.engines import CPU, with_late_streams
from torch import Tensor, nn
from torch.nn import utils

from overspill.errors import OverspillError, StoreError
from overspill.runtime.compiled.stored_gradient import StoredGradient
from overspill.runtime.step.residency import Spec
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.transfer.engine import TransferEngine, make_engine
from overspill.runtime.transfer.host_store import HostStore


@pytest.fixture(params=["threads", "late streams"])
def engine(request: pytest.FixtureRequest) -> Iterator[TransferEngine]:
    made = make_engine(HostStore(), CPU, checksum=True) if request.param == "threads" else with_late_streams()
    yield made
    assert not made._arriving
    assert getattr(made.store, "copied_dead_memory", 0) == 0
    made.close()


on_threads = pytest.mark.parametrize("engine", ["threads"], indirect=True)
"""For tests of errors, which a stream would raise later."""


class Transfers:
    """Counts the transfers of an engine inside the block."""

    def __init__(self, engine: TransferEngine) -> None:
        self.engine = engine

    def __enter__(self) -> Self:
        self.before = self.engine.offloaded_bytes, self.engine.prefetched_bytes
        return self

    def __exit__(self, *_: object) -> None:
        self.written = self.engine.offloaded_bytes - self.before[0]
        self.read = self.engine.prefetched_bytes - self.before[1]


def has_plain_bits(name: str, dtype: torch.dtype) -> bool:
    """NumPy does not know bfloat16, and fused SGD in it gives other bits in each run."""
    return dtype != torch.bfloat16 or not name.startswith(("numpy", "SGD[('fused'"))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, marks=[] if dtype == torch.float32 and not number % 3 else [pytest.mark.long])
        for number, name in enumerate(USES)
        for dtype in (torch.float32, torch.bfloat16)
        if has_plain_bits(name, dtype)
    ],
)
def test_a_use_gives_the_bits_of_plain_gradients(name: str, dtype: torch.dtype, engine: TransferEngine) -> None:
    outcomes = []
    for of in (None, engine):
        model, x = trained(of, dtype)
        result = USES[name](model, x)
        outcomes.append((result, gradients(model)))
    (plain, plain_gradients), (stored, stored_gradients) = outcomes
    if name not in STAY and not name.startswith(("create_graph", "zero_none", "assign", "hooks")):
        assert all(g is None or g.is_stored for g in stored_gradients)
    assert same(plain, stored)
    assert same([g is None for g in plain_gradients], [g is None for g in stored_gradients])
    assert same([g for g in plain_gradients if g is not None], [g for g in stored_gradients if g is not None])


# -- transfers and memory


def stored(engine: TransferEngine, *shapes: tuple[int, ...]) -> list[StoredGradient]:
    return [StoredGradient.of(numbers(*shape, seed=seed), engine) for seed, shape in enumerate(shapes)]


def test_reading_twice_without_a_change_writes_once(engine: TransferEngine) -> None:
    with Transfers(engine) as sent:
        (g,) = stored(engine, (8, 8))
        assert float(g.sum()) == float(g.sum()) == float(numbers(8, 8).sum())
    assert (sent.written, sent.read) == (g.nbytes, 2 * g.nbytes)


def test_a_change_is_written_once_more_and_into_the_same_slot(engine: TransferEngine) -> None:
    (g,) = stored(engine, (8, 8))
    used = engine.store.used_bytes
    with Transfers(engine) as sent:
        g.add_(1)
    assert (sent.written, sent.read) == (g.nbytes, g.nbytes)
    assert engine.store.peak_bytes == used


def test_products_and_overwriting_bring_nothing(engine: TransferEngine) -> None:
    g, other = stored(engine, (8, 8), (8, 8))
    with Transfers(engine) as sent:
        g.mul_(0.5).mul_(torch.tensor(3.0))
        torch._foreach_mul_([g, other], torch.tensor(0.1))
        torch._foreach_mul_([g, other], 0.1)
    assert (sent.written, sent.read) == (0, 0)
    with Transfers(engine) as sent:
        g.zero_()
        torch._foreach_zero_([g, other])
        g.copy_(torch.ones(8, 8))
    assert (sent.written, sent.read) == (4 * g.nbytes, 0)
    assert torch.equal(g.take(), torch.ones(8, 8))
    assert torch.equal(other.take(), torch.zeros(8, 8))


def test_clipping_reads_each_gradient_once_and_writes_none(engine: TransferEngine) -> None:
    parameters = [nn.Parameter(torch.zeros(8, 8)) for _ in range(5)]
    for parameter, gradient in zip(parameters, stored(engine, *[(8, 8)] * 5), strict=True):
        parameter.grad = gradient
    with Transfers(engine) as sent:
        utils.clip_grad_norm_(parameters, 0.1)
    assert (sent.written, sent.read) == (0, 5 * 8 * 8 * 4)


def test_a_fused_optimizer_reads_gradients_and_does_not_write_them(engine: TransferEngine) -> None:
    parameter = nn.Parameter(torch.zeros(8, 8))
    (parameter.grad,) = stored(engine, (8, 8))
    with Transfers(engine) as sent:
        torch.optim.AdamW([parameter], fused=True).step()
    assert (sent.written, sent.read) == (0, parameter.grad.nbytes)


class Peak:
    """The most bytes that gradients have on the device at once, by the memory that an engine brings."""

    def __init__(self, engine: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live = self.most = 0
        prefetch = engine.prefetch

        def counted(handle: Tensor, *args: Any) -> Tensor:
            data = prefetch(handle, *args)
            self.live += data.nbytes
            self.most = max(self.most, self.live)
            weakref.finalize(data.untyped_storage(), self._died, data.nbytes)
            return data

        monkeypatch.setattr(engine, "prefetch", counted)

    def _died(self, nbytes: int) -> None:
        self.live -= nbytes


LIST_OPS: dict[str, Callable[[list[Any]], Any]] = {
    "norm": torch._foreach_norm,
    "add": lambda gradients: torch._foreach_add_(gradients, 1.0),
    "clip": lambda gradients: torch._foreach_clamp_max_(gradients, 0.1),
    "add tensors": lambda gradients: torch._foreach_add_(gradients, [torch.ones(100) for _ in gradients]),
    "unscale": lambda gradients: torch._amp_foreach_non_finite_check_and_unscale_(
        gradients, torch.zeros(1), torch.tensor(0.5)
    ),
}


@pytest.mark.parametrize("op", LIST_OPS)
def test_a_list_has_two_gradients_on_the_device_at_most(
    op: str, engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients, plain = stored(engine, *[(100,)] * 8), [numbers(100, seed=seed) for seed in range(8)]
    peak = Peak(engine, monkeypatch)
    assert same(LIST_OPS[op](gradients), LIST_OPS[op](plain))
    assert (peak.live, peak.most) == (0, 2 * 400)
    assert all(g.is_stored for g in gradients)
    assert same(gradients, plain)


def test_the_next_one_arrives_while_the_present_one_is_used(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gradients = stored(engine, *[(100,)] * 3)
    order = []
    for name in ("prefetch", "await_prefetch"):
        of_engine = getattr(engine, name)
        monkeypatch.setattr(engine, name, lambda tensor, f=of_engine, n=name: order.append(n) or f(tensor))
    torch._foreach_norm(gradients)
    assert order == ["prefetch", "await_prefetch", *["prefetch", "await_prefetch"] * 2]
    order.clear()
    torch.stack(gradients)
    assert order == ["prefetch"] * 3 + ["await_prefetch"] * 3


def test_a_stored_gradient_has_no_bytes_on_the_device(engine: TransferEngine) -> None:
    with LiveBytes(CPU) as live:
        g = StoredGradient.of(torch.ones(1000), engine)
        live.add([g, g.detach()])
        assert live.live_bytes == 8  # the handle
        live.add([g.take(), g])
        assert live.live_bytes == g.nbytes == 4000


def test_all_objects_over_it_gone_its_slot_is_free(engine: TransferEngine) -> None:
    (g,) = stored(engine, (8, 8))
    again, data = g.detach(), g.data
    for use in (torch.sum, torch.clone, repr, copy.deepcopy, pickle.dumps):
        use(g)
    again.add_(data)
    assert engine.stored_count == 1
    del g, again
    assert engine.stored_count == 1
    del data
    assert engine.stored_count == 0
    assert engine.store.used_bytes == 0


def test_training_leaves_nothing_in_the_store(engine: TransferEngine) -> None:
    model, x = trained(engine)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(x).square().mean().backward()
        utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        assert engine.stored_count == 4
        optimizer.zero_grad()
        assert engine.stored_count == 0


# -- taking it, giving it up


def test_taken_it_is_on_the_device_for_good(engine: TransferEngine) -> None:
    (g,) = stored(engine, (8, 8))
    alias = g.detach()
    g.mul_(0.3).mul_(0.7)
    real = g.take()
    assert type(real) is Tensor
    assert torch.equal(real, numbers(8, 8).mul_(0.3).mul_(0.7))
    assert not any(one.is_stored for one in (g, alias))
    assert engine.stored_count == 0
    g.add_(1)
    assert alias.take() is g.take() is real
    assert float(real[0, 0]) == float(alias[0, 0])
    # Also for code below the dispatcher.
    assert torch.equal(torch.from_dlpack(torch.utils.dlpack.to_dlpack(g)), real)
    other = torch.zeros(8, 8)
    other.data = alias
    assert torch.equal(other, real)


def test_given_up_it_is_empty(engine: TransferEngine) -> None:
    (g,) = stored(engine, (8, 8))
    alias = g.detach()
    factor = torch.tensor(0.3)
    g.mul_(factor).mul_(2)
    factor.fill_(9)
    handle, factors = g.give_up()
    data = engine.await_prefetch(engine.prefetch(handle))
    for one in factors:
        data.mul_(one)
    assert torch.equal(data, numbers(8, 8).mul_(0.3).mul_(2))
    uses = [
        g.sum, g.detach, g.zero_, g.numpy, g.tolist, g.take, g.give_up, g.data_ptr, alias.clone, lambda: g.mul_(2),
        lambda: torch.zeros(8, 8).add_(g), lambda: torch._foreach_mul_([g], 2.0), lambda: torch._foreach_norm([g]),
        lambda: repr(g), lambda: copy.deepcopy(g), lambda: pickle.dumps(g), lambda: torch.from_dlpack(g), g.t_,
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(OverspillError, match="gone"):
            use()
    assert not g.is_stored
    assert (g.shape, g.nbytes) == ((8, 8), 256)
    del handle
    assert engine.stored_count == 0


def test_what_is_on_the_device_cannot_be_given_up(engine: TransferEngine) -> None:
    (g,) = stored(engine, (8, 8))
    g.take()
    with pytest.raises(OverspillError, match="call take"):
        g.give_up()


def test_a_gradient_is_made_of_a_handle(engine: TransferEngine) -> None:
    real = numbers(8, 8).t()
    spec, handle = Spec.of(real), engine.offload(real)
    g = StoredGradient(handle, spec, engine)
    del handle
    assert g.stride() == (1, 8)
    assert same(g, real)
    with pytest.raises(ValueError, match="handle"):
        StoredGradient(None, spec, engine)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32])
def test_products_of_every_dtype_have_plain_bits(dtype: torch.dtype, engine: TransferEngine) -> None:
    plain = (numbers(50) * 10).to(dtype)
    g = StoredGradient.of(plain.clone(), engine)
    factors = (
        [3, torch.tensor(7)]
        if dtype == torch.int32
        else [0.3, 3, torch.tensor(0.7), torch.tensor(1.1, dtype=torch.float64), True]
    )
    for factor in factors:
        assert plain.mul_(factor) is plain
        assert g.mul_(factor) is g
        torch._foreach_mul_([plain], factor)
        torch._foreach_mul_([g], factor)
    assert same(g, plain)


@pytest.mark.parametrize("factor", [1j, torch.tensor(1j), torch.ones(3), torch.ones(1, 50)], ids=str)
def test_a_product_that_pytorch_refuses_is_refused_at_once(factor: Any, engine: TransferEngine) -> None:
    (g,) = stored(engine, (50,))
    with pytest.raises(RuntimeError):
        numbers(50).mul_(factor)
    with pytest.raises(RuntimeError):
        g.mul_(factor)
    assert same(g, numbers(50))


def test_a_copy_that_pytorch_refuses_leaves_the_values(engine: TransferEngine) -> None:
    (g,) = stored(engine, (50,))
    with pytest.raises(RuntimeError, match="size"):
        g.copy_(torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        torch._foreach_add_([g], [torch.ones(3)])
    assert same(g, numbers(50))


def test_memory_that_is_not_there_is_an_error_below_the_dispatcher_too(engine: TransferEngine) -> None:
    (gradient,) = stored(engine, (8,))
    other = torch.zeros(8)
    other.data = gradient
    for use in (lambda: torch.utils.dlpack.to_dlpack(gradient), lambda: other.mul_(2)):
        with pytest.raises(RuntimeError, match="data pointer"):
            use()


# -- what cannot be stored


def test_what_shares_its_memory_or_is_not_plain_is_refused(engine: TransferEngine) -> None:
    bucket = torch.zeros(100)
    weight = nn.Parameter(torch.zeros(4))
    refused = [
        bucket[:50], bucket[50:], bucket.view(10, 10)[:, 0], torch.zeros(1).expand(4), torch.zeros(4).to_sparse(),
        weight, weight * 2, torch.zeros(4, dtype=torch.complex64).conj(),
        StoredGradient.of(torch.zeros(4), engine),
    ]  # fmt: skip
    for tensor in refused:
        with pytest.raises(ValueError, match="stored"):
            StoredGradient.of(tensor, engine)


@pytest.mark.parametrize("shape", [(), (1,), (3, 0)])
def test_the_smallest_are_stored_too(shape: tuple[int, ...], engine: TransferEngine) -> None:
    g = StoredGradient.of(torch.ones(shape), engine)
    assert same(g, torch.ones(shape))
    g.add_(1).mul_(2)
    assert same(g, torch.full(shape, 4.0))
    if not shape:
        assert (g.item(), float(g), f"{g:.1f}", g.tolist()) == (4, 4, "4.0", 4)


# -- autograd


class ReturnsStored(torch.autograd.Function):
    """A product whose backward returns the gradient of its weight in the store."""

    @staticmethod
    def forward(ctx, x, w, engine):
        ctx.save_for_backward(x, w)
        ctx.engine = engine
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gradient = x.t() @ g
        return g @ w.t(), gradient if ctx.engine is None else StoredGradient.of(gradient, ctx.engine), None


class Products(nn.Module):
    def __init__(self, engine):
        super().__init__()
        self.engine = engine
        self.w, self.v = (nn.Parameter(numbers(8, 8, seed=seed)) for seed in (1, 2))

    def forward(self, x):
        return ReturnsStored.apply(ReturnsStored.apply(x, self.w, self.engine), self.v, self.engine)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("parallel", [None, False, True], ids=["one process", "copied buckets", "views of buckets"])
def test_backward_may_return_stored_gradients(parallel: bool | None, engine: TransferEngine) -> None:
    outcomes = []
    for of in (None, engine):
        model = called = Products(of)
        fired: list[float] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda g, fired=fired: fired.append(float(g.sum())))
            parameter.register_post_accumulate_grad_hook(lambda p, fired=fired: fired.append(float(p.grad.sum())))
        if parallel is not None:
            called = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=parallel)
        for scale in (1, 2):
            called(numbers(4, 8) * scale).square().sum().backward()
            stays = of is None or parallel
            assert all(isinstance(g, StoredGradient) and g.is_stored for g in gradients(model)) != stays
            for parameter in model.parameters() if stays and of is not None else ():
                with pytest.raises(ValueError, match="another tensor"):
                    StoredGradient.of(parameter.grad, engine)
        outcomes.append((fired, gradients(model)))
    assert same(*outcomes)
    assert len(fired) == 8


@pytest.fixture
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("views", [False, True])
def test_distributed_data_parallel_and_no_sync(views: bool, engine: TransferEngine) -> None:
    outcomes = []
    for of in (None, engine):
        model, x = trained(of)
        called = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=views)
        model.zero_grad()
        called(x).square().mean().backward()
        with called.no_sync():
            called(x).square().mean().backward()
        called(x).square().mean().backward()
        outcomes.append(gradients(model))
    assert same(*outcomes)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_averaging_by_hand(asynchronous: bool, engine: TransferEngine) -> None:
    (g,) = stored(engine, (8, 8))
    work = torch.distributed.all_reduce(g.mul_(2), async_op=asynchronous)
    assert (work is None) != asynchronous
    if asynchronous:
        work.wait()
    g.div_(4)
    torch.distributed.broadcast(g, src=0)
    assert not g.is_stored
    assert same(g, numbers(8, 8) / 2)


def test_autograd_takes_it_over_without_a_transfer(engine: TransferEngine) -> None:
    model = Products(engine)
    with Transfers(engine) as sent:
        model(numbers(4, 8)).square().sum().backward()
    assert (sent.written, sent.read) == (2 * 256, 0)
    with Transfers(engine) as sent:
        model(numbers(4, 8)).square().sum().backward()
    assert (sent.written, sent.read) == (4 * 256, 4 * 256)


@pytest.mark.parametrize("first", ["plain", "stored"])
def test_plain_and_stored_gradients_add_up(first: str, engine: TransferEngine) -> None:
    outcomes = []
    for engines in ((None, None), (engine, None) if first == "stored" else (None, engine)):
        model = Products(None)
        for model.engine in engines:
            model(numbers(4, 8)).square().sum().backward()
        outcomes.append(gradients(model))
    assert all(isinstance(g, StoredGradient) == (first == "stored") for g in outcomes[1])
    assert same(*outcomes)


def test_a_parameter_used_twice(engine: TransferEngine) -> None:
    outcomes = []
    for of in (None, engine):
        model = Products(of)
        model.v = model.w
        model(numbers(4, 8)).square().sum().backward()
        outcomes.append(gradients(model))
    assert same(*outcomes)


class ReturnsAdded(torch.autograd.Function):
    """Its backward returns for each parameter a gradient that it has added already."""

    @staticmethod
    def forward(ctx, engine, *parameters):
        ctx.engine, ctx.parameters = engine, parameters
        return torch.zeros((), requires_grad=True)

    @staticmethod
    def backward(ctx, _):
        results = []
        for parameter in ctx.parameters:
            parameter.grad.add_(1)
            results.append(StoredGradient(None, Spec.of(parameter), ctx.engine, added_to=parameter.grad))
        return None, *results


def test_what_the_program_has_added_is_not_added_again(engine: TransferEngine) -> None:
    model = Products(engine)
    model(numbers(4, 8)).square().sum().backward()
    before, objects, fired = copy.deepcopy(gradients(model)), gradients(model), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad))
    ReturnsAdded.apply(engine, *model.parameters()).backward()
    assert same([g + 1 for g in before], gradients(model))
    assert all(one is other for one, other in zip(objects, gradients(model), strict=True))
    assert len(fired) == 2


def test_what_has_been_added_has_no_other_use(engine: TransferEngine) -> None:
    one, other = stored(engine, (8, 8), (8, 8))
    added = StoredGradient(None, Spec.of(one), engine, added_to=one)
    uses = [
        lambda: other.add_(added), lambda: torch.zeros(8, 8).add_(added), lambda: one.add_(added, alpha=2),
        lambda: added.add_(one), added.detach, added.sum, added.numpy, added.take, added.give_up, lambda: added * 2,
        lambda: torch._foreach_add_([one], [added]),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(OverspillError, match="been added"):
            use()
    assert one.add_(added) is one
    with pytest.raises(OverspillError, match="gone"):
        one.add_(added)
    assert same(one, numbers(8, 8))


def test_what_is_taken_in_inference_can_be_changed_afterwards(engine: TransferEngine) -> None:
    (g,) = stored(engine, (8, 8))
    with torch.inference_mode():
        real = g.take()
    real.add_(1)
    g.add_(1)
    assert same(g, numbers(8, 8) + 1 + 1)


def test_dynamo_describes_a_parameter_and_its_gradient_stays_in_the_store(engine: TransferEngine) -> None:
    model, x = trained(engine)
    plain, _ = trained(None)
    for of in (model, plain):
        torch.compile(of, backend="aot_eager")(x).square().mean().backward()
    assert all(g.is_stored for g in gradients(model))
    assert same(gradients(model), gradients(plain))


def test_clipping_takes_the_kernels_that_plain_gradients_get(engine: TransferEngine) -> None:
    seen: list[list[str]] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            seen[-1].append(str(op))
            return op(*args, **(kwargs or {}))

    for of in (None, engine):
        model, _ = trained(of)
        seen.append([])
        with Seen():
            utils.clip_grad_norm_(model.parameters(), 0.1)
    assert "aten._foreach_norm.Scalar" in seen[0]
    assert seen[0] == seen[1]


# -- threads and trouble


@on_threads
def test_threads_use_the_same_gradients(engine: TransferEngine) -> None:
    one, other = stored(engine, (100,), (100,))
    ends = threading.Barrier(3)

    def add(target: Tensor, source: Tensor) -> None:
        ends.wait(timeout=60)
        for _ in range(50):
            target.add_(source)
            torch._foreach_sub_([target, source], 1.0)
        ends.wait(timeout=60)

    one.zero_()
    other.zero_()
    threads = [threading.Thread(target=add, args=pair, daemon=True) for pair in ((one, other), (other, one))]
    for thread in threads:
        thread.start()
    ends.wait(timeout=60)
    ends.wait(timeout=60)
    for thread in threads:
        thread.join()
    assert all(math.isfinite(g.sum()) and g.is_stored for g in (one, other))


@on_threads
def test_what_another_thread_changes_while_it_arrives_is_brought_again(
    engine: TransferEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = stored(engine, (50,), (50,))
    offload = engine.offload

    def offloads(source: Tensor) -> Tensor:
        monkeypatch.setattr(engine, "offload", offload)
        thread = threading.Thread(target=other.zero_)
        thread.start()
        thread.join(timeout=60)
        return offload(source)

    monkeypatch.setattr(engine, "offload", offloads)
    torch._foreach_add_([one, other], 1.0)
    assert same([one, other], [numbers(50) + 1, torch.ones(50)])


@on_threads
def test_a_store_that_fails_loses_no_values(engine: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = stored(engine, (50,), (50,))

    def full(*_: object) -> None:
        raise StoreError("the disk is full")

    for failing in (engine.store, "write"), (engine, "offload"):
        with monkeypatch.context() as trouble:
            trouble.setattr(*failing, full)
            with pytest.raises(StoreError, match="full"):
                (one if failing[1] == "write" else other).add_(1)
    assert not any(g.is_stored for g in (one, other))
    assert same([one, other], [numbers(50) + 1, numbers(50, seed=1) + 1])


@on_threads
def test_a_read_that_fails_can_be_tried_again(engine: TransferEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = stored(engine, (50,), (50,))

    def broken(*_: object) -> None:
        raise StoreError("the disk is broken")

    with monkeypatch.context() as trouble:
        trouble.setattr(engine.store, "read", broken)
        with pytest.raises(StoreError, match="broken"):
            torch._foreach_norm(gradients)
        with pytest.raises(StoreError, match="broken"):
            gradients[0].take()
    gc.collect()
    assert not engine._arriving
    assert all(g.is_stored for g in gradients)
    assert same(gradients, [numbers(50), numbers(50, seed=1)])


def test_an_op_that_fails_within_a_list_cancels_what_arrives(engine: TransferEngine) -> None:
    gradients = stored(engine, (50,), (50,), (50,))
    with pytest.raises(RuntimeError, match="size"):
        torch._foreach_add_(gradients, [torch.ones(50), torch.ones(3), torch.ones(50)])
    gc.collect()
    assert not engine._arriving
    assert same(gradients, [numbers(50) + 1, numbers(50, seed=1), numbers(50, seed=2)])


def test_after_the_store_is_closed_a_use_says_so() -> None:
    engine = make_engine(HostStore(), CPU)
    (g,) = stored(engine, (50,))
    engine.close()
    for use in (g.sum, g.take, lambda: g.add_(1), lambda: torch._foreach_norm([g, g])):
        with pytest.raises(StoreError, match="closed"):
            use()

"""A managed step on CUDA runs the kernels that eager PyTorch runs there, each as often: no other names, none missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from tests.gpu_rehearsal.jobs import DOORS, job
from tests.gpu_rehearsal.modules import MODULES
from torch.utils._python_dispatch import TorchDispatchMode

from overspill.models import BuiltModel

MODELS = ("gpt2", "resnet18", "unet", "vgg11", "googlenet", "densenet121", "deeplabv3plus")
SAME_KERNEL = {
    "cudnn_batch_norm": "_batch_norm_with_update_functional",  # where cuDNN serves it, this op calls cuDNN
    "cudnn_batch_norm_backward": "batch_norm_backward",
    "native_batch_norm": "_native_batch_norm_legit_functional",  # one CUDA function serves both
}
NO_KERNEL = {
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_", "lift_fresh", "_local_scalar_dense",
    "_record_function_enter_new", "_record_function_exit", "hold", "_unsafe_view", "_reshape_alias", "detach_", "resize_",
    "offload", "await_offload", "prefetch", "await_prefetch",
}  # fmt: skip
"""Ops that launch nothing on the device."""
ALLOWED: dict[str, str] = {
    "ones_like": "autograd makes the gradient of the loss; a step with the loss in it has it as a constant",
    "clone": "the whole step keeps what an update reads and writes apart",
    "lift_fresh_copy": "a constant of the program, such as a list of indices, is copied before it is read",
    "copy_": "statistics of batch norms are computed anew and then put in place",
}
"""Ops whose number may differ, and why that changes no number: they only fill or copy."""


class Ops(TorchDispatchMode):
    """Counts the ops that launch kernels, in-place ones under the name of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self.ops: Counter[str] = Counter()

    def add(self, values: Any) -> None:
        """Nothing is counted here."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        schema = func._schema
        name = schema.name.split("::")[1]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        if not is_view and name not in NO_KERNEL:
            name = name if name == "copy_" or name.startswith("_foreach") else name.removesuffix("_")
            self.ops[SAME_KERNEL.get(name, name)] += 1
        return func(*args, **(kwargs or {}))


def ops_of(door: str, model: str | Callable[[], BuiltModel], batch: int, *, autocast: bool) -> Counter[str]:
    """The ops of the second step."""
    ops = Ops()
    budget = None if door == "plain" else 1.0
    tracker = None if door == "plain" else ops
    with job(door, model, batch, budget, optimizer="sgd", small=True, tracker=tracker, autocast=autocast) as it:
        it.step()
        ops.ops.clear()
        if door == "plain":
            with ops:
                it.step()
        else:
            it.step()
    return ops.ops


def difference(
    name: str, model: str | Callable[[], BuiltModel], batch: int, door: str, record: Any, *, autocast: bool = False
) -> dict[str, Any]:
    plain, managed = (ops_of(which, model, batch, autocast=autocast) for which in ("plain", door))
    differ = {op: (plain[op], managed[op]) for op in sorted(plain | managed) if plain[op] != managed[op]}
    # A whole step updates parameters one by one, each by the foreach kernel that plain training gives all of them.
    updates = {op for op in differ if op.startswith("_foreach") and differ[op][0] and differ[op][1]}
    wrong = {op: counts for op, counts in differ.items() if op not in ALLOWED and op not in updates}
    record.rows("op_sets").append(
        {
            "of": name,
            "door": door,
            "autocast": autocast,
            "kernels": plain.total(),
            "differ": differ,
            "wrong": len(wrong),
        }
    )
    return wrong


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("model", MODELS)
def test_models_run_the_kernels_of_eager_pytorch(model: str, door: str, record: Any) -> None:
    assert difference(model, model, 2, door, record) == {}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("model", ["gpt2", "resnet18", "unet"])
def test_models_run_the_kernels_of_eager_pytorch_under_autocast(model: str, door: str, record: Any) -> None:
    assert difference(model, model, 2, door, record, autocast=True) == {}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("module", MODULES)
def test_modules_run_the_kernels_of_eager_pytorch(module: str, door: str, record: Any) -> None:
    torch.manual_seed(0)
    assert difference(module, MODULES[module], 4, door, record) == {}

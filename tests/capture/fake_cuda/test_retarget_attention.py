"""The attention kernels that CUDA takes, and what memory they take, as PyTorch's sources have it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.capture.fake_cuda.retargeting import HALF, F, aten, cuda, names, row, run, taken
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from overspill.core.errors import RequestError

H, T, W = 4, 64, 32


def qkv(
    dtype: torch.dtype = HALF, width: int = W, heads: int = H, keys: int = T, kv_heads: int | None = None,
    dim: int = 4, grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def make(h: int, t: int) -> Tensor:
        return cuda(*((2, h, t, width) if dim == 4 else (h, t, width)), dtype=dtype, grad=grad)

    return make(heads, T), make(kv_heads or heads, keys), make(kv_heads or heads, keys)


CHOICES: dict[str, tuple[str, tuple[int, int], dict[str, Any], dict[str, Any]]] = {
    "half": ("flash", (8, 0), {}, {}),
    "bfloat16": ("flash", (9, 0), {"dtype": torch.bfloat16}, {}),
    "half, before Ampere": ("efficient", (7, 5), {}, {}),
    "bfloat16, before Ampere": ("math", (7, 5), {"dtype": torch.bfloat16}, {}),
    "float": ("efficient", (8, 0), {"dtype": torch.float32}, {}),
    "double": ("math", (8, 0), {"dtype": torch.float64}, {}),
    "half, with a mask": ("efficient", (8, 0), {}, {"mask": True}),
    "float, with a mask": ("efficient", (8, 6), {"dtype": torch.float32}, {"mask": True}),
    "half, with dropout": ("flash", (8, 0), {}, {"dropout_p": 0.1}),
    "half, causal": ("flash", (8, 0), {}, {"is_causal": True}),
    "half, causal, fewer keys": ("efficient", (8, 0), {"keys": 48}, {"is_causal": True}),
    "half, fewer keys": ("flash", (8, 0), {"keys": 48}, {}),
    "half, an odd width": ("flash", (8, 0), {"width": 20}, {}),
    "half with a mask, an odd width": ("math", (8, 0), {"width": 20}, {"mask": True}),
    "float, an odd width": ("math", (8, 0), {"dtype": torch.float32, "width": 30}, {}),
    "float, an odd width, before Ampere": ("efficient", (7, 5), {"dtype": torch.float32, "width": 30}, {}),
    "half, rows of 256": ("flash", (8, 0), {"width": 256}, {}),
    "half, rows of 264": ("efficient", (8, 0), {"width": 264}, {}),
    "half, rows of 224, a consumer's GPU": ("efficient", (8, 6), {"width": 224}, {}),
    "half, rows of 224, a consumer's GPU, no gradients": ("flash", (8, 6), {"width": 224, "grad": False}, {}),
    "half, rows of 256, a consumer's GPU": ("flash", (8, 9), {"width": 256}, {}),
    "half, rows of 256, a consumer's GPU, dropout": ("efficient", (12, 0), {"width": 256}, {"dropout_p": 0.1}),
    "half, shared keys": ("flash", (8, 0), {"kv_heads": 2}, {"enable_gqa": True}),
    "float, shared keys": ("math", (8, 0), {"kv_heads": 2, "dtype": torch.float32}, {"enable_gqa": True}),
    "three dimensions": ("math", (8, 0), {"dim": 3}, {}),
    "no keys": ("math", (8, 0), {"keys": 0}, {}),
    "Pascal": ("efficient", (6, 0), {}, {}),
}
OPS = {
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "math": "_safe_softmax",
}


@row(aten.scaled_dot_product_attention.default)
@pytest.mark.parametrize("case", CHOICES)
def test_attention_takes_the_kernel_that_cuda_takes_for(case: str) -> None:
    """sdp_utils.cpp, `select_sdp_backend`."""
    kernel, capability, inputs, options = CHOICES[case]

    def program() -> None:
        query, key, value = qkv(**inputs)
        kwargs = dict(options)
        if kwargs.pop("mask", False):
            kwargs["attn_mask"] = cuda(query.shape[-2], key.shape[-2], dtype=query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, **kwargs)
        assert out.shape == (*query.shape[:-1], value.shape[-1])
        if out.requires_grad:
            out.sum().backward()

    found = names(run(program, capability))
    assert [k for k, op in OPS.items() if op in found] == [kernel]
    if inputs.get("grad", True):
        assert kernel == "math" or f"{OPS[kernel]}_backward" in found


@row(aten._scaled_dot_product_attention_math.default)
def test_attention_in_single_ops_adds_its_mask_in_place() -> None:
    """attention.cpp, `_scaled_dot_product_attention_math`: the scores are float, and at most three of them at once."""

    def program() -> None:
        with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            F.scaled_dot_product_attention(*qkv(torch.float32), attn_mask=cuda(T, T), dropout_p=0.1)

    recording = run(program)
    assert [n for n in names(recording) if n.startswith("add")] == ["add_"]
    assert "native_dropout" in names(recording)
    half = run(lambda: _math(torch.float16))
    assert names(half)[3:6] == ["_to_copy"] * 3
    scores = 2 * H * T * T
    assert [a.nbytes for a in half.allocations if a.name == "_safe_softmax" and a.nbytes] == [4 * scores]


def _math(dtype: torch.dtype, **kwargs: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        return F.scaled_dot_product_attention(*qkv(dtype), **kwargs)


def test_kernels_that_the_program_turns_off_are_not_taken() -> None:
    def chosen(*backends: SDPBackend, masked: bool = False) -> list[str]:
        def program() -> None:
            mask = cuda(T, T, dtype=HALF) if masked else None
            with sdpa_kernel(list(backends)):
                F.scaled_dot_product_attention(*qkv(), attn_mask=mask)

        found = names(run(program))
        return [kernel for kernel, op in OPS.items() if op in found]

    flash, efficient, plain = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    assert chosen(flash, plain) == ["flash"]
    assert chosen(efficient, plain) == ["efficient"]
    assert chosen(plain) == ["math"]
    with pytest.raises(RequestError, match="No available kernel"):
        chosen(flash, masked=True)


def test_global_switches_of_kernels_are_respected() -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert OPS["efficient"] in names(run(lambda: F.scaled_dot_product_attention(*qkv())))
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_expanded_keys_of_a_cache_are_dense_enough() -> None:
    def program() -> None:
        query, key, value = qkv(kv_heads=1)
        F.scaled_dot_product_attention(query, key.expand(2, H, T, W), value.expand(2, H, T, W))

    assert OPS["flash"] in names(run(program))


def test_rows_that_are_not_side_by_side_go_the_long_way() -> None:
    def program() -> None:
        query, key, value = (t.transpose(-1, -2) for t in qkv(width=T))
        F.scaled_dot_product_attention(query, key, value)

    assert OPS["math"] in names(run(program))


@pytest.mark.parametrize(("keys", "padded"), [(64, False), (60, True)])
def test_masks_whose_rows_do_not_start_at_multiples_of_eight_are_padded(keys: int, padded: bool) -> None:
    """attention.cpp, `preprocess_mask`."""

    def program() -> None:
        query, key, value = qkv(keys=keys, grad=False)
        F.scaled_dot_product_attention(query, key, value, attn_mask=cuda(T, keys, dtype=HALF))

    assert ("constant_pad_nd" in names(run(program))) is padded


def test_boolean_masks_become_numbers_of_the_querys_dtype() -> None:
    def program() -> None:
        query, key, value = qkv(grad=False)
        mask = torch.zeros(T, T, dtype=torch.bool, device="cuda")
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    made = [a.nbytes for a in run(program).allocations if a.name == "where"]
    assert made == [2 * T * T]


def test_attention_on_the_host_is_the_hosts_own() -> None:
    expected = F.scaled_dot_product_attention(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8))

    def program() -> None:
        x = torch.ones(1, 1, 4, 8)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), expected)
        assert torch.equal(F.softmax(torch.ones(2), 0), torch.tensor([0.5, 0.5]))

    run(program)


@row(aten._scaled_dot_product_flash_attention_backward.default)
@pytest.mark.parametrize(("width", "rounded"), [(32, 32), (40, 64), (96, 96), (136, 192), (256, 256)])
def test_flash_attention_accumulates_the_querys_gradient_in_float(width: int, rounded: int) -> None:
    """flash_api.cpp, `mha_bwd`: rows to 128; `head_size_rounded` to 32, beyond 128 to 64."""
    recording = run(lambda: F.scaled_dot_product_attention(*qkv(width=width)).sum().backward())
    assert taken(recording)[-1:] == [4 * 2 * H * 128 * (rounded + 1)]  # before it what the sum takes


def test_flash_attention_with_shared_keys_makes_their_gradients_for_every_head() -> None:
    recording = run(lambda: F.scaled_dot_product_attention(*qkv(kv_heads=2), enable_gqa=True).sum().backward())
    assert taken(recording) == [4 * 2 * H * 128 * (W + 1) + 2 * 2 * (2 * H * T * W)]


@row(aten._scaled_dot_product_efficient_attention_backward.default)
def test_efficient_attention_accumulates_half_gradients_in_float() -> None:
    """attention_backward.cu: `delta`, from a product in float inputs; for half ones accumulators of all gradients."""
    rows, values = 2 * H * T, 2 * H * T * W
    full = run(lambda: F.scaled_dot_product_attention(*qkv(torch.float32)).sum().backward())
    assert taken(full) == [4 * values, 4 * 2 * rows]
    half = run(lambda: F.scaled_dot_product_attention(*qkv()).sum().backward(), (7, 5))
    assert taken(half, "7.5") == [4 * (rows + 3 * values)]


@row(aten._safe_softmax.default)
def test_the_safe_softmax_makes_the_plain_one_and_a_mask() -> None:
    assert taken(run(lambda: _math(torch.float32))) == [2 * H * T * T * (4 + 1)]

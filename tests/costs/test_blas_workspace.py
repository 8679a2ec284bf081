"""cuBLAS and cuBLASLt workspaces: sizes by GPU, by release and by what the environment says, right or wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overspill.core.errors import RequestError
from overspill.costs import Lifetime, Workspace, cublas_workspace_bytes, cublaslt_workspace_bytes

MIB = 1 << 20
USUAL = 8_519_680  # what torch.cuda.memory_snapshot shows, discuss.pytorch.org 178671


@pytest.mark.parametrize(
    ("capability", "release", "nbytes"),
    [
        ("8.6", "2.6.0+cu124", USUAL),
        ("8.9", "2.13.0", USUAL),
        ("6.1", "2.0", USUAL),
        ("9.0", "2.0.1", 32 * MIB),
        ("9.0", "2.13", 32 * MIB),
        ("10.0", "2.11", USUAL),
        ("12.0", "2.11", USUAL),
        ("10.0", "2.12", 32 * MIB),
        ("12.0", "2.13.0a0+gitcf30153", 32 * MIB),
        ("11.0", "2.13", USUAL),
    ],
)
def test_the_default_depends_on_the_gpu_and_the_release(capability: str, release: str, nbytes: int) -> None:
    assert cublas_workspace_bytes(capability, {}, release) == Workspace(nbytes, Lifetime.KEPT)


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        (":4096:8", 32 * MIB),
        (":16:8", 128 * 1024),
        (":4096:2:16:8", USUAL),
        (":0:0", 0),
        (":4096:0", 0),
        ("4096:8", USUAL),  # no colon before the size: PyTorch warns and takes the default
        ("", USUAL),
        ("on", USUAL),
        (":-1:8", USUAL),
        ("size:4096:1,", 4 * MIB),  # what stands around a pair is not read
        (":4096:1:16", 4 * MIB),
        (":4096:1 :16:1", 4 * MIB + 16 * 1024),
    ],
)
def test_the_environment_is_read_as_pytorch_reads_it(config: str, nbytes: int) -> None:
    assert cublas_workspace_bytes("8.6", {"CUBLAS_WORKSPACE_CONFIG": config}).nbytes == nbytes


def test_zero_bytes_bring_up_no_block() -> None:
    assert cublas_workspace_bytes("8.6", {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}).own_bytes == 0


@pytest.mark.parametrize(
    ("release", "lifetime", "own_bytes"),
    [
        ("2.0", Lifetime.CALL, MIB),
        ("2.6.0", Lifetime.CALL, MIB),
        ("2.8", Lifetime.CALL, MIB),
        ("2.9", Lifetime.KEPT, MIB),
        ("2.11", Lifetime.KEPT, MIB),
        ("2.12", Lifetime.SHARED, 0),
        ("2.13", Lifetime.SHARED, 0),
    ],
)
def test_cublaslt_went_from_a_block_a_call_to_the_block_of_cublas(
    release: str, lifetime: Lifetime, own_bytes: int
) -> None:
    found = cublaslt_workspace_bytes("8.6", {}, release)
    assert (found.nbytes, found.lifetime, found.own_bytes) == (MIB, lifetime, own_bytes)


@pytest.mark.parametrize(
    ("release", "unified", "lifetime"),
    [
        ("2.6", "1", Lifetime.CALL),
        ("2.8", "1", Lifetime.SHARED),
        ("2.9", "1", Lifetime.SHARED),
        ("2.9", "yes", Lifetime.KEPT),
        ("2.13", "0", Lifetime.KEPT),
        ("2.13", "no", Lifetime.SHARED),
    ],
)
def test_sharing_can_be_asked_for_and_refused(release: str, unified: str, lifetime: Lifetime) -> None:
    variables = {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": unified}
    assert cublaslt_workspace_bytes("8.6", variables, release).lifetime is lifetime


@pytest.mark.parametrize(
    ("text", "kib"),
    [("4096", 4096), (" 64", 64), ("64MiB", 64), ("0", 0), ("", 1024), ("much", 1024), ("9" * 12, 1024)],
)
def test_the_size_of_cublaslt_is_read_as_pytorch_reads_it(text: str, kib: int) -> None:
    assert cublaslt_workspace_bytes("8.6", {"CUBLASLT_WORKSPACE_SIZE": text}).nbytes == kib * 1024


def test_a_size_that_wraps_around_is_refused_unless_the_block_of_cublas_caps_it() -> None:
    variables = {"CUBLASLT_WORKSPACE_SIZE": "-1"}
    with pytest.raises(RequestError, match="CUBLASLT_WORKSPACE_SIZE=-1"):
        cublaslt_workspace_bytes("8.6", variables)
    assert cublaslt_workspace_bytes("8.6", variables, "2.13").nbytes == USUAL


@pytest.mark.parametrize(("release", "nbytes"), [("2.6", MIB), ("2.10", MIB), ("2.11", 0), ("2.13", 0)])
def test_no_workspace_for_cublas_came_to_mean_none_for_cublaslt(release: str, nbytes: int) -> None:
    assert cublaslt_workspace_bytes("8.6", {"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, release).nbytes == nbytes


@given(
    capability=st.sampled_from(["7.5", "8.6", "9.0", "10.0", "12.0"]),
    minor=st.integers(12, 20),
    kib=st.integers(0, 2**20),
    config=st.sampled_from([None, ":0:0", ":16:8", ":4096:8", "?"]),
)
def test_a_shared_block_is_never_larger_than_the_block_that_it_shares(
    capability: str, minor: int, kib: int, config: str | None
) -> None:
    variables = {"CUBLASLT_WORKSPACE_SIZE": str(kib)} | ({} if config is None else {"CUBLAS_WORKSPACE_CONFIG": config})
    release = f"2.{minor}"
    shared = cublaslt_workspace_bytes(capability, variables, release)
    assert shared.own_bytes == 0
    assert shared.nbytes <= cublas_workspace_bytes(capability, variables, release).nbytes


@pytest.mark.parametrize("capability", ["", "86", "sm_86", "8.60"])
def test_a_compute_capability_that_is_none_is_refused(capability: str) -> None:
    with pytest.raises(RequestError, match="compute capability"):
        cublas_workspace_bytes(capability)


@pytest.mark.parametrize(("release", "complaint"), [("nightly", "PyTorch release"), ("1.13.1", "not known")])
def test_a_release_that_is_none_or_too_old_is_refused(release: str, complaint: str) -> None:
    for workspace in (cublas_workspace_bytes, cublaslt_workspace_bytes):
        with pytest.raises(RequestError, match=complaint):
            workspace("8.6", {}, release)

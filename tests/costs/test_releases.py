"""Releases of PyTorch and CUDA by name, and one clear line for what nobody knows."""

from __future__ import annotations

import pytest
import torch

from overspill.core.errors import RequestError
from overspill.costs.releases import software_named


def test_named_releases_are_taken_as_they_are() -> None:
    made = software_named("2.6", "12.4")
    assert (made.torch_version, made.cuda_version) == ("2.6", "12.4")
    made = software_named("2.9.1+cu126", "12.6.3")
    assert (made.torch_version, made.cuda_version) == ("2.9.1+cu126", "12.6.3")


def test_without_a_name_it_is_the_pytorch_that_is_here() -> None:
    made = software_named()
    assert made.torch_version == torch.__version__
    assert made.cuda_version == (torch.version.cuda or "13.0")
    assert software_named(cuda="12.8").torch_version == torch.__version__


def test_a_pytorch_alone_brings_the_cuda_of_its_wheel() -> None:
    assert software_named("2.6").cuda_version == "12.4"
    assert software_named("2.0.1").cuda_version == "11.7"


@pytest.mark.parametrize(
    ("release", "cuda", "says"),
    [
        ("1.13", None, "what PyTorch 1.13 takes is not known; 2.0 to 2.14 are"),
        ("3.0", None, "what PyTorch 3.0 takes is not known"),
        ("newest", None, "'newest' is not a release of PyTorch; write it as 2.6"),
        ("2", None, "'2' is not a release of PyTorch"),
        ("2.6 or so", None, "'2.6 or so' is not a release of PyTorch"),
        (None, "12", "'12' is not a release of CUDA; write it as 12.4"),
        (None, "12.40", "what CUDA 12.40 takes is not known; 9.0 to 9.2, 10.0 to 10.2"),
        ("2.6", "", "'' is not a release of CUDA"),
    ],
)
def test_what_is_not_known_is_one_clear_line(release: str | None, cuda: str | None, says: str) -> None:
    with pytest.raises(RequestError) as refusal:
        software_named(release, cuda)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)

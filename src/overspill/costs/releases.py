"""Releases of PyTorch and CUDA whose costs are known."""

from __future__ import annotations

import re
import sys

from overspill.core.errors import RequestError

from .scratch import Software

# The CUDA of the wheel that `pip install torch==RELEASE.0` brought (download.pytorch.org, release notes).
_CUDA_OF = {
    "2.0": "11.7", "2.1": "12.1", "2.2": "12.1", "2.3": "12.1", "2.4": "12.1", "2.5": "12.4", "2.6": "12.4",
    "2.7": "12.6", "2.8": "12.8", "2.9": "12.8", "2.10": "12.8", "2.11": "13.0", "2.12": "13.0", "2.13": "13.0",
    "2.14": "13.0",
}  # fmt: skip
# The last minor release of each major one.
_CUDA_UNTIL = {9: 2, 10: 2, 11: 8, 12: 9, 13: 3}


def software_named(torch: str | None = None, cuda: str | None = None) -> Software:
    """Return the software for releases such as `2.6` and `12.4`, with or without a patch number.

    None for `torch`: the release that is loaded, otherwise the newest that is known. None for `cuda`: that of its
    wheel. Raises RequestError.
    """
    loaded = sys.modules.get("torch")
    if torch is None and cuda is None and loaded is not None:
        return Software(loaded.__version__, loaded.version.cuda or _cuda_of(loaded.__version__))
    here = Software.torch_version if loaded is None else loaded.__version__
    release = here if torch is None else _known_torch(torch)
    return Software(release, _cuda_of(release) if cuda is None else _known_cuda(cuda))


def _known_torch(text: str) -> str:
    """Return `text`, if its PyTorch release is known. Raises RequestError."""
    if "{}.{}".format(*release_of(text, "PyTorch", "2.6")) not in _CUDA_OF:
        first, *_, last = _CUDA_OF
        raise RequestError(f"what PyTorch {text} takes is not known; {first} to {last} are")
    return text


def _known_cuda(text: str) -> str:
    major, minor = release_of(text, "CUDA", "12.4")
    if minor > _CUDA_UNTIL.get(major, -1):
        spans = ", ".join(f"{known}.0 to {known}.{last}" for known, last in _CUDA_UNTIL.items())
        raise RequestError(f"what CUDA {text} takes is not known; {spans} are")
    return text


def _cuda_of(torch: str) -> str:
    """Return the CUDA release of PyTorch's wheel; for a PyTorch newer than those known, the last one's."""
    major, minor = release_of(torch, "PyTorch", "2.6")
    return _CUDA_OF.get(f"{major}.{minor}", Software.cuda_version)


def release_of(text: str, what: str, example: str) -> tuple[int, int]:
    """Return the major and minor number of a release of `what`, written as `example`. Raises RequestError."""
    match = re.fullmatch(r"(\d+)\.(\d+)(?:\.\d+)?(?:[a-z+.-].*)?", text, re.ASCII)
    if match is None:
        raise RequestError(f"{text!r} is not a release of {what}; write it as {example}")
    return int(match.group(1)), int(match.group(2))

"""Communication buffers outside the allocator: NCCL's, and Horovod's fusion buffer.

NCCL keeps buffers for each connection, and a connection for each channel and neighbour:

    receiving side   LL + LL128 + Simple, rounded up to 2 MiB     10 MiB
    sending side     a header, rounded up to 2 MiB                 2 MiB

(src/init.cc computeBuffSizes and src/transport/p2p.cc, NCCL 2.30.7; both sizes are seen in nccl issue 1685.) A ring
has one neighbour each way; with more than two GPUs the trees add about half as many connections.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from overspill.core import Device
from overspill.core.errors import RequestError

from .interval import NOTHING, Interval

_MIB = 1 << 20
# src/include/device.h: 8 lines x 512 threads x 8 steps x 16 B, and 120 elements x 640 threads x 8 steps x 8 B.
_BUFFERS = {"NCCL_LL_BUFFSIZE": 524_288, "NCCL_LL128_BUFFSIZE": 4_915_200, "NCCL_BUFFSIZE": 4_194_304}
_HEADER = 4096  # assumed: ncclRecvMem and ncclSendMem, a page each; the rounding hides it
_GRAIN = 2 * _MIB  # CUDA_IPC_MIN

# Channels of collectives inside one machine, from lines "N coll channels" of NCCL's logs (NCCL_DEBUG=INFO).
# V100 with 6 links; A100; 8 H100; assumed for B200: as the H100. Other GPUs have no NVLink or one bridge.
_NVLINK_CHANNELS = {"7.0": 12, "8.0": 24, "9.0": 24, "10.0": 24}
_PCIE_CHANNELS = 2
_MOST_PEERS = 7  # of one machine with 8 GPUs, all of them reached over NVLink
_P2P_CHANNELS = 32  # "32 p2p channels per peer" on A100 and H100 with NVLink

# What a communicator of A100s takes above its connections: 544 MB with 2 and 688 MB with 4 GPUs, 24 channels
# (nccl issue 964), less 24 x 12 MiB and 36 x 12 MiB, leave 256 MiB both times.
_REST_PER_CHANNEL = 256 * _MIB // 24
_HIGH_FACTOR = 2.5  # nccl issue 864: 1.6 GB for one communicator, 2.4 times the 688 MiB above
_HIGH_FLOOR = 512 * _MIB  # assumed: about half a GB a communicator, as public calculators of training memory do
_FUSION_BYTES = 64 * _MIB


def nccl_bytes(
    device: Device,
    gpus: int,
    *,
    nvlink: bool = True,
    communicators: int = 1,
    all_to_all: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Interval:
    """Return the bytes that NCCL keeps on each of `gpus` GPUs of one machine.

    `all_to_all` means that experts are exchanged. A process group of PyTorch makes a communicator at its first
    collective. `nvlink` says whether GPUs that can be linked by NVLink are; over PCIe the buffers may be on the host.
    """
    if device.kind != "cuda" or gpus < 2 or communicators < 1:
        return NOTHING
    variables = environment or {}
    linked = nvlink and device.compute_capability in _NVLINK_CHANNELS
    channels = _NVLINK_CHANNELS[device.compute_capability] if linked else _PCIE_CHANNELS
    channels = min(channels, _number(variables, "NCCL_MAX_NCHANNELS", channels))
    # Rings and trees.
    connection = connection_bytes(variables)
    connections = channels if gpus == 2 else channels * 3 // 2
    central = connections * connection + channels * _REST_PER_CHANNEL
    # Experts are exchanged over direct connections between all pairs.
    exchange = 0
    if all_to_all:
        each = _number(variables, "NCCL_MAX_P2P_NCHANNELS", _P2P_CHANNELS if linked else _PCIE_CHANNELS)
        exchange = each * min(gpus - 1, _MOST_PEERS) * connection
    one = Interval(
        channels * connection if linked else 0,
        central + exchange,
        max(int(_HIGH_FACTOR * central), _HIGH_FLOOR) + exchange,
    )
    return one.times(communicators)


def connection_bytes(environment: Mapping[str, str] | None = None) -> int:
    """Return the bytes of one channel's connection to a neighbour, both directions.

    They are 12 MiB unless the environment changes it.
    """
    variables = environment or {}
    received = sum(_number(variables, name, default) for name, default in _BUFFERS.items())
    return _rounded(_HEADER + received) + _rounded(_HEADER)


def horovod_fusion_bytes(environment: Mapping[str, str] | None = None) -> int:
    """Return the bytes of Horovod's fusion buffer.

    They are 64 MiB (its docs/tensor-fusion.rst; DNNMem, FSE 2020, §4.5), or as the environment sets them.
    """
    return _number(environment or {}, "HOROVOD_FUSION_THRESHOLD", _FUSION_BYTES)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // _GRAIN) * _GRAIN


def _number(variables: Mapping[str, str], name: str, default: int) -> int:
    text = variables.get(name)
    if text is None:
        return default
    if re.fullmatch(r"\s*\d+\s*", text, re.ASCII) is None:
        raise RequestError(f"{name}={text} is no count; write a whole number")
    return int(text)

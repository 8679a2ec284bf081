"""Dymem (Yang and Cheng, HPDC'20): its figures, and ours for them.

The paper trains on CIFAR-10 and does not say at what size. ResNet-32 holds 35 MB at 32 x 32 and 1.9 GB at 224 x 224,
where the paper has 1.9 GB (Fig. 15); Inception-v4 (128), which takes no less than 75 x 75, needs 3.8 GB under vDNN at
256 x 256 and 5.3 GB at its own 299, where the paper has 3.65 GB (Fig. 12). These sizes are taken.

Its pool, GTBM, is `placement/allocators/two_ended.py`, which no claim goes through. vDNN's memory is what CNMeM's best fit spreads
over, as Fig. 15 counts; Dymem's is its live bytes, which a perfect pool would take.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean

from overspill.core import LayerType, Op, Phase
from overspill.core.errors import InfeasibleBudget

from .claim import Claim
from .lab import MIB, Lab, Run, Setting

INCEPTION = Setting("inception-v4", 128, image_size=256)
RESNET_32 = Setting("resnet32-cifar", 100, image_size=224, batch_norm=False)
RESNET_50 = Setting("resnet50", 100)
ALEXNET = Setting("alexnet", 256)
VGG_128, VGG_256 = Setting("vgg16-vdnn", 128), Setting("vgg16-vdnn", 256, features=True)
NETWORKS = (ALEXNET, VGG_128, RESNET_50, INCEPTION)
BASE, ALL, ONE_STREAM = "oracle", "vdnn-all", "sequential"
SHARES = (1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0)


def _least(setting: Setting, policy: str, lab: Lab) -> Run:
    """The run in the least memory that `policy` finds a schedule for (§5.1: what makes a network trainable)."""
    try:
        return lab.run(setting, policy, 1)
    except InfeasibleBudget as error:
        floor_bytes = error.floor_bytes
    for share in SHARES[:-1]:
        try:
            return lab.run(setting, policy, int(share * floor_bytes))
        except InfeasibleBudget:
            continue
    return lab.run(setting, policy, int(SHARES[-1] * floor_bytes))


def _spread_mb(setting: Setting, policy: str, lab: Lab) -> float:
    return lab.run(setting, policy).spread_bytes / MIB


def _live_mb(setting: Setting, policy: str, lab: Lab) -> float:
    return lab.run(setting, policy).peak_bytes / MIB


def _least_mb(setting: Setting, policy: str, lab: Lab) -> float:
    return _least(setting, policy, lab).peak_bytes / MIB


def _saved_percent(lab: Lab) -> float:
    """Against vDNN, both with memory-optimal algorithms."""
    return 100 * (1 - _least_mb(INCEPTION, "dymem:m", lab) / _spread_mb(INCEPTION, "vdnn-all:m", lab))


def _saved_of_superneurons_percent(lab: Lab) -> float:
    ours = _least(INCEPTION, "superneurons-offload:m", lab).spread_bytes / MIB
    return 100 * (1 - _least_mb(INCEPTION, "dymem:m", lab) / ours)


def _more_than_vdnn_mb(lab: Lab) -> float:
    """Both in CNMeM's pool, for in linear networks "Dymem falls back to the same best-fit algorithm" (§5.1)."""
    return _spread_mb(ALEXNET, "dymem:m", lab) - _spread_mb(ALEXNET, "vdnn-all:m", lab)


def _conv_throughput(setting: Setting, policy: str, lab: Lab) -> float:
    """Percent of the fastest algorithms' throughput that convolutions have."""
    conv = LayerType.CONV
    return 100 * lab.run(setting, BASE).seconds_of(conv) / lab.run(setting, policy).seconds_of(conv)


def _mean_conv_throughput(policy: str, lab: Lab) -> float:
    return fmean(_conv_throughput(setting, policy, lab) for setting in NETWORKS)


def _lost_percent(lab: Lab) -> float:
    return 100 - _mean_conv_throughput(f"{BASE}:m", lab)


def _speedup(setting: Setting, lab: Lab) -> float:
    return lab.run(setting, ALL).seconds / lab.run(setting, "dymem").seconds


def _overlapped_percent(setting: Setting, policy: str, lab: Lab) -> float:
    """Overlapped time, of the time that one stream takes for both."""
    whole = lab.run(setting, f"{ONE_STREAM}:m").seconds
    return 100 * lab.run(setting, f"{policy}:m").timeline.overlapped_seconds / whole


def _reduced_percent(lab: Lab) -> float:
    """The most that Dymem takes off the time of one stream."""
    return max(
        100 * (1 - lab.run(setting, "dymem:m").seconds / lab.run(setting, f"{ONE_STREAM}:m").seconds)
        for setting in (INCEPTION, RESNET_32)
    )


def _block(lab: Lab, taps: int) -> float:
    """Computation over communication, forward, of the first residual block's convolutions with `taps` x `taps`."""
    run = lab.run(RESNET_50, f"{BASE}:m")
    graph, device = run.graph, run.device
    seconds = {e.target: e.end_seconds - e.start_seconds for e in run.timeline.events}

    def kernel(op: Op) -> int:
        return next(graph.tensors[t].shape[-1] for t in op.reads if graph.tensors[t].persistent)

    inside = [op for op in graph.ops if op.layer.startswith("model.3.branch") and op.phase is Phase.FORWARD]
    found = [op for op in inside if op.layer_type is LayerType.CONV and kernel(op) == taps]
    moved = [next(graph.tensors[t].nbytes for t in op.reads if not graph.tensors[t].persistent) for op in found]
    return sum(seconds[op.id] for op in found) / sum(map(device.offload_seconds, moved))


_claim = partial(Claim, "dymem")

_3650 = (
    "for Inception V4, the maximum memory footprint is reduced from 3650MB to 2527MB, resulting in 31% memory saving"
)
_28 = "Dymem can still achieve 28% memory saving compared with SuperNeurons"
_250 = "Dymem even requires nearly 250MB more memory capacity than vDNN for AlexNet"
_60 = "the memory-optimal algorithm could result in nearly 60% performance loss on average"
_95 = "Dymem and vDNN reach an average of 95% and 97% throughput of the performance-optimal"
_84 = "batch size of VGG-16 is configured to 256, the average throughput is decreased to 84% running in the vDNN"
_72 = "The performance is worse running in Dymem, which is 72% of the performance-optimal setting"
_42 = "ResNet-50, running with batch size 100, which achieves up to 42% compared with vDNN"
_18 = "overlap the communication with the computation to some extent by 18% and 12% for Inception V4 and ResNet"
_46 = "compared with the baseline, Dymem can achieve nearly up to 46% reduction on the execution time"
_2500 = "requires nearly 2500MB GPU memory for vDNN. But for Dymem, the peak memory requirement is 1854MB"
_SIZE = "The image size, 256, is chosen for this figure: 5.3 GB at 299, 3.8 at 256, 3.1 at 224."
_GTBM = (
    "Dymem's live bytes against vDNN in CNMeM's pool are the most that a placement can save. Between live bytes of both it "
    "is 24 %, with both in CNMeM 16 %, with both in GTBM as Algorithm 3 has it 6 % (3673 of 3918 MB): its high end fragments."
)
_CACHE = (
    "SuperNeurons without recomputation moves outputs of convolutions alone: 5.0 GB of normalised maps and 2.3 GB of joined "
    "ones stay at its peak of 9.4 GB."
)
_FRAGMENTS = "All of it is fragments: the live bytes of both peak at 1082 MB."
_NO_CONVOLUTION = (
    "The step's peak, 11.0 GB in the first pooling's backward, has no convolution, and all fast workspaces fit below it: "
    "budgets that would slow convolutions down end the training first (the same peak with memory-optimal algorithms)."
)
_BOTH_FAST = (
    "Both with the fastest algorithms. Where vDNN stops at its first pass, memory-optimal algorithms with all layers "
    "offloaded, and Dymem takes the fastest, it is 1.45. Links of 8 to 24 GB/s and convolutions of 20 to 65 % of peak "
    "give 1.10 to 1.33."
)
_CONV_ONLY = (
    "vDNN here offloads all layers with memory-optimal algorithms; offloading convolutions' inputs alone with the fastest, "
    "12.7 % are overlapped."
)
_PERFECT = "Perfect overlap would take 45 % off Inception-v4 and 49 % off ResNet-32."
_WHICH = (
    "The paper does not say which block or algorithm. Ours is ResNet-50's first with memory-optimal algorithms; with the "
    "fastest it is 0.81."
)
_BLOCK = "Computation 25 76 3, Communication 66 68 x"

CLAIMS: tuple[Claim, ...] = (
    _claim("Fig. 12", "Inception-v4 (128): vDNN's memory", _3650, "5.1", 3650, "MB",
           partial(_spread_mb, INCEPTION, "vdnn-all:m"), _SIZE),
    _claim("Fig. 12", "Inception-v4 (128): Dymem's memory", _3650, "5.1", 2527, "MB",
           partial(_least_mb, INCEPTION, "dymem:m")),
    _claim("Fig. 12", "Inception-v4 (128): saved of vDNN's memory", _3650, "5.1", 31, "%", _saved_percent, _GTBM),
    _claim("Fig. 12", "Inception-v4 (128): saved of SuperNeurons' memory", _28, "5.1", 28, "%",
           _saved_of_superneurons_percent, _CACHE),
    _claim("Fig. 12", "AlexNet (256): Dymem's memory above vDNN's", _250, "5.1", 250, "MB", _more_than_vdnn_mb,
           _FRAGMENTS),
    _claim("Fig. 12", "(m): convolution throughput lost, mean of four networks", _60, "5.1", 60, "%", _lost_percent),
    _claim("Fig. 12", "Dymem: convolution throughput, mean of four networks", _95, "5.1", 95, "%",
           partial(_mean_conv_throughput, "dymem")),
    _claim("Fig. 12", "vDNN: convolution throughput, mean of four networks", _95, "5.1", 97, "%",
           partial(_mean_conv_throughput, "vdnn-dynamic")),
    _claim("Fig. 12", "vDNN: convolution throughput, VGG-16 (256)", _84, "5.1", 84, "%",
           partial(_conv_throughput, VGG_256, "vdnn-dynamic"), _NO_CONVOLUTION),
    _claim("Fig. 12", "Dymem: convolution throughput, VGG-16 (256)", _72, "5.1", 72, "%",
           partial(_conv_throughput, VGG_256, "dymem"), _NO_CONVOLUTION),
    _claim("Fig. 13", "ResNet-50 (100): throughput over vDNN's", _42, "5.2", 1.42, "x", partial(_speedup, RESNET_50),
           _BOTH_FAST),
    _claim("Fig. 14", "Inception-v4: vDNN's overlapped time", _18, "5.3", 18, "%",
           partial(_overlapped_percent, INCEPTION, ALL)),
    _claim("Fig. 14", "ResNet-32: vDNN's overlapped time", _18, "5.3", 12, "%",
           partial(_overlapped_percent, RESNET_32, ALL), _CONV_ONLY),
    _claim("Fig. 14", "Dymem: time less than with one stream, most", _46, "5.3", 46, "%", _reduced_percent,
           _PERFECT),
    _claim("Fig. 15", "ResNet-32 (100) without batch norm: vDNN's memory", _2500, "5.4", 2500, "MB",
           partial(_spread_mb, RESNET_32, "vdnn-all:m")),
    _claim("Fig. 15", "ResNet-32 (100) without batch norm: Dymem's memory", _2500, "5.4", 1854, "MB",
           partial(_live_mb, RESNET_32, "dymem:m")),
    _claim("Table 1", "residual block, 3x3: computation over communication", _BLOCK, "3.2.1", 76 / 68, "x",
           partial(_block, taps=3), _WHICH),
    _claim("Table 1", "residual block, 1x1: computation over communication", _BLOCK, "3.2.1", 25 / 66, "x",
           partial(_block, taps=1)),
)  # fmt: skip

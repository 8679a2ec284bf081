"""Dymem (Yang and Cheng, HPDC'20): its figures, and ours for them.

Its ResNets are of basic blocks, with two 3x3 convolutions each (§4.3.2): 32, 50 and 152 layers are He et al.'s 6n + 2
for CIFAR-10, and 101 is taken as 102.

The paper trains on CIFAR-10 and does not state the image size. ResNet-32 holds 35 MB at 32 x 32 and 1.9 GB at 224 x
224, where the paper has 1.9 GB (Fig. 15). Inception-v4 (128) takes no less than 75 x 75. It needs 3.8 GB under vDNN at
256 x 256 and 5.3 GB at its own 299, where the paper has 3.65 GB (Fig. 12). So 224 and 256 are taken, and the two rows
by which they were chosen do not count.

All comparisons have one baseline: vDNN's dynamic policy (§4.1). Its least need is that of its first pass, with all
layers offloaded and memory-optimal algorithms. Its speed is that of the pass that it takes on the device. vDNN's memory
is in CNMeM's pool, Dymem's in its own (GTBM). Both count the bytes that Fig. 15 calls used, fragments included.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from statistics import fmean

from overspill.core import LayerType, Op, Phase
from overspill.core.errors import InfeasibleBudgetError
from overspill_papers.placement import size_pool

from .chainer import Parts
from .claim import Claim
from .lab import MIB, Lab, LabSetting
from .layers import bytes_by_kind, maps_by_layer
from .run import PolicyRun

INCEPTION = LabSetting("inception-v4", 128, image_size=256)
NARROW = 0.2
"""The share of its FLOP/s that a Titan X reaches in convolutions of 16 to 64 channels: so that those of Table 1 take
as long over their transfers as there."""
RESNET_32 = LabSetting("resnet32-cifar", 100, image_size=224, batch_norm=False, conv_efficiency=NARROW)
RESNET_50, RESNET_101, RESNET_152 = (
    LabSetting(f"{__name__}:resnet{depth}", 100, conv_efficiency=NARROW) for depth in (50, 101, 152)
)
BOTTLENECK = LabSetting("resnet50", 100)
"""ResNet-50 for ImageNet, whose first block has the 1x1 convolution of Table 1."""
ALEXNET = LabSetting("alexnet", 256)
VGG_128, VGG_256 = LabSetting("vgg16-vdnn", 128), LabSetting("vgg16-vdnn", 256, features=True)
NETWORKS = (ALEXNET, VGG_128, RESNET_50, INCEPTION)
BASE, ALL, DYNAMIC, ONE_STREAM = "oracle", "vdnn-all", "vdnn-dynamic", "sequential"
LEAST = f"{ALL}:m"
"""The first pass of the dynamic policy: if it does not fit, nothing does."""
LARGE = (LayerType.CONV, LayerType.ACTIVATION, LayerType.NORM, LayerType.POOL)
SMALL = (LayerType.DROPOUT, LayerType.SOFTMAX, LayerType.LINEAR)
ITERATIONS = 20
SHARES = (1.0, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0)


def resnet50() -> Parts:
    return _cifar("resnet50", (8, 8, 8))


def resnet101() -> Parts:
    return _cifar("resnet101", (17, 17, 16))


def resnet152() -> Parts:
    return _cifar("resnet152", (25, 25, 25))


def _cifar(name: str, blocks: tuple[int, int, int]) -> Parts:
    from torch.nn import functional as F  # noqa: PLC0415  # what only lists claims does without

    from overspill.models.resnet import cifar  # noqa: PLC0415

    job = cifar(name, blocks, image_size=224)
    return job.module, job.make_batch, lambda logits, _images, labels: F.cross_entropy(logits, labels)


def _feature_share(lab: Lab) -> float:
    """Return the activations' percentage of the network-wide memory."""
    kinds = bytes_by_kind(lab.graph(INCEPTION))
    return 100 * kinds["feature maps"] / sum(kinds.values())


def _layer_share(setting: LabSetting, kinds: Collection[LayerType], lab: Lab) -> float:
    """Return the percentage of activations that layers of `kinds` make."""
    maps = maps_by_layer(lab.graph(setting))
    return 100 * sum(nbytes for kind, nbytes in maps.items() if kind in kinds) / sum(maps.values())


def _steps(setting: LabSetting, phases: Collection[Phase], lab: Lab) -> float:
    """Return the number of layers that run in each of these phases."""
    return len({(op.phase, op.layer) for op in lab.graph(setting).ops if op.phase in phases})


def _least(setting: LabSetting, policy: str, lab: Lab) -> list[PolicyRun]:
    """Return runs in the least memory of `policy`, and in more.

    It is the least for which it finds schedules (§5.1: the condition of a trainable network).
    """
    floor = lab.floor_bytes(setting, policy)
    found = []
    for share in SHARES:
        try:
            found.append(lab.run(setting, policy, int(share * floor)))
        except InfeasibleBudgetError:
            continue
    return found


def vdnn_mb(setting: LabSetting, lab: Lab) -> float:
    return lab.run(setting, LEAST).spread_bytes / MIB


def dymem_mb(setting: LabSetting, lab: Lab) -> float:
    """Return the MiB in Dymem's own pool, which is not smallest at the smallest budget."""
    return min(run.two_ended_bytes for run in _least(setting, "dymem:m", lab)) / MIB


def _whole_mb(setting: LabSetting, lab: Lab) -> float:
    """Return the MiB of a step of Dymem's with all the memory of the device, not at the least budget."""
    return lab.run(setting, "dymem:m").two_ended_bytes / MIB


def _saved_percent(lab: Lab) -> float:
    return 100 * (1 - dymem_mb(INCEPTION, lab) / vdnn_mb(INCEPTION, lab))


def _superneurons_mb(lab: Lab) -> float:
    return min(run.spread_bytes for run in _least(INCEPTION, "superneurons-offload:m", lab)) / MIB


def _saved_of_superneurons_percent(lab: Lab) -> float:
    return 100 * (1 - dymem_mb(INCEPTION, lab) / _superneurons_mb(lab))


def _more_than_vdnn_mb(lab: Lab) -> float:
    return (lab.run(ALEXNET, "dymem:m").spread_bytes - lab.run(ALEXNET, LEAST).spread_bytes) / MIB


def _conv_throughput(setting: LabSetting, policy: str, lab: Lab) -> float:
    """Return the convolutions' throughput as a percentage of that of the fastest algorithms."""
    conv = LayerType.CONV
    return 100 * lab.run(setting, BASE).seconds_of(conv) / lab.run(setting, policy).seconds_of(conv)


def _mean_conv_throughput(policy: str, lab: Lab) -> float:
    return fmean(_conv_throughput(setting, policy, lab) for setting in NETWORKS)


def _lost_percent(lab: Lab) -> float:
    return 100 - _mean_conv_throughput(f"{BASE}:m", lab)


def _speedup(setting: LabSetting, against: str, lab: Lab) -> float:
    return lab.run(setting, against).seconds / lab.run(setting, "dymem").seconds


def _overlapped_percent(setting: LabSetting, policy: str, lab: Lab) -> float:
    """Return overlapped time as a percentage of the time that one stream takes for both."""
    whole = lab.run(setting, f"{ONE_STREAM}:m").seconds
    return 100 * lab.run(setting, f"{policy}:m").timeline.overlapped_seconds / whole


def _failure_percent(beta_mb: int, lab: Lab) -> float:
    """Return the percentage of attempts to train an iteration that fail.

    The first iteration is in a main space of 10 GB, the others in the space sized from it and β.
    """
    run = lab.run(RESNET_101, "dymem")
    sizing = size_pool([run.two_ended_events] * ITERATIONS, beta_bytes=beta_mb * MIB)
    return 100 * sizing.failure_rate


def _overlap_ratio(setting: LabSetting, lab: Lab) -> float:
    return _overlapped_percent(setting, "dymem", lab) / _overlapped_percent(setting, ALL, lab)


def _reduced_percent(lab: Lab) -> float:
    """Return the largest saving of Dymem over the time of one stream, in percent."""
    return max(
        100 * (1 - lab.run(setting, "dymem:m").seconds / lab.run(setting, f"{ONE_STREAM}:m").seconds)
        for setting in (INCEPTION, RESNET_32)
    )


def _block(lab: Lab, taps: int) -> float:
    """Return computation over communication of the first residual block's convolutions in forward.

    They have `taps` x `taps`.
    """
    run = lab.run(BOTTLENECK if taps == 1 else RESNET_50, f"{BASE}:m")
    graph, device = run.graph, run.device
    seconds = {e.target: e.end_seconds - e.start_seconds for e in run.timeline.events}

    def kernel(op: Op) -> int:
        return next(graph.tensors[t].shape[-1] for t in op.reads if graph.tensors[t].persistent)

    inside = [
        op
        for op in graph.ops
        if op.layer.startswith(f"model.{3 if taps == 1 else 2}.branch") and op.phase is Phase.FORWARD
    ]
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
_LEADING = (
    "the results consistently demonstrate the leading throughput on ResNet-50, ResNet-101, ResNet-152, and Inception V4"
)
_LINEAR = "For linear networks, VGG-16, and AlexNet, there is not much performance improvement over vDNN"
_LONGER = "The overlapped time in Dymem is longer than that in the vDNN"
_90 = "more than 90% of GPU DRAM is required by Inception V4"
_LAYERS = "the memory usage of CONV, ACT, BN, and POOL layers can account for more than 90% of total usage"
_1 = (
    "it is not fruitful to offload Dropout, Softmax, and FC layers because they only require less than 1% of the total "
    "memory"
)
_SIZE = "the size of images, 256, is chosen by this row: 5.3 GB at 299, 3.8 at 256, 3.1 at 224."
_SIZE_32 = "the size of images, 224, is chosen by this row."
_STEPS = "One iteration requires 190 steps in the forward and backward passes"
_23 = "there are 23 forward steps and 23 backward steps"
_COUNTED = "Ours are calls of layers; 83 forward and, as sums and reshapes have no backward of their own, 73 backward."
_BETA = "We configure beta varying from 100 to 500MB and run ResNet-101 ... Training failure (%) 5, 0.9, 0"
_EXACT = "Our iterations repeat exactly, and none fails."
_JOINS = "What is left belongs to sums and concatenations, which the paper does not name."
_SLOW = (
    "Table 1 may also be of the fastest algorithms: then narrow convolutions reach 0.11 of the device's FLOP/s, and it "
    "is 1.36. With the 0.65 of wide ones it is 1.12."
)
_SOME = "vDNN's pass here offloads convolutions' inputs alone; against vDNN_all it would be 1.26 times as fast."
_ENDS = (
    "Live bytes are 2307 MB; best fit spreads them over 3207, its own pool over 3561. In backward two generations of "
    "fork tensors overlap and take turns at the high end, half of which is then empty while the low end is full. The "
    "smallest main space that training survives, where each end takes the other's holes, is 3246. Counting layers that "
    "work in place as no reference gives 3286 here, but 21 % more than now on AlexNet. If what backward brings or "
    "makes is grouped as its layer (§3.3.2: forks temporary, all others movable), it is 3476, and 8 % more on "
    "ResNet-32."
)
_SAVED = "By live bytes of both it would be 24 %, with both in CNMeM's pool 16 %."
_CACHE = (
    "SuperNeurons without recomputation moves outputs of convolutions alone: 5.0 GB of normalised maps and 2.3 GB of "
    "joined ones stay at its peak, and it takes 10.4 GB. The paper implies 3.5. If every output may leave, it takes "
    "3.2; if the network has no batch norm and joined maps may leave too, 3.7."
)
_FRAGMENTS = (
    'Both in CNMeM\'s pool, for in linear networks Dymem "falls back to the same best-fit algorithm". All of it is '
    "fragments: the live bytes of both peak at 1082 MB."
)
_NO_CONVOLUTION = (
    "The step's peak, 11.0 GB in the first pooling's backward, has no convolution, and all fast workspaces fit below "
    "it: budgets that would slow convolutions down end the training first (the same peak with memory-optimal "
    "algorithms)."
)
_PERFECT = "It is Inception-v4's, of which perfect overlap would take 45 %."
_WHICH = (
    "A basic block has no 1x1 convolution; ours is that of ResNet-50 for ImageNet, with memory-optimal algorithms and "
    "the efficiency of wide convolutions."
)
_NARROW = (
    "the efficiency of convolutions of 16 to 64 channels, 0.2, is set by this row, with memory-optimal algorithms."
)
_BLOCK = "Computation 25 76 3, Communication 66 68 x"

_MAPS_GRADIENTS = "Gradients of feature maps, which stand for themselves here, are 6 % more."

CLAIMS: tuple[Claim, ...] = (
    _claim("Fig. 1", "Inception-v4 (128): share of feature maps", _90, "2.1", 90, "%", _feature_share, _MAPS_GRADIENTS,
           bound=">"),
    *(
        _claim("Fig. 8", f"{name}: memory of {what}", quote, "2.3.2", value, "%",
               partial(_layer_share, setting, kinds), _JOINS if bound == ">" and setting is not VGG_128 else "",
               bound=bound)
        for name, setting in (
            ("Inception-v4 (128)", INCEPTION), ("ResNet-50 (100)", RESNET_50), ("VGG-16 (128)", VGG_128)
        )
        for what, quote, value, kinds, bound in (
            ("CONV, ACT, BN and POOL", _LAYERS, 90, LARGE, ">"), ("Dropout, Softmax and FC", _1, 1, SMALL, "<"),
        )
    ),
    _claim("Fig. 12", "Inception-v4 (128): vDNN's memory", _3650, "5.1", 3650, "MB", partial(vdnn_mb, INCEPTION),
           fitted=_SIZE),
    _claim("Fig. 12", "Inception-v4 (128): Dymem's memory", _3650, "5.1", 2527, "MB", partial(dymem_mb, INCEPTION),
        _ENDS,
           repeats="it is what 31 % leave of 3650 MB, by which the size of images is set."),
    _claim("Fig. 12", "Inception-v4 (128): saved of vDNN's memory", _3650, "5.1", 31, "%", _saved_percent, _SAVED),
    _claim("Fig. 12", "Inception-v4 (128): saved of SuperNeurons' memory", _28, "5.1", 28, "%",
           _saved_of_superneurons_percent, _CACHE),
    _claim("Fig. 12", "AlexNet (256): Dymem's memory above vDNN's", _250, "5.1", 250, "MB", _more_than_vdnn_mb,
           _FRAGMENTS),
    _claim("Fig. 12", "(m): convolution throughput lost, mean of four networks", _60, "5.1", 60, "%", _lost_percent),
    _claim("Fig. 12", "Dymem: convolution throughput, mean of four networks", _95, "5.1", 95, "%",
           partial(_mean_conv_throughput, "dymem")),
    _claim("Fig. 12", "vDNN: convolution throughput, mean of four networks", _95, "5.1", 97, "%",
           partial(_mean_conv_throughput, DYNAMIC)),
    _claim("Fig. 12", "vDNN: convolution throughput, VGG-16 (256)", _84, "5.1", 84, "%",
           partial(_conv_throughput, VGG_256, DYNAMIC), _NO_CONVOLUTION),
    _claim("Fig. 12", "Dymem: convolution throughput, VGG-16 (256)", _72, "5.1", 72, "%",
           partial(_conv_throughput, VGG_256, "dymem"), _NO_CONVOLUTION),
    _claim("Fig. 13", "ResNet-50 (100): throughput over vDNN's", _42, "5.2", 1.42, "x",
           partial(_speedup, RESNET_50, DYNAMIC), _SLOW),
    _claim("Fig. 13", "ResNet-50 (100): throughput over vDNN_all's", _42, "5.2", 1.42, "x",
           partial(_speedup, RESNET_50, ALL), aside="had vDNN offloaded all layers, with the fastest algorithms."),
    *(
        _claim("Fig. 13", f"{name}: throughput over vDNN's, at least", _LEADING, "5.2", 1, "x",
               partial(_speedup, setting, DYNAMIC), note, bound=">")
        for name, setting, note in (
            ("ResNet-101 (100)", RESNET_101, ""), ("ResNet-152 (100)", RESNET_152, ""),
            ("Inception-v4 (128)", INCEPTION, _SOME),
        )
    ),
    *(
        _claim("Fig. 13", f"{name}: throughput over vDNN's", _LINEAR, "5.2", 1, "x",
            partial(_speedup, setting, DYNAMIC),
               aside="1 is no figure of the paper's, which says it in words.")
        for name, setting in (("AlexNet (256)", ALEXNET), ("VGG-16 (128)", VGG_128))
    ),
    _claim("Fig. 14", "Inception-v4: vDNN's overlapped time", _18, "5.3", 18, "%",
           partial(_overlapped_percent, INCEPTION, ALL)),
    _claim("Fig. 14", "ResNet-32: vDNN's overlapped time", _18, "5.3", 12, "%",
           partial(_overlapped_percent, RESNET_32, ALL)),
    *(
        _claim("Fig. 14", f"{name}: Dymem's overlapped time over vDNN's, at least", _LONGER, "5.3", 1, "x",
               partial(_overlap_ratio, setting), bound=">")
        for name, setting in (("Inception-v4", INCEPTION), ("ResNet-32", RESNET_32))
    ),
    _claim("Fig. 14", "Dymem: time less than with one stream, most", _46, "5.3", 46, "%", _reduced_percent,
           _PERFECT),
    _claim("Fig. 15", "ResNet-32 (100) without batch norm: vDNN's memory", _2500, "5.4", 2500, "MB",
           partial(vdnn_mb, RESNET_32)),
    _claim("Fig. 15", "ResNet-32 (100) without batch norm: Dymem's memory", _2500, "5.4", 1854, "MB",
           partial(_whole_mb, RESNET_32), fitted=_SIZE_32),
    *(
        _claim("§4.3.1", f"AlexNet (256): steps {word}", _23, "4.3.1", 23, "steps", partial(_steps, ALEXNET, (phase,)))
        for word, phase in (("forward", Phase.FORWARD), ("backward", Phase.BACKWARD))
    ),
    _claim("Fig. 15", "ResNet-32 (100) without batch norm: steps", _STEPS, "5.4", 190, "steps",
           partial(_steps, RESNET_32, (Phase.FORWARD, Phase.BACKWARD)), _COUNTED),
    _claim("Table 1", "residual block, 3x3: computation over communication", _BLOCK, "3.2.1", 76 / 68, "x",
           partial(_block, taps=3), fitted=_NARROW),
    _claim("Table 1", "residual block, 1x1: computation over communication", _BLOCK, "3.2.1", 25 / 66, "x",
           partial(_block, taps=1), _WHICH),
    *(
        _claim("Table 2", f"ResNet-101 (100): training failures, β of {beta} MB", _BETA, "5.5", value, "%",
               partial(_failure_percent, beta), _EXACT)
        for beta, value in ((100, 5), (300, 0.9))
    ),
)  # fmt: skip

"""vDNN (Rhu et al., MICRO'16, arXiv 1602.08124): its figures, and ours for them.

Their axes are in MB of 2^20 bytes and their text divides these by 1000: 16017 MiB of feature maps are "16 GB".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from overspill.core import LayerType, Phase, Verb
from overspill.policies import Policy
from overspill.policies.vdnn import VdnnAll

from .claim import Claim
from .lab import MIB, Lab, Setting, network_wide_bytes
from .layers import bytes_of, most_at_once, spans, weighted
from .run import Run

GB = 1000 * MIB
NO_SEARCH = VdnnAll(memory_optimal=True, pooling_searches=False)
BASE, ALL, DYNAMIC = "oracle", "vdnn-all", "vdnn-dynamic"


def _setting(model: str, batch: int, *, features: bool = True) -> Setting:
    return Setting(model, batch, "titan-x", cudnn=4, features=features)


ALEXNET, OVERFEAT, GOOGLENET = _setting("alexnet", 128), _setting("overfeat", 128), _setting("googlenet", 128)
VGG_64, VGG_128, VGG_256 = (_setting("vgg16-vdnn", batch) for batch in (64, 128, 256))
SIX = (ALEXNET, OVERFEAT, GOOGLENET, VGG_64, VGG_128, VGG_256)
DEEP = tuple(_setting(f"vgg{depth}", 32, features=False) for depth in (116, 216, 316, 416))


def _baseline_gb(model: str, batch: int, lab: Lab, *, gradients: bool = True) -> float:
    setting = replace(_setting(model, batch, features=False), gradients=gradients)
    return network_wide_bytes(lab.graph(setting)) / GB


def _saved_percent(settings: Sequence[Setting], policy: str, taken: Callable[[Run], float], lab: Lab) -> float:
    """Percent of the baseline's memory that `policy` saves, on average over `settings`.

    Against the whole network stands what vDNN's pool holds, without the classifier, which Torch allocates (§IV-A): that
    is how 89 % can be saved of AlexNet, whose classifier's weights alone are a fifth of all.
    """
    return fmean(100 * (1 - taken(lab.run(s, policy)) / _network_wide(s, lab)) for s in settings)


def _network_wide(setting: Setting, lab: Lab) -> int:
    return network_wide_bytes(lab.graph(replace(setting, features=False)))


def _average(run: Run) -> float:
    """Over the steps of the memory manager, each allocation, release and op counting once."""
    return fmean(run.timeline.live_bytes)


def _largest(run: Run) -> float:
    return run.pool_bytes


def _throughput_percent(setting: Setting, policy: str, lab: Lab) -> float:
    return 100 * lab.run(setting, BASE).seconds / lab.run(setting, policy).seconds


def _lost_percent(settings: Sequence[Setting], policy: str, of: Callable[..., float], lab: Lab) -> float:
    return of([100 - _throughput_percent(setting, policy, lab) for setting in settings])


def _mean_throughput(lab: Lab) -> float:
    return fmean(_throughput_percent(setting, DYNAMIC, lab) for setting in SIX)


def _pool_gb(setting: Setting, policy: str | Policy, lab: Lab) -> float:
    return lab.run(setting, policy).pool_bytes / GB


def _offloaded_gb(setting: Setting, policy: str, lab: Lab) -> float:
    return lab.run(setting, policy).offloaded_bytes / GB


def _feature_share(setting: Setting, lab: Lab) -> float:
    """Percent of the baseline's memory that belongs to the layers before the classifier."""
    return 100 * network_wide_bytes(lab.graph(setting)) / _network_wide(setting, lab)


def _reuse_ms(setting: Setting, lab: Lab) -> float:
    """From the end of the first layer's forward to the start of its backward."""
    run = lab.run(setting, BASE)
    first = next(op for op in run.graph.ops if op.layer_type is LayerType.CONV)
    spans = {e.target: e for e in run.timeline.events if e.verb is Verb.RUN}
    begun = min(
        spans[op.id].start_seconds
        for op in run.graph.ops
        if op.layer == first.layer and op.phase is Phase.BACKWARD and op.id in spans
    )
    return 1000 * (begun - spans[first.id].end_seconds)


def _deep_growth(lab: Lab) -> float:
    return _baseline_gb("vgg416", 32, lab) / _baseline_gb("vgg16-vdnn", 32, lab)


def _deep_gpu_gb(lab: Lab, *, gradients: bool = True) -> float:
    return max(_pool_gb(replace(setting, gradients=gradients), DYNAMIC, lab) for setting in DEEP)


def _deep_host_percent(setting: Setting, lab: Lab) -> float:
    """Percent of all that is allocated, on the GPU and on the host, that is on the host."""
    run = lab.run(setting, DYNAMIC)
    return 100 * run.offloaded_bytes / (run.offloaded_bytes + run.pool_bytes)


def _deep_throughput(lab: Lab) -> float:
    return min(_throughput_percent(setting, DYNAMIC, lab) for setting in DEEP)


def _unused_percent(of: Callable[[list[float]], float], lab: Lab) -> float:
    """Of the baseline's memory, what not even the layer that uses most of it does, over the ten networks."""
    graphs = [lab.graph(replace(setting, features=False)) for setting in (*SIX, *DEEP)]
    return of([100 * (1 - most_at_once(graph) / network_wide_bytes(graph)) for graph in graphs])


def _too_large(lab: Lab) -> list[Setting]:
    """Those of the ten networks whose baseline is more than the GPU has."""
    return [s for s in (*SIX, *DEEP) if _network_wide(s, lab) > lab.device(s).memory_bytes]


def _too_large_count(lab: Lab) -> float:
    return len(_too_large(lab))


def _of_too_large(of: Callable[[list[float]], float], figure: Callable[[Setting, Lab], float], lab: Lab) -> float:
    return of([figure(setting, lab) for setting in _too_large(lab)])


def _network_wide_gb(setting: Setting, lab: Lab) -> float:
    return _network_wide(setting, lab) / GB


def _dynamic_saved_percent(setting: Setting, lab: Lab) -> float:
    return _saved_percent((setting,), DYNAMIC, _average, lab)


def _dynamic_lost_percent(setting: Setting, lab: Lab) -> float:
    return 100 - _throughput_percent(setting, DYNAMIC, lab)


def _over_weights(lab: Lab) -> float:
    """Maps and workspaces of VGG-16's convolutions in forward, over their weights."""
    graph = lab.graph(VGG_256)
    rows = [bytes_of(graph, ops[0]) for ops in weighted(graph, (LayerType.CONV,)).values()]
    return sum(maps + space for maps, _, space in rows) / sum(weights for _, weights, _ in rows)


def _most_bandwidth(lab: Lab) -> float:
    """The most bytes a second that a convolution moves, in GB."""
    run = lab.run(VGG_64, BASE)
    ran = spans(run)
    ops = (op for op in run.graph.ops if op.layer_type is LayerType.CONV and op.moved_bytes)
    return max(op.moved_bytes / (ran[op.id][1] - ran[op.id][0]) for op in ops) / 1e9


def _traffic_percent(lab: Lab) -> float:
    """The most that transfers slow a step down by taking bandwidth of DRAM, all layers offloaded."""
    shared = (replace(setting, shared_bandwidth=True) for setting in SIX)
    return max(100 * (lab.run(a, ALL).seconds / lab.run(b, ALL).seconds - 1) for a, b in zip(shared, SIX, strict=True))


def _whole_share(lab: Lab, *, policy: str | Policy = f"{ALL}:m", gradients: bool = True, spread: bool = False) -> float:
    """Percent of the GPU's free memory that VGG-16 (256), its classifier too, takes; `spread`: with CNMeM's fragments."""
    run = lab.run(replace(VGG_256, features=False, gradients=gradients), policy)
    return 100 * (run.spread_bytes if spread else run.pool_bytes) / run.device.usable_bytes


_claim = partial(Claim, "vdnn")

_TOTALS = "incurring a total of 28 GB of memory usage for batch size 256"
_BOTH = "(15 GB and 28 GB respectively)"
_DEEP = "the baseline memory requirements monotonically increase by 14 times (from 4.9 GB to 67.1 GB)"
_UP_TO = "reduces the average GPU memory usage of AlexNet by up to 89%, OverFeat by 91%, and GoogLeNet by 95%"
_ALL_M = "an average 73% and 93% reduction on the maximum and average memory usage of the six networks"
_ALL_P = "slightly reduced to 64% and 90% for the maximum and average memory usage"
_CONV_P = "reduces the maximum and average memory usage by 52% and 76% on average, even with the performance-optimal"
_DYN = "reducing the maximum and average memory consumption by 49% and 69% on average compared to baseline"
_LOSS = "exhibit an average 58% and 55% performance loss (maximum 65% and 63% degradation) compared to baseline"
_97 = "reaching an average 97% of baseline's throughput (worst case 82% of the oracular baseline, for VGG-16 (256))"
_48 = "VGG-16 (128) trained with memory-optimal vDNNall only uses up to 4.8 GB ... leads to a 61% performance loss"
_REUSE = "more than 60 ms and 1200 ms for the first layer of AlexNet and VGG-16 (64), respectively"
_SHARE = "feature extraction layers ... accounting for 81% of memory usage on AlexNet and 96% on VGG-16 (256)"
_GPU = "only using up to 4.2 GB of GPU memory and having all remaining 81% to 92% ... reside in CPU memory"
_NO_LOSS = "vDNNdyn also did not incur any noticeable performance degradations"
_UNUSED = "leading to 53% to 79% of allocated memory not being used at all at any given time"
_SIX_FAIL = "fail in training 6 out of the 10 studied DNNs when their memory allocation size (14 GB to 67 GB) exceeds the GPU memory"
_SIX_SAVED = "reduces the average GPU memory usage of these 6 memory hungry networks by 73% to 98%"
_SIX_LOST = "Compared to a hypothetical, oracular GPU ..., vDNN incurs 1% to 18% performance overhead"
_90 = "Similar experiments to VGG-16 (256) result in an average 90% reduction in memory usage at a cost of 18%"
_ENABLES = (
    "vDNN enables VGG-16 with batch size 256 ... to be trained on a single NVIDIA Titan X GPU card containing 12 GB"
)
_ORDER = "the intermediate feature maps and workspace incur an order of magnitude higher memory usage compared to the weights"
_RARELY = "The feature extraction layers rarely saturate the 336 GB/sec of peak memory bandwidth"
_47 = "vDNN's additional traffic will approximately incur up to a worst-case (16/336) = 4.7% performance overheads"
_NO_SEARCH = "the backward of a pooling layer starts no prefetch; Fig. 10 has no such exception."
_SPREAD = "the same, from the start of CNMeM's pool to the block that lies highest."
_APPLIED = "each gradient of a weight is applied, and gone, as soon as it is made."


def _savings(quote: str, policy: str, label: str, maximum: float, average: float, note: str = "") -> tuple[Claim, ...]:
    return tuple(
        _claim("Fig. 11", f"{label}: saved of {what} memory, six networks", quote, "V-A", value, "%",
               partial(_saved_percent, SIX, policy, taken), remark)
        for what, value, taken, remark in (
            ("maximum", maximum, _largest, note), ("average", average, _average, _BY_STEPS),
        )
    )  # fmt: skip


_GRADIENTS_ASIDE = "81 % leave 0.2 GB to the classifier, as much as its weights alone take. Without the gradients of weights ours is 76 %."
_RELEASED = (
    "Five of the six fit the GPU without offloading here, as layers release what is used up, and then save by that alone. "
    "Were VGG-16 (128), whose baseline takes 15 GB, under vDNN_conv, it would save 53 % instead of 38 %: the mean is 44 %."
)
_POOLING = (
    "The most is held in the first pooling's backward, when the search of Fig. 10 has already fetched CONV_02's input: "
    "three maps of 1.57 GB and two of a quarter. CONV_02's own backward takes 4.9 GB. If poolings start no prefetch that is "
    "all, dyn still reaches 97.0 % (82.1 % with VGG-16 (256)), and all(m) saves 68.9 % of maximum memory instead of 66.2."
)
_POOLING_256 = (
    "The same pooling: with the classifier's weights, and the gradients of all, 12.2 GB. Either reading below fits, but only "
    "by bytes handed out: CNMeM scatters them over more than the GPU has, however the paper's came to lie."
)
_WEIGHT_GRADIENTS = (
    "2.2 GB of it are gradients of weights, which are all there at the end of backward. With each applied, "
    "and gone, as soon as it is made, it is 4.0 GB."
)
_BY_STEPS = (
    "Average over the memory manager's steps. Weighted by time the long early layers count more, and it would be 85 % for "
    "all(m), against the same base without the classifier."
)
_TUNED = "the algorithms' relative speeds are set by this figure (costs/convolution.py)."
_WORKSPACE = "the speed of transforms is set by this figure (costs/convolution.py); all sizes are formulas."
_EFFICIENCY = "the device's efficiency is set by this figure and four of convnet-benchmarks (devices/titan-x.toml)."
_ASIDE = (
    "As everywhere in Fig. 14 the classifier is left aside, its memory too: with it the first pooling's backward "
    "holds 11.9 GiB, where the GPU leaves 11.6 to the pool, and no schedule is found."
)

CLAIMS: tuple[Claim, ...] = (
    _claim("Fig. 1", "VGG-16 (256), baseline", _TOTALS, "I", 28, "GB", partial(_baseline_gb, "vgg16-vdnn", 256),
           fitted=_WORKSPACE),
    _claim("Fig. 1", "VGG-16 (128), baseline", _BOTH, "V-C", 15, "GB", partial(_baseline_gb, "vgg16-vdnn", 128),
           fitted=_WORKSPACE),
    _claim("Fig. 1", "AlexNet (128), baseline", 'required a "mere" 1.1 GB', "I", 1.1, "GB",
           partial(_baseline_gb, "alexnet", 128)),
    *(
        _claim("Fig. 1", f"baseline's memory that is never used at once, {word} of ten networks", _UNUSED, "I", value, "%",
               partial(_unused_percent, of))
        for word, value, of in (("least", 53, min), ("most", 79, max))
    ),
    _claim("Fig. 1", "networks, of ten, that the baseline cannot train", _SIX_FAIL, "I", 6, "networks", _too_large_count),
    *(
        _claim(where, f"those networks: {what}", quote, "I", value, unit, partial(_of_too_large, of, figure))
        for where, what, quote, value, unit, of, figure in (
            ("Fig. 1", "least memory", _SIX_FAIL, 14, "GB", min, _network_wide_gb),
            ("Fig. 1", "most memory", _SIX_FAIL, 67, "GB", max, _network_wide_gb),
            ("Fig. 11", "dyn, least saved of average memory", _SIX_SAVED, 73, "%", min, _dynamic_saved_percent),
            ("Fig. 11", "dyn, most saved of average memory", _SIX_SAVED, 98, "%", max, _dynamic_saved_percent),
        )
    ),
    _claim("Fig. 4", "AlexNet (128), share of feature extraction", _SHARE, "III", 81, "%",
           partial(_feature_share, ALEXNET), _GRADIENTS_ASIDE),
    _claim("Fig. 4", "AlexNet (128), share of feature extraction, gradients applied", _SHARE, "III", 81, "%",
           partial(_feature_share, replace(ALEXNET, gradients=False)), aside=_APPLIED),
    _claim("Fig. 4", "VGG-16 (256), share of feature extraction", _SHARE, "III", 96, "%",
           partial(_feature_share, VGG_256)),
    _claim("Fig. 5", "VGG-16 (256), maps and workspaces of convolutions over their weights", _ORDER, "II-C", 10, "x",
           _over_weights, bound=">"),
    _claim("Fig. 6", "AlexNet (128), reuse distance of the first layer", _REUSE, "III-A", 60, "ms",
           partial(_reuse_ms, ALEXNET), bound=">", fitted=_EFFICIENCY),
    _claim("Fig. 6", "VGG-16 (64), reuse distance of the first layer", _REUSE, "III-A", 1200, "ms",
           partial(_reuse_ms, VGG_64), bound=">", fitted=_EFFICIENCY),
    *(
        _claim("Fig. 11", f"{name} (128), all(m): saved of average memory", _UP_TO, "abstract", value, "%",
               partial(_saved_percent, (setting,), "vdnn-all:m", _average))
        for name, setting, value in (("AlexNet", ALEXNET, 89), ("OverFeat", OVERFEAT, 91), ("GoogLeNet", GOOGLENET, 95))
    ),
    *_savings(_ALL_M, "vdnn-all:m", "all(m)", 73, 93),
    *_savings(_ALL_P, "vdnn-all", "all(p)", 64, 90),
    *_savings(_CONV_P, "vdnn-conv", "conv(p)", 52, 76),
    *_savings(_DYN, DYNAMIC, "dyn", 49, 69, _RELEASED),
    _claim("Fig. 11", "VGG-16 (256), dyn: saved of average memory", _90, "VII", 90, "%",
           partial(_saved_percent, (VGG_256,), DYNAMIC, _average)),
    _claim("Fig. 11", "VGG-16 (256), all(m): memory, of what the GPU has free", _ENABLES, "abstract", 100, "%",
           _whole_share, _POOLING_256, bound="<"),
    *(
        _claim("Fig. 11", f"VGG-16 (256), all(m): memory, of what the GPU has free, {label}", _ENABLES, "abstract", 100, "%",
               compute, bound="<", aside=reading)
        for label, compute, reading in (
            ("gradients applied", partial(_whole_share, gradients=False), _APPLIED),
            ("poolings start no prefetch", partial(_whole_share, policy=NO_SEARCH), _NO_SEARCH),
            ("with CNMeM's fragments", partial(_whole_share, policy=NO_SEARCH, spread=True), _SPREAD),
        )
    ),
    _claim("Fig. 11", "VGG-16 (128), all(m): maximum memory", _48, "V-A", 4.8, "GB",
           partial(_pool_gb, VGG_128, "vdnn-all:m"), _POOLING),
    _claim("Fig. 11", "VGG-16 (128), all(m): maximum memory, poolings start no prefetch", _48, "V-A", 4.8, "GB",
           partial(_pool_gb, VGG_128, NO_SEARCH), aside=_NO_SEARCH),
    _claim("Fig. 12", "VGG-16 (256), all: offloaded", "reaching up to 16 GB of GPU memory savings", "V-A", 16, "GB",
           partial(_offloaded_gb, VGG_256, "vdnn-all")),
    _claim("Fig. 13", "VGG-16 (64): most bandwidth that a convolution takes", _RARELY, "V-B", 336, "GB/s", _most_bandwidth,
           bound="<"),
    _claim("§V-B", "all(p): time that transfers' traffic costs, most of six networks", _47, "V-B", 4.7, "%",
           _traffic_percent, bound="<"),
    _claim("Fig. 14", "dyn: throughput of the baseline's, six networks", _97, "V-C", 97, "%", _mean_throughput),
    _claim("Fig. 14", "dyn: throughput of the baseline's, VGG-16 (256)", _97, "V-C", 82, "%",
           partial(_throughput_percent, VGG_256, DYNAMIC), _ASIDE),
    *(
        _claim("Fig. 14", f"networks that the baseline cannot train, dyn: throughput lost, {word}", _SIX_LOST, "I", value,
               "%", partial(_of_too_large, of, _dynamic_lost_percent))
        for word, value, of in (("least", 1, min), ("most", 18, max))
    ),
    *(
        _claim("Fig. 14", f"{label}: throughput lost, {word} of six networks", _LOSS, "V-C", value, "%",
               partial(_lost_percent, SIX, policy, of), fitted=_TUNED)
        for label, policy, mean, most in (("all(m)", "vdnn-all:m", 58, 65), ("conv(m)", "vdnn-conv:m", 55, 63))
        for word, value, of in (("mean", mean, fmean), ("most", most, max))
    ),
    _claim("Fig. 14", "all(m): throughput lost, VGG-16 (128)", _48, "V-A", 61, "%",
           partial(_lost_percent, (VGG_128,), "vdnn-all:m", fmean)),
    _claim("Fig. 15", "VGG-16 (32), baseline", _DEEP, "V-E", 4.9, "GB", partial(_baseline_gb, "vgg16-vdnn", 32)),
    _claim("Fig. 15", "VGG-16 (32), baseline, gradients applied", _DEEP, "V-E", 4.9, "GB",
           partial(_baseline_gb, "vgg16-vdnn", 32, gradients=False), aside=_APPLIED),
    _claim("Fig. 15", "VGG-416 (32), baseline", _DEEP, "V-E", 67.1, "GB", partial(_baseline_gb, "vgg416", 32)),
    _claim("Fig. 15", "VGG-416 over VGG-16, baseline", _DEEP, "V-E", 14, "x", _deep_growth),
    _claim("Fig. 15", "VGG-116 to 416, dyn: most on the GPU", _GPU, "V-E", 4.2, "GB", _deep_gpu_gb,
           _WEIGHT_GRADIENTS),
    _claim("Fig. 15", "VGG-116 to 416, dyn: most on the GPU, gradients applied", _GPU, "V-E", 4.2, "GB",
           partial(_deep_gpu_gb, gradients=False), aside=_APPLIED),
    _claim("Fig. 15", "VGG-116, dyn: share on the host", _GPU, "V-E", 81, "%", partial(_deep_host_percent, DEEP[0])),
    _claim("Fig. 15", "VGG-416, dyn: share on the host", _GPU, "V-E", 92, "%", partial(_deep_host_percent, DEEP[-1])),
    _claim("Fig. 15", "VGG-116 to 416, dyn: least throughput of the baseline's", _NO_LOSS, "V-E", 100, "%",
           _deep_throughput),
)  # fmt: skip

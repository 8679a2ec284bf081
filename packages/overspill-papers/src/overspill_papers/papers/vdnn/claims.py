"""vDNN's figures, in its own words, and the measurement of ours."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean

from overspill_papers.papers.claim import Claim

from .measures import (
    ALEXNET,
    DEEP,
    DYNAMIC,
    GOOGLENET,
    NO_SEARCH,
    OVERFEAT,
    SIX,
    VGG_64,
    VGG_128,
    VGG_256,
    average_bytes,
    baseline_gb,
    deep_gpu_gb,
    deep_growth,
    deep_host_percent,
    deep_throughput,
    dynamic_lost_percent,
    dynamic_saved_percent,
    feature_share,
    largest_bytes,
    lost_percent,
    mean_throughput,
    most_bandwidth,
    network_wide_gb,
    of_too_large,
    offloaded_gb,
    over_weights,
    pool_gb,
    power_percent,
    reuse_ms,
    saved_percent,
    throughput_percent,
    too_large_count,
    traffic_percent,
    unused_percent,
    whole_share,
)

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
_SIX_FAIL = (
    "fail in training 6 out of the 10 studied DNNs when their memory allocation size (14 GB to 67 GB) exceeds the GPU "
    "memory"
)
_SIX_SAVED = "reduces the average GPU memory usage of these 6 memory hungry networks by 73% to 98%"
_SIX_LOST = "Compared to a hypothetical, oracular GPU ..., vDNN incurs 1% to 18% performance overhead"
_90 = "Similar experiments to VGG-16 (256) result in an average 90% reduction in memory usage at a cost of 18%"
_ENABLES = (
    "vDNN enables VGG-16 with batch size 256 ... to be trained on a single NVIDIA Titan X GPU card containing 12 GB"
)
_ORDER = (
    "the intermediate feature maps and workspace incur an order of magnitude higher memory usage compared to the "
    "weights"
)
_RARELY = "The feature extraction layers rarely saturate the 336 GB/sec of peak memory bandwidth"
_47 = "vDNN's additional traffic will approximately incur up to a worst-case (16/336) = 4.7% performance overheads"
_POWER = "vDNNdyn incurs 1% to 7% maximum power overheads"
_NO_SEARCH = "the backward of a pooling layer starts no prefetch; Fig. 10 has no such exception."
_SPREAD = "the same, from the start of CNMeM's pool to the block that lies highest."
_APPLIED = "each gradient of a weight is applied, and gone, as soon as it is made."


def _savings(quote: str, policy: str, label: str, maximum: float, average: float, note: str = "") -> tuple[Claim, ...]:
    return tuple(
        _claim("Fig. 11", f"{label}: saved of {what} memory, six networks", quote, "V-A", value, "%",
               partial(saved_percent, SIX, policy, taken), remark)
        for what, value, taken, remark in (
            ("maximum", maximum, largest_bytes, note), ("average", average, average_bytes, _BY_STEPS),
        )
    )  # fmt: skip


_GRADIENTS_ASIDE = (
    "81 % leave 0.2 GB to the classifier, as much as its weights alone take. Without the gradients of weights ours is "
    "76 %."
)
_RELEASED = (
    "Five of the six fit the GPU without offloading here, as layers release what is used up, and then save by that "
    "alone. Were VGG-16 (128), whose baseline takes 15 GB, under vDNN_conv, it would save 53 % instead of 38 %: the "
    "mean is 44 %."
)
_POOLING = (
    "The most is held in the first pooling's backward, when the search of Fig. 10 has already fetched CONV_02's input: "
    "three maps of 1.57 GB and two of a quarter. CONV_02's own backward takes 4.9 GB. If poolings start no prefetch "
    "that is all, dyn still reaches 97.0 % (82.1 % with VGG-16 (256)), and all(m) saves 68.9 % of maximum memory "
    "instead of 66.2."
)
_POOLING_256 = (
    "The same pooling: with the classifier's weights, and the gradients of all, 12.2 GB. Either reading below fits, "
    "but only by bytes handed out: CNMeM scatters them over more than the GPU has, however the paper's came to lie."
)
_WEIGHT_GRADIENTS = (
    "2.2 GB of it are gradients of weights, which are all there at the end of backward. With each applied, "
    "and gone, as soon as it is made, it is 4.0 GB."
)
_DEEPER = (
    "The axis of Fig. 1 ends at 30 000 MB, so the very deep networks, of up to 67 GB, are not in it. With them it "
    "would be 96.7 %."
)
_FITS = (
    "VGG-16 (128) fits the GPU here with nothing offloaded, as layers release what is used up, and loses nothing. "
    "Under vDNN_conv it would save 79 % of average memory and lose 2.2 % of throughput."
)
_BY_STEPS = (
    "Average over the memory manager's steps. Weighted by time the long early layers count more, and it would be 85 % "
    "for all(m), against the same base without the classifier."
)
_TUNED = "the algorithms' relative speeds are set by this figure (costs/convolution.py)."
_WORKSPACE = "the speed of transforms is set by this figure (costs/convolution.py); all sizes are formulas."
_EFFICIENCY = "the device's efficiency is set by this figure and four of convnet-benchmarks (devices/titan-x.toml)."
_ASIDE = (
    "As everywhere in Fig. 14 the classifier is left aside, its memory too: with it the first pooling's backward "
    "holds 11.9 GiB, where the GPU leaves 11.6 to the pool, and no schedule is found."
)

_WATTS = (
    "By a model of the board's power (papers/vdnn/power.py) whose constants are assumed, and with everything "
    "offloaded, as dyn offloads nothing of these here. Transfers take 4 W of 250 at most, and where power is highest "
    "there often are none. With cores that take all their power in every op it is 0 to 0.7 % instead of 0 to 0.8."
)

_JOULES = "20 pJ for each bit that a transfer moves"

CLAIMS: tuple[Claim, ...] = (
    _claim("Fig. 1", "VGG-16 (256), baseline", _TOTALS, "I", 28, "GB", partial(baseline_gb, "vgg16-vdnn", 256),
           fitted=_WORKSPACE),
    _claim("Fig. 1", "VGG-16 (128), baseline", _BOTH, "V-C", 15, "GB", partial(baseline_gb, "vgg16-vdnn", 128),
           fitted=_WORKSPACE),
    _claim("Fig. 1", "AlexNet (128), baseline", 'required a "mere" 1.1 GB', "I", 1.1, "GB",
           partial(baseline_gb, "alexnet", 128)),
    *(
        _claim("Fig. 1", f"baseline's memory that is never used at once, {word} of six networks", _UNUSED, "I", value,
            "%",
               partial(unused_percent, of), note)
        for word, value, of, note in (("least", 53, min, ""), ("most", 79, max, _DEEPER))
    ),
    _claim("Fig. 1", "networks, of ten, that the baseline cannot train", _SIX_FAIL, "I", 6, "networks",
        too_large_count),
    *(
        _claim(where, f"networks that it cannot train: {what}", quote, "I", value, unit,
               partial(of_too_large, of, figure), repeats=repeated)
        for where, what, quote, value, unit, of, figure, repeated in (
            ("Fig. 1", "least memory", _SIX_FAIL, 14, "GB", min, network_wide_gb, "it is VGG-16 (128)'s."),
            ("Fig. 1", "most memory", _SIX_FAIL, 67, "GB", max, network_wide_gb, "it is VGG-416 (32)'s."),
        )
    ),
    *(
        _claim("Fig. 11", f"networks that it cannot train: dyn, {word} saved of average memory", _SIX_SAVED, "I", value,
            "%",
               partial(of_too_large, of, dynamic_saved_percent), note)
        for word, value, of, note in (("least", 73, min, _FITS), ("most", 98, max, ""))
    ),
    _claim("Fig. 4", "AlexNet (128), share of feature extraction", _SHARE, "III", 81, "%",
           partial(feature_share, ALEXNET), _GRADIENTS_ASIDE),
    _claim("Fig. 4", "AlexNet (128), share of feature extraction, gradients applied", _SHARE, "III", 81, "%",
           partial(feature_share, replace(ALEXNET, gradients=False)), aside=_APPLIED),
    _claim("Fig. 4", "VGG-16 (256), share of feature extraction", _SHARE, "III", 96, "%",
           partial(feature_share, VGG_256)),
    _claim("Fig. 5", "VGG-16 (256), maps and workspaces of convolutions over their weights", _ORDER, "II-C", 10, "x",
           over_weights, bound=">"),
    _claim("Fig. 6", "AlexNet (128), reuse distance of the first layer", _REUSE, "III-A", 60, "ms",
           partial(reuse_ms, ALEXNET), bound=">", fitted=_EFFICIENCY),
    _claim("Fig. 6", "VGG-16 (64), reuse distance of the first layer", _REUSE, "III-A", 1200, "ms",
           partial(reuse_ms, VGG_64), bound=">", fitted=_EFFICIENCY),
    *(
        _claim("Fig. 11", f"{name} (128), all(m): saved of average memory", _UP_TO, "abstract", value, "%",
               partial(saved_percent, (setting,), "vdnn-all:m", average_bytes))
        for name, setting, value in (("AlexNet", ALEXNET, 89), ("OverFeat", OVERFEAT, 91), ("GoogLeNet", GOOGLENET, 95))
    ),
    *_savings(_ALL_M, "vdnn-all:m", "all(m)", 73, 93),
    *_savings(_ALL_P, "vdnn-all", "all(p)", 64, 90),
    *_savings(_CONV_P, "vdnn-conv", "conv(p)", 52, 76),
    *_savings(_DYN, DYNAMIC, "dyn", 49, 69, _RELEASED),
    _claim("Fig. 11", "VGG-16 (256), dyn: saved of average memory", _90, "VII", 90, "%",
           partial(saved_percent, (VGG_256,), DYNAMIC, average_bytes)),
    _claim("Fig. 11", "VGG-16 (256), all(m): memory, of what the GPU has free", _ENABLES, "abstract", 100, "%",
           whole_share, _POOLING_256, bound="<"),
    *(
        _claim("Fig. 11", f"VGG-16 (256), all(m): memory, of what the GPU has free, {label}", _ENABLES, "abstract", 100,
            "%",
               compute, bound="<", aside=reading)
        for label, compute, reading in (
            ("gradients applied", partial(whole_share, gradients=False), _APPLIED),
            ("poolings start no prefetch", partial(whole_share, policy=NO_SEARCH), _NO_SEARCH),
            ("with CNMeM's fragments", partial(whole_share, policy=NO_SEARCH, spread=True), _SPREAD),
        )
    ),
    _claim("Fig. 11", "VGG-16 (128), all(m): maximum memory", _48, "V-A", 4.8, "GB",
           partial(pool_gb, VGG_128, "vdnn-all:m"), _POOLING),
    _claim("Fig. 11", "VGG-16 (128), all(m): maximum memory, poolings start no prefetch", _48, "V-A", 4.8, "GB",
           partial(pool_gb, VGG_128, NO_SEARCH), aside=_NO_SEARCH),
    _claim("Fig. 12", "VGG-16 (256), all: offloaded", "reaching up to 16 GB of GPU memory savings", "V-A", 16, "GB",
           partial(offloaded_gb, VGG_256, "vdnn-all")),
    _claim("Fig. 13", "VGG-16 (64): most bandwidth that a convolution takes", _RARELY, "V-B", 336, "GB/s",
        most_bandwidth,
           bound="<", certain="no op can take more, for its time is at least its bytes over 336 GB/s."),
    _claim("§V-B", "all(p): time that transfers' traffic costs, most of six networks", _47, "V-B", 4.7, "%",
           traffic_percent, bound="<", certain="transfers of 12.8 GB/s are 3.8 % of 336, whatever they do."),
    _claim("Fig. 14", "dyn: throughput of the baseline's, six networks", _97, "V-C", 97, "%", mean_throughput),
    _claim("Fig. 14", "dyn: throughput of the baseline's, VGG-16 (256)", _97, "V-C", 82, "%",
           partial(throughput_percent, VGG_256, DYNAMIC), _ASIDE),
    *(
        _claim("Fig. 14", f"networks that the baseline cannot train, dyn: throughput lost, {word}", _SIX_LOST, "I",
            value,
               "%", partial(of_too_large, of, dynamic_lost_percent), note, repeats=repeated)
        for word, value, of, note, repeated in (
            ("least", 1, min, _FITS, ""), ("most", 18, max, "", "it is what VGG-16 (256)'s 82 % leave."),
        )
    ),
    *(
        _claim("Fig. 14", f"{label}: throughput lost, {word} of six networks", _LOSS, "V-C", value, "%",
               partial(lost_percent, SIX, policy, of), fitted=_TUNED)
        for label, policy, mean, most in (("all(m)", "vdnn-all:m", 58, 65), ("conv(m)", "vdnn-conv:m", 55, 63))
        for word, value, of in (("mean", mean, fmean), ("most", most, max))
    ),
    _claim("Fig. 14", "all(m): throughput lost, VGG-16 (128)", _48, "V-A", 61, "%",
           partial(lost_percent, (VGG_128,), "vdnn-all:m", fmean)),
    _claim("§V-D", "all(p): maximum power above the baseline's, least of five networks", _POWER, "V-D", 1, "%",
           partial(power_percent, min), _WATTS, assumed=_JOULES),
    _claim("§V-D", "all(p): maximum power above the baseline's, most of five networks", _POWER, "V-D", 7, "%",
           partial(power_percent, max), bound="<", certain="by the model transfers take 4 W of 250 at most.",
           assumed=_JOULES),
    _claim("Fig. 15", "VGG-16 (32), baseline", _DEEP, "V-E", 4.9, "GB", partial(baseline_gb, "vgg16-vdnn", 32)),
    _claim("Fig. 15", "VGG-16 (32), baseline, gradients applied", _DEEP, "V-E", 4.9, "GB",
           partial(baseline_gb, "vgg16-vdnn", 32, gradients=False), aside=_APPLIED),
    _claim("Fig. 15", "VGG-416 (32), baseline", _DEEP, "V-E", 67.1, "GB", partial(baseline_gb, "vgg416", 32)),
    _claim("Fig. 15", "VGG-416 over VGG-16, baseline", _DEEP, "V-E", 14, "x", deep_growth,
           repeats="it is the quotient of the two."),
    _claim("Fig. 15", "VGG-116 to 416, dyn: most on the GPU", _GPU, "V-E", 4.2, "GB", deep_gpu_gb,
           _WEIGHT_GRADIENTS),
    _claim("Fig. 15", "VGG-116 to 416, dyn: most on the GPU, gradients applied", _GPU, "V-E", 4.2, "GB",
           partial(deep_gpu_gb, gradients=False), aside=_APPLIED),
    _claim("Fig. 15", "VGG-116, dyn: share on the host", _GPU, "V-E", 81, "%", partial(deep_host_percent, DEEP[0])),
    _claim("Fig. 15", "VGG-416, dyn: share on the host", _GPU, "V-E", 92, "%", partial(deep_host_percent, DEEP[-1])),
    _claim("Fig. 15", "VGG-116 to 416, dyn: least throughput of the baseline's", _NO_LOSS, "V-E", 100, "%",
           deep_throughput, aside="100 % is no figure of the paper's, which says it in words."),
)  # fmt: skip

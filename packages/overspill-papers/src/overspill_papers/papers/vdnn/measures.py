"""vDNN's networks, and the measures of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from overspill.core import LayerType, Phase, Verb
from overspill.policies import Policy
from overspill_papers.papers.lab import MIB, Lab, LabSetting, network_wide_bytes
from overspill_papers.papers.layers import bytes_of, most_at_once, spans, weighted
from overspill_papers.papers.run import PolicyRun
from overspill_papers.policies.vdnn import VdnnAll

from .power import most_watts

GB = 1000 * MIB
NO_SEARCH = VdnnAll(memory_optimal=True, pooling_searches=False)
BASE, ALL, DYNAMIC = "oracle", "vdnn-all", "vdnn-dynamic"


def on_titan_x(model: str, batch: int, *, features: bool = True) -> LabSetting:
    return LabSetting(model, batch, "titan-x", cudnn=4, features=features)


ALEXNET, OVERFEAT, GOOGLENET = on_titan_x("alexnet", 128), on_titan_x("overfeat", 128), on_titan_x("googlenet", 128)
VGG_64, VGG_128, VGG_256 = (on_titan_x("vgg16-vdnn", batch) for batch in (64, 128, 256))
SIX = (ALEXNET, OVERFEAT, GOOGLENET, VGG_64, VGG_128, VGG_256)
DEEP = tuple(on_titan_x(f"vgg{depth}", 32, features=False) for depth in (116, 216, 316, 416))


def baseline_gb(model: str, batch: int, lab: Lab, *, gradients: bool = True) -> float:
    setting = replace(on_titan_x(model, batch, features=False), gradients=gradients)
    return network_wide_bytes(lab.graph(setting)) / GB


def saved_percent(settings: Sequence[LabSetting], policy: str, taken: Callable[[PolicyRun], float], lab: Lab) -> float:
    """Return the percentage of the baseline's memory that `policy` saves, on average over `settings`.

    The whole network is compared with vDNN's pool, without the classifier, which Torch allocates (§IV-A). That is how
    89 % can be saved of AlexNet, whose classifier's weights alone are a fifth of the total.
    """
    return fmean(100 * (1 - taken(lab.run(s, policy)) / network_wide(s, lab)) for s in settings)


def network_wide(setting: LabSetting, lab: Lab) -> int:
    return network_wide_bytes(lab.graph(replace(setting, features=False)))


def average_bytes(run: PolicyRun) -> float:
    """Return the average bytes over the steps of the memory manager.

    Each allocation, release and op counts once.
    """
    return fmean(run.timeline.live_bytes)


def largest_bytes(run: PolicyRun) -> float:
    return run.pool_bytes


def throughput_percent(setting: LabSetting, policy: str, lab: Lab) -> float:
    return 100 * lab.run(setting, BASE).seconds / lab.run(setting, policy).seconds


def lost_percent(settings: Sequence[LabSetting], policy: str, of: Callable[..., float], lab: Lab) -> float:
    return of([100 - throughput_percent(setting, policy, lab) for setting in settings])


def mean_throughput(lab: Lab) -> float:
    return fmean(throughput_percent(setting, DYNAMIC, lab) for setting in SIX)


def pool_gb(setting: LabSetting, policy: str | Policy, lab: Lab) -> float:
    return lab.run(setting, policy).pool_bytes / GB


def offloaded_gb(setting: LabSetting, policy: str, lab: Lab) -> float:
    return lab.run(setting, policy).offloaded_bytes / GB


def feature_share(setting: LabSetting, lab: Lab) -> float:
    """Return the percentage of the baseline's memory that belongs to the layers before the classifier."""
    return 100 * network_wide_bytes(lab.graph(setting)) / network_wide(setting, lab)


def reuse_ms(setting: LabSetting, lab: Lab) -> float:
    """Return the milliseconds from the end of the first layer's forward to the start of its backward."""
    run = lab.run(setting, BASE)
    first = next(op for op in run.graph.ops if op.layer_type is LayerType.CONV)
    spans = {e.target: e for e in run.timeline.events if e.verb is Verb.RUN}
    begun = min(
        spans[op.id].start_seconds
        for op in run.graph.ops
        if op.layer == first.layer and op.phase is Phase.BACKWARD and op.id in spans
    )
    return 1000 * (begun - spans[first.id].end_seconds)


def deep_growth(lab: Lab) -> float:
    return baseline_gb("vgg416", 32, lab) / baseline_gb("vgg16-vdnn", 32, lab)


def deep_gpu_gb(lab: Lab, *, gradients: bool = True) -> float:
    return max(pool_gb(replace(setting, gradients=gradients), DYNAMIC, lab) for setting in DEEP)


def deep_host_percent(setting: LabSetting, lab: Lab) -> float:
    """Return the percentage of allocated bytes that are on the host.

    The total is allocated on the GPU and on the host.
    """
    run = lab.run(setting, DYNAMIC)
    return 100 * run.offloaded_bytes / (run.offloaded_bytes + run.pool_bytes)


def deep_throughput(lab: Lab) -> float:
    return min(throughput_percent(setting, DYNAMIC, lab) for setting in DEEP)


def unused_percent(of: Callable[[list[float]], float], lab: Lab) -> float:
    """Return the percentage of the baseline's memory that no layer uses, over the networks of Fig. 1.

    Not even the layer with the largest use needs it. Fig. 1's axis ends at 30 000 MB, which leaves room for the six
    networks of Fig. 11, but not for the very deep ones.
    """
    graphs = [lab.graph(replace(setting, features=False)) for setting in SIX]
    return of([100 * (1 - most_at_once(graph) / network_wide_bytes(graph)) for graph in graphs])


def too_large(lab: Lab) -> list[LabSetting]:
    """Return those of the ten networks whose baseline exceeds the GPU's memory."""
    return [s for s in (*SIX, *DEEP) if network_wide(s, lab) > lab.device(s).memory_bytes]


def too_large_count(lab: Lab) -> float:
    return len(too_large(lab))


def of_too_large(of: Callable[[list[float]], float], figure: Callable[[LabSetting, Lab], float], lab: Lab) -> float:
    return of([figure(setting, lab) for setting in too_large(lab)])


def network_wide_gb(setting: LabSetting, lab: Lab) -> float:
    return network_wide(setting, lab) / GB


def dynamic_saved_percent(setting: LabSetting, lab: Lab) -> float:
    return saved_percent((setting,), DYNAMIC, average_bytes, lab)


def dynamic_lost_percent(setting: LabSetting, lab: Lab) -> float:
    return 100 - throughput_percent(setting, DYNAMIC, lab)


def over_weights(lab: Lab) -> float:
    """Return maps and workspaces of VGG-16's convolutions in forward, over their weights."""
    graph = lab.graph(VGG_256)
    rows = [bytes_of(graph, ops[0]) for ops in weighted(graph, (LayerType.CONV,)).values()]
    return sum(maps + space for maps, _, space in rows) / sum(weights for _, weights, _ in rows)


def most_bandwidth(lab: Lab) -> float:
    """Return the most GB a second that a convolution moves."""
    run = lab.run(VGG_64, BASE)
    ran = spans(run)
    ops = (op for op in run.graph.ops if op.layer_type is LayerType.CONV and op.moved_bytes)
    return max(op.moved_bytes / (ran[op.id][1] - ran[op.id][0]) for op in ops) / 1e9


def traffic_percent(lab: Lab) -> float:
    """Return the largest slowdown of a step by transfers' use of DRAM bandwidth, in percent.

    All layers are offloaded.
    """
    shared = (replace(setting, shared_bandwidth=True) for setting in SIX)
    return max(100 * (lab.run(a, ALL).seconds / lab.run(b, ALL).seconds - 1) for a, b in zip(shared, SIX, strict=True))


def power_percent(of: Callable[[list[float]], float], lab: Lab) -> float:
    """Return the percentage that offloading adds to the board's maximum power.

    All layers are offloaded. VGG-16 (256) is left out, since the baseline cannot train it.
    """
    pairs = [(lab.run(setting, ALL), lab.run(setting, BASE)) for setting in SIX[:5]]
    return of([100 * (most_watts(run, lab.scale) / most_watts(base, lab.scale) - 1) for run, base in pairs])


def whole_share(lab: Lab, *, policy: str | Policy = f"{ALL}:m", gradients: bool = True, spread: bool = False) -> float:
    """Return the percentage of the GPU's free memory that VGG-16 (256) takes, classifier included.

    `spread` includes CNMeM's fragmentation.
    """
    run = lab.run(replace(VGG_256, features=False, gradients=gradients), policy)
    return 100 * (run.spread_bytes if spread else run.pool_bytes) / run.device.usable_bytes

"""vDNN's plots: all networks and policies, of Figs. 1, 4 to 6 and 11 to 15."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from overspill.core import Phase
from overspill.core.errors import InfeasibleBudgetError
from overspill_papers.papers.lab import MIB, Lab, LabSetting, network_wide_bytes
from overspill_papers.papers.layers import bytes_by_kind, bytes_of, most_at_once, spans, weighted
from overspill_papers.papers.run import PolicyRun
from overspill_papers.papers.vdnn.measures import BASE, DEEP, DYNAMIC, SIX, VGG_64, VGG_256

from . import Curve, PaperFigure, in_parts

POLICIES = {
    "all (m)": "vdnn-all:m", "all (p)": "vdnn-all", "conv (m)": "vdnn-conv:m", "conv (p)": "vdnn-conv", "dyn": DYNAMIC,
}  # fmt: skip
NAMES = {"alexnet": "AlexNet", "overfeat": "OverFeat", "googlenet": "GoogLeNet", "vgg16-vdnn": "VGG-16"}


def _name(setting: LabSetting) -> str:
    return f"{NAMES.get(setting.model, setting.model.upper().replace('VGG', 'VGG-'))} ({setting.batch})"


def _whole(setting: LabSetting) -> LabSetting:
    return replace(setting, features=False)


def _baseline(lab: Lab) -> Mapping[str, Curve]:
    graphs = {_name(s): lab.graph(_whole(s)) for s in (*SIX, *DEEP)}
    needed = {name: network_wide_bytes(graph) / MIB for name, graph in graphs.items()}
    return {
        "allocated": needed,
        "most that a layer uses": {name: most_at_once(graph) / MIB for name, graph in graphs.items()},
    }


def _breakdown(lab: Lab) -> Mapping[str, Curve]:
    return in_parts({_name(s): bytes_by_kind(lab.graph(_whole(s))) for s in SIX})


def _layer_memory(lab: Lab) -> Mapping[str, Curve]:
    graph = lab.graph(_whole(VGG_256))
    parts = ("feature maps", "weights", "workspace")
    return in_parts(
        {name: dict(zip(parts, bytes_of(graph, ops[0]), strict=True)) for name, ops in weighted(graph).items()}
    )


def _layer_times(lab: Lab) -> Mapping[str, Curve]:
    run = lab.run(_whole(VGG_64), BASE)
    ran = spans(run)
    forward, backward, reuse = {}, {}, {}
    for name, ops in weighted(run.graph).items():
        first, *later = (ran[op.id] for op in ops if op.id in ran)
        forward[name] = 1000 * (first[1] - first[0])
        backward[name] = 1000 * sum(end - start for start, end in later)
        reuse[name] = 1000 * (min(start for start, _ in later) - first[1])
    return {"forward": forward, "backward": backward, "reuse distance": reuse}


def _bandwidth(lab: Lab) -> Mapping[str, Curve]:
    run = lab.run(_whole(VGG_64), BASE)
    ran = spans(run)
    found: dict[str, dict[str, float]] = {"forward": {}, "backward": {}}
    for name, ops in weighted(run.graph).items():
        for label, phase in (("forward", Phase.FORWARD), ("backward", Phase.BACKWARD)):
            rates = [
                op.moved_bytes / (ran[op.id][1] - ran[op.id][0]) for op in ops if op.phase is phase and op.id in ran
            ]
            found[label][name] = max(rates, default=0.0) / 1e9
    return found


def _runs(settings: Sequence[LabSetting], policies: Mapping[str, str], lab: Lab) -> dict[tuple[str, str], PolicyRun]:
    found = {}
    for setting in settings:
        for label, policy in policies.items():
            try:
                found[_name(setting), label] = lab.run(setting, policy)
            except InfeasibleBudgetError:  # its bar is missing, as where the paper has a star
                continue
    return found


def _memory(lab: Lab) -> Mapping[str, Curve]:
    curves: dict[str, dict[str, float]] = {"average": {}, "maximum": {}}
    for (name, label), run in _runs(SIX, POLICIES, lab).items():
        live = run.timeline.live_bytes
        curves["average"][f"{name} {label}"] = sum(live) / len(live) / MIB
        curves["maximum"][f"{name} {label}"] = run.pool_bytes / MIB
    for setting in SIX:
        baseline = network_wide_bytes(lab.graph(_whole(setting))) / MIB
        curves["average"][f"{_name(setting)} base (p)"] = curves["maximum"][f"{_name(setting)} base (p)"] = baseline
    return curves


def _offloaded(lab: Lab) -> Mapping[str, Curve]:
    policies = {"all": "vdnn-all", "conv": "vdnn-conv"}
    runs = _runs(SIX, policies, lab)
    return {
        label: {name: run.offloaded_bytes / MIB for (name, of), run in runs.items() if of == label}
        for label in policies
    }


def _performance(lab: Lab) -> Mapping[str, Curve]:
    policies = {**POLICIES, "base (m)": f"{BASE}:m", "base (p)": BASE}
    runs = _runs(SIX, policies, lab)
    return {
        label: {name: runs[name, "base (p)"].seconds / run.seconds for (name, of), run in runs.items() if of == label}
        for label in policies
    }


def _deep(lab: Lab) -> Mapping[str, Curve]:
    gpu, host = {}, {}
    for setting in DEEP:
        name, run = _name(setting), lab.run(setting, DYNAMIC)
        gpu[f"{name} dyn"] = run.pool_bytes / MIB
        host[f"{name} dyn"] = run.offloaded_bytes / MIB
        gpu[f"{name} base"] = network_wide_bytes(lab.graph(setting)) / MIB
    return {"GPU": gpu, "CPU": host}


FIGURES = (
    PaperFigure("Fig. 1", "Memory of the baseline, and what one layer uses of it", "network (batch)", "MB", _baseline),
    PaperFigure("Fig. 4", "Memory by what it is for", "network (batch)", "MB", _breakdown),
    PaperFigure("Fig. 5", "VGG-16 (256): memory of each layer in forward", "layer", "MB", _layer_memory),
    PaperFigure(
        "Fig. 6", "VGG-16 (64): time of each layer, and until its input is used again", "layer", "ms", _layer_times
    ),
    PaperFigure("Fig. 11", "Average and maximum memory", "network (batch) and policy", "MB", _memory),
    PaperFigure("Fig. 12", "Memory offloaded to the host", "network (batch)", "MB", _offloaded),
    PaperFigure("Fig. 13", "VGG-16 (64): DRAM bandwidth of each layer", "layer", "GB/s", _bandwidth),
    PaperFigure("Fig. 14", "Performance, of the baseline's", "network (batch)", "of the baseline's", _performance),
    PaperFigure("Fig. 15", "Very deep networks: memory on the GPU and the host", "network (batch)", "MB", _deep),
)

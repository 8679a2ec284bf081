"""Dymem's plots: Figs. 1, 5, 8 and 12 to 15."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from overspill.core import LayerType, Phase
from overspill.core.errors import InfeasibleBudgetError
from overspill_papers.papers.dymem import (
    ALL,
    BASE,
    DYNAMIC,
    INCEPTION,
    LEAST,
    NETWORKS,
    ONE_STREAM,
    RESNET_32,
    RESNET_50,
    dymem_mb,
    vdnn_mb,
)
from overspill_papers.papers.lab import MIB, Lab, LabSetting
from overspill_papers.papers.layers import bytes_by_kind, maps_by_layer, spans

from . import Curve, PaperFigure, in_parts

NAMES = {"alexnet": "AlexNet", "vgg16-vdnn": "VGG-16", "resnet50": "ResNet-50", "inception-v4": "Inception-v4"}
POLICIES = {"vDNN": DYNAMIC, "SuperNeurons": "superneurons-offload", "Dymem": "dymem"}
GOOGLENET = LabSetting("googlenet", 128)
FEW_LAYERS = 10
BATCHES = (25, 50, 75, 100, 150, 200)


def _name(setting: LabSetting) -> str:
    return f"{NAMES[setting.model]} ({setting.batch})"


def _breakdown(lab: Lab) -> Mapping[str, Curve]:
    return in_parts({_name(s): bytes_by_kind(lab.graph(s)) for s in NETWORKS})


def _layers(lab: Lab) -> Mapping[str, Curve]:
    run = lab.run(GOOGLENET, BASE)
    ran = spans(run)
    first = [op for op in run.graph.ops if op.phase is Phase.FORWARD and op.layer_type is not LayerType.ACTIVATION]
    curves: dict[str, dict[str, float]] = {"computation": {}, "communication": {}}
    for number, op in enumerate(first[:FEW_LAYERS]):
        moved = sum(run.graph.tensors[t].nbytes for t in op.reads if not run.graph.tensors[t].persistent)
        curves["computation"][f"f{number}"] = 1000 * (ran[op.id][1] - ran[op.id][0])
        curves["communication"][f"f{number}"] = 1000 * run.device.offload_seconds(moved)
    return curves


def _shares(lab: Lab) -> Mapping[str, Curve]:
    maps = {_name(s): maps_by_layer(lab.graph(s)) for s in NETWORKS}
    types = sorted({kind for found in maps.values() for kind in found})
    return {
        kind.value: {name: 100 * found.get(kind, 0) / sum(found.values()) for name, found in maps.items()}
        for kind in types
    }


def _memory(lab: Lab) -> Mapping[str, Curve]:
    return {
        "vDNN": {_name(s): vdnn_mb(s, lab) for s in NETWORKS},
        "Dymem": {_name(s): dymem_mb(s, lab) for s in NETWORKS},
    }


def _convolutions(lab: Lab) -> Mapping[str, Curve]:
    def share(setting: LabSetting, policy: str) -> float:
        conv = LayerType.CONV
        return lab.run(setting, BASE).seconds_of(conv) / lab.run(setting, policy).seconds_of(conv)

    policies = {"vDNN": DYNAMIC, "Dymem": "dymem", "memory-optimal": f"{BASE}:m"}
    return {label: {_name(s): share(s, policy) for s in NETWORKS} for label, policy in policies.items()}


def _throughput(lab: Lab) -> Mapping[str, Curve]:
    curves: dict[str, dict[float, float]] = {label: {} for label in POLICIES}
    for batch in BATCHES:
        for label, policy in POLICIES.items():
            try:
                curves[label][batch] = batch / lab.run(replace(RESNET_50, batch=batch), policy).seconds
            except InfeasibleBudgetError:  # it cannot train at that batch, nor at a larger one
                continue
    return curves


def _decomposition(lab: Lab) -> Mapping[str, Curve]:
    curves: dict[str, dict[str, float]] = {"overlapped": {}, "communication": {}, "computation": {}}
    for network, setting in (("Inception-v4", INCEPTION), ("ResNet-32", RESNET_32)):
        whole = lab.run(setting, f"{ONE_STREAM}:m").seconds
        for label, policy in (("one stream", ONE_STREAM), ("vDNN", ALL), ("Dymem", "dymem")):
            line, name = lab.run(setting, f"{policy}:m").timeline, f"{network}, {label}"
            curves["overlapped"][name] = line.overlapped_seconds / whole
            curves["computation"][name] = (line.compute_seconds - line.overlapped_seconds) / whole
            curves["communication"][name] = (line.step_seconds - line.compute_seconds) / whole
    return curves


def _by_step(lab: Lab) -> Mapping[str, Curve]:
    curves: dict[str, dict[float, float]] = {}
    for label, policy in (("vDNN", LEAST), ("Dymem", "dymem:m")):
        run = lab.run(RESNET_32, policy)
        done = run.cnmem if label == "vDNN" else run.two_ended
        assert done.spread is not None
        curves[label] = {100 * i / len(done.spread): float(nbytes) / MIB for i, nbytes in enumerate(done.spread)}
    return curves


FIGURES = (
    PaperFigure("Fig. 1", "Memory by what it is for", "network (batch)", "MB", _breakdown),
    PaperFigure("Fig. 5", "GoogLeNet (128): first layers in forward", "layer", "ms", _layers),
    PaperFigure("Fig. 8", "Feature maps by the layers that make them", "network (batch)", "%", _shares),
    PaperFigure("Fig. 12", "Memory with memory-optimal algorithms", "network (batch)", "MB", _memory),
    PaperFigure(
        "Fig. 12", "Convolutions' throughput of the fastest algorithms'", "network (batch)", "share", _convolutions
    ),
    PaperFigure("Fig. 13", "ResNet-50: throughput", "batch", "images/s", _throughput, lines=True),
    PaperFigure("Fig. 14", "Time of a step, of that with one stream", "network, policy", "share", _decomposition),
    PaperFigure(
        "Fig. 15", "ResNet-32 (100): memory used over a step", "% of the step's events", "MB", _by_step, lines=True
    ),
)

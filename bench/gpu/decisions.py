"""What follows from a campaign's figures: each rule has its threshold, and says what to do where it is crossed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from overspill.core.errors import RequestError
from overspill.core.units import format_apart, format_seconds
from overspill.devices import load_device

from . import tables
from .experiment import Figures, peak_of
from .tables import Found

HELD, CROSSED, UNKNOWN = "holds", "act", "no figures"
MOST_ADDS_A_SWAP = 10.0
FULL_DUPLEX_SHARE = 0.75
"""Both directions at once in this share of their times added up are two lanes, each with half of what both carry."""
DEVICE_FILE_TOLERANCE = 0.1
MOST_HOST_SHARE = 0.9
"""The time between two events on the GPU has its waits for the host in it: near 1 the host is what the step waits for."""
LEAST_OVERLAP = 0.5
RECORDED_TOLERANCE = 0.1
"""How far the share of copy time beside ops that a recording has may be from the profiler's beside kernels."""
MOST_RECORDING_COST = 0.1
GAIN_BY_MEASURED_TIMES = 0.05
MOST_LEFT_WHEN_PARKED = 0.05
MOST_COST_OF_ALLOCATOR = 0.01
MEDIAN_ESTIMATE_ERROR, LARGEST_ESTIMATE_ERROR = 0.03, 0.15
PLAIN_AGAIN = ("plain again", "torch.compile again")
OTHER_KERNELS = "plain, native batch norm"


@dataclass(frozen=True)
class Verdict:
    """On one rule: whether it holds, what says so, and what to do where it does not."""

    rule: str
    state: str
    evidence: str
    action: str = ""


Rule = Callable[[Found], Iterator[Verdict]]


def verdicts(found: Found) -> list[Verdict]:
    """What every rule says; of one without figures that there are none."""
    told = []
    for rule, text in RULES.items():
        of_rule = [Verdict(text, v.state, v.evidence, v.action) for v in rule(found)]
        told += of_rule or [Verdict(text, UNKNOWN, "")]
    return told


def _judged(crossed: bool, evidence: str, action: str) -> Verdict:
    return Verdict("", CROSSED if crossed else HELD, evidence, action if crossed else "")


def installed(found: Found) -> Iterator[Verdict]:
    """Topic 0."""
    if (figures := found.get("0-command-line")) is not None:
        evidence = f"exit code {figures['exit_code']}, identical: {figures['identical']}"
        yield _judged(figures["identical"] is not True, evidence, "stop here and mend this first")


def cheap_swaps(found: Found) -> Iterator[Verdict]:
    """Topic 1, host time."""
    if (figures := found.get("1-host-time")) is not None:
        count = figures["adds_a_swap"]
        yield _judged(count > MOST_ADDS_A_SWAP, f"{count:.1f} small ops a swap", "native code for transfers first")


def true_device_file(found: Found) -> Iterator[Verdict]:
    """Topic 1, the link."""
    link, name = found.get("1-bandwidth"), found.get("0-imports", {}).get("device_file")
    if link is None:
        return
    try:
        device = load_device(name or "")
    except RequestError:
        yield _judged(True, "this device has no file of its own", "write one from these figures")
        return
    for field in ("offload_bytes_per_second", "prefetch_bytes_per_second"):
        measured = link["both_ways_bytes_per_second"] / 2 if device.full_duplex else link[field]
        said = getattr(device, field)
        evidence = f"{field}: {measured / 1e9:.1f} GB/s measured, {said / 1e9:.1f} GB/s in {device.name}.toml"
        yield _judged(abs(measured / said - 1) > DEVICE_FILE_TOLERANCE, evidence, "put the measured rate into the file")
    duplex = link["duplex_share"] < FULL_DUPLEX_SHARE
    evidence = f"both ways at once take {link['duplex_share']:.2f} of one after the other; the file says full_duplex = {device.full_duplex}"
    yield _judged(duplex != device.full_duplex, evidence, "change full_duplex")


def whole_round_trips(found: Found) -> Iterator[Verdict]:
    """Topic 2."""
    for name, figures in tables.named(found, "2-").items():
        evidence = f"{name}: {figures['wrong']} of {figures['trips']} wrong"
        yield _judged(figures["wrong"] > 0, evidence, "a wait is missing; no other figure counts")


def same_bits(found: Found) -> Iterator[Verdict]:
    """Topic 3."""
    for model, figures in tables.named(found, "3-bits-").items():
        arms = {name: told for name, told in figures["arms"].items() if name != OTHER_KERNELS}
        controls = [told for name, told in arms.items() if name in PLAIN_AGAIN]
        if not all(told.get("identical") for told in controls):
            yield Verdict(
                "", UNKNOWN, f"{model}: plain training does not repeat itself", "compare by the spread of plain runs"
            )
            continue
        for name, told in arms.items():
            if "refused" in told:
                yield Verdict("", UNKNOWN, f"{model}, {name}: refused: {told['refused'][:120]}", "find out why")
            elif name not in PLAIN_AGAIN:
                first = "identical" if told["identical"] else told.get("first_differing", "losses alone")
                yield _judged(not told["identical"], f"{model}, {name}: {first}", "mend before any speed is quoted")


def within_budget(found: Found) -> Iterator[Verdict]:
    """Topics 3 and 5: what the allocator reserves, and what is in use of the device."""
    for name, figures in found.items():
        if name.startswith("5-peak-"):
            yield from _within(name, figures)
        for arm, told in figures.get("arms", {}).items():
            yield from _within(f"{name}, {arm}", told)


def _within(name: str, figures: Figures) -> Iterator[Verdict]:
    if not figures.get("planned_reserved_bytes"):  # a budget of live bytes, as on the CPU
        return
    for what, measured, planned in (
        ("reserved", "reserved_peak_bytes", "planned_reserved_bytes"),
        ("device in use", "device_used_bytes", "budget_bytes"),
    ):
        if figures.get(measured):
            yield _compared(f"{name}: {what}", figures[measured], figures[planned])


def _compared(what: str, measured: int, planned: int) -> Verdict:
    evidence = "{} {} of {}".format(what, *format_apart(measured, planned))
    return _judged(measured > planned, evidence, "find what the plan does not count")


def card_of_that_size(found: Found) -> Iterator[Verdict]:
    """Topic 5."""
    for name, figures in tables.named(found, "5-survives-").items():
        if name.endswith("x1.0"):
            retries = figures.get("retries", 0)
            evidence = f"{name}: " + (f"{retries} retries" if figures["survived"] else "out of memory")
            crossed = not figures["survived"] or retries > 0
            yield _judged(crossed, evidence, "the README must say that a budget is live bytes")


def device_bound(found: Found) -> Iterator[Verdict]:
    """Topic 6, host against GPU."""
    for name, figures in _ours(found):
        if "gpu_seconds" in figures:
            host, gpu = figures["host_seconds"], figures["gpu_seconds"]
            evidence = f"{name}: host {format_seconds(host)}, GPU {format_seconds(gpu)}"
            yield _judged(host > MOST_HOST_SHARE * gpu, evidence, "native code for transfers first")


def faster_than_peers(found: Found) -> Iterator[Verdict]:
    """Topic 6, against each peer on a card as it took, beyond what plain training differs from itself."""
    for name, figures in _ours(found):
        _, job, way = name.split("-", 2)
        peer = found.get(f"6-{job}-{way.partition('-at-')[2]}", {})
        if "-at-" not in way or "step_seconds" not in peer:
            continue
        if "step_seconds" not in figures:
            yield _judged(True, f"{name}: {figures['outcome']}", "say so beside the peer's figure")
            continue
        ratio, noise = figures["step_seconds"] / peer["step_seconds"], _noise(found, job)
        evidence = f"{name}: {ratio:.2f} times the peer's step (noise {noise:.0%})"
        yield _judged(ratio > 1 + noise, evidence, "claim no speed against this peer")


def _ours(found: Found) -> Iterator[tuple[str, Figures]]:
    for name, figures in found.items():
        if name.startswith("6-") and str(figures.get("way", "")).startswith("overspill"):
            yield name, figures


def _noise(found: Found, job: str) -> float:
    """How far two runs of plain training are from one another."""
    one, other = (found.get(f"6-{job}-{k}", {}).get("step_seconds") for k in ("eager", "eager-again"))
    return abs(one / other - 1) if one and other else 0.0


def overlap(found: Found) -> Iterator[Verdict]:
    """Topic 7."""
    for name, figures in tables.named(found, "7-profile-").items():
        if "copy_busy_seconds" not in figures or (share := _beside(figures)) is None:
            continue
        yield _judged(share < LEAST_OVERLAP, f"{name}: {share:.0%} of copy time", "find what the lanes wait for")


def true_recordings(found: Found) -> Iterator[Verdict]:
    """Topic 7, recordings."""
    for name, figures in tables.named(found, "7-recorded-").items():
        recorded, profiled = (_beside(figures[key]) if key in figures else None for key in ("recorded", "profiled"))
        if recorded is not None and profiled is not None:
            evidence = f"{name}: {recorded:.0%} of copy time beside ops, by the profiler {profiled:.0%} beside kernels"
            off = abs(recorded - profiled) > RECORDED_TOLERANCE
            yield _judged(off, evidence, "find which event stands in the wrong place")
        if "snapshot_replays" in figures:
            same = "replays" if figures["snapshot_replays"] else "does not replay"
            yield _judged(
                not figures["snapshot_replays"], f"{name}: the snapshot {same}", "find the event that differs"
            )


def cheap_recordings(found: Found) -> Iterator[Verdict]:
    """Topic 7, what recordings cost."""
    for name, figures in tables.named(found, "7-recorded-").items():
        cost = figures["ratio_median"] - 1
        yield _judged(cost > MOST_RECORDING_COST, f"{name}: {cost:+.1%}", "say in docs/tools.md what it costs on a GPU")


def _beside(figures: Figures) -> float | None:
    """The share of copy time that lies beside kernels; None where nothing was copied."""
    copies = sum(figures["copy_busy_seconds"].values())
    return figures["copies_beside_kernels_seconds"] / copies if copies else None


def good_device_file(found: Found) -> Iterator[Verdict]:
    """Topic 8."""
    for name, figures in tables.named(found, "8-again-").items():
        gain = 1 - figures["by_measured_times_measured_seconds"] / figures["by_device_file_measured_seconds"]
        yield _judged(
            gain > GAIN_BY_MEASURED_TIMES, f"{name}: {gain:+.1%}", "mend rates or efficiencies of the device file"
        )


def true_estimates(found: Found) -> Iterator[Verdict]:
    """Topic 9."""
    if errors := tables.errors_of_estimates(found):
        sizes = {name: abs(error) for name, error in errors.items()}
        worst = max(sizes, key=lambda name: sizes[name])
        middle = statistics.median(sizes.values())
        crossed = middle > MEDIAN_ESTIMATE_ERROR or sizes[worst] > LARGEST_ESTIMATE_ERROR
        evidence = f"median {middle:.1%}, largest {sizes[worst]:.1%} ({worst}), {len(sizes)} jobs"
        yield _judged(crossed, evidence, "mend the models of workspaces and context")


def larger_than_memory(found: Found) -> Iterator[Verdict]:
    """Topic 10."""
    plain, ours = found.get("10-decoder-plain"), found.get("10-decoder-6GiB")
    if plain and ours:
        same = plain["losses"] == ours["losses"]
        yield _judged(not same, "losses are " + ("equal" if same else "not equal"), "claim nothing of it")
    if ours and (peak := peak_of(ours, "allocated")) is not None:
        yield _compared("10-decoder-6GiB:", peak, ours["budget_bytes"])


def shared(found: Found) -> Iterator[Verdict]:
    """Topic 12."""
    for name, figures in found.items():
        if name.startswith("12-parked-"):
            same = figures["losses"] == figures["parked_losses"]
            yield _judged(not same, f"{name}: losses are {'equal' if same else 'not equal'}", "mend park")
            if figures["reserved_parked_bytes"] is not None:
                left = figures["reserved_parked_bytes"] / figures["reserved_before_bytes"]
                crossed = left > MOST_LEFT_WHEN_PARKED
                yield _judged(crossed, f"{name}: {left:.1%} stay reserved", "find what park leaves on the device")


def allocators(found: Found) -> Iterator[Verdict]:
    """Topic 13."""
    for job in ("gpt2", "resnet50"):
        plain, expandable = found.get(f"13-{job}-pytorch"), found.get(f"13-{job}-expandable")
        for name in ("planned", "chunked", "gtbm"):
            ours = found.get(f"13-{job}-{name}")
            if plain is None or ours is None:
                continue
            same = plain["losses"] == ours["losses"]
            yield _judged(not same, f"13-{job}-{name}: losses are {'equal' if same else 'not equal'}", "do not use it")
            if name == "planned" and expandable is not None and "reserved_peak_bytes" in ours:
                most, theirs = ours["reserved_peak_bytes"], expandable["reserved_peak_bytes"]
                evidence = "13-{}-planned: reserved {} of {}".format(job, *format_apart(most, theirs))
                yield _judged(most > theirs, evidence, "replay a snapshot of it in simulation")
                slower = ours["step_seconds"] / plain["step_seconds"] - 1
                crossed = slower > MOST_COST_OF_ALLOCATOR
                yield _judged(crossed, f"13-{job}-planned: a step takes {slower:+.1%}", "find where its host time goes")
    if graphs := found.get("13-graphs-planned"):
        same = {*graphs["losses"]} == {*graphs["replayed_losses"]}
        yield _judged(
            not same, f"13-graphs-planned: losses are {'equal' if same else 'not equal'}", "refuse graphs again"
        )


RULES: dict[Rule, str] = {
    installed: "the command line trains, with identical numbers",
    whole_round_trips: "0 of all round trips come back wrong",
    same_bits: "every way of ours gives plain training's bits where plain training repeats itself",
    within_budget: "what is reserved and used of the device stays within what a budget has for it",
    card_of_that_size: "a limit of 1.0 times the budget, less the context, is enough for PyTorch's allocator, without a retry",
    cheap_swaps: f"a swap takes at most {MOST_ADDS_A_SWAP:.0f} small ops of host time",
    device_bound: f"host time of our steps is at most {MOST_HOST_SHARE:.0%} of the time between events on the GPU",
    faster_than_peers: "our step on a card as a peer took is no slower than the peer's, beyond the noise of plain training",
    overlap: f"at least {LEAST_OVERLAP:.0%} of copy time lies beside kernels",
    true_recordings: f"a recording has the share of copy time beside ops that the profiler has, within {RECORDED_TOLERANCE:.0%}, and its snapshot replays",
    cheap_recordings: f"a recorded step takes at most {MOST_RECORDING_COST:.0%} longer",
    true_device_file: f"the device file's link is within {DEVICE_FILE_TOLERANCE:.0%} of the measured one",
    good_device_file: f"plans by measured op times gain at most {GAIN_BY_MEASURED_TIMES:.0%}",
    true_estimates: f"estimates: median error at most {MEDIAN_ESTIMATE_ERROR:.0%}, largest at most {LARGEST_ESTIMATE_ERROR:.0%}",
    larger_than_memory: "the decoder of three times its budget has plain training's losses, within the budget",
    shared: f"a job that parks has the losses of one that does not, and at most {MOST_LEFT_WHEN_PARKED:.0%} stay reserved meanwhile",
    allocators: f"on Overspill's allocators training has the losses of PyTorch's, graphs of it too; `planned` reserves no more than expandable segments, and a step takes at most {MOST_COST_OF_ALLOCATOR:.0%} longer",
}

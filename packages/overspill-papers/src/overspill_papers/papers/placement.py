"""Profile-guided placement (Sekiyama et al., 2018): its figures and ours.

Authors: Sekiyama, Imai, Imamichi and Raymond. Chainer 3 runs with MomentumSGD on a P100. Inference is of one image, and
reads a label too. "Total" is the memory in use before a step and the memory that the step takes. The step takes it from
Chainer's pool, or from the arena that the best-fit heuristic (§3.2) places. Three iterations run in the pool.

seq2seq trains on sentences of other lengths in each mini-batch. The pool keeps the memory it took for all of them. The
arena is placed again where a step requests more (§4.3), and so is as large as the largest of the steps' own.

Figs. 3 and 4 and the time of the pool's search have no row: they are host time of Python and C++ of 2018. Nor have the
bars of Fig. 2, whose values the text does not give.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from statistics import fmean

from overspill.core import Trace
from overspill.placement import Events, replay
from overspill.placement.packing import Limits, solver_named
from overspill.policies import policy_named

from . import seq2seq
from .chainer import as_chainer, held_bytes, inference_trace, training_trace
from .claim import Claim
from .lab import Lab, LabSetting

GIB = 1 << 30
ALEXNET, GOOGLENET = f"{__package__}.chainer:alexnet", f"{__package__}.chainer:googlenet"
RESNET, INCEPTION = "resnet50", "inception-resnet-v2"
ITERATIONS = 3
TRANSLATED = 20
"""Words of the translated sentence, whose length the paper does not state."""
BATCH, MINI_BATCHES, DRAWS = 256, 10, 200
"""For seq2seq's training: the batch, the steps before Fig. 2c, and the sampled corpora of which ours is the mean."""
SEARCH = Limits(time_limit_seconds=60.0)


def _trace(model: str, batch: int, lab: Lab, *, training: bool = True) -> tuple[Trace, int]:
    """Return the blocks of a step, and the bytes that are allocated before it."""
    setting = LabSetting(model, batch, "p100-nvlink", layers=False, optimizer="momentum")
    graph = as_chainer(lab.graph(setting))
    if not training:
        return inference_trace(graph), held_bytes(graph, training=False)
    kept = policy_named("in-core").plan(graph, lab.device(setting))
    return training_trace(graph, kept), held_bytes(graph, training=True)


def _placed(trace: Trace, solver: str, lab: Lab) -> int:
    if (instead := lab.replaced(solver)) != solver:
        return replay(Events.of(trace), instead).peak_reserved_bytes
    layout = solver_named(solver).solve(trace, SEARCH).layout
    assert layout is not None
    return layout.peak_bytes


def _pooled(trace: Trace, times: int = 1) -> int:
    """Return the bytes that Chainer's pool holds after `trace`, repeated `times`."""
    return replay(Events.of(trace).repeated(times), "chainer").peak_reserved_bytes


def _saved(traces: Sequence[Trace], held: int, lab: Lab) -> float:
    """Return the percentage of the total saved in consecutive steps."""
    in_turn = seq2seq.in_turn(traces)
    pool = _pooled(in_turn)
    placed = pool if lab.replaced("skyline") != "skyline" else max(_placed(trace, "skyline", lab) for trace in traces)
    return 100 * (1 - (held + placed) / (held + pool))


def _inference_bytes(model: str, solver: str, lab: Lab) -> float:
    return _placed(_trace(model, 1, lab, training=False)[0], solver, lab)


def _saved_percent(model: str, lab: Lab) -> float:
    """Return the percentage of the total saved in inference."""
    trace, held = _trace(model, 1, lab, training=False)
    return _saved([trace] * ITERATIONS, held, lab)


def _translation_saved_percent(lab: Lab) -> float:
    trace = seq2seq.inference(TRANSLATED)
    return _saved([trace] * ITERATIONS, seq2seq.held_bytes(training=False), lab)


def _most_saved_percent(lab: Lab) -> float:
    """Return the percentage of the total saved in training of seq2seq, the mean of many sampled corpora."""
    held, draws = seq2seq.held_bytes(training=True), Random(0)  # noqa: S311 - no secret

    def step() -> Trace:
        return seq2seq.training(draws.choices(seq2seq.LENGTHS, k=BATCH), lab.scale)

    return fmean(_saved([step() for _ in range(MINI_BATCHES)], held, lab) for _ in range(DRAWS))


def _network_wide_gb(lab: Lab) -> float:
    """Return the memory if no two blocks share bytes, in GB."""
    trace, held = _trace(ALEXNET, 32, lab)
    return (held + sum(block.nbytes for block in trace.blocks)) / GIB


def _pool_gb(model: str, batch: int, lab: Lab) -> float:
    trace, held = _trace(model, batch, lab)
    return (held + _pooled(trace, ITERATIONS)) / GIB


def _arena_gb(model: str, batch: int, lab: Lab) -> float:
    trace, held = _trace(model, batch, lab)
    return (held + _placed(trace, "skyline", lab)) / GIB


def _inception_over_alexnet(batch: int, lab: Lab) -> float:
    return _pool_gb(INCEPTION, batch, lab) / _pool_gb(ALEXNET, batch, lab)


def _training_saved_percent(model: str, batch: int, lab: Lab) -> float:
    """Return the percentage of the total saved in training."""
    trace, held = _trace(model, batch, lab)
    return _saved([trace] * ITERATIONS, held, lab)


def _inception_saved_over_others(batch: int, lab: Lab) -> float:
    """Return what is saved of Inception-ResNet's total, over the most that is saved of another network's."""
    others = max(_training_saved_percent(model, batch, lab) for model in (ALEXNET, GOOGLENET, RESNET))
    return _training_saved_percent(INCEPTION, batch, lab) / others if others else 0.0


_claim = partial(Claim, "placement")

_POOL = (
    "in the training of AlexNet with 32 mini-batch size, the network-wise memory allocation consumes 1.50 GB device "
    "memory whereas the pool-based memory allocation does only 1.21 GB"
)
_OPTIMA = "the objective function values by the heuristic and CPLEX match (10169344 and 12202496, respectively)"
_SAME = "the paper gives one number for both."
_SAVED = "reduce the total memory amounts in GoogLeNet and ResNet-50 by 12.6% and 10.0%, respectively"
_FITS = (
    "in 64 mini-batch size, the memory consumption in the optimized version fits within the physical memory capacity "
    "(16 GB), whereas the required memory in the original Chainer exceeds the capacity considerably"
)
_SMALLER_POOL = (
    "Ours holds 20.6 MB in Chainer's pool and 15.6 in the arena, beside 102 MB of weights; the paper's would be 29 and "
    "16. What the pool keeps beside is not known: on GoogLeNet, of as large maps, ours agrees."
)
_WHICH = (
    "The paper does not say which Inception-ResNet, nor at what image size; ours is the second, at 299 x 299, and "
    "holds what backward reads, 13.4 GB."
)
_MOST_EFFECTIVE = "our optimization works well in all models and is the most effective for Inception-ResNet"
_TIMES = (
    "the training of Inception-ResNet consumes 12.5 times as much memory as that of AlexNet in some configuration (see "
    "Figure 2)"
)
_REVERSED = "Reversed: ours saves 8 % of Inception-ResNet, 11 % of AlexNet and 19 % of GoogLeNet."
_CONFIGURATION = (
    "The configuration is not said; ours is the largest batch of Fig. 2. In the arena it is 11.2. Chainer's pool of "
    "Inception-ResNet holds more than ours, as two rows above."
)
_TRANSLATION = (
    "As for the inference, the amount of consumed memory and the running time reduce by 14.6% (Figure 2d) and 23.8%"
)
_MOST = "our method not only reduces the memory consumption by up to 49.5%"
_TWICE = (
    "Scores of a word split the block of 96 MiB in which weights were gathered, so the pool takes another: that is "
    "all. The paper's keeps 35 MB more, as cuDNN's workspaces may. Of a sentence of 60 words what it leaves is large "
    "enough for scores, and nothing would be saved."
)
_LENGTHS = (
    "Of which network is not said; ours is seq2seq's, with 256 sentences of 1 to 49 words, drawn evenly as the "
    "corpus's are not known. The pool grows whenever a step is larger than all before, so that a run tells little: 29 "
    "to 55 % in the middle half of 200, none at least, 67 at most. After 20 steps it is 51 % in the mean, after 100 60."
)
_RESERVE = "what cuDNN's LSTM reserves for backward, six numbers a unit"

CLAIMS: tuple[Claim, ...] = (
    _claim("§5.1", "AlexNet (32), training: network-wide", _POOL, "5.1", 1.50, "GB", _network_wide_gb),
    _claim("§5.1", "AlexNet (32), training: Chainer's pool", _POOL, "5.1", 1.21, "GB", partial(_pool_gb, ALEXNET, 32)),
    *(
        _claim("§5.2", f"{label}, inference: {how}", _OPTIMA, "5.2", value, "bytes",
               partial(_inference_bytes, model, solver), repeats=_SAME if solver == "mip" else "")
        for label, model, value in (("AlexNet", ALEXNET, 10_169_344), ("GoogLeNet", GOOGLENET, 12_202_496))
        for how, solver in (("best-fit heuristic", "skyline"), ("integer program", "mip"))
    ),
    _claim("Fig. 2", "GoogLeNet, inference: saved of the total", _SAVED, "5.2", 12.6, "%",
           partial(_saved_percent, GOOGLENET)),
    _claim("Fig. 2", "ResNet-50, inference: saved of the total", _SAVED, "5.2", 10.0, "%",
           partial(_saved_percent, RESNET), _SMALLER_POOL),
    _claim("Fig. 2", "seq2seq, inference: saved of the total", _TRANSLATION, "5.3", 14.6, "%",
           _translation_saved_percent, _TWICE),
    _claim("Fig. 2", "seq2seq (256), training: saved of the total", _MOST, "abstract", 49.5, "%", _most_saved_percent,
           _LENGTHS, assumed=_RESERVE),
    _claim("Fig. 2", "Inception-ResNet (64), training: optimized", _FITS, "5.2", 16, "GB",
           partial(_arena_gb, INCEPTION, 64), bound="<"),
    _claim("Fig. 2", "Inception-ResNet (64), training: Chainer's pool", _FITS, "5.2", 16, "GB",
           partial(_pool_gb, INCEPTION, 64), _WHICH, bound=">"),
    _claim("Fig. 2", "Inception-ResNet (64), training: saved over the other CNNs' most, at least", _MOST_EFFECTIVE,
           "5.2", 1, "x", partial(_inception_saved_over_others, 64), _REVERSED, bound=">"),
    _claim("Fig. 2", "Inception-ResNet over AlexNet (128), training: Chainer's pool", _TIMES, "1", 12.5, "x",
           partial(_inception_over_alexnet, 128), _CONFIGURATION),
)  # fmt: skip

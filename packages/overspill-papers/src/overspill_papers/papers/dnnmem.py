"""DNNMem (Gao et al., ESEC/FSE 2020): its measurements and our estimates of the same jobs on its P40.

"Real" rows are NVML's readings; ours are estimates by each framework's own rules. PyTorch's jobs run on a virtual GPU.
MXNet's are symbols (`symbols.py`). TensorFlow's are graphs that a current TensorFlow traced as TensorFlow 1 builds them
(`tools/tensorflow_graphs.py`). Shape Inference is the paper's baseline, computed by its definition (§5.2): weights,
input and the outputs of forward, with activations, dropout and sums in place.

Some settings are assumed where the paper gives none, once for all rows. Those of sizes and optimizers are in
`dnnmem_tables.py` and `dnnmem_torch.py`. Batch norm of TensorFlow's networks has fixed statistics and an untrained
scale. Only this kind can be "in place", as §5.3 states.

Figs. 8 and 9 and the bars of Figs. 1 and 7 have no row, since the text does not give their measured values. It gives
only DNNMem's own errors, which are not ours to reproduce. Of TensorFlow's batch norm in Fig. 8 it states that it takes
nothing, as it is in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, product
from math import prod
from pathlib import Path
from statistics import fmean

from overspill.capture.recording.recording import Recording
from overspill.devices import load_device
from overspill.estimation import Estimate
from overspill_papers.capture.mxnet.backward import MxnetStep, training_step
from overspill_papers.capture.mxnet.executor import record as record_symbol
from overspill_papers.capture.mxnet.operators import is_operator
from overspill_papers.capture.tensorflow.executor import record as record_graph
from overspill_papers.capture.tensorflow.graph import at_batch, load

from . import dnnmem_tables as tables
from .claim import Claim
from .lab import Lab
from .symbols import NETWORKS, resnet50

GIB = 1 << 30
BERT_HEADS = 12
_GRID_MODELS = ("VGG16", "ResNet50", "InceptionV3")
_GRID_SIDES, _GRID_BATCHES = range(224, 301, 25), (2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
_ESTIMATE = "estimate"
_RESERVED = "reservation and fragmentation"
GRAPHS = Path(__file__).parent / "tensorflow"
_GRAPHS = {"VGG16": "vgg16", "ResNet50": "resnet50-fixed", "InceptionV3": "inception-v3-fixed"}
_IN_PLACE = ("Activation", "Dropout", "Flatten", "Reshape", "_copy", "elemwise_add", "broadcast_add")

_OF_SCORES = ("_scores", "mask", "minus_infinity", "_where", "_softmax", "_masked")
"""Names of attention's scores. Shape Inference leaves them out: Table 7 has one figure for 128 x 64 and 64 x 128
tokens, and scores grow with the length."""


def _inputs(model: str, batch: int, length: int | None, side: int | None = None) -> dict[str, tuple[int, ...]]:
    """Return the inputs of a network's symbol."""
    if model == "LSTM":
        states = {f"lstm{layer}_begin_{part}": (batch, tables.LSTM_WIDTH) for layer in range(2) for part in "hc"}
        return {"data": (tables.LSTM_STEPS, batch, tables.LSTM_WIDTH), **states}
    if model == "BERT":
        length = length or 1
        scores = (batch * BERT_HEADS, length, length)
        lines = dict.fromkeys(("data", "segments", "positions"), (batch, length))
        return {**lines, "mask": scores, "minus_infinity": scores, "softmax_label": (batch,)}
    side = side or tables.IMAGE_SIDES[model]
    return {"data": (batch, 3, side, side), "softmax_label": (batch,)}


def _recording(framework: str, model: str, batch: int, length: int | None) -> Recording:
    """Return a step of a network as a framework runs it on the P40, with SGD, and for BERT with Adam and decay."""
    device = load_device("p40")
    if framework == "MXNet":
        symbol = NETWORKS[model]()
        inputs = _inputs(model, batch, length)
        return record_symbol(symbol, inputs, device, optimizer="adamw" if model == "BERT" else "sgd")
    if framework == "TensorFlow":
        name = f"bert-{length}" if model == "BERT" else _GRAPHS[model]
        return record_graph(at_batch(load(GRAPHS / f"{name}.json.gz"), batch), device)
    from .dnnmem_torch import record  # noqa: PLC0415  # imports torch

    return record(model, batch, length)


@dataclass(frozen=True)
class PaperFigures:
    """Bytes of a step on the P40: the total, the context, and the most live at once in the last step."""

    total: int
    context: int
    live: int


def _figures(framework: str, model: str, batch: int, length: int | None) -> PaperFigures:
    estimate = _of(_recording(framework, model, batch, length), framework, model, batch)
    return PaperFigures(estimate.total_bytes, estimate.context_bytes, _steady_bytes(estimate.recording))


def _estimated(framework: str, model: str, batch: int, length: int | None, lab: Lab) -> PaperFigures:
    return lab.workers.made(f"{framework}'s {model} ({batch})", _figures, framework, model, batch, length)


def _of(recording: Recording, framework: str, model: str, batch: int) -> Estimate:
    """Return the estimate on the P40, with the software of the paper."""
    name = framework.lower()
    return Estimate(model, recording, load_device("p40"), batch, name, software=tables.SOFTWARE, framework=name)


def _total_gb(row: tables.TableRow, lab: Lab) -> float:
    """Return the memory that NVML would show, in GB."""
    if (row.framework, row.model) == ("TensorFlow", "LSTM"):
        return _least_lstm_gb(row.batch_size, lab)
    if _by_shapes(lab):
        return _shape_inference_gb(row, lab)
    return _estimated(row.framework, row.model, row.batch_size, row.seq_len, lab).total / GIB


def _by_shapes(lab: Lab) -> bool:
    """Return whether Shape Inference replaces estimates."""
    return lab.replaced(_ESTIMATE) != _ESTIMATE


def _least_lstm_gb(batch: int, lab: Lab) -> float:
    """Return the least memory of TensorFlow's LSTM, if it keeps the inputs of its gradients for backward, in GB.

    It has weights and their gradients, the steps of input, output and states, four gates a layer, and the context.
    """
    width, step = tables.LSTM_WIDTH, tables.LSTM_STEPS * batch * tables.LSTM_WIDTH
    weights = 2 * (2 * 4 * width * width + 2 * 4 * width)
    kept = step + 2 * (2 + 4) * step
    context = _estimated("TensorFlow", "VGG16", 128, None, lab).context
    return (4 * (2 * weights + kept) + context) / GIB


def _category_gb(batch: int, category: str, lab: Lab) -> float:
    """Return a category of Table 8, VGG16 in TensorFlow, in GB.

    The categories are the bytes live once all algorithms have been tried, and the rest.
    """
    if _by_shapes(lab):
        row = next(row for row in _ROWS if (row.framework, row.model) == ("TensorFlow", "VGG16"))
        inferred = _shape_inference_gb(replace(row, batch_size=batch), lab)
        return {"live tensors": inferred, "total": inferred}.get(category, 0.0)
    made = _estimated("TensorFlow", "VGG16", batch, None, lab)
    parts = {"live tensors": made.live, _RESERVED: made.total - made.context - made.live, "total": made.total}
    return parts[category] / GIB


def _steady_bytes(recording: Recording) -> int:
    """Return the most bytes that are live at once in the last step."""
    changes = [0] * (recording.events + 1)
    for allocation in recording.allocations:
        changes[allocation.start] += allocation.nbytes
        changes[allocation.end] -= allocation.nbytes
    return max(list(accumulate(changes))[recording.starts[-1] :])


def _shape_inference_gb(row: tables.TableRow, lab: Lab) -> float:
    """Return weights, inputs and out-of-place outputs of forward, in GB.

    In TensorFlow, batch norm is in place too (§5.3).
    """
    del lab
    if row.model == "LSTM":  # one operator a layer: two products of four gates, and its output
        weights = 2 * (2 * 4 * tables.LSTM_WIDTH * tables.LSTM_WIDTH + 2 * 4 * tables.LSTM_WIDTH)
        return 4 * (weights + 3 * tables.LSTM_STEPS * row.batch_size * tables.LSTM_WIDTH) / GIB
    return _inferred(row.framework, row.model, row.batch_size, row.seq_len) / GIB


def _inferred(framework: str, model: str, batch: int, length: int | None, side: int | None = None) -> int:
    keras = (framework, model) == ("TensorFlow", "ResNet50")
    symbol = resnet50(early=True) if keras else NETWORKS[model]()
    step = training_step(symbol, _inputs(model, batch, length, side), trains=False)
    return _inferred_bytes(step, batch_norm_in_place=framework == "TensorFlow")


def _mean_error_percent(framework: str, lab: Lab) -> float:
    """Return the mean error of Shape Inference against our estimate over a grid."""
    of_models = (lab.workers.made(f"{framework}'s {model}s", _grid_errors, framework, model) for model in _GRID_MODELS)
    return 100 * fmean(chain.from_iterable(of_models))


def _grid_errors(framework: str, model: str) -> list[float]:
    device, errors = load_device("p40"), []
    for side, batch in product(*_grid(framework, model)):
        if framework == "MXNet":
            total = _of(
                record_symbol(NETWORKS[model](), _inputs(model, batch, None, side), device), framework, model, batch
            ).total_bytes
        else:
            total = _figures(framework, model, batch, None).total
        if total <= device.memory_bytes:
            errors.append(abs(1 - _inferred(framework, model, batch, None, side) / total))
    return errors


def _grid(framework: str, model: str) -> tuple[Sequence[int], Sequence[int]]:
    """Return sides of images, and batches."""
    own = (tables.IMAGE_SIDES[model],)
    return {
        "MXNet": (_GRID_SIDES, _GRID_BATCHES), "TensorFlow": (own, _GRID_BATCHES), "PyTorch": (own, _GRID_BATCHES[::3])
    }[framework]  # fmt: skip


def _inferred_bytes(step: MxnetStep, *, batch_norm_in_place: bool) -> int:
    in_place = (*_IN_PLACE, "BatchNorm") if batch_norm_in_place else _IN_PLACE
    total = 0
    for node, operator, shapes in zip(step.nodes, step.of, step.shapes, strict=True):
        if node.name.endswith(_OF_SCORES):
            continue
        if operator is None or not any(is_operator(node, name) for name in in_place):
            total += sum(4 * prod(shape) for shape in shapes[: None if operator is None else operator.visible])
    return total


def _error_percent(framework: str, lab: Lab) -> float:
    """Return the mean error of our estimates of the jobs of Tables 6 and 7."""
    rows = [row for row in _REAL if row.framework == framework]
    return 100 * fmean(abs(1 - _total_gb(row, lab) / (row.real_gb or 1.0)) for row in rows)


def _paper_error_percent(framework: str) -> float:
    """Return the mean error of the paper's estimates of the same jobs."""
    rows = [row for row in _REAL if row.framework == framework]
    return 100 * fmean(abs(1 - (row.estimated_gb or 0.0) / (row.real_gb or 1.0)) for row in rows)


def _error_row(framework: str) -> Claim:
    own = f"DNNMem's own mean error on the same nine jobs is {_paper_error_percent(framework):.1f} %."
    return _claim("Tables 6, 7", f"{framework}: mean error of nine jobs", _ERRORS, "1", 16.3, "%",
                  partial(_error_percent, framework), own, bound="<")  # fmt: skip


_claim = partial(Claim, "dnnmem")
_ERRORS = "The average estimation errors are below 16.3%"
_MEASURED = "To obtain the real consumed GPU memory of a DL model, we profiled the job using NVIDIA NVML"
_INFERRED = (
    "We query such cost functions for tensors of the initial input, weights, intermediate outputs, and final output "
    "under forward propagation, and then add them up"
)
_CATEGORIES = "The real memory consumption of each part was obtained from TensorFlow runtime logs"
_MEMORY = (
    "Among these 9 experiments, 8 failed due to OOM. That is, the memory consumption is larger than the available "
    "memory"
)
_GRID = "the mean relative errors of Shape Inference (SI) range from 35.9% to 49.1%"
_RESNET = "a PyTorch ResNet50 training job with a batch size of 256 [...] requires 22 GB of GPU memory"
_NOTES: dict[tuple[str, str, int], str] = {
    (
        "TensorFlow",
        "LSTM",
        128,
    ): "At least: weights and gradients, inputs, states and gates of 100 steps, and the context. Of "
    "what was measured beside the context, 3.8 GiB, weights and gradients are 3.1: no program that keeps gates for "
    "backward fits.",
    ("MXNet", "VGG16", 128): "Which algorithm cuDNN found fastest is not known. With FFT in tiles of 32 for the second "
    "convolution, 4.3 GiB, it would be 14.5; within MXNet's default limit of 1 GiB it is 11.1.",
    (
        "MXNet",
        "LSTM",
        128,
    ): "Its arrays of 2.5 MiB take 4 in MXNet's pool, as in the driver's pages; in their own size it would be 12.1.",
    (
        "PyTorch",
        "LSTM",
        128,
    ): "From the second step on, gradients are there to which new ones are added, 1.6 GiB; in the first "
    "step alone it is 7.97.",
    (
        "MXNet",
        "BERT",
        100,
    ): "Ours has GELU by erf, which is GluonNLP's default; written out by tanh, which it has too, it would be 20.6.",
}
_CARD = "its allocator has taken all of the card by then, so that the card's size is the answer."
_GRID_NOTES = {
    "MXNet": "Over 120 pairs of a side from 224 to 299 and a batch from 2 to 256, those that fit; ours in place of "
    "what was measured.",
    "TensorFlow": "The same over ten batches at each network's own side. What the allocator takes is far more than its "
    "tensors where batches are small: the mean is 38 % of batches of 128 and more, 82 % below 32. The paper does not "
    "say which it took.",
    "PyTorch": "The same over four batches, 2 to 256, at each network's own side.",
}


# What was set by looking at a row, so that it shows nothing.
_GATE = "that gradients are asked for as Keras does, none waiting for another, and that batch norm is frozen"
_SUMS = "that Shape Inference takes sums to be in place"
_SIDE = "that InceptionV3 reads images of 299 x 299"
_KEYED: dict[tuple[str, str, int, bool], str] = {
    ("TensorFlow", "ResNet50", 128, False): _GATE,
    ("TensorFlow", "ResNet50", 512, False): _GATE,
    ("TensorFlow", "InceptionV3", 128, False): _GATE,
    ("TensorFlow", "InceptionV3", 512, False): _GATE,
    ("PyTorch", "InceptionV3", 128, False): _SIDE,
    ("PyTorch", "BERT", 32, False): "that BERT is trained by Adam",
    ("MXNet", "LSTM", 128, True): "the length of the LSTM's sequences",
    ("MXNet", "ResNet50", 128, True): _SUMS,
    ("TensorFlow", "ResNet50", 128, True): _SUMS,
}


def _fitted(row: tables.TableRow, *, inferred: bool = False) -> str:
    if row.model == "BERT" and row.seq_len != 32:
        return ""
    return _KEYED.get((row.framework, row.model, row.batch_size, inferred), "")


def _job(row: tables.TableRow) -> str:
    length = f" x {row.seq_len} tokens" if row.model == "BERT" else ""
    return f"{row.model} ({row.batch_size}{length})"


def _label(row: tables.TableRow) -> str:
    return f"{_job(row)}, {row.framework}"


def _measured(row: tables.TableRow) -> Claim:
    note = _NOTES.get((row.framework, row.model, row.batch_size), "")
    real, compute = row.real_gb or 0.0, partial(_total_gb, row)
    key = row.framework, row.model, row.batch_size
    certain = _CARD if key == ("TensorFlow", "BERT", 100) else ""
    repeats = (
        "it is the sum of Table 8's two, which have one digit more." if key == ("TensorFlow", "VGG16", 128) else ""
    )
    return _claim(row.source, _label(row), _MEASURED, "5.2", real, "GB", compute, note, fitted=_fitted(row),
                  certain=certain, repeats=repeats)  # fmt: skip


def _inferred_row(rows: list[tables.TableRow]) -> Claim:
    """Return the row of all frameworks that have the same figure."""
    row = rows[-1]
    fitted = _fitted(row, inferred=True)
    names = " and ".join(each.framework for each in rows) if len(rows) < len(tables.FRAMEWORKS) else "all frameworks"
    what = f"{_job(row)}, {names}: Shape Inference"
    compute = partial(_shape_inference_gb, row)
    return _claim(row.source, what, _INFERRED, "5.2", row.shape_inference_gb or 0.0, "GB", compute, fitted=fitted)


def _memory(row: tables.TableRow) -> Claim:
    compute = partial(_total_gb, row)
    bound = ">" if row.real_oom else "<"
    return _claim("§5.2", _label(row), _MEMORY, "5.2", tables.P40_GB, "GB", compute, bound=bound, fitted=_fitted(row))


_ROWS = [row for framework in tables.FRAMEWORKS for row in tables.load(framework)]
_REAL = [row for row in _ROWS if row.source.startswith("Table")]
_SHAPES: dict[tuple[str, int, int | None, float | None], list[tables.TableRow]] = {}
for _row in _ROWS:
    if _row.source.startswith("Table"):  # frameworks that infer the same shapes have one figure, which is one row
        _SHAPES.setdefault((_row.model, _row.batch_size, _row.seq_len, _row.shape_inference_gb), []).append(_row)

CLAIMS: tuple[Claim, ...] = (
    _claim("Fig. 1", "ResNet50 (256), PyTorch", _RESNET, "1", 22, "GB",
           partial(_total_gb, next(row for row in _ROWS if row.source == "Figure 1"))),
    *map(_measured, sorted(_REAL, key=lambda row: row.source)),
    *map(_error_row, tables.FRAMEWORKS),
    *map(_inferred_row, sorted(_SHAPES.values(), key=lambda rows: rows[0].source)),
    *(
        _claim("Table 8", f"VGG16 ({batch}), TensorFlow: {category}", _CATEGORIES, "5.2", value, "GB",
               partial(_category_gb, batch, category),
               repeats="it is the sum of the two." if category == "total" else "",
               certain=_CARD if (batch, category) == (256, _RESERVED) else "")
        for batch, values in tables.TABLE_8.items() for category, value in values.items()
    ),
    *(
        _claim("Fig. 7", f"Shape Inference, {framework}: mean error, {what}", _GRID, "5.2", value, "%",
               partial(_mean_error_percent, framework), note, bound=bound)
        for framework, note in _GRID_NOTES.items()
        for what, value, bound in (("at least", 35.9, ">"), ("at most", 49.1, "<"))
    ),
    *(_memory(row) for row in _ROWS if row.source == "Section 5.2"),
)  # fmt: skip

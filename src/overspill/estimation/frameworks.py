"""Estimates of jobs of other frameworks: MXNet's symbols, TensorFlow's graphs and ONNX files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from overspill.capture.mxnet import executor as mxnet
from overspill.capture.mxnet.symbol import read_symbol
from overspill.capture.onnx import reader as onnx
from overspill.capture.recording.recording import Recording
from overspill.capture.tensorflow.executor import record as record_graph
from overspill.capture.tensorflow.trace import trace
from overspill.core import Device
from overspill.core.errors import RequestError

from .api import Setting, traced
from .estimate import Estimate
from .source import BATCH, Source, shapes_of


def of_source(source: Source, batch: int, optimizer: str | None, setting: Setting) -> Estimate:
    """The estimate of `source` at a batch size; without an optimizer, of its inference.

    Raises RequestError for what is wrong with the file or its inputs, UnsupportedError for operators that are not known.
    """
    record = _RECORDERS[source.framework](source, optimizer, setting.device)

    def recorded(size: int | None, iterations: int | None) -> Recording:  # noqa: ARG001  # there is one, the same each time
        return record(size or batch)

    return traced(recorded, source.target, batch, setting, framework=source.framework)


def _mxnet(source: Source, optimizer: str | None, device: Device) -> Callable[[int], Recording]:
    symbol = read_symbol(Path(source.target))
    if not source.inputs:
        raise RequestError(
            f"say what shape the inputs of {source.target} have, for instance --input data={BATCH},3,224,224; "
            f"its variables: {', '.join(symbol.variables[:8])}"
        )
    return lambda batch: mxnet.record(symbol, shapes_of(source.inputs, batch), device, optimizer=optimizer)


def _tensorflow(source: Source, optimizer: str | None, device: Device) -> Callable[[int], Recording]:
    return lambda batch: record_graph(trace(source.target, batch, optimizer), device)


def _onnx(source: Source, optimizer: str | None, device: Device) -> Callable[[int], Recording]:
    def record(batch: int) -> Recording:
        given = shapes_of(source.inputs, batch)
        symbol, inputs = onnx.read(Path(source.target), batch, given, trains=optimizer is not None)
        if onnx.LABEL in symbol.variables:
            inputs[onnx.LABEL] = (batch,)
        return mxnet.record(symbol, inputs, device, optimizer=optimizer)

    return record


_RECORDERS = {"mxnet": _mxnet, "tensorflow": _tensorflow, "onnx": _onnx}

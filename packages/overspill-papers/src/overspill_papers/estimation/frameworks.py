"""Record jobs of other frameworks, for `overspill estimate`: MXNet's symbols, TensorFlow's graphs and ONNX files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from overspill.capture.recording.recording import Recording
from overspill.core import Device
from overspill.core.errors import RequestError
from overspill.job.source import BATCH, Source, shapes_of
from overspill_papers.capture.mxnet import executor
from overspill_papers.capture.mxnet.symbol import read_symbol
from overspill_papers.capture.onnx import reader
from overspill_papers.capture.tensorflow.executor import record as record_graph
from overspill_papers.capture.tensorflow.trace import trace


def mxnet(source: Source, optimizer: str | None, device: Device) -> Callable[[int], Recording]:
    """Return the recording of a symbol file by batch size."""
    symbol = read_symbol(Path(source.target))
    if not source.inputs:
        raise RequestError(
            f"say what shape the inputs of {source.target} have, for instance --input data={BATCH},3,224,224; "
            f"its variables: {', '.join(symbol.variables[:8])}"
        )
    return lambda batch: executor.record(symbol, shapes_of(source.inputs, batch), device, optimizer=optimizer)


def tensorflow(source: Source, optimizer: str | None, device: Device) -> Callable[[int], Recording]:
    """Return the recording of a user's function in TensorFlow, by batch size."""
    return lambda batch: record_graph(trace(source.target, batch, optimizer), device)


def onnx(source: Source, optimizer: str | None, device: Device) -> Callable[[int], Recording]:
    """Return the recording of an ONNX file, by batch size, as MXNet would run it."""

    def record(batch: int) -> Recording:
        given = shapes_of(source.inputs, batch)
        symbol, inputs = reader.read(Path(source.target), batch, given, trains=optimizer is not None)
        if reader.LABEL in symbol.variables:
            inputs[reader.LABEL] = (batch,)
        return executor.record(symbol, inputs, device, optimizer=optimizer)

    return record

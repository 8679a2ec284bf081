"""A bench that goes model by model: its options, its record after each model, and `--read` for the table of a record."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from paired import json_record

Measure = Callable[[str, Namespace], Iterable[dict[str, Any]]]
"""The rows of one model, by the options."""


def run_by_model(
    parser: ArgumentParser,
    models: str,
    out: Path,
    measure: Measure,
    table: Callable[[dict[str, Any]], str],
    shown: slice,
    *about: str,
    rows: str = "models",
) -> None:
    """Measure `models`, or those asked for, on one thread; print the lines `shown` of each one's table, then the whole.

    The record has its rows under `rows`, and the options `about` what was measured.
    """
    parser.add_argument("--models", default=models)
    parser.add_argument("--read", type=Path)
    parser.add_argument("--out", type=Path, default=out)
    options = parser.parse_args()
    if options.read is not None:
        print(table(json.loads(options.read.read_text())))
        return
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    record = partial(
        json_record, torch.device("cpu"), **{name: getattr(options, name) for name in about}, **{rows: found}
    )
    for model in options.models.split(","):
        found += (new := [*measure(model, options)])
        options.out.write_text(record())
        print(*table(json.loads(record()) | {rows: new}).splitlines()[shown], sep="\n", flush=True)
    print(table(json.loads(record())))

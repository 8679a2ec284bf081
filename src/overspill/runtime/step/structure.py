"""A model's modules, parameters and buffers, and their places."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import nn

from overspill.pytorch.modules import TABLES

"""Dictionaries in which a module keeps them."""


class Structure:
    """The module tree, compared by identity before each step.

    `parameters` and `buffers` are by name; a parameter is under each of its names.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        self._tables: list[tuple[nn.Module, tuple[tuple[dict[str, Any], tuple[Any, ...]], ...]]] = []
        for path, part in module.named_modules(remove_duplicate=False):
            tables = tuple(part.__dict__[name] for name in TABLES)
            self._tables.append((part, tuple((table, _entries(table)) for table in tables)))
            prefix = f"{path}." if path else ""
            self.parameters |= {prefix + n: p for n, p in dict.items(tables[0]) if p is not None}
        self.buffers = dict(module.named_buffers())

    def holds(self) -> bool:
        """Return whether the model still has this structure."""
        for part, tables in self._tables:
            own = part.__dict__
            for name, (table, entries) in zip(TABLES, tables, strict=True):
                if own[name] is not table or len(table) != len(entries) // 2:
                    return False
                if entries and not all(map(is_, _entries(table), entries)):
                    return False
        return True


def _entries(table: dict[str, Any]) -> tuple[Any, ...]:
    return (*dict.keys(table), *dict.values(table))  # past the guards of a step's parameters

"""The plugin for axolotl, with a copy of its plugin interface: axolotl itself cannot be installed beside this PyTorch.

The copy has what axolotl's BasePlugin and PluginManager do (src/axolotl/integrations/base.py, commit 067b021): a plugin
is made by its dotted name, asked for the class of its arguments, given the config, and asked for callbacks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from overspill.errors import RequestError

NAME = "overspill.callbacks.axolotl.OverspillPlugin"


class BasePlugin:
    """Axolotl's, as far as a plugin of ours gets in touch with it."""

    def register(self, cfg: dict[str, Any]) -> None: ...

    def get_input_args(self) -> str | None: ...

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        return []

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        return []


class Config(dict[str, Any]):
    """Axolotl's DictDefault, which has None for what is missing."""

    def __missing__(self, key: str) -> None:
        return None


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("transformers", reason="needs transformers")
    pytest.importorskip("pydantic", reason="needs pydantic")
    base = ModuleType("axolotl.integrations.base")
    base.BasePlugin = BasePlugin  # type: ignore[attr-defined]
    for name in ("axolotl", "axolotl.integrations"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    module, _, name = NAME.rpartition(".")  # as PluginManager.register does
    yield getattr(importlib.import_module(module), name)()
    sys.modules.pop(module, None)


def test_the_plugin_gives_the_trainer_a_budget(plugin: Any) -> None:
    from overspill.callbacks import Budget

    assert isinstance(plugin, BasePlugin)
    config = Config(overspill=Config(budget="20GiB", store="host"), base_model="tiny")
    plugin.register(config)
    assert plugin.add_callbacks_pre_trainer(config, None) == []
    (callback,) = plugin.add_callbacks_post_trainer(config, None)
    assert isinstance(callback, Budget)
    assert callback._forwards._options.limit.nbytes == 20 << 30
    assert callback._forwards._options.store == "host"


def test_its_part_of_the_config_file_is_described_by_a_class(plugin: Any) -> None:
    module, _, name = plugin.get_input_args().rpartition(".")
    found = getattr(importlib.import_module(module), name)
    assert found(overspill={"budget": "20GiB"}).model_dump() == {"overspill": {"budget": "20GiB"}}
    with pytest.raises(ValueError, match="valid dictionary"):
        found(overspill="20GiB")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (None, "needs a budget"),
        (Config(store="host"), "needs a budget"),
        (Config(budget="20GiB", budgets=1), "budgets"),
        (Config(budget="much"), "much"),
    ],
)
def test_options_that_cannot_be_right_are_refused_before_a_model_is_loaded(
    plugin: Any, options: Any, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        plugin.register(Config(overspill=options))

"""Every name of PyTorch that Overspill uses is where the wall looks for it, and the wall is the only place for them."""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from overspill.pytorch.names import Name, is_there, private_names

ROOT = Path(__file__).parents[2]
SOURCES = (ROOT / "src/overspill", ROOT / "packages/overspill-papers/src/overspill_papers")
WALL = ROOT / "src/overspill/pytorch"
PRIVATE = re.compile(r"_[^_]")
NOT_TORCHS = {
    "sys._getframe", "functools._lru_cache_wrapper", "os._exit",  # Python
    "graph._get_function",  # TensorFlow
    "_fields",  # named tuples
    "_register_custom_module",  # peft
    "_hf_hook",  # accelerate
}  # fmt: skip
"""Private names of others, by the last two parts or the last one."""
TORCHS = {
    name for kind in (torch.Tensor, torch.UntypedStorage, torch.nn.Module, torch.optim.Optimizer, torch.fx.Node, torch.fx.Graph)
    for name in dir(kind) if PRIVATE.match(name)
}  # fmt: skip
"""Private names that objects of PyTorch have, whatever classes of ours have as well."""


@pytest.mark.parametrize("name", sorted(set(private_names())), ids=str)
def test_the_installed_pytorch_has(name: Name) -> None:
    assert is_there(name), f"{name} is gone; {WALL.name}/{name.where}.py uses it (CONTRIBUTING.md, a new PyTorch)"


@pytest.mark.parametrize(
    ("path", "attribute"),
    [("torch._dynamo", "no_such_name"), ("torch._no_such_module", "name"), ("torch.Tensor", "_no_such_attribute")],
)
def test_a_name_that_moved_is_missed(path: str, attribute: str) -> None:
    assert not is_there(Name(path, attribute, "names"))


def uses(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield private names that are not the file's own: of PyTorch by path, and of any object but `self`."""
    own = own_names(nodes) | {node.id for node in nodes if isinstance(node, ast.Name)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if is_private(a.name))
        elif isinstance(node, ast.ImportFrom) and str(node.module).startswith("torch"):
            yield from (name for a in node.names if is_private(name := f"{node.module}.{a.name}"))
        elif (
            isinstance(node, ast.Attribute)
            and PRIVATE.match(node.attr)
            and node.attr not in own
            # The name of an op is the vocabulary of all kernels and graphs: `aten._to_copy`.
            and not re.search(r"\b(aten|ops|prims)\b", ast.unparse(node.value))
        ):
            yield ast.unparse(node)


def nodes_of(text: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(text))]


def own_names(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of functions, classes and attributes that a file defines."""
    named = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return named | {node.attr for node in nodes if isinstance(node, ast.Attribute) and owner(node) in {"self", "cls"}}


def owner(node: ast.Attribute) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def is_private(path: str) -> bool:
    return path.startswith("torch") and any(PRIVATE.match(part) for part in path.split("."))


def is_foreign(name: str, known: set[str]) -> bool:
    last = name.rpartition(".")[2]
    return (
        (last not in known or last in TORCHS)
        and last not in NOT_TORCHS
        and ".".join(name.split(".")[-2:]) not in NOT_TORCHS
    )


def test_private_names_of_pytorch_stand_in_the_wall_alone() -> None:
    files = [path for source in SOURCES for path in source.rglob("*.py") if WALL not in path.parents]
    assert len(files) > 400
    trees = {path: nodes_of(path.read_text(encoding="utf-8")) for path in files}
    # Private names of our own classes, which their neighbours may read.
    known = {name for nodes in trees.values() for name in own_names(nodes)}
    found = {
        str(path.relative_to(ROOT)): names
        for path, nodes in trees.items()
        if (names := sorted({name for name in uses(nodes) if is_foreign(name, known)}))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("import torch._dynamo", 1),
        ("from torch._subclasses.fake_tensor import FakeTensor", 1),
        ("from torch.optim.optimizer import _global_optimizer_post_hooks", 1),
        ("import torch\ntorch._C._has_storage(t)", 2),
        ("version = tensor._version", 1),
        ("def f(self): return self._version", 0),
        ("y = aten._to_copy.default(x)", 0),
        ("from overspill.pytorch.fake_tensors import FakeTensor", 0),
    ],
)
def test_a_private_name_is_seen_however_it_is_written(text: str, count: int) -> None:
    assert len(list(uses(nodes_of(text)))) == count


def test_the_ops_that_sources_name_are_there() -> None:
    """`aten.x` and `aten.x.overload` of all sources; the registry of ops has them, or a release has renamed them."""
    named = set()
    for path in (path for source in SOURCES for path in source.rglob("*.py")):
        if "aten." not in (text := path.read_text(encoding="utf-8")):
            continue
        nodes = nodes_of(text)
        called = {node.func for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            if isinstance(node, ast.Attribute) and owner(node) == "aten" and node not in called:
                named.add(node.attr)
    assert len(named) > 150
    missing = {name for name in named if not hasattr(torch.ops.aten, name) and not hasattr(builtins, name)}
    assert missing == set()

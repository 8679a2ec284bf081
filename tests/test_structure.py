"""The shape of the source tree: imports go one way, the nouns import nothing of ours, `import overspill` is cheap."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "overspill"
PAPERS = ROOT / "packages" / "overspill-papers" / "src" / "overspill_papers"
# A folder may import itself and those of earlier ranks; folders of one rank do not know one another. Those of
# overspill_papers may import from the folders of overspill by the same order.
ORDER = (
    ("core", "pytorch"),
    ("devices", "costs", "models"),
    ("job",),
    ("capture",),
    ("simulate",),
    ("planning",),
    ("bounds",),
    ("policies",),
    ("plans",),
    ("placement",),
    ("estimation",),
    ("runtime",),
    ("papers",),
    ("report",),
    ("callbacks",),
    ("cli",),
)
RANK = {folder: rank for rank, folders in enumerate(ORDER) for folder in folders}
both = pytest.mark.parametrize("package", [PACKAGE, PAPERS], ids=lambda path: path.name)
TOP = "overspill"  # stands for the files directly in src/overspill: they may import anything, and only cli them


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


@cache
def imported_modules(path: Path, source: Path) -> list[str]:
    """The full names of all that the file at `path` imports, at its top or inside functions, a name in a string included."""
    package, found = path.relative_to(source).parent.parts, list[str]()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            found += [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and "import_module" in (
            getattr(node.func, "attr", ""),
            getattr(node.func, "id", ""),
        ):
            found += [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
    return found


def imported_folders(path: Path, package: Path) -> set[str]:
    """Our folders that the file at `path` imports from; TOP for the files beside them, `overspill_papers` from outside it."""
    found = set()
    for name in imported_modules(path, package.parent):
        root, folder = f"{name}.".split(".")[:2]
        if root in {"overspill", package.name}:
            found.add(folder if folder in RANK else TOP)
        elif root == PAPERS.name:
            found.add(root)
    return found


def violations(package: Path) -> list[str]:
    """What breaks the order in `package`, one line each."""
    found = []
    for path in sorted(package.glob("**/*.py")):
        name = path.relative_to(package)
        folder = name.parts[0]
        allowed = {other for other, rank in RANK.items() if rank < RANK.get(folder, len(ORDER))} | {folder}
        if folder not in RANK or folder == "cli":
            allowed.add(TOP)
        found += [f"{name} imports from {other}" for other in sorted(imported_folders(path, package) - allowed)]
    return found


@both
def test_every_folder_has_its_place_in_the_order(package: Path) -> None:
    folders = {path.relative_to(package).parts[0] for path in package.glob("*/**/*.py")}
    assert folders <= RANK.keys()


@both
def test_imports_go_only_along_the_order(package: Path) -> None:
    assert violations(package) == []


def test_the_nouns_import_nothing_but_the_standard_library_and_msgspec() -> None:
    for path in sorted((PACKAGE / "core").glob("**/*.py")):
        roots = {name.split(".")[0] for name in imported_modules(path, SOURCE)}
        assert roots <= {*sys.stdlib_module_names, "msgspec", "overspill"}, path.name
        assert imported_folders(path, PACKAGE) <= {"core"}, path.name


@pytest.mark.parametrize(
    ("file", "line", "folder"),
    [
        ("core/graph.py", "import overspill.costs", "costs"),
        ("core/graph.py", "from ..costs import op_time", "costs"),
        ("core/graph.py", "from .. import costs", "costs"),
        ("core/graph.py", "def f():\n    from overspill import cli", "cli"),
        ("costs/op_time.py", "from overspill.models import resnet", "models"),
        ("costs/deep/er.py", "from ...simulate.clock import simulate", "simulate"),
        ("core/graph.py", "importlib.import_module('overspill.report.plan')", "report"),
        ("cli/plan.py", "from overspill_papers.papers import Lab", "overspill_papers"),
        ("simulate/clock.py", "import overspill", TOP),
        ("simulate/clock.py", "from overspill import compile", TOP),
    ],
)
def test_a_forbidden_import_is_seen_however_it_is_written(tmp_path: Path, file: str, line: str, folder: str) -> None:
    path = tmp_path / "overspill" / file
    path.parent.mkdir(parents=True)
    path.write_text(f"import os\nfrom .sibling import x\nfrom overspill.core import Graph\n{line}\n")
    assert violations(tmp_path / "overspill") == [f"{file} imports from {folder}"]


def test_overspill_papers_may_import_what_comes_before_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "overspill_papers" / "capture" / "mxnet.py"
    path.parent.mkdir(parents=True)
    path.write_text(
        "from overspill_papers.capture import x\nfrom overspill.capture import y\nimport overspill.runtime.z\n"
    )
    assert violations(tmp_path / "overspill_papers") == ["capture/mxnet.py imports from runtime"]


@pytest.mark.parametrize("modules", ["overspill", "overspill.core, overspill.devices"])
def test_importing_it_does_not_import_torch(modules: str) -> None:
    program = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, check=False).returncode == 0


def module_of(path: Path, source: Path) -> str:
    """The full name of the module at `path`."""
    parts = path.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(package: Path) -> list[list[str]]:
    """Groups of modules of `package` that import one another, at their top or inside functions, by name.

    A package's `__init__` that hands on what its modules have is no module of the circle: who imports from it is counted
    as importing the module where the name stands.
    """
    # Of native modules the stub stands in the tree.
    source = package.parent
    files = [path for pattern in ("**/*.py", "**/*.pyi") for path in package.glob(pattern)]
    paths = {module_of(path, source): path for path in sorted(files, reverse=True)}
    imports = {name: imported_modules(path, source) for name, path in paths.items()}
    handed_on = {
        f"{name}.{full.rsplit('.', 1)[1]}": full
        for name, path in paths.items() if path.name == "__init__.py"
        for full in imports[name]
        if "." in full
    }  # fmt: skip

    def target(full: str) -> str:
        while full in handed_on and handed_on[full] != full:
            full = handed_on[full]
        while full not in paths and "." in full:
            full = full.rsplit(".", 1)[0]
        return full

    arrows = {
        name: {t for full in found if (t := target(full)) != name and t in paths} for name, found in imports.items()
    }
    reach: dict[str, set[str]] = {}
    for name in arrows:
        seen, left = set[str](), [name]
        while left:
            for other in arrows[left.pop()] - seen:
                seen.add(other)
                left.append(other)
        reach[name] = seen
    groups = {
        frozenset({name, *(o for o in reach[name] if name in reach[o])}) for name in arrows if name in reach[name]
    }
    return sorted(sorted(group) for group in groups)


@both
def test_no_module_imports_itself_by_way_of_others(package: Path) -> None:
    assert circles(package) == []


@pytest.mark.parametrize("back", ["from overspill.core import A", "A = import_module('overspill.core.a').A"])
def test_a_circle_is_seen_also_inside_functions_and_behind_a_package(tmp_path: Path, back: str) -> None:
    package = tmp_path / "overspill" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("from .a import A as A\n")
    (package / "a.py").write_text("def f():\n    from .b import B\nA = 1\n")
    (package / "b.py").write_text(f"{back}\nB = A\n")
    assert circles(package.parent) == [["overspill.core.a", "overspill.core.b"]]


def named_in_tables(text: str) -> list[str]:
    """The paths in the tables of docs/structure.md, `{a,b}` spelled out."""
    found = []
    for cell in re.findall(r"`([\w/{},]+\.py)`", text):
        before, _, rest = cell.partition("{")
        names, _, after = rest.partition("}")
        found += [f"{before}{name}{after}" for name in names.split(",")]
    return found


def test_docs_structure_names_every_module_and_no_other() -> None:
    text = (ROOT / "docs/structure.md").read_text(encoding="utf-8")
    named = {path for path in named_in_tables(text) if not path.startswith("tests/")}
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    assert modules - named == set()
    assert {path for path in named - modules if not (ROOT / path).exists()} == set()


@both
def test_no_class_name_stands_in_two_files(package: Path) -> None:
    """Unless one is a subclass of the other."""
    places: dict[str, list[tuple[str, list[str]]]] = {}
    for path in sorted(package.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).rpartition(".")[2] for base in node.bases]
                places.setdefault(node.name, []).append((path.name, bases))
    twice = {name: found for name, found in places.items() if len({file for file, _ in found}) > 1}
    assert {name: found for name, found in twice.items() if not any(name in bases for _, bases in found)} == {}


# What tests ask of errors


def rows(values: ast.expr, tables: dict[str, ast.expr]) -> list[ast.expr]:
    """What a loop or the parameters of a test go through, by name or written there."""
    if isinstance(values, ast.Call) and isinstance(values.func, ast.Attribute) and values.func.attr == "values":
        values = tables.get(ast.unparse(values.func.value), values)
    return values.values if isinstance(values, ast.Dict) else getattr(values, "elts", [])


def bindings(tree: ast.Module) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The names that are assigned or looped over, or are parameters of a test, each with a value."""
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign) and node.value]
    pairs = [(node.targets[0] if isinstance(node, ast.Assign) else node.target, node.value) for node in assigned]
    yield from pairs
    tables = {ast.unparse(target): value for target, value in pairs}
    for node in ast.walk(tree):
        if isinstance(node, ast.For):
            yield from ((node.target, row) for row in rows(node.iter, tables))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "parametrize":
            names = ast.literal_eval(node.args[0])
            target = ast.parse(names if isinstance(names, str) else ",".join(names), mode="eval").body
            yield from ((target, row) for row in rows(node.args[1], tables))


def named_values(tree: ast.Module) -> dict[str, list[ast.expr]]:
    """What each name may stand for in a file of tests."""
    found: dict[str, list[ast.expr]] = {}
    for target, value in bindings(tree):
        is_param = isinstance(value, ast.Call) and ast.unparse(value.func) == "pytest.param"
        values = value.args if is_param else getattr(value, "elts", []) if isinstance(target, ast.Tuple) else [value]
        for name, one in zip(getattr(target, "elts", [target]), values, strict=False):
            found.setdefault(ast.unparse(name), []).append(one)
    return found


def long_matches(text: str) -> list[str]:
    """The patterns in a file of tests that match more than three words of an error's sentence, or are none to be read."""
    tree, long = ast.parse(text), []
    values = named_values(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in {"raises", "warns"}:
            for given in (keyword.value for keyword in node.keywords if keyword.arg == "match"):
                for pattern in values.get(ast.unparse(given), [given]):
                    said = re.sub(r"\{[^{}]*\}", "x", ast.unparse(pattern))
                    words = [
                        w
                        for w in re.split(r" +|\.\*", re.sub(r"^r?f?r?|\\\\?[a-z]", "", said))
                        if re.search("[A-Za-z]", w)
                    ]
                    if not isinstance(pattern, ast.Constant | ast.JoinedStr) or len(words) > 3:
                        long.append(said)
    return long


def test_tests_ask_errors_for_their_type_and_fields_and_match_no_sentence() -> None:
    files = [path for tests in (ROOT / "tests", PAPERS.parents[1] / "tests") for path in tests.rglob("*.py")]
    texts = {path: text for path in files if "match=" in (text := path.read_text(encoding="utf-8"))}
    assert len(texts) > 100
    assert {path.name: long for path, text in texts.items() if (long := long_matches(text))} == {}


@pytest.mark.parametrize(
    ("text", "long"),
    [
        ("with pytest.raises(E, match='the budget'): pass", 0),
        ("with pytest.raises(E, match='the budget is below'): pass", 1),
        ("with pytest.raises(E, match=f'{n} bytes.*are missing'): pass", 1),
        ("for n, said in ((1, 'a b'), (2, 'a b c d')):\n with pytest.raises(E, match=said): pass", 1),
        ("@pytest.mark.parametrize(('n', 'said'), [(1, 'a b'), pytest.param(2, 'a b c d')])\ndef f(n, said):\n with pytest.raises(E, match=said): pass", 1),
        ("T = {'x': (1, 'a b c d')}\n@pytest.mark.parametrize(('n', 'said'), T.values(), ids=T)\ndef f(n, said):\n with pytest.raises(E, match=said): pass", 1),
        ("with pytest.raises(E, match=str(n)): pass", 1),
    ],
)  # fmt: skip
def test_a_long_match_is_seen_wherever_it_is_written(text: str, long: int) -> None:
    assert len(long_matches(text)) == long


def test_no_file_has_both_sides_of_a_merge() -> None:
    found = subprocess.run(
        ["git", "grep", "-lE", "^(<{7}|>{7}) "], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (found.stdout, found.stderr) == ("", "")

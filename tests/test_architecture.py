"""The rules of the house (docs/architecture.md), kept by reading the source, never by importing it.

Every rule is a function from a tree of source to a list of complaints. The last part of this file
tries each rule on a small tree that breaks it: a rule that cannot fail keeps nothing.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "moesaic"

FLOORS = {
    "base": 0, "facts": 1, "policy": 2, "kernels": 2, "report": 2, "sim": 3, "dist": 3,
    "store": 4, "nn": 5, "ps": 5, "models": 6, "flow": 6, "elastic": 6, "train": 7, "serve": 7,
    "api": 8, "cli": 9, "testing": 9,
}  # fmt: skip
"""The areas and their floors: an area imports from floors below its own, and from itself."""

SEES = {
    "policy": {"base", "facts"},
    "sim": {"base", "facts", "policy"},
    "report": {"base", "facts"},
}
"""Areas that see less than their floor would let them."""

SEEN_BY = {
    "policy": {"sim", "train", "serve", "api", "cli"},
    "sim": {"api", "cli"},
    "report": {"api", "cli"},
    "testing": set[str](),
}
"""Areas that are seen by fewer than their floor would let see them."""

TORCH_FREE = {"base", "facts", "policy", "sim", "report", "store"}
"""Areas that no import of torch stands in, not even a local one."""

ENVIRONMENT = {
    "dist/world.py": {
        "WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
        "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
    },
    "api/start.py": {
        "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
    },
    "api/launch.py": {"WORLD_SIZE", "RANK", "LOCAL_RANK", "TORCHELASTIC_ERROR_FILE"},
    "api/memory_here.py": {"LOCAL_WORLD_SIZE"},
    "kernels/device.py": {"ONEDNN_PRIMITIVE_CACHE_CAPACITY"},
    "testing/hosts.py": {"GLOO_SOCKET_IFNAME"},
    "testing/ranks.py": {"GLOO_SOCKET_IFNAME"},
}  # fmt: skip
"""The environment variables that are read or set, by file: torchrun's own, its children's, and what
OpenMP reads once."""

IMPORTERS = {"import_module", "__import__", "importing"}
"""Functions that import what they are given the name of."""
DEVICE_FILES = ("kernels/device.py", "facts/job/device_name.py")
VAGUE = {"util", "utils", "common", "helper", "helpers", "misc", "tools", "stuff"}
REFUSED = ("Manager", "Registry")
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 500

MUTATORS = {
    "add", "append", "appendleft", "clear", "discard", "extend", "extendleft", "insert", "pop",
    "popitem", "popleft", "remove", "reverse", "setdefault", "sort", "update",
}  # fmt: skip
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9_]*")
TYPE_NAME = re.compile(r"_?[A-Z][A-Za-z0-9]*")


@dataclass(frozen=True)
class Module:
    """One file of the package."""

    path: Path
    place: Path
    """Relative to the package."""

    @property
    def name(self) -> str:
        """Dotted, without the package: `nn.moe`; an area's own file has the area's name."""
        parts = self.place.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def area(self) -> str:
        """The first part of the name; empty for the files of the package's root."""
        return self.place.parts[0] if len(self.place.parts) > 1 else ""

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree."""
        return list(ast.walk(self.tree))

    def at(self, node: ast.AST) -> str:
        return f"{self.place.as_posix()}:{getattr(node, 'lineno', 1)}"

    def imports(self) -> Iterator[tuple[ast.AST, str]]:
        """Every import wherever it stands, as a full dotted name; names imported are appended."""
        package = ["moesaic", *self.place.parts[:-1]]
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                start = ".".join([*above, *([node.module] if node.module else [])])
                yield from ((node, f"{start}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and _called(node) in IMPORTERS:
                for argument in node.args[:1]:
                    if isinstance(argument, ast.Constant):
                        yield node, str(argument.value)


def modules(source: Path) -> list[Module]:
    return [Module(path, path.relative_to(source)) for path in sorted(source.rglob("*.py"))]


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


# The rules.


def imports_go_down(house: list[Module]) -> Iterator[str]:
    for module in house:
        if module.area and module.area not in FLOORS:
            yield f"{module.place}: the area '{module.area}' has no floor"
            continue
        for node, target in module.imports():
            parts = target.split(".")
            area = parts[1] if len(parts) > 1 and parts[0] == "moesaic" else ""
            if area not in FLOORS or area == module.area:
                continue
            up = FLOORS[area] >= FLOORS.get(module.area, max(FLOORS.values()) + 1)
            sees = area in SEES.get(module.area, FLOORS)
            seen = module.area in SEEN_BY.get(area, FLOORS) or not module.area
            if up or not sees or not seen:
                yield f"{module.at(node)}: {module.area} must not import {target}"


def modules_form_no_cycle(house: list[Module], package: str = "moesaic") -> Iterator[str]:
    """Within areas too; an area's own file gathers what lies in it and may be asked from inside."""
    names = {module.name for module in house if module.place.name != "__init__.py"}
    edges: dict[str, set[str]] = {}
    for module in house:
        if module.name in names:
            found = (_longest(target, names, package) for _, target in module.imports())
            edges[module.name] = {name for name in found if name and name != module.name}
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        yield f"these modules import one another in a circle: {', '.join(error.args[1])}"


def _longest(target: str, names: set[str], package: str) -> str | None:
    name = target.removeprefix(f"{package}.")
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name if target.startswith(f"{package}.") else None


def torch_stays_out(house: list[Module]) -> Iterator[str]:
    for module in house:
        if module.area in TORCH_FREE:
            for node, target in module.imports():
                if target.split(".")[0] in {"torch", "transformers"}:
                    yield f"{module.at(node)}: {module.area} does without torch, not {target}"


def names_say_something(house: list[Module]) -> Iterator[str]:
    for module in house:
        for part in module.place.with_suffix("").parts:
            if part in VAGUE:
                yield f"{module.place}: '{part}' says nothing of what is in it"
        for node in module.nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                for word in REFUSED:
                    if word.lower() in node.name.lower():
                        yield f"{module.at(node)}: {node.name}, a {word.lower()}"


def nothing_global_changes(house: list[Module]) -> Iterator[str]:
    """A module's names are imports, functions, classes, types, and CAPITALS that nobody changes."""
    for module in house:
        for node in module.nodes:
            if isinstance(node, ast.Global):
                yield f"{module.at(node)}: global {', '.join(node.names)}"
            for name in _changed(node):
                yield f"{module.at(node)}: {name} is changed in place"
        yield from _module_variables(module)
        yield from _class_variables(module)


def _module_variables(module: Module) -> Iterator[str]:
    seen: set[str] = set()
    for node, name in _assigned(module.tree.body):
        if name in seen:
            yield f"{module.at(node)}: {name} is assigned twice"
        seen.add(name)
        named = CONSTANT.fullmatch(name) or TYPE_NAME.fullmatch(name)
        if not named and not (name.startswith("__") and name.endswith("__")):
            yield f"{module.at(node)}: the module variable {name} is not a constant"


def _class_variables(module: Module) -> Iterator[str]:
    for owner in module.nodes:
        if not isinstance(owner, ast.ClassDef):
            continue
        for node, name in _assigned(owner.body):
            value = getattr(node, "value", None)
            mutable = isinstance(value, ast.List | ast.Dict | ast.Set | ast.ListComp)
            if mutable and not CONSTANT.fullmatch(name):
                yield f"{module.at(node)}: {owner.name}.{name} is shared and can change"


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    for node in body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            for leaf in ast.walk(target):
                if isinstance(leaf, ast.Name):
                    yield node, leaf.id


def _changed(node: ast.AST) -> Iterator[str]:
    """Constants (also of other modules) that a statement or call changes in place."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    for target in targets if isinstance(node, ast.stmt) else []:
        held = target.value if isinstance(target, ast.Subscript) else target
        name = _constant(held) if isinstance(target, ast.Subscript | ast.Attribute) else None
        if name:
            yield name
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = _constant(node.func.value) if node.func.attr in MUTATORS else None
        if name:
            yield name


def _constant(node: ast.expr) -> str | None:
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return name if CONSTANT.fullmatch(name) and len(name) > 1 else None


def environment_is_listed(house: list[Module]) -> Iterator[str]:
    for module in house:
        allowed = ENVIRONMENT.get(module.place.as_posix(), set())
        used = 0
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                for alias in node.names:
                    if alias.name in {"environ", "getenv", "putenv"}:
                        yield f"{module.at(node)}: import os, and say os.{alias.name}"
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv", "putenv"}:
                used += 1
        found = [name for node in module.nodes for name in _variables(node, module.tree)]
        for name in sorted(set(found) - allowed):
            yield f"{module.place}: the environment variable {name} is not on the list"
        if used > len(found):
            yield f"{module.place}: the environment is used other than by a variable's name"


def _variables(node: ast.AST, tree: ast.Module) -> Iterator[str]:
    """Names of environment variables that this very node uses."""
    key: ast.expr | None = None
    if isinstance(node, ast.Subscript) and _is_environ(node.value):
        key = node.slice
    elif isinstance(node, ast.Compare) and any(map(_is_environ, node.comparators)):
        key = node.left
    elif isinstance(node, ast.Call) and node.args and _asks_environment(node.func):
        key = node.args[0]
    if isinstance(key, ast.Name):
        values = [getattr(s, "value", None) for s, name in _assigned(tree.body) if name == key.id]
        key = next(iter(values), None)
    if isinstance(key, ast.Constant):
        yield str(key.value)


def _asks_environment(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and (
        _is_environ(function.value) or function.attr in {"getenv", "putenv"}
    )


def _is_environ(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def devices_have_one_home(house: list[Module]) -> Iterator[str]:
    for module in house:
        if module.place.as_posix() not in DEVICE_FILES and "cuda" in module.text.lower():
            line = module.text[: module.text.lower().index("cuda")].count("\n") + 1
            yield f"{module.place}:{line}: device names stand in {' and '.join(DEVICE_FILES)} alone"


def broad_excepts_say_why(house: list[Module]) -> Iterator[str]:
    """Ruff's BLE001 finds a broad except that does not raise; one that is excused has a reason."""
    for module in house:
        for number, line in enumerate(module.text.splitlines(), 1):
            if "noqa: BLE001" in line and not re.search(r"noqa: BLE001 - \w.{10,}", line):
                yield f"{module.place}:{number}: a broad except says no reason"


def nothing_is_long(house: list[Module]) -> Iterator[str]:
    for module in house:
        lines = module.text.count("\n")
        if lines > MAX_FILE_LINES:
            yield f"{module.place}: {lines} lines, {MAX_FILE_LINES} are enough"
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    yield f"{module.at(node)}: {node.name} has {lines} lines"


RULES: list[Callable[[list[Module]], Iterator[str]]] = [
    imports_go_down, modules_form_no_cycle, torch_stays_out, names_say_something,
    nothing_global_changes, environment_is_listed, devices_have_one_home, broad_excepts_say_why,
    nothing_is_long,
]  # fmt: skip


def _on_the_page(page: str) -> set[str]:
    """Return the modules of the table: a row has a package, what it holds, and its modules."""
    named = set(re.findall(r"`(__\w+__)`", page))
    for package, cells in re.findall(r"^\| `([a-z0-9_.]+)` \| (.*) \|$", page, flags=re.MULTILINE):
        bare = re.findall(r"`([a-z0-9_]+)`", cells.rpartition(" | ")[2])
        named |= {package, *(f"{package}.{name}" for name in bare)}
    return named


def undocumented(house: list[Module], page: str) -> list[str]:
    """Return modules that the table does not name."""
    named = _on_the_page(page)
    return [module.name for module in house if module.name and module.name not in named]


def invented(house: list[Module], page: str) -> list[str]:
    """Return modules of the table that do not exist."""
    return sorted(_on_the_page(page) - {module.name for module in house})


# The house keeps them.


@pytest.fixture(scope="module")
def house() -> list[Module]:
    return modules(SOURCE)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps(
    house: list[Module], rule: Callable[[list[Module]], Iterator[str]]
) -> None:
    assert not list(rule(house))


def test_benchmarks_form_no_import_cycle(tmp_path: Path) -> None:
    """Imports inside functions count too."""
    assert not list(modules_form_no_cycle(modules(ROOT / "benchmarks"), "benchmarks"))
    files = {"a.py": "from benchmarks import b\n", "b.py": "def late():\n    import benchmarks.a\n"}
    (complaint,) = modules_form_no_cycle(build(tmp_path, files), "benchmarks")
    assert "a, b" in complaint or "b, a" in complaint


def test_every_directory_of_tests_is_run(pytestconfig: pytest.Config) -> None:
    """By itself pytest passes over directories of some names, and says nothing."""
    passed_over, root = pytestconfig.getini("norecursedirs"), Path(__file__).parent
    for path in root.rglob("*.py"):
        for name in path.relative_to(root).parent.parts:
            assert not any(fnmatch(name, pattern) for pattern in passed_over), path


def test_every_module_is_on_the_map(house: list[Module]) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert not undocumented(house, page)
    assert not invented(house, page)


WITHOUT_TORCH = """
import importlib, sys
sys.modules.update(torch=None, transformers=None)
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def import_without_torch(names: list[str], directory: Path) -> str:
    """What such an interpreter complains of."""
    command = [sys.executable, "-c", WITHOUT_TORCH, *names]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True).stderr


def test_facts_policies_reports_and_the_command_line_import_without_torch() -> None:
    free = [f"moesaic.{m.name}" for m in modules(SOURCE) if m.area in TORCH_FREE | {"cli"}]
    assert len(free) > 20
    assert import_without_torch(free, ROOT) == ""


# The rules can fail.

BREACHES = {
    "imports_go_down": [
        ("base/config.py", "from moesaic.facts.job import Job\n"),
        ("nn/moe.py", "def build():\n    from moesaic.models import lm\n"),
        ("models/lm.py", "if TYPE_CHECKING:\n    import moesaic.train.run\n"),
        ("report/page.py", "from moesaic.dist import world\n"),
        ("dist/world.py", "from ..policy import planner\n"),
        ("train/run.py", "import importlib\nimportlib.import_module('moesaic.cli.main')\n"),
        ("serve/http.py", "from moesaic.testing.jobs import tiny_job\n"),
        ("attic/old.py", "x = 1\n"),
    ],
    "modules_form_no_cycle": [("nn/a.py", "def late():\n    from moesaic.nn import b\n")],
    "torch_stays_out": [("facts/plan.py", "def late():\n    import torch.nn\n")],
    "names_say_something": [
        ("nn/utils.py", ""),
        ("nn/moe.py", "class ExpertManager:\n    pass\n"),
    ],
    "nothing_global_changes": [
        ("nn/moe.py", "def count():\n    global TOTAL\n    TOTAL = 1\n"),
        ("nn/moe.py", "cache = {}\n"),
        ("nn/moe.py", "SEEN = set()\ndef see(x):\n    SEEN.add(x)\n"),
        ("nn/moe.py", "from moesaic.nn import seen\ndef see(x):\n    seen.SEEN[x] += 1\n"),
        ("nn/moe.py", "LIMIT = 1\nLIMIT = 2\n"),
        ("nn/moe.py", "class Moe:\n    seen = []\n"),
    ],
    "environment_is_listed": [
        ("nn/moe.py", "import os\nTHREADS = os.getenv('MOESAIC_THREADS')\n"),
        ("nn/moe.py", "from os import environ\n"),
        ("dist/world.py", "import os\nKEY = 'SECRET'\nVALUE = os.environ.get(KEY)\n"),
        ("dist/world.py", "import os\nFOUND = 'SECRET' in os.environ\n"),
        ("dist/world.py", "import os\nALL = dict(os.environ)\n"),
    ],
    "devices_have_one_home": [("nn/moe.py", "DEVICE = 'cuda:0'\n")],
    "broad_excepts_say_why": [
        ("nn/moe.py", "try:\n    go()\nexcept Exception:  # noqa: BLE001\n    go()\n")
    ],
    "nothing_is_long": [
        ("nn/moe.py", "def long():\n" + "    x = 1\n" * 60),
        ("nn/moe.py", "\n" * 501),
    ],
}

GOOD = {
    "__init__.py": "__version__ = '1'\n",
    "base/config.py": "from moesaic import __version__\nNAMES = {'a': 1}\n",
    "facts/plan.py": "from moesaic.base import config\n",
    "nn/b.py": "from moesaic.nn import a\n",
    "kernels/device.py": "NAME = 'cuda'\n",
    "dist/world.py": "import os\nSIZE = os.environ.get('WORLD_SIZE', '1')\n",
    "train/run.py": (
        "from moesaic.policy import planner\n"
        "def count(found):\n    found['a'] = 1\n    local = []\n    local.append(1)\n"
    ),
}


def build(directory: Path, files: dict[str, str]) -> list[Module]:
    for place, text in files.items():
        path = directory / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return modules(directory)


def test_a_good_tree_breaks_no_rule(tmp_path: Path) -> None:
    house = build(tmp_path, GOOD)
    assert [complaint for rule in RULES for complaint in rule(house)] == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_breach_is_found(rule: Callable[[list[Module]], Iterator[str]], tmp_path: Path) -> None:
    for number, (place, text) in enumerate(BREACHES[rule.__name__]):
        house = build(tmp_path / str(number), {**GOOD, place: text})
        complaints = list(rule(house))
        assert complaints, f"not found: {place}: {text}"
        assert place.split("/")[0] in complaints[0] or "nn.a" in complaints[0]


def test_the_map_is_compared_both_ways(tmp_path: Path) -> None:
    house = build(tmp_path, {"base/config.py": "", "base/__init__.py": ""})
    page = "| `base` | the ground: `nn.moe` | `errors` |\n"
    assert undocumented(house, page) == ["base.config"]
    assert invented(house, page) == ["base.errors"]

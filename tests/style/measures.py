"""How readable the sources are, counted on their syntax trees and tokens.

In:  the text of a Python file. Out: the forms that no file may have (`nested_comprehensions`, `chained_conditionals`,
`on_default_device` where nothing sets it, as line numbers), and `Measure`, the counts from which the table of `python -m
tests.style` is made.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

ROOT = Path(__file__).parents[2] / "autoptd"
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Statements that indent a reader's eye. `elif` is no level of its own.
LEVELS = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)
MAX_COLUMNS = 100
# First words of docstrings that state a thing instead of saying what the function does.
NOT_VERBS = frozenset(
    "a all an and another any are as at before both by each every everything few for from had has here how i if in is it its"
    " many most my no nobody none not nothing of on one only or our same several since some such that the their them there"
    " these they this those to two was were what whatever when where which while who whole whose whether why with within"
    " without yes".split()
)
# Words that end in s and are an imperative nevertheless.
VERBS_IN_S = frozenset("pass process address express guess press compress discuss focus access cross".split())
# Functions of torch that make a tensor on torch's default device, which a user may have changed.
FACTORIES = frozenset(
    "arange empty empty_strided eye full linspace ones rand randint randn randperm scalar_tensor tensor zeros".split()
)


def nested_comprehensions(tree: ast.AST) -> list[int]:
    """Lines of comprehensions that stand inside another one: in its element, its conditions or what it
    iterates over.
    """
    lines = []
    for outer in ast.walk(tree):
        if isinstance(outer, COMPREHENSIONS):
            inner = [node for node in ast.walk(outer) if node is not outer]
            lines += [node.lineno for node in inner if isinstance(node, COMPREHENSIONS)]
    return sorted(set(lines))


def chained_conditionals(tree: ast.AST) -> list[int]:
    """Lines of conditional expressions that are a branch or the condition of another one."""
    lines = []
    for outer in ast.walk(tree):
        if isinstance(outer, ast.IfExp):
            parts = (outer.body, outer.test, outer.orelse)
            lines += [part.lineno for part in parts if isinstance(part, ast.IfExp)]
    return sorted(set(lines))


def privates_of_classes(tree: ast.Module) -> set[str]:
    """Names such as `_release` that the classes of a module define: methods, fields, and attributes of self."""
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and is_own(part.value):
                found.add(part.attr)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                found.add(statement.name)
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                found.add(statement.target.id)
    return {name for name in found if name.startswith("_") and not name.startswith("__")}


def is_own(value: ast.expr) -> bool:
    """Whether an attribute is one of the object whose method this is."""
    if isinstance(value, ast.Call):
        value = value.func
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def foreign_privates(tree: ast.Module, known: Collection[str]) -> list[str]:
    """Accesses such as `pm._release` to what `known`, names that classes of other modules define, has and this one has not."""
    foreign = set(known) - privates_of_classes(tree)
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in foreign]
    return [f"{node.lineno}: {ast.unparse(node)}" for node in found if not is_own(node.value)]


def on_default_device(tree: ast.AST) -> list[int]:
    """Lines of calls of torch's factories that name no device."""
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
        is_factory = of_torch and node.func.attr in FACTORIES
        if is_factory and not any(keyword.arg in ("device", None) for keyword in node.keywords):
            lines.append(node.lineno)
    return sorted(set(lines))


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a function is read like an attribute: its docstring says what it is, as a noun."""
    names = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any(name in ("property", "cached_property", "functools.cached_property") for name in names)


def begins_with_verb(docstring: str) -> bool:
    """Guess whether the first word is an imperative: no article, pronoun or preposition, no `-s`, `-ing` or
    plural.
    """
    word = docstring.split(maxsplit=1)[0].strip("`'\"(.,:;") if docstring.split() else ""
    lower = word.lower()
    if not lower.isalpha() or lower in NOT_VERBS or word != word.capitalize():
        return False
    return lower in VERBS_IN_S or not lower.endswith(("s", "ing"))


@dataclass
class Measure:
    """Counts of one file, or of several: measures add."""

    files: int = 0
    lines: int = 0
    code: int = 0
    comments: int = 0
    wide: int = 0
    comprehensions: int = 0
    conditionals: int = 0
    nested: int = 0
    chained: int = 0
    docstrings: int = 0
    without_verb: list[str] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def __add__(self, other: Measure) -> Measure:
        return Measure(
            **{part.name: getattr(self, part.name) + getattr(other, part.name) for part in fields(self)}
        )


def lengths_of_functions(tree: ast.AST) -> list[int]:
    """Return the lines of every function, nested ones too."""
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in functions]


def measure(path: str, source: str) -> Measure:
    """Count one file."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    public = [node for node in functions if not node.name.startswith("_") and not is_property(node)]
    documented = [(node.name, ast.get_docstring(node)) for node in public]
    code, comments = code_and_comments(source, tree)
    text = source.splitlines()
    return Measure(
        files=1,
        lines=len(text),
        code=len(code),
        comments=comments,
        wide=sum(len(text[number - 1]) > MAX_COLUMNS for number in code),
        comprehensions=sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        conditionals=sum(isinstance(node, ast.IfExp) for node in nodes),
        nested=len(nested_comprehensions(tree)),
        chained=len(chained_conditionals(tree)),
        docstrings=sum(bool(docstring) for _, docstring in documented),
        without_verb=[f"{path}:{name}" for name, text in documented if text and not begins_with_verb(text)],
        lengths=lengths_of_functions(tree),
        depths=[depth(node) for node in functions],
    )


def code_and_comments(source: str, tree: ast.AST) -> tuple[set[int], int]:
    """Return the numbers of the lines that hold code (no docstring, no comment alone), and the number of
    comments.
    """
    code: set[int] = set()
    comments = 0
    silent = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments += 1
        elif token.type not in silent:
            code |= set(range(token.start[0], token.end[0] + 1))
    return code - docstring_lines(tree), comments


def docstring_lines(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            lines |= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return lines


def depth(function: ast.AST) -> int:
    """Count the deepest nesting of blocks in a function; a function within it is counted for itself."""
    return max((depth_of_statement(statement) for statement in getattr(function, "body", [])), default=0)


def depth_of_statement(statement: ast.AST) -> int:
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return 0
    own = int(isinstance(statement, LEVELS))
    # An `elif` is an If alone in the orelse of another: it stands on the same level.
    if (
        isinstance(statement, ast.If)
        and len(statement.orelse) == 1
        and isinstance(statement.orelse[0], ast.If)
    ):
        inside = max((depth_of_statement(child) for child in statement.body), default=0)
        return max(own + inside, depth_of_statement(statement.orelse[0]))
    return own + max((depth_of_statement(child) for child in blocks(statement)), default=0)


def blocks(statement: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements one level below."""
    for name in ("body", "orelse", "finalbody"):
        children = getattr(statement, name, [])
        if isinstance(children, list):
            yield from children
    for branch in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield from branch.body


def place_of(path: Path) -> str:
    """Name the package that a file is measured with: `viz`, `passes/solve`, or `api.py` at the top."""
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[:-1]) or parts[0]


def measure_places(root: Path = ROOT) -> dict[str, Measure]:
    """Measure every package below `root`, in alphabetical order."""
    places: dict[str, Measure] = {}
    for path in sorted(root.rglob("*.py")):
        place = place_of(path)
        counts = measure(str(path.relative_to(root)), path.read_text())
        places[place] = places.get(place, Measure()) + counts
    return dict(sorted(places.items()))

"""No comprehension within a comprehension, no chain of conditional expressions: a loop or a named helper
instead.
"""

from __future__ import annotations

import ast
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.style.measures import (
    ROOT,
    begins_with_verb,
    chained_conditionals,
    code_and_comments,
    depth,
    foreign_privates,
    lengths_of_functions,
    measure,
    nested_comprehensions,
    on_default_device,
    privates_of_classes,
)

FILES = sorted(ROOT.rglob("*.py"))
# Run within `on_cpu()`, or (deferred weights) within modes of their own.
PLACED = ("passes", "trace", "subject/initial")


@pytest.mark.parametrize("file", FILES, ids=[str(file.relative_to(ROOT)) for file in FILES])
def test_a_line_says_one_thing(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert nested_comprehensions(tree) == [], (
        "a comprehension within another: write a loop, or name the inner one"
    )
    assert chained_conditionals(tree) == [], (
        "`a if x else b if y else c`: write `if` statements, or a named helper"
    )


def test_tensors_name_their_device() -> None:
    """`torch.set_default_device("cuda")` is for the user's model."""
    for file in FILES:
        if not str(file.relative_to(ROOT)).startswith(PLACED):
            assert on_default_device(ast.parse(file.read_text())) == [], file


def test_no_object_reaches_into_anothers_privates() -> None:
    """What one class calls `_name` is not read or written by other modules; torch's privates are not meant."""
    trees = {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in FILES}
    known: set[str] = set().union(*map(privates_of_classes, trees.values()))
    known -= {*dir(nn.Module()), *dir(torch.Tensor), *dir(namedtuple("Record", ""))}
    found = {path: accesses for path, tree in trees.items() if (accesses := foreign_privates(tree, known))}
    assert found == {}, "give it a public name, or the other object a method or a callback"


def test_nine_functions_of_ten_have_20_lines_at_most() -> None:
    lengths = [length for file in FILES for length in lengths_of_functions(ast.parse(file.read_text()))]
    longer = sum(length > 20 for length in lengths)
    assert longer <= 0.1 * len(lengths), f"{longer} of {len(lengths)} functions are longer"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("[[x for x in row] for row in rows]", [1]),
        ("[max(x for x in row) for row in rows]", [1]),
        ("{x for x in f(\n  y for y in z)}", [1]),
        ("[x for x in rows if any(\n  y for y in x)]", [1]),
        ("a = [x for x in b]\nc = [x for x in a]", []),
        ("[x for row in rows for x in row]", []),
    ],
)
def test_nested_comprehensions_are_found(source: str, lines: list[int]) -> None:
    assert nested_comprehensions(ast.parse(source)) == lines


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("a if x else b if y else c", [1]),
        ("(a if x else b) if y else c", [1]),
        ("f(a if x else b) + (c if y else d)", []),
    ],
)
def test_chained_conditionals_are_found(source: str, lines: list[int]) -> None:
    assert chained_conditionals(ast.parse(source)) == lines


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("pm._release = f", ["1: pm._release"]),
        ("self._pm._release()", ["1: self._pm._release"]),
        ("self._release()\ncls._release\nsuper()._release\nsuper(A, self)._release()", []),
        ("class A:\n  def _release(self): ...\ndef f(a: A):\n  a._release()", []),
        ("class A:\n  def f(self, a):\n    self._release = a._release", []),
        ("x._version\nx.release", []),
    ],
)
def test_foreign_privates_are_found(source: str, found: list[str]) -> None:
    assert foreign_privates(ast.parse(source), {"_release"}) == found


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("torch.zeros(2)\ntorch.zeros(2, device=d)", [1]),
        ("torch.tensor([1], dtype=torch.int64)", [1]),
        ("torch.full((), x, **kwargs)\ntorch.zeros_like(x)\nx.new_zeros(2)\nnp.zeros(2)", []),
    ],
)
def test_factories_without_a_device_are_found(source: str, lines: list[int]) -> None:
    assert on_default_device(ast.parse(source)) == lines


def test_lines_comments_and_levels_are_counted() -> None:
    source = (
        '"""Doc.\n\nMore.\n"""\n# why\nx = 1  # trailing\n\ndef f():\n    """Return one."""\n    return 1\n'
    )
    assert code_and_comments(source, ast.parse(source)) == ({6, 8, 10}, 2)
    assert measure("m.py", source).lengths == [3]
    nested = "def f():\n for a in b:\n  if a:\n   pass\n  elif c:\n   pass\n  else:\n   while d:\n    pass\n"
    assert depth(ast.parse(nested).body[0]) == 3


def test_verbs_are_guessed() -> None:
    assert begins_with_verb("Return the sum.") and begins_with_verb("Pass it on.")
    for text in ("The sum.", "What is left.", "Bytes of a call.", "Whether it is so.", "`x` of y."):
        assert not begins_with_verb(text)

"""A mesh axis by its name, and a degree, stand only where axes are declared, chosen, asked for or drawn.

All else asks the mesh for the axes of a role (`ir/mesh.py`), and so takes another axis as it takes these.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from autoptd.ir.mesh import Mesh
from tests.style.axes import ROOT, axes_named, axes_of_package, axis_constants

# Files and folders in which axes have names.
ALLOWED = {
    "ir/mesh.py": "the table of axes",
    "options/options.py": "the keywords",
    "passes/annotate.py": "what each axis may split",
    "api.py": "the signatures",
    "model/parallel_model.py": "the public face",
    "wings/cli": "the public face",
    "wings/viz": "pictures: each axis has a colour and a place",
    "wings/planner": "formulas in t, p, d",
}
# Ten at most.
EXCEPTIONS = {
    "options/elsewhere.py": "names of keywords in other libraries, and what to write here instead",
}


@pytest.fixture(scope="module")
def in_package() -> dict[str, list[tuple[int, str]]]:
    return axes_of_package()


def is_allowed(file: str) -> bool:
    return file in EXCEPTIONS or any(file == place or file.startswith(f"{place}/") for place in ALLOWED)


def test_axes_are_named_in_few_places(in_package: dict[str, list[tuple[int, str]]]) -> None:
    wrong = {file: lines for file, lines in in_package.items() if not is_allowed(file)}
    assert wrong == {}, "ask the mesh for the axes of a role, or say in EXCEPTIONS why it is about one axis"


def test_every_exception_is_one(in_package: dict[str, list[tuple[int, str]]]) -> None:
    assert len(EXCEPTIONS) <= 10
    assert set(EXCEPTIONS) <= set(in_package)
    assert all((ROOT / place).exists() for place in ALLOWED)


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ('world.group(("tp",))', ["'tp'"]),
        ('"""Of tp."""\nx = f"sum over dp of {y}"', ["'sum over dp of '"]),
        ('groups["tp:(2)4"]', ["'tp:(2)4'"]),
        ("def peer(world, pp): return pp", ["pp", "pp="]),
        ("Coordinate(pp=world.coordinate.pp)", [".pp", "pp="]),
        ("self._tp = 1", ["._tp"]),
        ("options.t > 1 or mesh.d == asked.p", [".d", ".p", ".t"]),
        ("Mesh(t=2)", ["t="]),
        ("weight.t() @ x", []),
        ("F.dropout(x, p=0.1)", []),
        ('"""Ranks along tp."""\nhttp = step.output', []),
    ],
)
def test_what_names_an_axis_is_found(source: str, named: list[str]) -> None:
    assert sorted(text for _, text in axes_named(ast.parse(source))) == named


def test_a_constant_that_holds_an_axis_is_one(tmp_path: Path) -> None:
    """In the file that imports it too: the literal itself may stand in an allowed one."""
    assert axis_constants(ast.parse('TENSOR = "tp"\nMODE: str = "dp"\nOTHER = "x"')) == {"TENSOR", "MODE"}
    (tmp_path / "names.py").write_text('TENSOR = "tp"\n')
    (tmp_path / "user.py").write_text("from names import TENSOR\n\n\ngroup(TENSOR)\nnames.TENSOR\n")
    assert axes_of_package(tmp_path)["user.py"] == [(4, "TENSOR"), (5, ".TENSOR")]


@pytest.mark.parametrize(
    "file", ["wings/doctor/checks.py", "codegen/body.py", "compiler/records/collectives.py"]
)
def test_a_literal_that_is_put_back_is_found(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text() + '\n\nAXES_OF_THIS_FILE = ("tp", "dp")\n')
    assert [text for _, text in axes_named(tree)] == ["'dp'", "'tp'"] and not is_allowed(file)


def test_what_is_asked_of_a_mesh_instead() -> None:
    mesh = Mesh(t=4, p=2, d=3, order="dp-tp-pp")
    assert (mesh.value_ranks, mesh.pipeline_ranks, mesh.replicas) == (4, 2, 3)
    assert mesh.value_text == "tp" and mesh.words == "t=4 tensor x p=2 pipeline x d=3 data parallel"
    assert mesh.product_text(mesh.batch_axes) == "d=3" and mesh.product_text(("tp", "dp")) == "t*d=12"
    assert mesh.along(mesh.value_axes) == Mesh(t=4, order="dp-tp-pp")

"""Names of the user's in emitted files: any character, in code, comments and docstrings."""

from __future__ import annotations

import ast

import pytest

from autoptd.codegen.again import names_in
from autoptd.codegen.writer import WIDTH, Writer, check_source, weight_text
from autoptd.errors import InternalError
from autoptd.ir.names import (
    OF_STAGE,
    RESERVED,
    free_method,
    free_name,
    identifier,
    in_docstring,
    quoted,
    shown,
)
from autoptd.runtime.step.stage import Stage
from tests.fuzz.features import HARD_NAMES

NAMES = [
    *HARD_NAMES,
    "😀",
    "ﬁ",
    "²x",
    "nul\0",
    "\u2028",
    "\x85",
    "\ud800",
    '"',
    '""',
    "\\",
    '\\"',
    "'",
    "",
    "é",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_name_leaves_no_text(name: str) -> None:
    assert ast.literal_eval(quoted(name)) == name and quoted(name).isascii()
    assert shown(name).isprintable()
    writer = Writer()
    writer.add(0, "def f(w):", comment=name)
    writer.docstring(f"Of {name}")
    writer.comment(2, f"{name}  (file.py:3)")
    writer.add(2, f"x = {weight_text('w', name)}", name, above=name)
    source = "\n".join([*writer.lines, "        return x", ""])
    check_source("stage_0.py", source)
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef) and len(function.body) == 3
    assert ast.get_docstring(function, clean=False) == f"Of {shown(name)}"


def test_a_variable_is_what_python_reads() -> None:
    for made in (*map(free_name, NAMES), *map(free_method, NAMES)):
        read = ast.parse(made, mode="eval").body
        assert (
            isinstance(read, ast.Name) and read.id == made
        )  # in its normal form: another name is another variable


def test_ordinary_names_stay_as_they_are() -> None:
    assert quoted("h.0.mlp") == '"h.0.mlp"' and free_name("hidden_states") == "hidden_states"
    assert identifier("0.weight") == "p_0_weight" and free_name("class") == "class_"
    assert in_docstring("What this stage has of h.3.") == "What this stage has of h.3."


def test_a_method_is_nothing_that_stages_have() -> None:
    stage = Stage(groups={}, weights={}, buffers={}, device=None)  # type: ignore[arg-type]
    own = {name for name in {*dir(Stage), *vars(stage)} if not name.startswith("_")}
    assert own == OF_STAGE
    for name in (*own, "mlp_again", "batch_sums_0", "_repeat", "0"):
        made = free_method(name)
        assert made not in own | RESERVED and not made.startswith(("_", "batch_sums_"))
        assert not made.endswith("_again") and made.isidentifier()


def test_a_long_index_stays_an_index() -> None:
    name = "name of a module " * 8
    writer = Writer()
    writer.add(2, f"x = F.linear(x, {weight_text('w', name)}.weight)")
    writer.add(2, f"x = {weight_text('w', name)}")
    text = "\n".join(line.strip() for line in writer.lines)
    indices = [node.slice for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Subscript)]
    assert [index.value for index in indices if isinstance(index, ast.Constant)] == [name, name]


def test_blanks_of_a_name_in_a_list_stay() -> None:
    writer = Writer()
    values = [weight_text("w", f"two  words {i}") for i in range(12)]
    writer.add_list("scales", values)
    assert max(map(len, writer.lines)) <= WIDTH
    (assigned,) = ast.parse("\n".join(line.strip() for line in writer.lines)).body
    assert isinstance(assigned, ast.Assign) and ast.unparse(assigned.value) == ast.unparse(
        ast.parse(f"({', '.join(values)})").body[0]
    )


def test_a_recipe_reads_what_its_code_names() -> None:
    body = Writer()
    body.add(2, 'x = torch.mul(w["a # b"], scale)  # of bias')
    body.add(2, 'return rt.all_gather(x, tp, site="mlp")')
    assert names_in(body) == {"x", "torch", "w", "scale", "rt", "tp"}


@pytest.mark.parametrize(
    ("source", "line"), [("x = 1\ny = (\n", 2), ("x = 1\ndef f(a, a): pass\n", 2), ("\0", 1)]
)
def test_a_file_that_is_no_python_is_refused(source: str, line: int) -> None:
    with pytest.raises(InternalError, match=rf"stage_1.py:{line}: is not valid Python"):
        check_source("stage_1.py", source)

"""Emitted files: readable, deterministic, the same for every rank, and no longer for a deeper model."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import pairwise

import pytest
import torch

from autoptd.api import compile
from autoptd.program.program import Program
from examples.gpt import GPT, GPTConfig

Tensor = torch.Tensor
COLLECTIVES = (
    "p_to_i",
    "i_to_r",
    "p_to_r",
    "s_to_i",
    "s_to_r",
    "p_to_s",
    "i_to_s",
    "r_to_s",
    "s_to_s",
    "i_to_p",
)


@cache
def gpt(layers: int = 4, t: int = 2, p: int = 1, v: int = 1, d: int = 1, m: int = 4) -> Program:
    """With as many layers on every stage, where that can be."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, block_size=32, n_layer=layers, n_head=4, n_embd=128))
        ids = torch.zeros(8, 32, dtype=torch.long)
    plan = {"cut": [layers // (p * v)] * (p * v)} if layers % (p * v) == 0 else None
    return compile(
        model, t=t, p=p, v=v, d=d, num_microbatches=m, plan=plan, example_inputs=(ids, ids.clone())
    )


EVERY = [{}, {"t": 1}, {"t": 4}, {"p": 2}, {"p": 2, "v": 2}, {"d": 2}, {"layers": 7, "p": 2, "v": 2}]


def sources(**mesh: int) -> list[str]:
    return list(gpt(**mesh).sources.values())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mesh", EVERY, ids=str)
def test_files_are_python_and_import_torch_and_the_runtime_only(mesh: dict[str, int]) -> None:
    for name, text in gpt(**mesh).sources.items():
        tree = ast.parse(text)
        compile_text(text, name)
        imports = [ast.unparse(node) for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        wanted = {"import torch": "torch" in used, "import torch.nn.functional as F": "F" in used}
        assert imports == [line for line, is_used in wanted.items() if is_used] + [
            "from autoptd import runtime as rt"
        ]
        if name != "layers.py":
            assert ast.unparse(tree.body.pop()).startswith("if __name__ == '__main__':")
        assert not [
            node
            for node in ast.walk(tree)
            if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Try, ast.Match))
        ]
        assert not re.search(r"\brank\b(?!s)", strip_comments(text)) and "cuda" not in text


def compile_text(text: str, name: str) -> None:
    exec(__builtins__["compile"](text, name, "exec"), {})  # type: ignore[index]


def strip_comments(text: str) -> str:
    return re.sub(r'#.*|"""(.|\n)*?"""', "", text)


@pytest.mark.parametrize("mesh", EVERY, ids=str)
def test_every_name_is_assigned_before_it_is_read(mesh: dict[str, int]) -> None:
    for text in gpt(**mesh).sources.values():
        for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
            known = {"torch", "F", "rt", "range", "float", *(arg.arg for arg in function.args.args)}
            for statement in function.body:
                stored = [
                    n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                ]
                loop = {statement.target.id} if isinstance(statement, ast.For) else set()  # type: ignore[union-attr]
                loaded = [
                    n for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
                ]
                assert {n.id for n in loaded} <= known | loop
                known |= {n.id for n in stored}


def test_the_same_input_gives_the_same_bytes() -> None:
    first = gpt(p=2, v=2)
    gpt.cache_clear()
    second = gpt(p=2, v=2)
    assert (
        first is not second
        and first.sources == second.sources
        and first.fingerprint() == second.fingerprint()
    )


def test_every_collective_has_its_line_with_bytes_and_reason_above() -> None:
    found = 0
    for text in sources(p=2):
        for above, line in pairwise(text.splitlines()):
            calls = re.findall(r"rt\.(\w+)\(", line)
            if any(call in COLLECTIVES for call in calls):
                found += 1
                assert len(calls) == 1 and re.fullmatch(r"\s+\w+ = rt\.\w+\(.*\)", line), line
                assert re.fullmatch(
                    r"\s+# (.+ (fwd|bwd), [\d,]+ B: .+|bias added on tp rank 0 only)", above
                ), above
    assert found > 6


def test_collectives_of_the_record_are_those_of_the_files() -> None:
    """A repeated layer is written once and recorded once per layer."""
    program = gpt(t=2, p=1)
    recorded = [one.conversion for one in program.collectives if one.conversion in COLLECTIVES]
    text = strip_comments(program.sources["stage_0.py"])
    block, rest = text.split("def forward")
    for kind in set(recorded):
        assert recorded.count(kind) == 4 * block.count(f"rt.{kind}(") + rest.count(f"rt.{kind}(")


@pytest.mark.parametrize("t", [2, pytest.param(1, marks=pytest.mark.thorough)])
def test_a_deeper_model_has_no_longer_file(t: int) -> None:
    small, large = (gpt(layers=layers, t=t).sources["stage_0.py"] for layers in (4, 8))
    assert len(large.splitlines()) == len(small.splitlines())
    assert "for i in range(8):  # transformer.h.0 to transformer.h.7" in large
    assert large.count("def layer(") == 1 and large.count("F.scaled_dot_product_attention") == 1


def test_every_stage_loops_over_its_own_layers() -> None:
    loops = [re.findall(r"range\((?:(\d+), )?(\d+)\)", text) for text in sources(layers=8, p=2, v=2)]
    bounds = [(int(first or 0), int(stop)) for found in loops for first, stop in found]
    assert bounds[0][0] == 0 and bounds[-1][1] == 8
    assert all(one[1] == other[0] for one, other in pairwise(bounds))


def test_two_views_are_one_line_with_the_last_shape() -> None:
    source = gpt(t=2).sources["stage_0.py"]
    assert "q = q.reshape(" in source and ").transpose(1, 2)  # [" in source
    # The sizes of the last view say its shape.
    assert re.search(r"y = y\.transpose\(1, 2\)\.contiguous\(\)\.reshape\([\d, ]+\)\n", source)


def test_the_code_does_not_depend_on_the_replicas() -> None:
    one, two = (strip_comments(gpt(d=d, m=m).sources["stage_0.py"]).split() for d, m in ((1, 4), (2, 2)))
    assert one == two


def test_names_of_the_user() -> None:
    lines = [line.strip() for line in gpt(t=2).sources["stage_0.py"].splitlines()]
    for wanted in (
        "def forward(self, idx, targets):",
        "ln_1 = F.layer_norm(x, [128], w.ln_1.weight, w.ln_1.bias, 1e-05)",
        "q, k, v = torch.split(c_attn, 64, 2)  # [2, 32, 64]",
        "# column: 512 = 2 x 256",
        "c_fc = F.linear(ln_2, w.mlp.c_fc.weight, w.mlp.c_fc.bias)  # [2, 32, 256]",
        "# column: 4 heads over 2 ranks",
        "y = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "# column: 256 = 2 x 128",
        "logits = F.linear(ln_f, w.transformer.wte.weight)",
    ):
        assert wanted in lines
    assert any(re.fullmatch(r"# attn  \(gpt\.py:\d+\)", line) for line in lines)


def test_lines_are_readable() -> None:
    for text in sources(p=2):
        assert max(map(len, text.splitlines())) <= 110
        assert "torch.ops" not in text and "\n\n\n\n" not in text and not text.startswith("\n")


def test_the_loss_stage_counts_labels_before_the_first_forward() -> None:
    first, last, _ = sources(p=2)
    assert "def count(" not in first and "def count(self, targets):" in last
    assert "rt.count_labels(targets, ignore_index=-100)" in last and "total=self.totals[0]" in last


def test_what_a_stage_reads_and_writes() -> None:
    program = gpt(p=2)
    first, last = program.stages
    assert first.inputs == ("idx",) and last.inputs == ("targets",)
    assert first.outputs == last.crossings == ("x_from_0",) and first.crossings == last.outputs == ()
    assert "def forward(self, x_from_0, targets):" in program.sources["stage_1.py"]
    assert "transformer.wte.weight" in first.params and "transformer.wte.weight" in last.params

"""What several stages call is written once, in layers.py; every stage file says what arrives, what leaves, what is summed."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

import autoptd
from autoptd.program.program import Program
from autoptd.runtime.step.stage import load_layers, load_stage, make_namespace
from examples.gpt import GPT, GPTConfig


@cache
def gpt(layers: int = 12, cut: tuple[int, ...] = (1, 2, 3, 3, 2, 1), **keywords: int) -> Program:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=256, block_size=32, n_layer=layers, n_head=4, n_embd=128))
        ids = torch.zeros(8, 32, dtype=torch.long)
    request = {"t": 2, "p": 3, "v": 2, "num_microbatches": 6, **keywords} if cut else {"t": 2, **keywords}
    plan = {"cut": list(cut)} if cut else None
    return autoptd.compile(model, **request, plan=plan, example_inputs=(ids.repeat(3, 1), ids.repeat(3, 1)))


def test_a_layer_of_several_stages_is_in_no_stage_file() -> None:
    sources = gpt().sources
    assert sorted(sources) == ["layers.py", *(f"stage_{k}.py" for k in range(6))]
    assert "".join(sources.values()).count("F.scaled_dot_product_attention") == 1
    assert sources["layers.py"].count("def layer(") == 1
    calls = [re.findall(r"range\((\d+), (\d+)\)|h\[(\d+)\], ", text) for text in sources.values()]
    assert calls[:6] == [
        [("", "", "0")],
        [("1", "3", "")],
        [("3", "6", "")],
        [("6", "9", "")],
        [("9", "11", "")],
        [("", "", "11")],
    ]


def test_stages_alike_have_files_alike() -> None:
    first, second = (gpt().sources[f"stage_{k}.py"] for k in (2, 3))
    changed = [
        (one, two) for one, two in zip(first.splitlines(), second.splitlines(), strict=True) if one != two
    ]
    assert len(changed) <= 8 and all(
        re.sub(r"\d+", "", one) == re.sub(r"\d+", "", two) for one, two in changed
    )


def test_a_program_of_one_stage_has_one_file() -> None:
    assert list(gpt(4, (), p=1).sources) == ["stage_0.py"]


def test_a_stage_says_what_arrives_and_where_its_values_go() -> None:
    text = gpt().sources["stage_2.py"]
    assert (
        "# x_from_1: [4, 32, 128] float32, I, from stage 1 (pipeline rank 1): add of transformer.h.2" in text
    )
    assert (
        "# x goes to stage 3 (pipeline rank 0) as x_from_2: [4, 32, 128] float32, I; its gradient comes back"
        in text
    )
    assert "# idx: [4, 32] int64, from the batch" in gpt(d=1).sources["stage_0.py"]


def test_a_stage_says_what_is_summed_at_the_end() -> None:
    assert "After the last microbatch" not in gpt().sources["stage_2.py"]  # t=2 alone: nothing
    text = gpt(d=3, num_microbatches=2).sources["stage_0.py"]
    (line,) = re.findall(r"# - (.*over dp.*)", text.partition("# After the last microbatch")[2])[:1]
    assert re.fullmatch(r"all-reduce 1 bucket of [\d,]+ B \(\d+ gradients\) over dp", line)
    assert "(transformer.wte.weight)" in text


def test_sites_have_the_number_of_the_layer() -> None:
    weights = make_namespace({"h.0.attn.weight": torch.ones(1), "h.1.at.weight": torch.ones(1)})
    assert weights.h[0].at("attn.c_proj") == "h.0.attn.c_proj" and weights.h[1].at() == "h.1"
    assert weights.h[1]["at"].weight.item() == 1  # what a model calls `at` hides no method
    starred = make_namespace({"h.0.attn.weight": torch.ones(1)}, is_starred=True)
    assert starred.h[0].at("attn") == "h.*.attn"
    assert 'site=w.at("attn.c_proj")' in gpt().sources["layers.py"]


def test_a_stage_without_its_layers_is_refused() -> None:
    sources = gpt().sources
    with pytest.raises(autoptd.InternalError, match=r"calls methods of layers\.py"):
        load_stage(sources["stage_1.py"], "<a stage of a test>")
    layers = load_layers(sources["layers.py"], "<layers of a test>")
    assert load_stage(sources["stage_1.py"], "<a stage of a test>", layers).layer is layers["layer"]  # type: ignore[attr-defined]

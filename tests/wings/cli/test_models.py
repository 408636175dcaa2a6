"""MODEL: sizes as published, configs, factories; without weights, with the values of buffers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.compat import FakeTensor
from autoptd.errors import PlanError
from autoptd.wings.cli.known import KNOWN
from autoptd.wings.cli.models import (
    as_call,
    find_model,
    length_of,
    make_with_weights,
    make_without_weights,
    vocabulary_of,
)

PUBLISHED = {  # parameters, as model cards and papers count them
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
}
ROUND = {"gpt3-2.7b": 2.7e9, "gpt3-6.7b": 6.7e9, "gpt3-175b": 175e9, "gpt-530b": 529.6e9, "gpt-1t": 1008e9}
GPT = "examples/gpt.py:make_gpt"


def test_a_function_that_a_file_does_not_have() -> None:
    """What it imports is no factory."""
    with pytest.raises(PlanError, match=r"no function nofunc\. Remedy: one of CausalSelf") as caught:
        find_model("examples/gpt.py:nofunc", {})
    assert "make_gpt" in str(caught.value) and "dataclass" not in str(caught.value)


def count(kind: str, sizes: Mapping[str, Any]) -> int:
    """Parameters of a decoder of these sizes, by hand."""
    if kind == "gpt2":
        h, layers = sizes["n_embd"], sizes["n_layer"]
        return (sizes["vocab_size"] + sizes["n_positions"]) * h + layers * (12 * h * h + 13 * h) + 2 * h
    h, ffn = sizes["hidden_size"], sizes["intermediate_size"]
    kv = h // sizes["num_attention_heads"] * sizes["num_key_value_heads"]
    layer = 2 * h * h + 2 * h * kv + 3 * h * ffn + 2 * h
    return 2 * sizes["vocab_size"] * h + sizes["num_hidden_layers"] * layer + h


@pytest.mark.parametrize("name", [*PUBLISHED, *ROUND])
def test_sizes_are_the_published_ones(name: str) -> None:
    found = count(KNOWN[name].kind, KNOWN[name].values)
    assert found == PUBLISHED[name] if name in PUBLISHED else found == pytest.approx(ROUND[name], rel=0.02)


@pytest.mark.parametrize("name", ["gpt2", "llama-3-8b"])
def test_a_known_size_is_built_without_memory(name: str) -> None:
    few = {"gpt2": "n_layer", "llama-3-8b": "num_hidden_layers"}[name]
    subject = find_model(name, {few: 2})
    model, inputs = make_without_weights(subject)
    assert inputs is None and all(isinstance(one, FakeTensor) for one in model.parameters())
    assert sum(one.numel() for one in model.parameters()) == count(
        KNOWN[name].kind, {**KNOWN[name].values, few: 2}
    )
    assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
    assert not any(isinstance(one, FakeTensor) or one.is_meta for one in model.buffers())
    assert length_of(subject, model, None) == KNOWN[name].length and length_of(subject, model, 16) == 16
    assert vocabulary_of(model, None) == KNOWN[name].values["vocab_size"]
    x = torch.zeros(2, 4, dtype=torch.long)
    assert set(as_call(model, x, x)) == {"input_ids", "labels"}


def test_ties_and_buffers_stay() -> None:
    model, _ = make_without_weights(find_model(GPT, {"n_layer": 1}))
    assert model.lm_head.weight is model.transformer.wte.weight and isinstance(
        model.lm_head.weight, FakeTensor
    )
    with torch.no_grad():
        real, _ = make_with_weights(find_model(GPT, {"n_layer": 1}))
    assert not isinstance(real.lm_head.weight, FakeTensor) and real.lm_head.weight.std() > 0
    assert isinstance(as_call(model, torch.zeros(1), torch.ones(1)), tuple)


def test_a_factory_may_bring_its_batch_and_tables(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up = nn.Linear(4, 4)\n"
        "        self.register_buffer('table', torch.arange(3.0))\n"
        "def make(): return Net(), (torch.zeros(2, 4),)\n"
        "def bad(): return 3\n"
        "def fail(**sizes): return nn.Linear(4, sizes['size'])\n"
    )
    model, inputs = make_without_weights(find_model(f"{tmp_path}/mine.py:make", {}), "bf16")
    assert (
        inputs[0].shape == (2, 4)
        and model.table.tolist() == [0, 1, 2]
        and model.up.weight.dtype == torch.bfloat16
    )
    for name, keywords, told in (
        ("mine.py:bad", {}, "returns an int"),
        ("mine.py:make", {"x": 1}, "unexpected keyword"),
        ("mine.py:mak", {}, "make"),
        ("mine.py:fail", {"size": "x"}, r"the factory raises when called with size='x': TypeError: "),
        ("other.py:make", {}, "no such file"),
    ):
        with pytest.raises(PlanError, match=told):
            make_with_weights(find_model(f"{tmp_path}/{name}", keywords))


def test_buffers_and_batches_drawn_at_random_have_values(tmp_path: Path) -> None:
    """Also tables in empty memory that is filled; parameters take none, tied ones stay tied."""
    (tmp_path / "drawn.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        drawn = nn.Parameter(torch.randn(4, 8))\n"
        "        self.up, self.down, self.again = nn.Linear(8, 4), drawn, drawn\n"
        "        self.huge = nn.Parameter(torch.empty(1 << 20, 1 << 20))\n"
        "        self.register_buffer('noise', torch.randn(8))\n"
        "        self.register_buffer('filled', torch.empty(8).fill_(3.0))\n"
        "    def forward(self, x, y):\n"
        "        return ((self.up(x + self.noise * self.filled) @ self.down - y) ** 2).mean()\n"
        "def make(): return Net(), (torch.randn(8, 8), torch.rand(8, 8))\n"
    )
    model, inputs = make_without_weights(find_model(f"{tmp_path}/drawn.py:make", {}))
    tensors = [*inputs, model.noise, model.filled]
    assert not any(isinstance(one, FakeTensor) or one.is_meta for one in tensors)
    assert model.filled.tolist() == [3.0] * 8 and float(inputs[1].min()) > 0 and float(inputs[1].max()) < 1
    assert all(isinstance(one, FakeTensor) for one in model.parameters()) and model.down is model.again
    assert model.huge.device == inputs[0].device
    del model.huge
    assert autoptd.compile(model, example_inputs=inputs, t=2).mesh.t == 2


def test_names_that_a_config_does_not_have_are_refused(tmp_path: Path) -> None:
    for name, wrong, right in (("gpt2", "n_layers", "n_layer"), ("llama-3-8b", "n_layer", "")):
        with pytest.raises(PlanError, match=f"--set {wrong}: is not a field of .*{right}"):
            make_without_weights(find_model(name, {wrong: 2}))
    model, _ = make_without_weights(
        find_model("gpt2", {"num_hidden_layers": 1, "attn_pdrop": 0.1})
    )  # its other name
    assert model.config.n_layer == 1 and len(model.transformer.h) == 1
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 1, "n_embd": 16, "n_head": 2})
    )
    with pytest.raises(PlanError, match="n_emb: is not a field"):
        make_without_weights(find_model(str(tmp_path), {"n_emb": 8}))


def test_rows_of_a_known_size_stay_within_its_window() -> None:
    subject = find_model("mistral-7b", {"num_hidden_layers": 1})
    model, _ = make_without_weights(subject)
    assert length_of(subject, model, 4096) == 4096 == length_of(subject, model, None)
    with pytest.raises(PlanError, match="--seq 8192: mistral-7b attends to 4096 tokens"):
        length_of(subject, model, 8192)


def test_a_config_of_transformers(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "transformers_version": "1", **sizes})
    )
    for name in (str(tmp_path), f"{tmp_path}/config.json"):
        model, _ = make_without_weights(find_model(name, {"num_hidden_layers": 2}))
        assert isinstance(model, nn.Module) and model.config.num_hidden_layers == 2
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    with pytest.raises(PlanError, match="model_type"):
        make_with_weights(find_model(str(tmp_path), {}))


def test_what_fails_while_a_model_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files and modules that do not run, and configs that transformers' own validators refuse."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text, told in (
        (
            "lacks",
            "import nothing_there",
            "imports nothing_there, which is not installed. Remedy: install",
        ),
        ("cannot", "def make(:", "raises on import: SyntaxError: invalid syntax"),
        ("unknown", "make = other", "raises on import: NameError: name 'other' is not defined"),
    ):
        (tmp_path / f"{name}.py").write_text(text)
        for model in (f"{name}:make", f"{tmp_path}/{name}.py:make"):
            with pytest.raises(PlanError, match=told):
                find_model(model, {})
    heads = {"num_attention_heads": 3, "num_hidden_layers": 1}
    with pytest.raises(PlanError, match=r"cannot build .*not a multiple.*other --set values\.$") as caught:
        make_without_weights(find_model("llama-3-8b", heads))
    assert "\n" not in str(caught.value)


def test_what_a_model_is_not() -> None:
    with pytest.raises(PlanError, match="gpt3-175b"):
        find_model("gpt3-175", {})
    with pytest.raises(PlanError, match="No module named"):
        find_model("nothing.there:factory", {})
    with pytest.raises(PlanError, match="dtype"):
        make_with_weights(find_model(GPT, {"n_layer": 1}), "float33")

"""The example model, its text and the demo's check: what other tests compare with is itself held to the textbook."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch.nn.functional import cross_entropy, layer_norm

from examples.curves import draw, find_faults
from examples.gpt import GPT, GPTConfig
from examples.text import batches, load_tokens, unigram_entropy

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = GPTConfig(vocab_size=11, block_size=6, n_layer=2, n_head=2, n_embd=8)


def make_small() -> GPT:
    torch.manual_seed(0)
    return GPT(SMALL).double()


def test_parameters_have_the_usual_names_and_one_tie() -> None:
    model = GPT(SMALL)
    assert model.lm_head.weight is model.transformer.wte.weight
    names = [name for name, _ in model.named_parameters()]
    assert "lm_head.weight" not in names and "lm_head.weight" in model.state_dict()
    layer = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
    layers = [f"transformer.h.{i}.{m}.{k}" for i in range(2) for m in layer for k in ("weight", "bias")]
    ends = ["transformer.ln_f.weight", "transformer.ln_f.bias"]
    assert names == ["transformer.wte.weight", "transformer.wpe.weight", *layers, *ends]


def test_initial_values() -> None:
    torch.manual_seed(0)
    state = GPT(GPTConfig(n_layer=8, n_embd=128)).state_dict()
    assert state["transformer.h.0.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert state["transformer.h.0.mlp.c_proj.weight"].std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert state["transformer.wte.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert not state["transformer.h.0.attn.c_attn.bias"].any()


def test_attention_is_the_textbook_formula_on_3_heads_head_dim() -> None:
    attention = make_small().transformer.h[0].attn
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    q, k, v = (
        (x @ attention.c_attn.weight.T + attention.c_attn.bias).view(3, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(4) + torch.full((6, 6), -math.inf, dtype=torch.float64).triu(
        1
    )
    y = (scores.softmax(-1) @ v).permute(0, 2, 1, 3).reshape(3, 6, 8)
    expected = y @ attention.c_proj.weight.T + attention.c_proj.bias
    assert torch.allclose(attention(x), expected, rtol=0, atol=1e-12)


def test_loss_and_logits() -> None:
    model, idx, targets = make_small(), torch.randint(11, (3, 6)), torch.randint(11, (3, 6))
    logits, loss = model(idx, targets)
    hidden = model.transformer.wte(idx) + model.transformer.wpe.weight[:6]
    for block in model.transformer.h:
        hidden = hidden + block.attn(block.ln_1(hidden))
        hidden = hidden + block.mlp(block.ln_2(hidden))
    last = model.transformer.ln_f
    expected = layer_norm(hidden, (8,), last.weight, last.bias) @ model.transformer.wte.weight.T
    assert torch.allclose(logits, expected, rtol=0, atol=1e-12)
    assert torch.equal(loss, cross_entropy(logits.flatten(0, 1), targets.flatten()))
    assert model(idx)[1] is None


def test_a_later_token_changes_nothing_before_it() -> None:
    model, idx = make_small(), torch.randint(11, (2, 6))
    other = idx.clone()
    other[:, 4] = (other[:, 4] + 1) % 11
    change = (model(idx)[0] - model(other)[0]).abs().amax(dim=(0, 2))
    assert not change[:4].any() and change[4:].all()


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="n_head=3"):
        GPTConfig(n_embd=64, n_head=3)
    with pytest.raises(ValueError, match="7 tokens"):
        make_small()(torch.zeros(1, 7, dtype=torch.long))


def test_text_is_english_bytes_or_the_file(tmp_path: Path) -> None:
    tokens = load_tokens()
    assert tokens.dim() == 1 and tokens.dtype == torch.int64 and tokens.min() >= 0 and tokens.max() < 256
    assert len(tokens) > 300_000
    assert (
        3.0 < unigram_entropy(tokens) < 3.5
    )  # 3.26 for Python 3.11; the text grows a little with every version
    (tmp_path / "mine.txt").write_bytes(b"abab")
    assert load_tokens(tmp_path / "mine.txt").tolist() == [97, 98, 97, 98]
    assert unigram_entropy(load_tokens(tmp_path / "mine.txt")) == pytest.approx(math.log(2))


def test_batches_follow_from_the_seed_alone() -> None:
    tokens = torch.arange(100)
    first, again, other = (list(batches(tokens, 4, 8, 3, seed)) for seed in (0, 0, 1))
    assert len(first) == 3 and all(x.shape == y.shape == (4, 8) for x, y in first)
    assert all(torch.equal(y, x + 1) for x, y in first)
    assert all(
        torch.equal(a, b) for a, b in zip(first, again, strict=True) for a, b in zip(a, b, strict=True)
    )
    assert not torch.equal(first[0][0], other[0][0]) and not torch.equal(first[0][0], first[1][0])
    last = max(int(y.max()) for _, y in batches(tokens, 64, 8, 20, 0))
    assert last == 99  # the last byte of the text is reached
    with pytest.raises(ValueError, match="too short"):
        next(batches(tokens, 4, 100, 1, 0))


def test_a_wrong_curve_is_found() -> None:
    assert find_faults([5.0, 3.0], [5.0005, 3.0], entropy=3.2) == []
    assert "part at step 1" in find_faults([5.0, 3.0], [5.0, 3.002], entropy=3.2)[0]
    assert "not below" in find_faults([5.0, 3.3], [5.0, 3.3], entropy=3.2)[0]
    assert "part at step 0" in find_faults([math.nan, 3.0], [math.nan, 3.0], entropy=3.2)[0]
    assert "2 steps" in find_faults([5.0, 3.0], [5.0], entropy=3.2)[0]


def test_curves_are_drawn_whatever_they_hold() -> None:
    picture = ElementTree.fromstring(draw([5.0, math.nan, 3.0], [5.0], entropy=3.2))
    lines = [line.attrib["points"].split() for line in picture if line.tag.endswith("polyline")]
    assert [len(points) for points in lines] == [2, 2, 1]  # entropy, one device without its NaN, in parallel


def test_single_writes_its_losses_without_autoptd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--steps 3 --batch 2 --length 8 --layers 1 --hidden 8 --heads 2".split()
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.delitem(sys.modules, "recipe", raising=False)
    # An import of it fails: the reference must not import what it judges.
    monkeypatch.setitem(sys.modules, "autoptd", None)
    monkeypatch.setattr(sys, "argv", ["single.py", "--out", str(tmp_path), *sizes])
    runpy.run_path(str(EXAMPLES / "single.py"), run_name="__main__")
    result = json.loads((tmp_path / "single.json").read_text())
    assert len(result["losses"]) == 3 and abs(result["losses"][0] - math.log(256)) < 0.3
    assert result["tokens_per_second"] > 0 and result["settings"]["hidden"] == 8

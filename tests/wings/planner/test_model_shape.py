"""The shape of a model that somebody has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from autoptd.errors import PlanError
from autoptd.wings.planner.plan import plan
from autoptd.wings.planner.shape import Shape, shape_of


@dataclass
class Config:
    """nanoGPT's names."""

    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_head: int = 16
    n_embd: int = 1024


class Parameter:
    def __init__(self, count: int) -> None:
        self.count = count

    def numel(self) -> int:
        return self.count


class Model:
    def __init__(self, config: Any, count: int) -> None:
        self.config, self.count = config, count

    def parameters(self) -> list[Parameter]:
        return [Parameter(self.count)]


def test_shapes_of_models() -> None:
    """By nanoGPT's and Hugging Face's names; the number of parameters tells a gated MLP from GPT's."""
    found = plan(Model(Config(), Shape(12, 1024, 16, 1024, vocab=50304).parameters), gpus=8, batch=32)
    assert found.model.request.shape == Shape(12, 1024, 16, 1024, vocab=50304)  # type: ignore[attr-defined]
    llama = {
        "num_hidden_layers": 12,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
    }
    llama |= {"intermediate_size": 2816, "num_key_value_heads": 4, "vocab_size": 32000}
    expected = Shape(12, 1024, 16, 2048, vocab=32000, ffn=2816, kv_heads=4, mlp_matrices=3)
    found = plan(Model(llama, expected.parameters), gpus=8, batch=32)
    assert found.model.request.shape == expected  # type: ignore[attr-defined]
    llama_1b = {
        "num_hidden_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    llama_1b |= {
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "head_dim": 64,
    }
    found_shape = shape_of(
        Model(llama_1b | {"tie_word_embeddings": True, "attention_dropout": 0.0}, 1_235_814_400)
    )
    assert (found_shape.mlp_matrices, found_shape.tied, found_shape.positions) == (3, True, False)
    assert shape_of(Model(llama_1b, 1_235_814_400)) == found_shape  # ties can be counted
    gpt_2 = {
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
        "resid_pdrop": 0.0,
    }
    assert not shape_of(Model(gpt_2 | {"attn_pdrop": 0.0}, 124_439_808)).dropout
    assert shape_of(Model(gpt_2 | {"attn_pdrop": 0.1}, 124_439_808)).dropout
    mixtral = llama | {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_local_experts": 8,
    }
    mixtral |= {"num_key_value_heads": 8, "intermediate_size": 14336}
    wrong = (
        (Model({"hidden_size": 8}, 1), "layers, heads, seq"),
        (object(), "no config"),
        (Model(mixtral, 46_702_792_704), "has 46,702,792,704 parameters"),
    )
    for model, fact in wrong:
        with pytest.raises(PlanError, match=fact):
            plan(model, gpus=8, batch=32)

"""Models of transformers, built in a deferred block in order: the bits of their usual constructors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests.subject.initial.test_deferred import assert_same, plain_and_deferred

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
# Of transformers: the model, its config and its sizes.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 61,
            "n_positions": 16,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "image_size": 32,
            "patch_size": 8,
        },
    ),
    "neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
        },
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 61, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**SIZES, "pad_token_id": 0, "eos_token_id": 0}),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": 61,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 1,
        },
    ),
}
DEFAULT = ("gpt2", "llama", "mamba", "vit")
ALL = [pytest.param(name, marks=[pytest.mark.thorough] * (name not in DEFAULT)) for name in FAMILIES]


def maker(name: str) -> Callable[[], nn.Module]:
    model, config, sizes = FAMILIES[name]
    return lambda: getattr(transformers, model)(getattr(transformers, config)(**sizes))


@pytest.mark.parametrize("name", ALL)
def test_in_order_the_bits_are_those_of_the_constructor(name: str) -> None:
    plain, made = plain_and_deferred(maker(name))
    assert_same(plain, made)

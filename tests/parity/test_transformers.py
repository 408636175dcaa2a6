"""Unmodified Hugging Face decoders, built from small configs: labels and all, as their users call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from tests.parity.models import LENGTH, VOCAB, batch

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": VOCAB, "use_cache": False}
LLAMA = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64, **SMALL}


def gpt2(**more: Any) -> nn.Module:
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": LENGTH, **SMALL, **more}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))  # with its own dropout of 0.1


def grouped_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        num_attention_heads=8, num_key_value_heads=4, attention_dropout=0.1, **LLAMA
    )
    return transformers.LlamaForCausalLM(config)


def neox() -> nn.Module:
    dropouts = {"attention_dropout": 0.1, "hidden_dropout": 0.2}
    config = transformers.GPTNeoXConfig(
        num_attention_heads=4, use_parallel_residual=True, **dropouts, **LLAMA
    )
    return transformers.GPTNeoXForCausalLM(config)


def gemma2() -> nn.Module:
    """Capped scores and logits, windows by turns, norms before and behind, tied embeddings."""
    sizes = {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(num_attention_heads=4, **sizes, **LLAMA))


def qwen3() -> nn.Module:
    """Norms of the heads of queries and keys."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **LLAMA))


def gemma3() -> nn.Module:
    """A window of three tokens and full attention by turns, each with rotary tables of its own."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 3}
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **kinds, **LLAMA))


def bloom() -> nn.Module:
    """ALiBi made from the mask, q, k, v of each head side by side, a GELU with a backward of its own."""
    sizes = {"n_layer": 2, "n_head": 4, "hidden_size": 32, "hidden_dropout": 0.1, **SMALL}
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes))


MODELS: dict[str, tuple[Callable[[], nn.Module], bool, bool]] = {  # sequence parallel, with an attention mask
    "gpt2": (gpt2, False, False),
    "gpt2 with eager attention": (lambda: gpt2(attn_implementation="eager"), True, False),
    "llama with grouped queries": (grouped_llama, False, True),
    "neox with a parallel residual": (neox, True, False),
    "gemma2": (gemma2, False, False),
    "bloom": (bloom, False, True),
}


@pytest.mark.parametrize(("make", "by_tokens", "is_masked"), MODELS.values(), ids=MODELS)
def test_family(make: Callable[[], nn.Module], by_tokens: bool, is_masked: bool) -> None:
    mesh = {"t": 2, "p": 2, "d": 2, "sequence_parallel": by_tokens}
    autoptd.verify(make().train(), **mesh, example_inputs=call_of(is_masked), steps=2)


ZIGZAG: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], bool]] = {  # with an attention mask
    "llama with grouped queries": (grouped_llama, {"c": 4}, False),
    "gemma3": (gemma3, {"c": 2, "t": 2, "sequence_parallel": True}, False),
    "gpt2": (gpt2, {"c": 2, "p": 2, "zero": 1, "d": 2}, False),
    "qwen3": (qwen3, {"c": 2, "t": 2}, False),
    "qwen3 with padding": (qwen3, {"c": 2}, True),
    "bloom": (bloom, {"c": 4}, True),
    "gpt2 with eager attention": (lambda: gpt2(attn_implementation="eager"), {"c": 2, "t": 2}, False),
    "gemma2": (gemma2, {"c": 4}, False),
    "neox with a parallel residual": (neox, {"c": 2, "t": 2, "sequence_parallel": True}, False),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("make", "mesh", "is_masked"), ZIGZAG.values(), ids=ZIGZAG)
@pytest.mark.parametrize("context", ["all_gather", pytest.param("auto", marks=pytest.mark.thorough)])
def test_family_in_zigzag_order(
    make: Callable[[], nn.Module], mesh: dict[str, Any], is_masked: bool, context: str
) -> None:
    """Positions, rotary tables, windows and the labels that the model shifts are those of each rank's two pieces."""
    how: dict[str, Any] = {"context": context, "token_order": "zigzag", "example_inputs": call_of(is_masked)}
    autoptd.verify(make().train(), **mesh, **how, steps=1)


def call_of(is_masked: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ids, _ = batch()
    call = {"input_ids": ids, "labels": ids.masked_fill(ids < 5, -100)}
    if is_masked:
        padding = torch.arange(LENGTH) >= LENGTH - torch.arange(len(ids))[:, None] % 4
        call = {
            **call,
            "attention_mask": (~padding).long(),
            "labels": call["labels"].masked_fill(padding, -100),
        }
    return call

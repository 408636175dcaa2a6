"""Unmodified Hugging Face decoders, built from small configs: labels and all, as their users call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from tests.parity.models import LENGTH, VOCAB, batch
from tests.thin import thinned

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


@pytest.mark.parametrize(("make", "by_tokens", "is_masked"), thinned(MODELS.values(), MODELS))
def test_family(make: Callable[[], nn.Module], by_tokens: bool, is_masked: bool) -> None:
    mesh = {"t": 2, "p": 2, "d": 2, "sequence_parallel": by_tokens}
    autoptd.verify(make().train(), **mesh, example_inputs=call_of(is_masked), steps=2)


@pytest.mark.parametrize(("make", "by_tokens", "is_masked"), thinned(MODELS.values(), MODELS))
def test_family_with_parts_of_the_tokens(
    make: Callable[[], nn.Module], by_tokens: bool, is_masked: bool
) -> None:
    """Its positions, masks, windows and shifted labels are its own: nothing is handed in."""
    mesh = {"t": 2, "c": 2, "sequence_parallel": by_tokens}
    autoptd.verify(make().train(), **mesh, example_inputs=call_of(is_masked), steps=1)


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

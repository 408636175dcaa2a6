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
    config = transformers.LlamaConfig(num_attention_heads=8, num_key_value_heads=4, attention_dropout=0.1, **LLAMA)
    return transformers.LlamaForCausalLM(config)


def neox() -> nn.Module:
    dropouts = {"attention_dropout": 0.1, "hidden_dropout": 0.2}
    config = transformers.GPTNeoXConfig(num_attention_heads=4, use_parallel_residual=True, **dropouts, **LLAMA)
    return transformers.GPTNeoXForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "gpt2 with eager attention": lambda: gpt2(attn_implementation="eager"),
    "llama with grouped queries": grouped_llama,
    "neox with a parallel residual": neox,
}


@pytest.mark.parametrize("by_tokens", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_family(make: Callable[[], nn.Module], by_tokens: bool) -> None:
    torch.manual_seed(0)
    ids, _ = batch()
    labels = ids.masked_fill(ids < 5, -100)
    mesh = {"t": 2, "p": 2, "d": 2, "sequence_parallel": by_tokens}
    autoptd.verify(make().train(), **mesh, example_inputs={"input_ids": ids, "labels": labels}, steps=2)

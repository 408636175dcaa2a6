"""Well-known model sizes as their authors published them: configs for transformers, so nothing is downloaded.

In: a name. Out: `Known`, the config's type and values. Dropout is off, as in large runs; `--set
attn_pdrop=0.1` turns it on, and attention runs unfused. A name stands for a shape only: neither weights nor
other details of the published model (such as GPT-3's sparse layers) are included.

    KNOWN["gpt2"].values["n_layer"]         # 12
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

GPT2_PAPER = "Radford et al. 2019, table 2"
GPT3_PAPER = "Brown et al. 2020, table 2.1; all attention dense"
PTD_PAPER = "Narayanan et al., SC'21, table 1"
LLAMA_2 = "Touvron et al. 2023 (Llama 2), and its published config"
LLAMA_3 = "Grattafiori et al. 2024 (Llama 3), table 3, and its published config"
MISTRAL = "Jiang et al. 2023 (Mistral 7B), table 1; rows within its sliding window of 4096"
QWEN = "Qwen team 2024 (Qwen2.5), table 1, and its published config"


@dataclass(frozen=True)
class Known:
    """A config for transformers: its `kind` (`model_type`) and the values that differ from the kind's
    defaults.

    `length`: tokens per sample.
    """

    kind: str
    values: Mapping[str, Any]
    length: int
    source: str


def _gpt2(layers: int, hidden: int, heads: int, length: int, source: str, vocab: int = 50257) -> Known:
    # GPT-2's own defaults are 0.1.
    off = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": length, "vocab_size": vocab}
    return Known("gpt2", {**sizes, **off}, length, source)


def _llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    ffn: int,
    vocab: int,
    length: int,
    source: str,
    kind: str = "llama",
) -> Known:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        # As published: all of these have an untied output head.
        "tie_word_embeddings": False,
    }
    return Known(kind, sizes, length, source)


KNOWN: dict[str, Known] = {
    "gpt2": _gpt2(12, 768, 12, 1024, GPT2_PAPER),
    "gpt2-medium": _gpt2(24, 1024, 16, 1024, GPT2_PAPER),
    "gpt2-large": _gpt2(36, 1280, 20, 1024, GPT2_PAPER),
    "gpt2-xl": _gpt2(48, 1600, 25, 1024, GPT2_PAPER),
    # GPT-3 has GPT-2's architecture in other sizes, and GPT-2's vocabulary.
    "gpt3-2.7b": _gpt2(32, 2560, 32, 2048, GPT3_PAPER),
    "gpt3-6.7b": _gpt2(32, 4096, 32, 2048, GPT3_PAPER),
    "gpt3-175b": _gpt2(96, 12288, 96, 2048, GPT3_PAPER),
    # The paper pads its vocabulary to a multiple of 1024.
    "gpt-530b": _gpt2(105, 20480, 128, 2048, PTD_PAPER, vocab=51200),
    "gpt-1t": _gpt2(128, 25600, 160, 2048, PTD_PAPER, vocab=51200),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096, LLAMA_2),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096, LLAMA_2),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096, LLAMA_2),
    "llama-3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192, LLAMA_3),
    "llama-3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192, LLAMA_3),
    "llama-3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192, LLAMA_3),
    "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, 4096, MISTRAL, "mistral"),
    "qwen2.5-7b": _llama(28, 3584, 28, 4, 18944, 152064, 8192, QWEN, "qwen2"),
    "qwen2.5-72b": _llama(80, 8192, 64, 8, 29568, 152064, 8192, QWEN, "qwen2"),
}


def list_names(args: Namespace) -> int:
    """Print the names and the sources of their sizes; return 0."""
    for name, known in KNOWN.items():
        print(f"{name:14} {known.kind:8} {known.source}")
    return 0

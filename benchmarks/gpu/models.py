"""The models of the section "Fast", at their published sizes and at toy size, their batches, and their FLOPs.

`nanoGPT 124M` is nanoGPT's published form (12 layers, no biases, no dropout, 12 rows of 1,024 tokens); `Llama 1.34B`
is the one for which 40,150 tokens/s on each of 8 H100s (d=8) are published; `GPT 1.3B` is SC'21's; `Llama 8B` and
`GPT-3 175B` are run as one rank of many; `Llama 8B` and `Qwen2.5 7B` with adapters, too (`adapters.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from examples.gpt import GPT, GPTConfig

Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Shape:
    """A decoder: `family` is "gpt" (examples/gpt.py), "llama" or "qwen" (transformers); b rows of s tokens are a microbatch."""

    name: str
    family: str
    layers: int
    h: int
    heads: int
    vocab: int
    s: int
    b: int
    ffn: int = 0  # 0: 4 h
    kv_heads: int = 0  # 0: as many as heads
    is_tied: bool = True
    has_bias: bool = True

    @property
    def tokens(self) -> int:
        return self.b * self.s

    @property
    def wide(self) -> int:
        return self.ffn or 4 * self.h

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    def layer_flops(self, tokens: int) -> float:
        """Model FLOPs of a layer, both ways: 6 per weight of a product, and of attention's scores the causal half."""
        weights = (
            2 * self.h**2 * (1 + self.kv / self.heads)
            + (2 if self.family == "gpt" else 3) * self.h * self.wide
        )
        return tokens * (6 * weights + 6 * self.s * self.h)

    def flops(self, tokens: int) -> float:
        """Model FLOPs of a step on `tokens` tokens: nothing counted for what is computed again."""
        return self.layers * self.layer_flops(tokens) + 6 * tokens * self.vocab * self.h


NANOGPT = Shape("nanoGPT 124M", "gpt", 12, 768, 12, 50304, 1024, 12, has_bias=False)
LLAMA_1B = Shape("Llama 1.34B", "llama", 16, 2048, 32, 131072, 4096, 2, ffn=8192)
GPT_1B = Shape("GPT 1.3B", "gpt", 24, 2048, 16, 50304, 2048, 2)
LLAMA_8B = Shape("Llama 8B", "llama", 32, 4096, 32, 128256, 4096, 1, ffn=14336, kv_heads=8, is_tied=False)
GPT_175B = Shape("GPT-3 175B", "gpt", 96, 12288, 96, 51200, 2048, 1)
QWEN_7B = Shape("Qwen2.5 7B", "qwen", 28, 3584, 28, 152064, 4096, 2, ffn=18944, kv_heads=4, is_tied=False)
SHAPES = {one.name: one for one in (NANOGPT, LLAMA_1B, GPT_1B, LLAMA_8B, GPT_175B, QWEN_7B)}


def toy(shape: Shape) -> Shape:
    """The same model, small enough for one core and Triton's interpreter."""
    kv = 2 if shape.kv != shape.heads else 0
    small = {"layers": min(shape.layers, 2), "h": 32, "heads": 4, "vocab": 64, "s": 8, "b": 2, "kv_heads": kv}
    return replace(shape, **small, ffn=64 if shape.ffn else 0)


def sized(shape: Shape, is_toy: bool) -> Shape:
    return toy(shape) if is_toy else shape


def build(shape: Shape, device: str, dtype: torch.dtype) -> nn.Module:
    """The unmodified model with random weights; `model.bfloat16()` for bf16, buffers included."""
    torch.manual_seed(0)
    with torch.device(device):
        model = _gpt(shape) if shape.family == "gpt" else _llama(shape)
        if device == "meta" and shape.family != "gpt":
            with torch.device("cpu"):  # its tables of angles are values, which a rank needs
                model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.to(dtype)


def _gpt(shape: Shape) -> nn.Module:
    config = GPTConfig(shape.vocab, shape.s, shape.layers, shape.heads, shape.h)
    model = GPT(config)
    if not shape.has_bias:
        for module in model.modules():
            if getattr(module, "bias", None) is not None:
                module.register_parameter("bias", None)
    return model


def _llama(shape: Shape) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    is_qwen = shape.family == "qwen"
    config = (Qwen2Config if is_qwen else LlamaConfig)(
        vocab_size=shape.vocab,
        hidden_size=shape.h,
        intermediate_size=shape.wide,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv,
        max_position_embeddings=shape.s,
        tie_word_embeddings=shape.is_tied,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return (Qwen2ForCausalLM if is_qwen else LlamaForCausalLM)(config)


def batch(shape: Shape, device: str, microbatches: int = 1) -> Call:
    """(args, kwargs) of random tokens, as the family's users call it."""
    generator = torch.Generator().manual_seed(1)
    rows = (shape.b * microbatches, shape.s)
    ids, targets = (torch.randint(0, shape.vocab, rows, generator=generator).to(device) for _ in range(2))
    return ((ids, targets), {}) if shape.family == "gpt" else ((), {"input_ids": ids, "labels": targets})


def loss_of(result: Any) -> torch.Tensor:
    """The loss of what either family returns."""
    return result[1] if isinstance(result, tuple) else result.loss  # type: ignore[no-any-return]


def small_family(name: str) -> tuple[nn.Module, Call]:
    """GPT-2, Llama or NeoX of transformers with two small layers, dropouts and all; on the CPU."""
    import transformers

    torch.manual_seed(0)
    few = {"vocab_size": 64, "use_cache": False}
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, **few}
    if name == "GPT-2":
        config = transformers.GPT2Config(n_layer=2, n_head=4, n_embd=64, n_positions=16, **few)
        model: nn.Module = transformers.GPT2LMHeadModel(config)
    elif name == "Llama":
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
        )
    else:
        model = transformers.GPTNeoXForCausalLM(
            transformers.GPTNeoXConfig(num_attention_heads=4, hidden_dropout=0.1, **sizes)
        )
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(1))
    return model, ((), {"input_ids": ids, "labels": ids.clone()})

"""The ecosystem's models, each from its own package and a small config, 64 wide. What `models.py` measures.

In: a number of layers. Out: `Family` by name, which makes the module and the call (a global batch with labels). Nothing is
edited or wrapped; where a model returns no loss, `loss_fn` names it. A package that is not there is an ImportError of `make`.

    family = families(layers=2)["llama"]
    autoptd.verify(family.make(), t=2, example_inputs=family.call(), loss_fn=family.loss_fn)
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, VOCAB, LENGTH, ROWS = 64, 8, 128, 16, 8
Call = dict[str, Any]
Sizes = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """How to make a model and call it; `kind` groups rows of the table, `about` says what this one has that others have not."""

    make: Callable[[], nn.Module]
    kind: str
    about: str
    call: Callable[[], Call]
    loss_fn: Callable[[Any, Tensor], Tensor] | None = None


def families(layers: int = 2) -> dict[str, Family]:
    """Every family, with so many layers (of either kind, where there are encoders and decoders)."""
    return {**_decoders(layers), **_other_transformers(layers), **_other_packages(layers)}


def token_ids(seed: int = 1) -> Tensor:
    return torch.randint(2, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))


def token_call(*, mask: bool = False) -> Call:
    """Ids, and the same ids as labels, of which some are ignored; with `mask`, the last tokens of most rows are padding."""
    ids = token_ids()
    call: Call = {"input_ids": ids, "labels": ids.masked_fill(ids % 7 == 0, -100)}
    if mask:
        padding = torch.arange(LENGTH) >= LENGTH - torch.arange(ROWS)[:, None] % 4
        call["attention_mask"] = (~padding).long()
        call["labels"] = call["labels"].masked_fill(padding, -100)
    return call


def image_call() -> Call:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(ROWS, 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, 8, (ROWS,), generator=generator)}


def next_token_call(name: str) -> Call:
    """Ids under the name that the model's forward has for them, and targets for `next_token_loss`."""
    return {name: token_ids(), "targets": token_ids(2)}


def next_token_loss(logits: Any, targets: Tensor) -> Tensor:
    """The loss of models that return logits alone."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def from_transformers(name: str, head: str, config: str, sizes: Sizes) -> nn.Module:
    """`<name><head>` from a config of these sizes, of the class `<config>Config`."""
    package = importlib.import_module("transformers")
    return getattr(package, name + head)(getattr(package, f"{config}Config")(**sizes))


def _decoder(
    name: str, about: str, sizes: Sizes, *, head: str = "ForCausalLM", config: str = "", mask: bool = False
) -> Family:
    make = partial(from_transformers, name, head, config or name, sizes)
    return Family(make, "decoder", about, partial(token_call, mask=mask))


def _decoders(layers: int) -> dict[str, Family]:
    """Causal language models of transformers, called with labels."""
    gpt2: Sizes = {
        "n_layer": layers,
        "n_head": HEADS,
        "n_embd": WIDTH,
        "n_positions": LENGTH,
        "vocab_size": VOCAB,
    }
    gpt2 |= {"use_cache": False}
    plain = {
        **_usual_sizes(layers),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
    }
    grouped = {**plain, "num_key_value_heads": 4}
    gemma = {**grouped, "head_dim": 8, "pad_token_id": 0, "sliding_window": 8, "query_pre_attn_scalar": 8}
    by_turns = ["sliding_attention", "full_attention"] * (layers // 2)
    neo = {"num_layers": layers, "num_heads": HEADS, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    neo |= {"vocab_size": VOCAB, "max_position_embeddings": LENGTH, "window_size": 8, "use_cache": False}
    bloom = {
        "n_layer": layers,
        "n_head": HEADS,
        "hidden_size": WIDTH,
        "vocab_size": VOCAB,
        "use_cache": False,
    }
    mpt = {"n_layers": layers, "n_heads": HEADS, "d_model": WIDTH, "vocab_size": VOCAB, "max_seq_len": LENGTH}
    opt = {**_usual_sizes(layers), "ffn_dim": 2 * WIDTH, "word_embed_proj_dim": WIDTH, "use_cache": False}
    return {
        "gpt2": _decoder("GPT2", "q, k, v in one weight, tied head", gpt2, head="LMHeadModel"),
        "gpt2-eager": _decoder(
            "GPT2", "attention written out", {**gpt2, "attn_implementation": "eager"}, head="LMHeadModel"
        ),
        "llama": _decoder("Llama", "grouped queries, rotary, gated MLP", grouped),
        "llama-mask": _decoder("Llama", "with an attention mask", grouped, mask=True),
        "llama-tied": _decoder("Llama", "tied head", {**grouped, "tie_word_embeddings": True}),
        "llama-mqa": _decoder("Llama", "one KV head", {**grouped, "num_key_value_heads": 1}),
        "mistral": _decoder("Mistral", "sliding window", {**grouped, "sliding_window": 8}),
        "qwen2": _decoder("Qwen2", "biases of q, k, v", grouped),
        "qwen3": _decoder("Qwen3", "norms of q and k", {**grouped, "head_dim": 8}),
        "gemma2": _decoder("Gemma2", "soft-capping, windows by turns", gemma),
        "gemma3": _decoder(
            "Gemma3",
            "norms of q and k, two rotary tables",
            {**gemma, "layer_types": by_turns},
            config="Gemma3Text",
        ),
        "phi": _decoder("Phi", "parallel residual, partial rotary", plain),
        "phi3": _decoder("Phi3", "q, k, v of grouped queries in one weight, gate and up too", grouped),
        "gpt-neox": _decoder("GPTNeoX", "[heads, 3, k] in one weight, parallel residual", plain),
        "gpt-neo": _decoder(
            "GPTNeo", "windows by turns", neo | {"attention_types": [[["global", "local"], layers // 2]]}
        ),
        "gptj": _decoder("GPTJ", "interleaved partial rotary, parallel", {**gpt2, "rotary_dim": 4}),
        "codegen": _decoder("CodeGen", "[4, (q, v, k)] in one weight, parallel", {**gpt2, "rotary_dim": 4}),
        "opt": _decoder("OPT", "learned positions", opt),
        "opt-mask": _decoder("OPT", "positions counted from the mask", opt, mask=True),
        "bloom": _decoder("Bloom", "ALiBi, [heads, 3, k] in one weight", bloom),
        "mpt": _decoder("Mpt", "ALiBi", {**mpt, "use_cache": False}),
        "falcon": _decoder("Falcon", "one KV head, parallel residual", {**plain, "multi_query": True}),
        "falcon-alibi": _decoder(
            "Falcon", "ALiBi", {**plain, "multi_query": False, "alibi": True, "parallel_attn": False}
        ),
        "falcon-new": _decoder(
            "Falcon",
            "grouped queries, two norms",
            {**plain, "new_decoder_architecture": True, "num_kv_heads": 4},
        ),
        "starcoder2": _decoder("Starcoder2", "grouped queries, biases", {**grouped, "sliding_window": 8}),
        "gpt-bigcode": _decoder("GPTBigCode", "one KV head, in one weight with q", gpt2),
        "stablelm": _decoder("StableLm", "partial rotary", grouped),
        "cohere": _decoder("Cohere", "interleaved rotary, parallel residual, scaled logits", grouped),
        "olmo2": _decoder("Olmo2", "norms behind, one norm over all heads", grouped),
        "granite": _decoder("Granite", "multipliers", grouped),
        "smollm3": _decoder(
            "SmolLM3",
            "rotary by turns",
            {**grouped, "pad_token_id": 0, "no_rope_layers": [1, 0] * (layers // 2)},
        ),
    }


def _other_transformers(layers: int) -> dict[str, Family]:
    """What else transformers has: experts, state spaces, encoders, encoder-decoders."""
    usual = _usual_sizes(layers)
    experts = {
        **usual,
        "num_key_value_heads": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "use_cache": False,
    }
    phi_experts = {**experts, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
    mamba = {
        "hidden_size": WIDTH,
        "state_size": 8,
        "num_hidden_layers": layers,
        "vocab_size": VOCAB,
        "use_cache": False,
    }
    small_experts = {**experts, "num_experts": 4, "moe_intermediate_size": WIDTH, "pad_token_id": 0}
    small_experts |= {"head_dim": WIDTH // HEADS, "bos_token_id": 1, "eos_token_id": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    oss = {**experts, "head_dim": WIDTH // HEADS, "sliding_window": LENGTH // 2, "rope_parameters": rope}
    latent = {**experts, "n_routed_experts": 4, "moe_intermediate_size": WIDTH, "first_k_dense_replace": 1}
    latent |= {"kv_lora_rank": WIDTH // 2, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
    latent |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), WIDTH // HEADS)
    latent |= {"n_shared_experts": 1, "num_key_value_heads": HEADS}
    by_token = {"experts_implementation": "batched_mm"}
    vit = {key: n for key, n in usual.items() if key not in ("vocab_size", "max_position_embeddings")}
    vit |= {"image_size": 16, "patch_size": 4, "num_labels": 8}
    t5 = {
        "d_model": WIDTH,
        "d_kv": WIDTH // HEADS,
        "d_ff": 2 * WIDTH,
        "num_layers": layers,
        "num_heads": HEADS,
    }
    t5 |= {"vocab_size": VOCAB, "decoder_start_token_id": 0, "use_cache": False}
    bart: Sizes = {
        "d_model": WIDTH,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2 * LENGTH,
        "use_cache": False,
    }
    for side in ("encoder", "decoder"):
        bart |= {f"{side}_layers": layers, f"{side}_attention_heads": HEADS, f"{side}_ffn_dim": 2 * WIDTH}

    def made(
        name: str, head: str, kind: str, about: str, sizes: Sizes, call: Callable[[], Call] = token_call
    ) -> Family:
        return Family(partial(from_transformers, name, head, name, sizes), kind, about, call)

    generates = "ForConditionalGeneration"
    return {
        "mixtral": made("Mixtral", "ForCausalLM", "other decoder", "experts", experts),
        "qwen3-moe": made("Qwen3Moe", "ForCausalLM", "other decoder", "many small experts", small_experts),
        "olmoe": made("Olmoe", "ForCausalLM", "other decoder", "experts, norms of q and k", small_experts),
        "gpt-oss": made("GptOss", "ForCausalLM", "other decoder", "experts with biases, sinks, windows", oss),
        "deepseek-v2": made(
            "DeepseekV2", "ForCausalLM", "other decoder", "shared experts, latent attention", latent
        ),
        "phi-moe": made("Phimoe", "ForCausalLM", "other decoder", "experts chosen by noise", phi_experts),
        "mixtral-batched": made(
            "Mixtral", "ForCausalLM", "other decoder", "weights gathered per token", {**experts, **by_token}
        ),
        "mamba": made("Mamba", "ForCausalLM", "other decoder", "state space", mamba),
        "bert": made("Bert", "ForMaskedLM", "encoder", "masked LM", {**usual, "use_cache": False}),
        "vit": made("ViT", "ForImageClassification", "encoder", "images", vit, image_call),
        "t5": made("T5", generates, "encoder-decoder", "relative position biases", t5),
        "bart": made("Bart", generates, "encoder-decoder", "learned positions", bart),
    }


def _usual_sizes(layers: int) -> Sizes:
    sizes = {"num_hidden_layers": layers, "num_attention_heads": HEADS, "hidden_size": WIDTH}
    return sizes | {
        "intermediate_size": 2 * WIDTH,
        "vocab_size": VOCAB,
        "max_position_embeddings": 2 * LENGTH,
    }


def _other_packages(layers: int) -> dict[str, Family]:
    """Models that return logits."""

    def made(make: Callable[..., nn.Module], kind: str, ids: str, about: str, **more: Any) -> Family:
        return Family(
            partial(make, layers, **more), kind, about, partial(next_token_call, ids), next_token_loss
        )

    rotary = {
        "rotary_pos_emb": True,
        "ff_glu": True,
        "ff_swish": True,
        "use_rmsnorm": True,
        "attn_kv_heads": 4,
    }
    gated = {"n_query_groups": 4, "rotary_percentage": 1.0, "parallel_residual": False, "bias": False}
    gated |= {"norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 2 * WIDTH}
    encoder, attention = "nn.TransformerEncoderLayer", "nn.MultiheadAttention"
    return {
        "x-transformers": made(
            _make_x_transformers, "other package", "x", "x_transformers, learned positions"
        ),
        "x-transformers-rotary": made(
            _make_x_transformers, "other package", "x", "rotary, gated, grouped queries", **rotary
        ),
        "litgpt-pythia": made(_make_litgpt, "other package", "idx", "litgpt.GPT, parallel residual"),
        "litgpt-llama": made(
            _make_litgpt, "other package", "idx", "grouped queries in one weight, gated", **gated
        ),
        "torchtitan": made(_make_torchtitan, "other package", "tokens", "its debug Llama 3, complex rotary"),
        "torch-encoder": made(EncoderLM, "torch", "ids", encoder),
        "torch-encoder-prenorm": made(EncoderLM, "torch", "ids", encoder, norm_first=True, activation="gelu"),
        "torch-attention": made(AttentionLM, "torch", "ids", attention, need_weights=False),
        "torch-attention-weights": made(
            AttentionLM, "torch", "ids", f"{attention} that returns weights", need_weights=True
        ),
    }


def _make_x_transformers(layers: int, **more: Any) -> nn.Module:
    package = importlib.import_module("x_transformers")
    decoder = package.Decoder(dim=WIDTH, depth=layers, heads=HEADS, attn_dim_head=WIDTH // HEADS, **more)
    return package.TransformerWrapper(num_tokens=VOCAB, max_seq_len=LENGTH, attn_layers=decoder)


def _make_litgpt(layers: int, **more: Any) -> nn.Module:
    package = importlib.import_module("litgpt.model")
    sizes = {
        "n_layer": layers,
        "n_head": HEADS,
        "n_embd": WIDTH,
        "block_size": LENGTH,
        "padded_vocab_size": VOCAB,
    }
    return package.GPT(package.Config(**sizes, vocab_size=VOCAB, **more))


def _make_torchtitan(layers: int) -> nn.Module:
    config = importlib.import_module("torchtitan.models.llama3").llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:layers]
    model = config.build()
    model.init_states()
    return model


class EncoderLM(nn.Module):
    """torch's own encoder layers as a small causal language model."""

    def __init__(self, layers: int, **more: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        make = partial(nn.TransformerEncoderLayer, WIDTH, HEADS, 2 * WIDTH, batch_first=True, **more)
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return self.head(x)


class AttentionLM(nn.Module):
    """nn.MultiheadAttention, called as its users call it, in a residual stream."""

    def __init__(self, layers: int, *, need_weights: bool) -> None:
        super().__init__()
        self.embed, self.need_weights = nn.Embedding(VOCAB, WIDTH), need_weights
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(layers))
        self.layers = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(WIDTH, VOCAB)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = norm(x)
            x = x + layer(y, y, y, attn_mask=self.mask, need_weights=self.need_weights)[0]
        return self.head(x)

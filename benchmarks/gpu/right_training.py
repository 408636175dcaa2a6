"""Section 1, of what training takes besides a mesh: precision, ZeRO, recomputation, long sequences, experts, random numbers.

Each row is `verify`: float64 at 1e-9, saved and loaded in the middle, an evaluation, the first losses in the model's own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import autoptd
from autoptd.ir import machine
from benchmarks.gpu.adapters import with_lora
from benchmarks.gpu.models import Call
from benchmarks.gpu.right_models import small_gpt, verified
from benchmarks.gpu.rows import Found, Row, Setting

ASKED: dict[str, dict[str, Any]] = {
    "c=2, Ulysses": {"c": 2, "context": "ulysses"},
    "c=2 t=2, keys gathered, zigzag": {
        "c": 2,
        "t": 2,
        "context": autoptd.ContextParallel("all_gather", "zigzag"),
    },
    "c=2 d=2, zero=1": {"c": 2, "d": 2, "zero": 1},
    "t=2 d=2, zero=1, bf16": {"t": 2, "d": 2, "zero": 1, "precision": "bf16"},
    "t=2 p=2, fp16": {"t": 2, "p": 2, "precision": "fp16"},
    "t=2 p=2, recomputed, sequence parallel": {
        "t": 2,
        "p": 2,
        "recompute": "full",
        "sequence_parallel": True,
    },
    "p=2 d=2, recomputed selectively": {"p": 2, "d": 2, "recompute": "selective"},
}
IN_SHORT = ("c=2 t=2, keys gathered, zigzag",)


def training(asked: dict[str, Any], setting: Setting) -> Iterator[Found]:
    """A small GPT with dropout; weights in float32 where a precision is asked for, which keeps them so."""
    model, (args, _) = small_gpt(setting, 0.1, asked.get("p", 1))
    if "precision" in asked:
        model.float()
    rows = {"num_microbatches": 4 // asked.get("d", 1), "steps": 1 if setting.is_toy else 2}
    yield verified(model, args, {**rows, **asked})


def experts(name: str, asked: dict[str, Any], setting: Setting) -> Iterator[Found]:
    """A mixture of experts of transformers, its rows grouped by expert; Phi's router draws random numbers."""
    model, (_, kwargs) = small_experts(name)
    example = {key: x.to(setting.where) for key, x in kwargs.items()}
    dtype = torch.float32 if setting.is_toy else torch.bfloat16
    yield verified(model.to(setting.where, dtype), example, {"steps": 1, **asked})


def by_queries(setting: Setting) -> Iterator[Found]:
    """Six heads over t=4, split by queries: as beside long sequences, products are slow for this row."""
    model, (args, _) = small_gpt(setting, 0.1, 1, heads=6)
    slow = machine.Machine(latency=1e-9, per_saved_byte=1e-12, flops=1e9)
    with mock.patch.object(machine, "DEFAULT", slow):
        yield verified(model, args, {"t": 4, "num_microbatches": 2, "steps": 1 if setting.is_toy else 2})


def windows(setting: Setting) -> Iterator[Found]:
    """A Mistral of transformers whose layers see eight tokens, its keys gathered: no rank makes a mask."""
    model, (_, kwargs) = small_decoder("Mistral", tokens=32, sliding_window=8)
    example = {key: x.to(setting.where) for key, x in kwargs.items()}
    model.to(setting.where, torch.float32 if setting.is_toy else torch.bfloat16)
    asked = {"c": 2, "t": 2, "context": "all_gather", "num_microbatches": 2, "steps": 1}
    yield verified(model, example, asked)


def adapters(setting: Setting) -> Iterator[Found]:
    """A Llama of transformers with LoRA of PEFT on all linear layers, dropout before them; its base is frozen."""
    base, (_, kwargs) = small_decoder("Llama")
    example = {key: x.to(setting.where) for key, x in kwargs.items()}
    model = with_lora(base).to(setting.where, torch.float32 if setting.is_toy else torch.bfloat16)
    yield verified(model, example, {"t": 2, "p": 2, "d": 2, "num_microbatches": 2, "steps": 1})


def made_by_ranks(setting: Setting) -> Iterator[Found]:
    """A model without memory: the values that ranks on the device make are to the bit those of one device."""
    with autoptd.deferred(seed=3):
        model, (_, kwargs) = small_decoder("Llama")
    pm = autoptd.parallelize(
        model, t=2, p=2, num_microbatches=2, example_inputs=kwargs, device=setting.where, backend="local"
    )
    made, wanted = pm.state_dict(), autoptd.materialize(model).state_dict()
    pm.close()
    differ = [name for name, x in wanted.items() if not torch.equal(made[name].cpu(), x)]
    yield {"parameters": len(wanted), "differ": differ, "ok": not differ}


def small_decoder(kind: str, tokens: int = 16, **sizes: Any) -> tuple[nn.Module, Call]:
    """Two small layers of a family of transformers, and a batch of eight rows; on the CPU."""
    import transformers

    torch.manual_seed(0)
    sizes |= {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**sizes))
    ids = torch.randint(0, 64, (8, tokens), generator=torch.Generator().manual_seed(1))
    return model, ((), {"input_ids": ids, "labels": ids.clone()})


def small_experts(name: str) -> tuple[nn.Module, Call]:
    """Two small layers of four experts, two for each token; on the CPU."""
    kind = {"Mixtral": "Mixtral", "Phi-3.5-MoE": "Phimoe"}[name]
    return small_decoder(kind, num_local_experts=4, num_experts_per_tok=2)


EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral, t=2": ("Mixtral", {"t": 2, "num_microbatches": 2}),
    "Mixtral, t=2 d=2": ("Mixtral", {"t": 2, "d": 2, "num_microbatches": 2}),
    "Phi-3.5-MoE, t=2 p=2": ("Phi-3.5-MoE", {"t": 2, "p": 2, "num_microbatches": 2}),
}
ROWS = [
    *(
        Row(f"training: {name}", partial(training, asked), 40, 2, name in IN_SHORT)
        for name, asked in ASKED.items()
    ),
    Row("training: t=4, six heads, split by queries", by_queries, 40, 2, False),
    Row("training: c=2 t=2, windows of keys", windows, 40, 2, False),
    Row("training: t=2 p=2 d=2, LoRA", adapters, 40, 2, False),
    Row("training: t=2 p=2, values made by ranks", made_by_ranks, 40, 2),
    *(
        Row(f"experts: {name}", partial(experts, kind, asked), 40, 2, False)
        for name, (kind, asked) in EXPERTS.items()
    ),
]

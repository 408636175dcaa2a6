"""Models of PEFT as they are: the base frozen, adapters divided with their hosts, trained as on one device.

LoRA, DoRA and IA3 are in the covering array, too (`kinds.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import autoptd
from tests.parity.models import MACHINE

VOCAB, WIDTH = 64, 32
PROJECTIONS = ["q_proj", "v_proj", "up_proj", "down_proj"]


def llama(**options: Any) -> nn.Module:
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=32, **sizes, **options)
    )


def gpt2() -> nn.Module:
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=WIDTH, n_layer=2, n_head=4, **dropout)
    )


def lora(**options: Any) -> peft.PeftConfig:
    options = {"r": 4, "target_modules": PROJECTIONS, "lora_dropout": 0.0} | options
    return peft.LoraConfig(task_type="CAUSAL_LM", **options)


def ia3() -> peft.PeftConfig:
    targets = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    return peft.IA3Config(task_type="CAUSAL_LM", **targets)


def prompt() -> peft.PeftConfig:
    return peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def vera() -> peft.PeftConfig:
    return peft.VeraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])


def randlora() -> peft.PeftConfig:
    return peft.RandLoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])


def adalora() -> peft.PeftConfig:
    sizes = {"init_r": 4, "target_r": 2, "total_step": 10}
    return peft.AdaLoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], **sizes)


def vblora() -> peft.PeftConfig:
    bank = {"num_vectors": 8, "vector_length": 8, "topk": 2}
    return peft.VBLoRAConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], **bank)


def with_rank(config: type[peft.PeftConfig], **options: Any) -> Callable[[], peft.PeftConfig]:
    return lambda: config(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"], **options)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], peft.PeftConfig]]] = {
    "LoRA": (llama, lora),
    "LoRA with dropout": (llama, lambda: lora(lora_dropout=0.1)),
    "LoRA of every linear layer": (llama, lambda: lora(target_modules="all-linear", use_rslora=True)),
    "LoRA of GPT-2": (gpt2, lambda: lora(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "DoRA": (llama, lambda: lora(use_dora=True)),
    "IA3": (llama, ia3),
    "prompt tuning": (llama, prompt),
}
# Their layers are not equal, or lie under paths that a slice has named: each is written out, below its whole path.
WRITTEN_OUT: dict[str, tuple[Callable[[], nn.Module], Callable[[], peft.PeftConfig]]] = {
    "LoRA and tokens of a tied head": (tied_llama, lambda: lora(trainable_token_indices=[1, 5, 9])),
    "VeRA": (llama, vera),
    "RandLora": (llama, randlora),
}
# What an adapter adds is computed from its weights: they are traced as they are written, and seldom divided.
COMPUTED: dict[str, tuple[Callable[[], nn.Module], Callable[[], peft.PeftConfig]]] = {
    "LoKr with rank dropout": (
        llama,
        with_rank(peft.LoKrConfig, rank_dropout=0.3, rank_dropout_scale=True),
    ),
    "LoKr": (llama, with_rank(peft.LoKrConfig)),
    "LoHa": (llama, with_rank(peft.LoHaConfig)),
    "HRA": (llama, with_rank(peft.HRAConfig)),
    "AdaLora": (llama, adalora),
    "VB-LoRA": (llama, vblora),
}
MESHES: tuple[dict[str, Any], ...] = (
    {"t": 2, "p": 2, "d": 2, "num_microbatches": 2},
    {"t": 2, "sequence_parallel": True, "d": 2, "zero": 1},
    {"t": 2, "c": 2},
    {"t": 4, "p": 2, "num_microbatches": 2, "recompute": "full"},
)


def adapted(kind: str) -> nn.Module:
    """A model of PEFT, whose adapters are no zeros."""
    base, config = (KINDS | WRITTEN_OUT | COMPUTED)[kind]
    torch.manual_seed(0)
    model = peft.get_peft_model(base(), config())
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return model


def batch(step: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (4, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


CELLS = [(kind, mesh) for mesh in range(len(MESHES)) for kind in KINDS]


@pytest.mark.thorough  # by default those below, of which LoRA is one
@pytest.mark.parametrize(("kind", "mesh"), CELLS, ids=[f"{kind}, {MESHES[mesh]}" for kind, mesh in CELLS])
def test_adapters_train_as_on_one_device(kind: str, mesh: int) -> None:
    autoptd.verify(adapted(kind), example_inputs=batch(), machine=MACHINE, steps=2, **MESHES[mesh])


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.thorough] if at else []) for at, kind in enumerate(WRITTEN_OUT)],
)
def test_adapters_whose_layers_are_written_out(kind: str) -> None:
    autoptd.verify(adapted(kind), example_inputs=batch(), machine=MACHINE, steps=2, t=2)


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.*raises on the values of a tensor")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.thorough] if at else []) for at, kind in enumerate(COMPUTED)],
)
def test_adapters_that_are_computed(kind: str) -> None:
    autoptd.verify(adapted(kind), example_inputs=batch(), machine=MACHINE, steps=2, **MESHES[1])


def test_adapters_are_divided_with_their_hosts() -> None:
    program = autoptd.compile(adapted("LoRA"), t=2, example_inputs=batch(), machine=MACHINE)
    dims = {spec.name.split("layers.0.")[-1]: spec for spec in program.params}
    column = dims["mlp.up_proj.lora_B.default.weight"]
    row = dims["mlp.down_proj.lora_A.default.weight"]
    assert column.local_shape(program.mesh) == (32, 4) and row.local_shape(program.mesh) == (4, 32)


def test_what_is_frozen_has_no_gradient_no_moments_and_no_sums(tmp_path: Path) -> None:
    model = adapted("LoRA")
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    asked = {"backend": "local", "example_inputs": batch(), "machine": MACHINE}
    pm = autoptd.parallelize(model, t=2, d=2, zero=1, **asked)
    try:
        optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
        before = pm.state_dict()
        loss = pm.step(**batch())
        assert set(pm.gradients()) == trained
        optimizer.step()
        after = pm.state_dict()
        assert {name for name in after if not torch.equal(after[name], before[name])} == trained
        pm.save(tmp_path / "step", optimizer=optimizer)
    finally:
        pm.close()
    other = autoptd.parallelize(adapted("LoRA"), p=2, **asked)
    try:
        optimizer = other.optimizer(torch.optim.AdamW, lr=1e-2)
        other.load(tmp_path / "step", optimizer=optimizer)
        found = other.state_dict()
        assert all(torch.equal(found[name], x) for name, x in after.items())
        assert other.step(**batch()) < loss
    finally:
        other.close()

"""What docs/howto/lora.md shows, made by runs: costs of adapters, and the errors of folders and of quantised bases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoptd
from autoptd.wings.reports.summary import summarize
from tests.parity.test_peft import MACHINE, adapted, batch, lora
from tests.trace.test_quantised import Linear4bit


def costs(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Two layers of Llama 3 8B, on meta."""
    sizes = {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    config = LlamaConfig(vocab_size=128256, num_hidden_layers=2, use_cache=False, **sizes)
    ids = torch.zeros(2, 4096, dtype=torch.long)
    lines = []
    for name in ("all trained", "adapters"):
        with autoptd.deferred():
            model: nn.Module = LlamaForCausalLM(config).bfloat16()
            if name == "adapters":
                how = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
                model = peft.get_peft_model(model, how)
        call = {"input_ids": ids, "labels": ids}
        program = autoptd.compile(model, num_microbatches=1, example_inputs=call)
        work = summarize(program).ranks[0].flops / 1e12
        lines.append(f"{name}: {program.memory(0)}, {work:.1f} TFLOP a step")
    return "\n".join(lines)


def refused_folders(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """An adapter of other settings, and one for a wider base."""

    def with_lora(width: int, **options: Any) -> Any:
        sizes = {
            "hidden_size": width,
            "intermediate_size": 64,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        base = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes))
        return peft.get_peft_model(base, lora(target_modules=["q_proj"], **options))

    lines = []
    with pytest.MonkeyPatch().context() as patch:
        patch.chdir(folder)
        with_lora(32, r=8, lora_alpha=32).save_pretrained("adapters/theirs")
        with_lora(64).save_pretrained("adapters/wider")
        pm = autoptd.parallelize(with_lora(32), t=2, backend="local", example_inputs=batch(), machine=MACHINE)
        try:
            for name in ("theirs", "wider"):
                with pytest.raises(autoptd.PlanError) as caught:
                    pm.load_adapter(f"adapters/{name}")
                lines.append(f"PlanError: {caught.value}")
        finally:
            pm.close()
    return "\n".join(lines)


def quantised_base(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A stand-in for a layer of bitsandbytes, within those of the adapter."""
    model = adapted("LoRA")
    for layer in model.base_model.model.model.layers:  # type: ignore[union-attr, operator]
        layer.self_attn.q_proj.base_layer = Linear4bit()
    with pytest.raises(autoptd.TraceError) as caught:
        autoptd.compile(model, t=2, example_inputs=batch())
    return f"TraceError: {caught.value}"

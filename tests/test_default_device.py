"""A default device that the user has set: it is for the model, and changes nothing of what is compiled or trained.

Meta stands for a GPU here: whatever AutoPTD would make there by mistake has no values, and fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autoptd
from autoptd.runtime.params.trial import check_elementwise
from tests.forks import told
from tests.parity.models import VOCAB, Separate, batch

HERE = Path(__file__).parent


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=VOCAB, num_attention_heads=4, max_position_embeddings=16, **sizes)
    )


def gpt2() -> nn.Module:
    """Its GELU is written out, and found by trying it."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, bos_token_id=None, eos_token_id=None, **sizes)
    )


def padded() -> dict[str, torch.Tensor]:
    """A batch for Transformers, with a mask of padding."""
    ids, _ = batch()
    mask = torch.ones_like(ids)
    mask[::2, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@pytest.mark.parametrize(
    "make, inputs, keywords",
    [
        (gpt2, padded(), {"t": 2, "p": 2}),
        pytest.param(
            *(lambda: Separate(2), batch(), {"t": 2, "c": 2, "memory": 1e9}), marks=pytest.mark.thorough
        ),
        (llama, padded(), {"t": 2, "d": 2, "precision": "bf16-mixed"}),
        pytest.param(
            *(llama, padded(), {"t": "auto", "p": "auto", "d": "auto", "gpus": 4, "machine": "h100"}),
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["gpt2", "masks in a buffer", "llama", "auto"],
)
def test_the_same_is_compiled(make: Any, inputs: Any, keywords: dict[str, Any]) -> None:
    model = make()
    wanted = autoptd.compile(model, example_inputs=inputs, **keywords)
    with torch.device("meta"):
        program = autoptd.compile(model, example_inputs=inputs, **keywords)
    assert program.sources == wanted.sources and program.plan == wanted.plan
    assert program.params == wanted.params and program.orders == wanted.orders


class Warming(torch.optim.SGD):
    """Counts in a tensor, as many do. It has a step of its own, so that it is tried."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            count = group.setdefault("count", torch.tensor(0.0))
            count += 1
            group["lr"] = 0.1 * min(1.0, count.item() / 3)
        return super().step(closure)


def test_an_optimizer_is_tried() -> None:
    with torch.device("meta"):
        check_elementwise(Warming, {"lr": 0.1})


@pytest.mark.processes
def test_processes_train_save_and_go_on_as_without(tmp_path: Path) -> None:
    found = told(HERE / "processes" / "default_device.py", 2, str(tmp_path))[0]
    assert found["meta"] == found["cpu"] and len(found["cpu"]) == 8, found

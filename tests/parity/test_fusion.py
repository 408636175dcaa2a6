"""Whole models with fused operators, against the model on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd

VOCAB, TOKENS = 64, 32


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB, "n_positions": TOKENS}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager", bos_token_id=0, eos_token_id=0))


def llama(attention: str = "eager") -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB}
    more = {"num_key_value_heads": 2, "intermediate_size": 32, "attn_implementation": attention}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more))


def gemma() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": VOCAB,
        "head_dim": 8,
    }
    more = {
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "attn_implementation": "eager",
        "sliding_window": 4,
    }
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **more, final_logit_softcapping=None))


MODELS: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "gpt2": (gpt2, {"masked_softmax", "gelu", "bias_dropout_add", "linear_cross_entropy"}),
    "llama": (llama, {"attention", "rms_norm", "rotary", "swiglu", "linear_cross_entropy"}),
    "gemma": (gemma, {"masked_softmax", "rms_norm", "rotary", "geglu", "linear_cross_entropy"}),
}
MESHES: dict[str, dict[str, Any]] = {
    "t2 p2": {"t": 2, "p": 2},
    "sequence parallel": {"t": 2, "sequence_parallel": True},
    "d2": {"d": 2},
    "plain": {"t": 2, "d": 2, "fuse": False},
}


def call() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (4, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 5:9] = -100
    return {"input_ids": ids, "labels": labels}


def fused(program: autoptd.Program) -> set[str]:
    return {one.op for one in program.fusions if not one.why}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt2", "sequence parallel"),
        ("gpt2", "t2 p2"),
        ("llama", "t2 p2"),
        ("llama", "d2"),
        ("gemma", "t2 p2"),
        ("llama", "plain"),
    ],
)
def test_parity(name: str, mesh: str) -> None:
    torch.manual_seed(0)
    (make, ops), request = MODELS[name], {"num_microbatches": 2, "example_inputs": call(), **MESHES[mesh]}
    model = make()
    assert fused(autoptd.compile(model, **request)) == (set() if mesh == "plain" else ops)
    autoptd.verify(model, **request, steps=2)


@pytest.mark.parametrize("mesh", ["t2 p2", "sequence parallel"])
def test_norms_of_sums_and_a_causal_mask_that_is_not_read(mesh: str) -> None:
    """What is fused for CUDA devices only, on a CPU; stages are cut between a sum and its norm as well."""
    torch.manual_seed(0)
    model = llama("sdpa")
    request = {"num_microbatches": 2, "example_inputs": call(), "fuse": "triton", **MESHES[mesh]}
    text = "".join(autoptd.compile(model, **request).sources.values())
    assert "residual=" in text and "is_causal=True" in text and "attn_mask=" not in text
    autoptd.verify(model, **request, steps=2)


class Padded(nn.Module):
    """Attention written out, whose mask (in float32, whatever the model is in) may hide all keys from a query."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        later = torch.ones(6, 6, dtype=torch.bool).triu(1)
        mask = torch.where(later | (seen == 0)[:, None, None, :], torch.finfo(torch.float32).min, 0.0)
        return ((q @ k.mT * 0.5 + mask).softmax(-1) @ v).square().mean()


def test_queries_that_padding_hides_from_all_keys() -> None:
    """Here in float32, the dtype in which such a mask meets its scores."""
    torch.manual_seed(0)
    model, seen = Padded(), torch.ones(4, 6)
    x, seen[0, :3] = torch.randn(4, 6, 8), 0
    model(x, seen).backward()
    pm = autoptd.parallelize(model, num_microbatches=1, example_inputs=(x, seen), backend="local")
    pm.step(x, seen)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pm.gradients()[name], parameter.grad)
    pm.close()


@pytest.mark.parametrize("affine", [{"bias": False}, {"elementwise_affine": False}])
def test_norms_of_sums_without_all_parameters(affine: dict[str, bool]) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(8, 8), nn.LayerNorm(8, **affine), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.a(x)
            return self.b(self.norm(y) + y).square().mean()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    request = {"t": 2, "num_microbatches": 2, "example_inputs": (torch.randn(4, 6, 8),), "fuse": "triton"}
    assert "residual=" in autoptd.compile(Normed(), **request).sources["stage_0.py"]
    autoptd.verify(Normed(), **request, steps=2)


@pytest.mark.thorough
def test_a_choice_of_operators() -> None:
    torch.manual_seed(0)
    request = {"example_inputs": call(), "num_microbatches": 2}
    chosen = autoptd.compile(llama(), **request, fuse_only=["rms_norm"])
    assert fused(chosen) == {"rms_norm"} and chosen.plan["options"]["fuse_only"] == ["rms_norm"]
    assert autoptd.compile(llama(), plan=chosen.plan, example_inputs=call()).sources == chosen.sources
    plain = autoptd.compile(llama(), **request, fuse=False)
    assert plain.fusions == () and "fused" not in plain.sources["stage_0.py"]


@pytest.mark.parametrize(
    "request_", [{"fuse": "cuda"}, {"fuse": True}, {"fuse_only": "rms_norm"}, {"fuse_only": ["norm"]}]
)
def test_what_cannot_be_asked_for(request_: dict[str, Any]) -> None:
    with pytest.raises(autoptd.PlanError, match="fuse"):
        autoptd.compile(llama(), example_inputs=call(), **request_)


def test_a_scaled_mean_counts_its_labels_over_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a loss over a split vocabulary are calls of their own, as the program tells."""
    from autoptd.passes.fusion import fuse, losses

    monkeypatch.setattr(fuse, "CHUNK_BYTES", {"cpu": 1})
    monkeypatch.setattr(losses, "CHUNK_ROWS", 24)
    torch.manual_seed(0)
    request = {"t": 2, "num_microbatches": 2, "example_inputs": call()}
    program = autoptd.compile(llama(), **request)
    calls = [one for one in program.collectives if one.conversion == "vocab_parallel_linear_cross_entropy"]
    assert len(calls) == 6 and "chunk=22" in program.sources["stage_0.py"]
    autoptd.verify(llama(), **request, steps=1)


HOOKS: dict[
    str, tuple[dict[str, Any], str]
] = {  # options, and what takes the weight's gradient of a fused head
    "overlap": ({"async_tensor_model_parallel_allreduce": True}, ""),
    "main": ({"accumulate_allreduce_grads_in_fp32": True}, "wgrad=self.main_grads"),
    "W behind B": ({"delay_wgrad_compute": "after_b"}, "wgrad=self.deferred"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_head_with_its_loss_beside_hooks_on_linear_layers(name: str, hooks: str) -> None:
    """GPT-2's head is the embedding too: in the same stage here."""
    torch.manual_seed(0)
    (make, _), (options, wgrad) = MODELS[name], HOOKS[hooks]
    mesh = {"t": 2} if name == "gpt2" else {"p": 2, "d": 2}
    request = {"num_microbatches": 2, "example_inputs": call(), **mesh, **options}
    model = make()
    program = autoptd.compile(model, **request)
    text = "".join(program.sources.values())
    statement = text[text.index("linear_cross_entropy(") :].partition("\n        return")[0]
    assert wgrad in statement and ("wgrad" in statement) == bool(wgrad)
    autoptd.verify(model, **request, steps=2)


@pytest.mark.thorough
def test_a_frozen_head_has_no_gradient_to_hand_over() -> None:
    torch.manual_seed(0)
    model = llama()
    model.lm_head.weight.requires_grad_(False)
    for options, _ in HOOKS.values():
        request = {"t": 2, "num_microbatches": 2, "example_inputs": call(), **options}
        assert "linear_cross_entropy" in fused(autoptd.compile(model, **request))
        autoptd.verify(model, **request, steps=1)

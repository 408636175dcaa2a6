"""Mixtures of experts of transformers, unmodified, with their default settings: trained as on one device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import autoptd
from autoptd.ir import machine
from benchmarks.gpu.right_training import small_experts
from tests.parity import covering
from tests.parity.kinds import KINDS
from tests.parity.models import MACHINE

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
CHOSEN = {"num_key_value_heads": 2, "num_experts_per_tok": 2}


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, **CHOSEN, intermediate_size=24, num_local_experts=3)
    return transformers.MixtralForCausalLM(config)


def qwen3() -> nn.Module:
    sizes = {"head_dim": 4, "intermediate_size": 24, "moe_intermediate_size": 8, "num_experts": 5}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES, **CHOSEN, **sizes))


def olmoe() -> nn.Module:
    sizes = {"intermediate_size": 8, "num_experts": 4}
    return transformers.OlmoeForCausalLM(transformers.OlmoeConfig(**SIZES, **CHOSEN, **sizes))


def gpt_oss() -> nn.Module:
    """Biases of experts, gates between the other channels, attention sinks and windows."""
    sizes = {"head_dim": 4, "intermediate_size": 8, "num_local_experts": 4, "sliding_window": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.GptOssConfig(**SIZES, **CHOSEN, **sizes, rope_parameters=rope)
    return transformers.GptOssForCausalLM(config)


def deepseek() -> nn.Module:
    """A dense layer, then experts beside one that all tokens have; latent attention."""
    heads = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
    counts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
    sizes = {"intermediate_size": 24, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    groups = {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "num_key_value_heads": 4}
    config = transformers.DeepseekV2Config(**SIZES, **heads, **counts, **sizes, **groups)
    return transformers.DeepseekV2ForCausalLM(config)


def phimoe() -> nn.Module:
    """Experts chosen by Gumbel noise, with a backward of the router's own."""
    sizes = {"intermediate_size": 24, "num_local_experts": 4}
    return transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**SIZES, **CHOSEN, **sizes))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "Mixtral": mixtral,
    "Qwen3-MoE": qwen3,
    "OLMoE": olmoe,
    "GPT-OSS": gpt_oss,
    "DeepSeek-V2": deepseek,
    "Phi-3.5-MoE": phimoe,
}
MESHES: tuple[dict[str, Any], ...] = (
    {"t": 2, "p": 2, "d": 2, "num_microbatches": 2},
    {"t": 2, "sequence_parallel": True, "d": 2, "zero": 1},
    {"t": 2, "c": 2},
    {"t": 4, "p": 2, "num_microbatches": 2, "recompute": "full"},
    {"t": 2, "d": 2, "precision": "bf16-mixed"},
)


def model_of(family: str) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def batch(rows: int = 4, step: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (rows, 8), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.clone()}


CELLS = [(family, mesh) for mesh in range(len(MESHES)) for family in FAMILIES]


@pytest.mark.thorough  # by default with the loss of their routers, below
@pytest.mark.parametrize(
    ("family", "mesh"), CELLS, ids=[f"{family}, {MESHES[mesh]}" for family, mesh in CELLS]
)
def test_experts_train_as_on_one_device(family: str, mesh: int) -> None:
    model = model_of(family)
    assert model.config._experts_implementation == "grouped_mm"
    autoptd.verify(model, example_inputs=batch(), machine=MACHINE, steps=2, **MESHES[mesh])


@pytest.mark.parametrize(
    ("family", "rows"), [("Mixtral", 4), pytest.param("Phi-3.5-MoE", 8, marks=pytest.mark.thorough)]
)
def test_a_model_in_bfloat16_is_not_refused(family: str, rows: int) -> None:
    """Sums of experts' rows, each rounded, are made in another order than the model's: more than a sum's own rounding."""
    model, (_, kwargs) = small_experts(family)
    found = {name: x[:rows] for name, x in kwargs.items()}
    autoptd.compile(model.bfloat16(), t=2, example_inputs=found, num_microbatches=1, machine=MACHINE)


# The auxiliary loss of routers: the product of two means over all tokens of the batch.
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
BALANCED_MESHES: tuple[dict[str, Any], ...] = (
    {"t": 2, "d": 2, "num_microbatches": 1},
    {"t": 2, "p": 2, "d": 2, "num_microbatches": 1},
    {"t": 2, "sequence_parallel": True, "d": 2, "zero": 1, "num_microbatches": 1},
    {"t": 2, "num_microbatches": 1},
    {"p": 2, "num_microbatches": 1},
    {"d": 2, "num_microbatches": 1},
    {"c": 2, "d": 2, "num_microbatches": 1},
)


def balanced(family: str, **options: Any) -> nn.Module:
    """A model whose loss has that of its routers; it has been called, so hooks that record their scores are there."""
    torch.manual_seed(0)
    config = FAMILIES[family]().config
    for name, number in (BALANCED | options).items():
        setattr(config, name, number)
    model: nn.Module = type(FAMILIES[family]())(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model(**batch())
    return model


ROUTERS = ["Mixtral", "Phi-3.5-MoE", "Qwen3-MoE", "OLMoE", "GPT-OSS"]
ROUTER_CELLS = [(family, mesh) for mesh in range(len(BALANCED_MESHES)) for family in ROUTERS]


@pytest.mark.one_in(96)
@pytest.mark.parametrize(
    ("family", "mesh"),
    ROUTER_CELLS,
    ids=[f"{family}, {BALANCED_MESHES[mesh]}" for family, mesh in ROUTER_CELLS],
)
def test_balanced_routers_train_as_on_one_device(family: str, mesh: int) -> None:
    about = {"machine": MACHINE, "steps": 2, **BALANCED_MESHES[mesh]}
    autoptd.verify(balanced(family), example_inputs=batch(), **about)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["Mixtral", pytest.param("Phi-3.5-MoE", marks=pytest.mark.thorough)])
def test_balanced_routers_take_one_microbatch(family: str) -> None:
    with pytest.raises(autoptd.PlanError, match="or run with num_microbatches=1"):
        autoptd.compile(balanced(family), d=2, num_microbatches=2, example_inputs=batch(), machine=MACHINE)


@pytest.mark.thorough
def test_hooks_of_routers_are_installed_once() -> None:
    """The first call of a model of transformers installs them, also where that is a trace."""
    model = model_of("Mixtral")
    model.config.output_router_logits = True
    program = autoptd.compile(model, t=2, num_microbatches=1, example_inputs=batch(), machine=MACHINE)
    again = autoptd.compile(
        balanced("Mixtral", router_aux_loss_coef=model.config.router_aux_loss_coef),
        **{"t": 2, "num_microbatches": 1, "machine": MACHINE},
        example_inputs=batch(),
    )
    assert program.sources == again.sources
    assert not any(module._forward_hooks for module in model.modules())


def by_expert(model: nn.Module) -> dict[str, Any]:
    """A plan that splits experts by their number."""
    names = [name for name, _ in model.named_parameters() if re.search(r"experts\.(gate_up|down)_proj", name)]
    patterns = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)
    return {"shard": [{"pattern": pattern, "dim": 0} for pattern in patterns]}


def with_four_experts(family: str) -> nn.Module:
    """The model of a family, with a number of experts that t = 2 and 4 divide."""
    torch.manual_seed(0)
    config = FAMILIES[family]().config
    name = next(
        name for name in ("num_local_experts", "n_routed_experts", "num_experts") if hasattr(config, name)
    )
    setattr(config, name, 4)
    model: nn.Module = type(FAMILIES[family]())(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.thorough  # by default in `test_all_tokens_may_choose_experts_of_one_rank`, and in the covering array
@pytest.mark.parametrize(
    ("family", "mesh"),
    CELLS,
    ids=[f"by expert, {family}, {MESHES[mesh]}" for family, mesh in CELLS],
)
def test_experts_by_number_train_as_on_one_device(family: str, mesh: int) -> None:
    model = with_four_experts(family)
    plan, keywords = by_expert(model), {"machine": MACHINE, "steps": 2, **MESHES[mesh]}
    autoptd.verify(model, example_inputs=batch(), plan=plan, **keywords)


@pytest.mark.parametrize("favourite", [0, pytest.param(3, marks=pytest.mark.thorough)])
def test_all_tokens_may_choose_experts_of_one_rank(favourite: int) -> None:
    """The other rank has no row at all, and its gradients are zeros."""
    model = with_four_experts("GPT-OSS")
    for name, parameter in model.named_parameters():
        if name.endswith("router.bias"):
            # The two experts of a token are both of one rank.
            parameter.data[favourite // 2 * 2 : favourite // 2 * 2 + 2] += 1e3
    autoptd.verify(model, t=2, example_inputs=batch(), plan=by_expert(model), machine=MACHINE, steps=1)


def test_experts_that_do_not_divide_are_not_split_by_number() -> None:
    model = model_of("Mixtral")
    with pytest.raises(autoptd.PlanError, match="divides no factor"):
        autoptd.compile(model, t=2, example_inputs=batch(), plan=by_expert(model), machine=MACHINE)


@pytest.mark.thorough
def test_products_of_other_rows_are_sorted_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """One product splits columns of all rows, the next one rows, where products are slow: two orders of a layer's choices."""
    monkeypatch.setattr(machine, "DEFAULT", covering.SLOW_PRODUCTS)
    kind, keywords = KINDS["numbered experts"], {"t": 3, "sequence_parallel": "auto"}
    program = autoptd.compile(kind.make(0.0), example_inputs=kind.batch(8, 0), **keywords)
    assert program.sources["stage_0.py"].count("= rt.by_expert(") == 2
    autoptd.verify(kind.make(0.0), example_inputs=kind.batch(8, 0), steps=2, **keywords)


class Before(nn.Module):
    """One choice a token, whose score weighs what the expert reads; what comes behind its only product is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.matrices = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score, chosen = self.gate(x).max(-1)
        ids, order = chosen.sort()
        ends = torch.histc(ids.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        y = nn.functional.grouped_mm((x * score.sigmoid()[:, None])[order], self.matrices, offs=ends)
        # 0 / 0 where a row is of zeros.
        y = y / y.norm(dim=-1, keepdim=True)
        return (y[order.argsort()] * torch.arange(16)).square().mean()


@pytest.mark.parametrize("t", [2, 4])
def test_scores_before_and_a_quotient_behind(t: int) -> None:
    torch.manual_seed(0)
    plan = {"shard": [{"pattern": "matrices", "dim": 0}]}
    found = torch.randn(8, 16)
    autoptd.verify(Before(), t=t, example_inputs=(found,), plan=plan, machine=MACHINE, steps=2)


CONFIGS = {  # two layers, else as they are released
    "Mixtral": transformers.MixtralConfig(num_hidden_layers=2, use_cache=False),
    "Qwen3-MoE": transformers.Qwen3MoeConfig(num_hidden_layers=2, use_cache=False, num_experts=128),
    "GPT-OSS": transformers.GptOssConfig(num_hidden_layers=2, use_cache=False),
}


# Few wide experts are divided inside: of 8, one rank would have a half more rows than the mean. Many narrow ones by number.
INSIDE = {"Mixtral": True, "Qwen3-MoE": False, "GPT-OSS": False}


@pytest.mark.parametrize("family", CONFIGS)
def test_experts_are_divided_by_what_is_cheaper_and_summed_once_a_layer(family: str) -> None:
    """A tensor rank has a part of all experts, or all of some; what tokens get from theirs is summed once."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[family], dtype=torch.bfloat16)
        ids = torch.zeros(4, 2048, dtype=torch.long)
    program = autoptd.compile(model, t=4, example_inputs={"input_ids": ids, "labels": ids}, machine="h100")
    specs = [spec for spec in program.params if spec.name.endswith(("gate_up_proj", "down_proj"))]
    assert len(specs) == 4
    for spec in specs:
        local, whole = spec.local_shape(program.mesh), spec.shape
        assert 4 * torch.Size(local).numel() == torch.Size(whole).numel()
        assert (local[0] == whole[0]) == INSIDE[family]
    assert not program.fallbacks
    said = program.explain("model.layers.0.mlp.experts").splitlines()
    chosen = [line for line in said if line.strip().startswith("chosen") and "by expert: " in line]
    assert bool(chosen) != INSIDE[family]
    lines = "\n".join(program.sources.values()).splitlines()
    # The two layers are one loop.
    conversions = [line.split("rt.")[1] for line in lines if "mlp.experts" in line and ", tp, " in line]
    assert len(conversions) == 1 and conversions[0].startswith("p_to_i(")


def test_no_weight_is_gathered_by_token() -> None:
    """Every row of 3 experts' matrices of 768 numbers would have its own."""
    program = autoptd.compile(model_of("Mixtral"), example_inputs=batch(), machine=MACHINE)
    text = "\n".join(program.sources.values())
    # The two layers are one loop.
    counts = {
        name: text.count(f"rt.{name}(") for name in ("by_expert", "take_rows", "grouped_mm", "put_rows")
    }
    assert counts == {"by_expert": 1, "take_rows": 1, "grouped_mm": 2, "put_rows": 1}
    assert "sort(" not in text and "aten.index" not in text and ".expand(" not in text.split("mlp  (")[1]

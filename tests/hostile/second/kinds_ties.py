"""save_pretrained of models that a user ties or unties by hand: what from_pretrained gives back is the trained model."""

# ruff: noqa: E501  (lines of other sources)

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch

import autoptd
from autoptd.errors import AutoptdError
from autoptd.options import grouped
from tests.hostile.judge import Outcome, limited, namespace

SMALL = "vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16"
LLAMA = f"from transformers import LlamaConfig, LlamaForCausalLM\nmodel = LlamaForCausalLM(LlamaConfig({SMALL}, tie_word_embeddings=%s))\n"
GPT = "from transformers import GPT2Config, GPT2LMHeadModel\nmodel = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=4, n_positions=16, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, tie_word_embeddings=%s))\n"
NEW = "torch.nn.Parameter({}.detach().clone() * 0.5)"
HEAD, IN = "model.lm_head.weight", "model.model.embed_tokens.weight"


@dataclass(frozen=True)
class Tie:
    name: str
    body: str


TIES = [
    Tie("tied by config", LLAMA % True),
    Tie("untied by config", LLAMA % False),
    Tie("tied by hand, config says untied", LLAMA % False + f"{HEAD} = {IN}"),
    Tie("the other way round", LLAMA % False + f"{IN} = {HEAD}"),
    Tie("untied by hand, config says tied", LLAMA % True + f"{HEAD} = {NEW.format(HEAD)}"),
    Tie(
        "tied by hand, config set", LLAMA % False + f"{HEAD} = {IN}\nmodel.config.tie_word_embeddings = True"
    ),
    Tie("config set, not tied", LLAMA % False + "model.config.tie_word_embeddings = True"),
    Tie("config unset, still tied", LLAMA % True + "model.config.tie_word_embeddings = False"),
    Tie("two layers share an MLP", LLAMA % False + "model.model.layers[1].mlp = model.model.layers[0].mlp"),
    Tie(
        "two layers share one weight",
        LLAMA % False + "model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight",
    ),
    Tie(
        "q and k of a layer share",
        LLAMA % False
        + "model.model.layers[0].mlp.up_proj.weight = model.model.layers[0].mlp.gate_proj.weight",
    ),
    Tie(
        "all norms share",
        LLAMA % False
        + "for l in model.model.layers:\n    l.input_layernorm.weight = model.model.norm.weight",
    ),
    Tie("the same layer twice", LLAMA % False + "model.model.layers[1] = model.model.layers[0]"),
    Tie("equal values, not tied", LLAMA % False + f"{HEAD}.data.copy_({IN}.data)"),
    Tie("GPT-2, tied", GPT % True),
    Tie("GPT-2, untied by hand", GPT % True + "model.lm_head.weight = " + NEW.format("model.lm_head.weight")),
    Tie("GPT-2, tied by hand", GPT % False + "model.lm_head.weight = model.transformer.wte.weight"),
    Tie("GPT-2, tied and shared MLP", GPT % True + "model.transformer.h[1].mlp = model.transformer.h[0].mlp"),
]


def judge_tie(tie: Tie, mesh: dict[str, Any]) -> Outcome:
    start = time.monotonic()

    def outcome(kind: str, detail: str = "") -> Outcome:
        return Outcome(kind, detail, time.monotonic() - start)

    def make() -> Any:
        case = namespace("import torch\ntorch.manual_seed(3)\n" + tie.body)
        torch.set_default_dtype(torch.float32)
        return case["model"].float()

    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 32, (4, 8), generator=draw) for _ in range(3)]
    model, plain, pm = make(), make(), None
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for ids in batches[:2]:
        plain(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    phase = "parallelize"
    try:
        with limited(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore")
            example = {"input_ids": batches[0], "labels": batches[0]}
            pm = autoptd.parallelize(
                model, **grouped({**mesh, "timeout": 60}), backend="local", example_inputs=example
            )
            opt = pm.optimizer(torch.optim.SGD, lr=0.5)
            for ids in batches[:2]:
                pm.step(input_ids=ids, labels=ids)
                opt.step()
                opt.zero_grad()
            phase = "save_pretrained"
            pm.save_pretrained(folder)
            back = type(model).from_pretrained(folder)
    except AutoptdError as error:
        return outcome("refused", f"in {phase}: {error}")
    except Exception as error:
        return outcome("raw", f"in {phase}: {type(error).__name__}: {error}")
    finally:
        torch.set_default_dtype(torch.float64)
        if pm is not None:
            pm.close()
    with torch.no_grad():
        gap = float((back.eval()(batches[2]).logits - plain.eval()(batches[2]).logits).abs().max())
    return (
        outcome("equal", "")
        if gap < 1e-4
        else outcome("wrong", f"logits of from_pretrained are off by {gap:.1e}")
    )

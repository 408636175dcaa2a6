"""`precision="bf16-mixed"` and `"fp16-mixed"`: equal to the bit to a loop under `torch.autocast`; whose lists they follow.

That its path of storage, use and gradients is right in all combinations: `covering.py`, in float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from tests.parity.models import batch, gpt
from tests.parity.test_transformers import LLAMA, gemma2, neox

STEPS = 4
LR = 1e-2


def by_hand(
    model: nn.Module, data: tuple[Tensor, ...], dtype: torch.dtype, scale: float = 1.0
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and parameters after training: forward under autocast, float32 parameters, torch's AdamW."""
    model = copy.deepcopy(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=LR, fused=True), []
    for step in range(STEPS):
        with torch.autocast("cpu", dtype):
            loss = model(*(x.roll(step, 0) for x in data))[-1]
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: x.detach() for name, x in model.named_parameters()}


def train(
    model: nn.Module, data: tuple[Tensor, ...], **keywords: Any
) -> tuple[list[float], dict[str, Tensor]]:
    keywords = {"precision": "bf16-mixed", "backend": "local", "timeout": 30, **keywords}
    pm = autoptd.parallelize(model, example_inputs=data, **keywords)
    optimizer, losses = pm.optimizer(torch.optim.AdamW, lr=LR), []
    for step in range(STEPS):
        losses.append(float(pm.step(*(x.roll(step, 0) for x in data))))
        optimizer.step()
        optimizer.zero_grad()
    state = pm.state_dict()
    pm.close()
    return losses, state


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("fp16-mixed", torch.float16)]
)
def test_to_the_bit_a_loop_under_autocast(precision: str, dtype: torch.dtype) -> None:
    scale = None if dtype == torch.bfloat16 else 1024.0
    losses, wanted = by_hand(gpt(2), batch(4), dtype, scale or 1.0)
    ours, state = train(
        gpt(2), batch(4), precision=precision, num_microbatches=1, fuse=False, loss_scale=scale
    )
    assert ours == losses
    for name, x in wanted.items():
        assert state[name].dtype == torch.float32 and torch.equal(state[name], x), name


def llama() -> nn.Module:
    # Of shared KV heads the model computes otherwise where it is traced: it repeats them before they are cast.
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_attention_heads=8, **LLAMA))


@pytest.mark.parametrize("make", [llama, neox, gemma2])
def test_real_models_to_the_bit(make: Callable[[], nn.Module]) -> None:
    """Their code reads dtypes, has regions without autocast, casts and adds in float32."""
    model, (ids, labels) = make().eval(), batch(4)
    call = {"input_ids": ids, "labels": labels}
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**call).loss
    loss.backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    pm = autoptd.parallelize(
        model, precision="bf16-mixed", num_microbatches=1, fuse=False, backend="local", example_inputs=call
    )
    assert float(pm.step(**call)) == float(loss.detach())
    found = pm.gradients()
    for name, x in wanted.items():
        assert torch.equal(found[name], x), name
    pm.close()


@pytest.mark.thorough  # by default in test_precision.py
def test_sharded_masters_are_those_of_whole_ones() -> None:
    """To the bit: what is read in 16 bits and what is not, in buckets of their own."""
    states = [train(gpt(2), batch(8), d=2, zero=zero)[1] for zero in (0, 1)]
    for name, x in states[0].items():
        assert torch.equal(x, states[1][name]), name


@pytest.mark.parametrize(
    "mesh", [{"d": 2}, {"t": 2, "d": 3, "zero": 1}, {"p": 2, "d": 2, "zero": 1}], ids=str
)
def test_the_ledger_knows_what_has_a_copy(mesh: dict[str, Any]) -> None:
    data = batch(12)
    pm = autoptd.parallelize(gpt(2), **mesh, precision="bf16-mixed", backend="local", example_inputs=data)
    optimizer = pm.optimizer(torch.optim.AdamW, lr=LR)
    pm.step(*data)
    optimizer.step()
    for rank, met in pm.memory().items():
        assert met == pm.program.memory(rank)
    pm.close()


def test_evaluation_is_under_autocast_too() -> None:
    data = batch(4)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        wanted = gpt(2).eval()(*data)[-1]
    pm = autoptd.parallelize(
        gpt(2), precision="bf16-mixed", fuse=False, num_microbatches=1, backend="local", example_inputs=data
    )
    pm.step(*data)
    assert float(pm.eval_step(*data)) == float(wanted)
    pm.close()


def test_an_overflow_is_skipped() -> None:
    """Logits of 16 bits overflow at a scale of 2**30 in backward: the update is skipped, and the scale halved."""
    data = batch(4)
    pm = autoptd.parallelize(
        gpt(2), d=2, zero=1, precision="fp16-mixed", initial_loss_scale=2.0**30, hysteresis=1,
        backend="local", example_inputs=data,
    )  # fmt: skip
    optimizer = pm.optimizer(torch.optim.AdamW, lr=LR)
    before = pm.state_dict()
    pm.step(*data)
    optimizer.step()
    assert optimizer.skipped == 1 and pm.loss_scale == 2.0**29
    assert all(torch.equal(x, before[name]) for name, x in pm.state_dict().items())
    pm.close()


def test_emitted_files_say_the_casts() -> None:
    program = autoptd.compile(gpt(2), precision="bf16-mixed", example_inputs=batch(4))
    text = program.sources["stage_0.py"]
    assert (
        "In `w`, every parameter that is read in bfloat16 only is in bfloat16, cast from the optimizer's float32 copy"
        in text
    )
    assert "ln_1 = ln_1.to(torch.bfloat16)" in text and ".weight.to(torch.bfloat16)" in text
    by_use = {spec.name: (spec.use.dtype, spec.has_master) for spec in program.params}
    assert by_use["transformer.h.0.attn.c_attn.weight"] == ("bfloat16", True)
    assert by_use["transformer.wte.weight"] == by_use["transformer.ln_f.weight"] == ("float32", False)


class Mixed(nn.Module):
    """Has a layer in 16 bits."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up = nn.Embedding(16, 16), nn.Linear(16, 32).to(dtype)
        self.down, self.norm = nn.Linear(32, 16), nn.LayerNorm(16)

    def forward(self, ids: Tensor) -> tuple[Tensor]:
        x = self.up(self.embed(ids).to(self.up.weight.dtype)).relu()
        return (self.norm(self.down(x.to(self.down.weight.dtype))).float().square().mean().log(),)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16-mixed", "fp16-mixed"])
def test_a_layer_in_16_bits_has_a_float32_copy_like_others(precision: str, dtype: torch.dtype) -> None:
    model, data = Mixed(dtype), (torch.randint(16, (4, 8)),)
    name, _, is_mixed = precision.partition("-")
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    if is_mixed and dtype != narrow:
        with pytest.raises(PlanError, match="its storage would be float32"):
            autoptd.parallelize(model, precision=precision, backend="local", example_inputs=data)
        return
    scale = 1024.0 if name == "fp16" else None
    ours, state = train(model, data, precision=precision, num_microbatches=1, fuse=False, loss_scale=scale)
    masters = {name: nn.Parameter(x.detach().float()) for name, x in model.named_parameters()}
    optimizer, losses = torch.optim.AdamW(masters.values(), lr=LR, fused=True), []
    if not is_mixed:
        model.to(narrow)
    for step in range(STEPS):
        with torch.autocast("cpu", narrow, enabled=bool(is_mixed)):
            (loss,) = model(*(x.roll(step, 0) for x in data))
        losses.append(float(loss.detach()))
        (loss * (scale or 1.0)).backward()
        for name, parameter in model.named_parameters():
            masters[name].grad, parameter.grad = parameter.grad.float() / (scale or 1.0), None
        optimizer.step()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(masters[name])
    assert ours == losses and state["up.weight"].dtype == dtype


class Penalised(nn.Module):
    """Reads a weight in float32 as well, in training or in evaluation alone."""

    def __init__(self, in_training: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up, self.in_training = nn.Embedding(16, 16), nn.Linear(16, 16), in_training

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.up(self.embed(ids))
        if self.training == self.in_training:
            hidden = hidden + 1e-2 * self.up.weight.square().sum()
        return nn.functional.cross_entropy(hidden.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("in_training", [True, False])
def test_an_evaluation_in_other_dtypes_is_refused(in_training: bool) -> None:
    data = batch(4, 16)
    pm = autoptd.parallelize(
        Penalised(in_training), precision="bf16-mixed", backend="local", example_inputs=data
    )
    pm.step(*data)
    with pytest.raises(PlanError, match=r"eval_step: up\.weight: eval mode reads it as"):
        pm.eval_step(*data)
    pm.step(*data)
    pm.close()

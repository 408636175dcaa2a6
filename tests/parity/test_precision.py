"""`precision="bf16"` and what all precisions share: equal to the loop that one writes by hand; what the user sees and writes.

That its path of storage, use and gradients is right in all combinations: `covering.py`, in float64.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError, TraceError
from tests.parity.checks import verify_module
from tests.parity.models import batch, gpt

STEPS = 4
LR = 1e-2
# Within float16, whose largest number is 65504: the loss of this model is computed in it.
SCALE = 2.0**13


def by_hand(
    model: nn.Module, data: tuple[Tensor, ...], dtype: torch.dtype = torch.bfloat16, scale: float = 1.0
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and float32 masters after training: stages in 16 bits, a loss that is scaled, gradients that add up in float32,
    torch's AdamW.
    """
    narrow = copy.deepcopy(model).to(dtype)
    for parameter in narrow.parameters():
        parameter.grad_dtype = torch.float32
    masters = {name: nn.Parameter(x.detach().float().clone()) for name, x in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=LR, fused=True)
    losses = []
    for step in range(STEPS):
        loss = narrow(*(x.roll(step, 0) for x in data))[-1]
        (loss * scale).backward()
        losses.append(float(loss.detach()))
        for name, parameter in narrow.named_parameters():
            assert parameter.grad is not None
            masters[name].grad, parameter.grad = parameter.grad / scale, None
        optimizer.step()
        with torch.no_grad():
            for name, parameter in narrow.named_parameters():
                parameter.copy_(masters[name])
    return losses, {name: x.detach() for name, x in masters.items()}


def train(
    model: nn.Module, data: tuple[Tensor, ...], steps: int = STEPS, **keywords: Any
) -> tuple[autoptd.ParallelModel, torch.optim.Optimizer, list[Tensor]]:
    pm = autoptd.parallelize(
        model, **{"precision": "bf16", **keywords}, backend="local", timeout=30, example_inputs=data
    )
    optimizer, losses = pm.optimizer(torch.optim.AdamW, lr=LR), []
    for step in range(steps):
        losses.append(pm.step(*(x.roll(step, 0) for x in data)))
        optimizer.step()
        optimizer.zero_grad()
    return pm, optimizer, losses


@pytest.mark.one_in(1)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_to_the_bit_what_one_writes_by_hand(precision: str) -> None:
    dtype, scale = (torch.bfloat16, None) if precision == "bf16" else (torch.float16, SCALE)
    losses, masters = by_hand(gpt(2), batch(4), dtype, scale or 1.0)
    asked = {"precision": precision, "loss_scale": scale, "num_microbatches": 1, "fuse": False}
    pm, optimizer, ours = train(gpt(2), batch(4), **asked)
    assert [float(x) for x in ours] == losses
    state = pm.state_dict()
    for name, x in masters.items():
        assert state[name].dtype == torch.float32 and torch.equal(state[name], x), name
    assert pm.loss_scale == scale and (scale is None or optimizer.skipped == 0)
    pm.close()


@pytest.mark.parametrize("mesh", [{"d": 2, "zero": 1}, {"p": 2, "d": 4, "zero": 1, "dp_shard": 2}], ids=str)
def test_sharded_masters_are_those_of_whole_ones(mesh: dict[str, Any]) -> None:
    states = []
    for keywords in (mesh, {name: value for name, value in mesh.items() if name not in ("zero", "dp_shard")}):
        pm, _, _ = train(gpt(2), batch(8), **keywords)
        states.append(pm.state_dict())
        pm.close()
    for name, x in states[0].items():
        torch.testing.assert_close(x, states[1][name], rtol=1e-5, atol=1e-6)


def gradients_of_one_device(precision: str, data: tuple[Tensor, ...]) -> dict[str, Tensor]:
    dtype, scale = (torch.float16, SCALE) if precision == "fp16" else (torch.bfloat16, 1.0)
    model = gpt(2) if "mixed" in precision else gpt(2).to(dtype)
    with torch.autocast("cpu", dtype, enabled="mixed" in precision):
        loss = model(*data)[-1]
    (loss * scale).backward()
    return {name: x.grad.double() / scale for name, x in model.named_parameters()}


MESH = {"t": 2, "p": 2, "d": 2}


@pytest.mark.parametrize(
    ("precision", "mesh", "m"),
    [
        ("bf16-mixed", MESH, 4),
        ("bf16-mixed", {"t": 2, "d": 2, "zero": 1, "sequence_parallel": True}, 4),
        ("bf16", MESH, 4),
        ("bf16", MESH, 256),
        ("fp16", {**MESH, "loss_scale": SCALE}, 4),
    ],
)
def test_gradients_are_as_exact_as_those_of_one_device(precision: str, mesh: dict[str, Any], m: int) -> None:
    """The relative 2-norm of their error against float64, the median of 5 seeds: at most 1.1 times that of one device."""
    errors: dict[str, list[float]] = {"one device": [], "mesh": []}
    data = batch(max(16, 2 * m))
    asked = {**mesh, "precision": precision, "num_microbatches": m, "backend": "local"}
    pm = autoptd.parallelize(gpt(2), **asked, example_inputs=data)
    optimizer = pm.optimizer(torch.optim.SGD, lr=0.0)
    for seed in range(5):
        rolled = tuple(x.roll(seed, 1) for x in data)
        exact = gpt(2).double()
        exact(*rolled)[-1].backward()
        true = {name: x.grad for name, x in exact.named_parameters()}
        errors["one device"].append(error(gradients_of_one_device(precision, rolled), true))
        pm.step(*rolled)
        errors["mesh"].append(error(pm.gradients(), true))
        optimizer.zero_grad()
    pm.close()
    one, ours = (sorted(found)[2] for found in errors.values())
    assert ours <= 1.1 * one, errors


def error(found: dict[str, Any], true: dict[str, Any]) -> float:
    off = sum(float((found[name].double() - x).square().sum()) for name, x in true.items())
    return float((off / sum(float(x.square().sum()) for x in true.values())) ** 0.5)


@pytest.mark.parametrize("mesh", [{}, {"d": 2, "zero": 1}], ids=str)
def test_what_a_user_writes_to_a_parameter_is_stored(mesh: dict[str, Any]) -> None:
    """In place, or through `.data`; entries that were left alone keep all their bits."""
    pm, optimizer, _ = train(gpt(2), batch(4), steps=1, **mesh)
    before = pm.state_dict()
    first, second = "transformer.wpe.weight", "transformer.ln_f.weight"
    with torch.no_grad():
        for name, x in pm.named_parameters():
            assert x.dtype == torch.bfloat16
            if name == first:
                x[0].fill_(3.0)
            elif name == second:
                alias = x.data
                alias.mul_(2.0)
    optimizer.zero_grad()
    optimizer.step()
    after = pm.state_dict()
    expected = before[first].clone()
    expected[0] = 3.0
    assert torch.equal(after[first], expected)
    assert torch.equal(after[second], (2 * before[second].bfloat16()).float())
    pm.step(*batch(4))
    assert torch.equal(pm.state_dict()[first], expected)
    # The alias of a parameter's data lives on.
    known = pm.state_dict()[second]
    with torch.no_grad():
        alias.mul_(0.5)
    optimizer.zero_grad()
    optimizer.step()
    assert not torch.equal(pm.state_dict()[second], known)
    pm.close()


def test_loading_keeps_bits_that_bf16_has_not() -> None:
    pm, _, _ = train(gpt(2), batch(4), steps=0)
    torch.manual_seed(3)
    wanted = {name: torch.randn_like(x) for name, x in gpt(2).state_dict().items() if x.is_floating_point()}
    wanted["lm_head.weight"] = wanted["transformer.wte.weight"]
    pm.load_state_dict(wanted, strict=False)
    found = pm.state_dict()
    for name, x in wanted.items():
        assert torch.equal(found[name], x), name
    loss = pm.eval_step(*batch(4))
    assert loss.isfinite()
    pm.close()


def test_the_users_model_is_what_it_was() -> None:
    model = gpt(2)
    model.register_buffer("scale", torch.tensor(1.0))
    before = {name: (x, x.clone(), x.data_ptr()) for name, x in model.state_dict(keep_vars=True).items()}
    pm, _, _ = train(model, batch(4), steps=1)
    for name, x in model.state_dict(keep_vars=True).items():
        known, value, address = before[name]
        assert x is known and torch.equal(x, value) and x.data_ptr() == address
    assert {x.dtype for x in pm.state_dict().values()} == {torch.float32}
    pm.close()


def test_a_bf16_model_is_stored_in_float32_and_handed_back_in_bf16() -> None:
    pm, optimizer, _ = train(gpt(2).to(torch.bfloat16), batch(4), steps=1)
    assert {x.dtype for group in optimizer.param_groups for x in group["params"]} == {torch.float32}
    assert {x.dtype for x in pm.state_dict().values() if x.is_floating_point()} == {torch.bfloat16}
    pm.close()


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed", "bf16", "fp16"])
def test_verify_compares_the_dtype_that_is_computed_in(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setattr(verify_module, "CHECKS", ("own dtype",))
    mesh = {"t": 2, "d": 2, "zero": 1}
    report = autoptd.verify(gpt(2), **mesh, precision=precision, example_inputs=batch(4), steps=2)
    own = [found for found in report.differences if found.what == "own dtype"]
    assert report.passed and own and all(found.allowed < 0.1 for found in own)


class Steep(nn.Module):
    """Amplifies rounding: in bf16, one device's own loss is 1% off that in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 52), nn.Linear(52, 16, bias=False)
        self.gates = nn.ModuleList(nn.Linear(52, 17) for _ in range(3))
        self.downs = nn.ModuleList(nn.Linear(17, 52) for _ in range(3))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = 7 * self.embed(ids)
        for gate, down in zip(self.gates, self.downs, strict=True):
            x = x + down(gate(x).relu().square()).tanh()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def test_verify_allows_what_rounding_does_to_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = Steep()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.45)
    monkeypatch.setattr(verify_module, "CHECKS", ("own dtype",))
    report = autoptd.verify(model, t=4, precision="bf16", example_inputs=batch(2, 16), steps=2)
    own = report.worst("own dtype")
    # Off by more than a rounding, as one device's own loss is off that in float64.
    assert 2.0**-6 < own.size <= own.allowed < 0.2


def test_verify_knows_in_which_dtype_gradients_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "CHECKS", ("own dtype",))
    keywords: dict[str, Any] = {"d": 2, "zero": 1, "example_inputs": batch(4), "steps": 2}
    whole, rounded = (autoptd.verify(gpt(2), reduce_dtype=name, **keywords) for name in ("fp32", "bf16"))
    assert whole.worst("own dtype").allowed == 1e-5 < rounded.worst("own dtype").allowed == 2.0**-6
    assert rounded.worst("own dtype").size > whole.worst("own dtype").size


def test_gradients_are_there_on_either_side_of_a_master() -> None:
    """The parameter and what the optimizer steps show one gradient: what is set on either is used, by clipping too."""
    data = batch(4)
    pm = autoptd.parallelize(gpt(2), precision="bf16", backend="local", example_inputs=data)
    optimizer = pm.optimizer(torch.optim.SGD, lr=1.0)
    name = "transformer.ln_f.bias"
    before = pm.state_dict()[name]
    seen = dict(pm.named_parameters())[name]
    names = optimizer.state_dict()["param_groups"][0]["params"]
    master = optimizer.param_groups[0]["params"][names.index(name)]
    pm.step(*data)
    assert master.grad is seen.grad is not None
    master.grad = torch.ones_like(before)
    norm = pm.clip_grad_norm_(1e9)
    # A second step adds to what was set.
    pm.step(*data)
    added = pm.gradients()[name] - 1
    assert norm > before.numel() ** 0.5 and 0 < float(added.abs().max()) < 0.5
    optimizer.step()
    torch.testing.assert_close(pm.state_dict()[name], before - 1 - added)
    seen.grad = None
    optimizer.step()
    torch.testing.assert_close(pm.state_dict()[name], before - 1 - added)
    optimizer.zero_grad()
    assert master.grad is None and seen.grad is None
    pm.close()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "torch.bfloat16"), ("fp16", "torch.float16")])
def test_inputs_in_another_dtype_are_to_blame(precision: str, dtype: str) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    keywords: dict[str, Any] = {"precision": precision, "d": 2, "backend": "local"}
    with pytest.raises(TraceError, match=rf"tensors 0 of the call with \.to\({dtype}\).*'{precision}-mixed'"):
        autoptd.parallelize(Summed(model), **keywords, example_inputs=(torch.randn(8, 8),))


class Summed(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()  # type: ignore[no-any-return]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="float64"):
        autoptd.parallelize(gpt(2).double(), precision="bf16", backend="local", example_inputs=batch())
    with pytest.raises(PlanError, match="already add up in float32"):
        autoptd.parallelize(
            gpt(2),
            precision="bf16",
            accumulate_allreduce_grads_in_fp32=True,
            backend="local",
            example_inputs=batch(),
        )

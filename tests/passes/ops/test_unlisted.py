"""Operators without a row: a user's rule is checked, what nobody registered is probed, and both train as on one device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd import PlanError
from autoptd.ir.notes import note
from autoptd.passes.ops import unlisted
from tests.passes.graphs import Net, annotate, find


@torch.library.custom_op("unlisted::swish", mutates_args=())
def swish(x: Tensor, scale: Tensor) -> Tensor:
    """x * sigmoid(scale * x), a scale for every feature."""
    return x * torch.sigmoid(scale * x)


@swish.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


def keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def swish_backward(ctx: Any, gradient: Tensor) -> Any:
    x, scale = ctx.saved_tensors
    gate = torch.sigmoid(scale * x)
    slope = gradient * x * gate * (1 - gate)
    return gradient * gate + slope * scale, (slope * x).flatten(0, -2).sum(0)


swish.register_autograd(swish_backward, setup_context=keep)


@torch.library.custom_op("unlisted::bounded", mutates_args=())
def bounded(x: Tensor) -> Tensor:
    """x, with a bound on its gradient."""
    return x.clone()


@bounded.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


bounded.register_autograd(lambda ctx, gradient: gradient.clamp(-0.01, 0.01))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.up, self.down = nn.ModuleList(nn.Linear(16, 64) for _ in range(2)), nn.Linear(64, 16)
        self.scale, self.head = nn.Parameter(torch.rand(64)), nn.Linear(16, 12)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for up in self.up:
            x = x + self.down(swish(up(x), self.scale))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(unlisted, "REGISTERED", {})
    yield


def example() -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(0)
    return torch.randint(12, (8, 6), generator=source), torch.randint(12, (8, 6), generator=source)


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    "rule", ["", "... d, d -> ... d", pytest.param("b s d, d -> b s d", marks=pytest.mark.thorough)]
)
def test_a_custom_operator_trains_as_on_one_device(rule: str) -> None:
    if rule:
        autoptd.register_rule("unlisted::swish", rule)
    torch.manual_seed(0)
    autoptd.verify(Model(), t=2, p=2, d=2, example_inputs=example(), steps=2)


def test_it_is_split_and_said_to_be_probed(tmp_path: Any) -> None:
    program = autoptd.compile(Model(), t=2, d=2, example_inputs=example())
    assert program.costs.redundant_gemm_flops == 0 and program.fallbacks == ()
    source = program.sources["stage_0.py"]
    assert "torch.ops.unlisted.swish" in source and "probed: split by d2: 64 = 2 x 32" in source
    assert program.unlisted == ("unlisted.swish in the model: probed: may be split by d0, d1, d2",)
    assert "probed: split by d2" in program.explain("")
    program.save(tmp_path)
    assert autoptd.Program.load(tmp_path) == program


def test_the_dump_says_so_too() -> None:
    graph, *_ = annotate(Model(), *example(), pieces=2)
    from autoptd.passes import describe

    assert "probed: may be split by d0, d1, d2" in describe(graph)
    assert note(find(graph, "unlisted.swish")).layout.batch.dim == 0


WRONG = {
    "b s d, s -> b s d": "has the sizes",
    "b s d -> b s d": "reads 2 tensors, and its rule .* names 1",
    "b d, d -> b d": "a tensor of 3 dims",
    "... d, e -> ... d": "cut along d .dim 2 of operand 0., its result has another shape",
    "... d, d -> ...": "a tensor of 3 dims|cut along|other",
    "b s d, d -> d s b": "sizes",
}


@pytest.mark.parametrize("rule", WRONG)
def test_a_rule_that_does_not_hold(rule: str) -> None:
    autoptd.register_rule("unlisted::swish", rule)
    with pytest.raises(PlanError, match=WRONG[rule]) as caught:
        annotate(Model(), *example(), t=2)
    assert "unlisted.swish" in caught.value.site


@torch.library.custom_op("unlisted::centre", mutates_args=())
def centre(x: Tensor) -> Tensor:
    """Every row less the mean of all rows in backward alone: its values can be cut, its gradients cannot."""
    return x.clone()


centre.register_fake(torch.empty_like)
centre.register_autograd(lambda ctx, gradient: gradient - gradient.mean(0))


def test_a_rule_whose_gradient_does_not_hold() -> None:
    autoptd.register_rule("unlisted::centre", "b d -> b d")
    model = Net(lambda self, x: F.linear(centre(F.linear(x, self.w)), self.w).sum(), w=(8, 8))
    with pytest.raises(PlanError, match=r"cut along b .*, the gradient of operand 0 differs"):
        annotate(model, torch.randn(6, 8), t=2)
    autoptd.register_rule("unlisted::centre", "b* d -> b* d")
    graph, _, _ = annotate(model, torch.randn(6, 8), t=2)
    assert note(find(graph, "unlisted.centre")).rule == "registered and probed: may be split by d"


@pytest.mark.parametrize(
    ("op", "rule", "fact"),
    [
        ("unlisted::nothing", "b -> b", "torch has no operator"),
        ("no operator", "b -> b", "torch has no operator"),
        ("aten::linear", "b i, o i -> b o", "already has a tested rule"),
        ("aten::gelu", "b -> b", "already has a tested rule"),
        ("unlisted::swish", "b s d, d", "invalid rule"),
        ("unlisted::swish", "b ... d, d -> b ... d", "invalid rule"),
        ("unlisted::swish", "b s d, d -> b-s d", "invalid rule"),
        ("unlisted::swish", "b s s, s -> b s s", "a letter twice"),
    ],
)
def test_what_cannot_be_registered(op: str, rule: str, fact: str) -> None:
    with pytest.raises(PlanError, match=fact):
        autoptd.register_rule(op, rule)


def test_a_backward_that_is_not_linear_sees_whole_gradients_only() -> None:
    """tp gives it no partial sum, and microbatches, which would, are refused where it reads parameters."""
    model = Net(lambda self, x: F.linear(x, bounded(self.w)).square().sum(), w=(8, 16))
    x = torch.randn(8, 16)
    graph, *_ = annotate(model, x, t=2)
    assert note(find(graph, "unlisted.bounded")).layout["tp"].kind == "I"
    autoptd.verify(model, t=2, num_microbatches=1, example_inputs=(x,), steps=2)
    with pytest.raises(PlanError, match="not linear"):
        annotate(model, x, pieces=2)

"""Fused operators in the graph: found in every spelling, equal to what they stand for, or refused in words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from autoptd import trace
from autoptd.ir import markers
from autoptd.ir.buffers import Buffers
from autoptd.ir.fusion import WIDEST, Fusion
from autoptd.ir.notes import copy_graph, note, ops, output
from autoptd.options import make_options
from autoptd.passes import find_fusions, localize, substitute
from autoptd.passes.context import Context
from autoptd.passes.fusion import losses
from autoptd.passes.localize import check_local
from autoptd.runtime.ops.fused import Fused

B, S, H, HEADS = 2, 6, 8, 2


class Spelled(nn.Module):
    """A function of tensors and its parameters."""

    def __init__(self, function: Callable[..., Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.function = function
        self.own = nn.ParameterDict({name: nn.Parameter(one) for name, one in parameters.items()})

    def forward(self, *tensors: Tensor) -> Tensor:
        out = self.function(*tensors, **dict(self.own.items()))
        return out if out.dim() == 0 else (out * torch.arange(out.numel()).view(out.shape).cos()).sum()


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def context(captured: trace.Captured, backend: str | bool = "eager") -> Context:
    """What passes are told of a model on one rank."""
    return Context(make_options(fuse=backend), traced_rows=B, rows=B, buffers=Buffers(captured.buffers))


def fused(model: Spelled, *tensors: Tensor, backend: str = "eager") -> list[Fusion]:
    """What is fused in a model; its values and gradients must stay what they are."""
    captured = trace.capture(model, tensors, {}, None)
    graph = captured.graph
    expected = run(copy_graph(graph), captured, tensors)
    ctx = context(captured, backend)
    for each in (find_fusions, localize, substitute):
        graph = each(graph, ctx)
        if each is localize:
            check_local(graph)
    graph.lint()
    found = run(graph, captured, tensors)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-12)
    return list(ctx.found.fusions)


def run(graph: Graph, captured: trace.Captured, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """The loss of a graph at t=1, and the gradients of parameters and inputs."""
    given = iter([one.clone().requires_grad_(one.is_floating_point()) for one in tensors])
    leaves: list[Tensor] = []
    known: dict[Node, Any] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            record = note(node)
            made = {"param": captured.parameters, "buffer": captured.buffers}.get(record.kind)
            known[node] = made[record.name].detach().clone() if made else next(given)
            if record.kind == "param":
                known[node].requires_grad_()
            leaves += [known[node]] if known[node].requires_grad else []
        elif node.op == "call_function":
            known[node] = call(node, *map_arg((node.args, node.kwargs), known.__getitem__))
    loss = known[output(graph).args[0]]
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def call(node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if node.target is markers.FUSED["linear_cross_entropy"]:
        x, targets, weight, bias = args
        kept = {
            key: kwargs[key] for key in ("reduction", "ignore_index", "label_smoothing", "chunk", "dtype")
        }
        return Fused().linear_cross_entropy(x, weight, targets, bias=bias, **kept)
    if node.target in markers.MARKERS:
        return getattr(Fused(), node.target.__name__)(*args, **kwargs)  # type: ignore[union-attr]
    return node.target(*args, **kwargs)  # type: ignore[operator]


def names(fusions: list[Fusion]) -> list[str]:
    return [one.op for one in fusions if not one.why for _ in range(one.times)]


def reasons(fusions: list[Fusion]) -> list[str]:
    return [one.why for one in fusions if one.why]


def cast(x: Tensor) -> Tensor:
    return x.to(torch.float64)


NORMS: dict[str, Callable[..., Tensor]] = {
    "llama": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "weight last": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "squared by itself": lambda x, w: (x * (x * x).mean(-1, True).add(1e-6).rsqrt()) * w,
    "square": lambda x, w: x * (1e-6 + x.square().mean(dim=[-1], keepdim=True)) ** -0.5 * w,
    "division": lambda x, w: w * (x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "reciprocal": lambda x, w: w * (x * (1.0 / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))),
    "gemma": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w),
    "torch": lambda x, w: F.rms_norm(x, (H,), w, 1e-6),
}


@pytest.mark.parametrize("how", NORMS)
def test_rms_norms(how: str) -> None:
    assert names(fused(Spelled(NORMS[how], w=random(H)), random(B, S, H))) == ["rms_norm"]


def test_a_norm_that_gives_less_than_its_weight_stays() -> None:
    """bfloat16 from a float32 weight, where our operator would give float32: attention behind it would meet both."""
    found = fused(Spelled(NORMS["torch"], w=random(H).float()), random(B, S, H).bfloat16())
    assert names(found) == [] and reasons(found) == ["gives torch.bfloat16, narrower than its weight"]


def layer_normed(x: Tensor, w: Tensor) -> Tensor:
    return F.layer_norm(x, (H,), w, None, 1e-5)


@pytest.mark.parametrize("norm", [NORMS["llama"], layer_normed])
@pytest.mark.parametrize(
    "how, joined",
    [
        (lambda a, b, norm: (total := a + b) + norm(total), True),
        (lambda a, b, norm: norm(a + b), True),
        (lambda a, b, norm: norm(total := a + b) + norm(total), True),  # the first of the two
        (lambda a, b, norm: (lambda total: total + (total.exp() + norm(total)))(a + b), False),  # read before
        (lambda a, b, norm: norm(a + b[:, :1]), False),
        (lambda a, b, norm: norm(torch.add(a, b, alpha=2)), False),
    ],
)
def test_norms_of_sums(how: Callable[..., Tensor], joined: bool, norm: Callable[..., Tensor]) -> None:
    model = Spelled(lambda a, b, w: how(a, b, lambda x: norm(x, w)), w=random(H))
    a, b = random(B, S, H), random(B, S, H).cos()
    fusions = fused(model, a, b, backend="triton")
    assert all(
        has_sum(model, a, b, backend) == (joined and backend == "triton") for backend in ("eager", "triton")
    )
    assert ("layer_norm" in names(fusions)) == (joined and norm is layer_normed)


def test_rows_wider_than_a_program_holds_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are fused by torch's operators, which make no sum of their own."""
    model = Spelled(lambda a, b, w: NORMS["llama"](a + b, w), w=random(H))
    a, b = random(B, S, H), random(B, S, H).cos()
    assert [one.form for one in fused(model, a, b, backend="triton")] == [""] and has_sum(
        model, a, b, "triton"
    )
    monkeypatch.setitem(WIDEST, "rms_norm", H - 1)
    (told,) = fused(model, a, b, backend="triton")
    assert told.op == "rms_norm" and not told.why and "7 elements at most, not 8" in told.form
    assert not has_sum(model, a, b, "triton") and fused(model, a, b)[0].form == ""


def has_sum(model: Spelled, a: Tensor, b: Tensor, backend: str) -> bool:
    """Whether a norm makes a sum itself."""
    captured = trace.capture(model, (a, b), {}, None)
    graph, ctx = captured.graph, context(captured, backend)
    for each in (find_fusions, localize, substitute):
        graph = each(graph, ctx)
    return any("residual" in node.kwargs for node in ops(graph))


def test_an_rms_norm_without_weight() -> None:
    model = Spelled(
        lambda x, w: (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) @ w, w=random(H, H)
    )
    assert names(fused(model, random(B, S, H))) == ["rms_norm"]


LAYER_NORMS: dict[str, Callable[..., Tensor]] = {
    "var": lambda x, w, b: w * (centred(x) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)) + b,
    "root": lambda x, w, b: w * (centred(x) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)) + b,
    "squares": lambda x, w, b: b + over_root(centred(x)) * w,
}


def over_root(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def centred(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


@pytest.mark.parametrize("how", LAYER_NORMS)
def test_layer_norms(how: str) -> None:
    assert names(fused(Spelled(LAYER_NORMS[how], w=random(H), b=random(H)), random(B, S, H))) == [
        "layer_norm"
    ]


NO_NORMS: dict[str, Callable[..., Tensor]] = {
    "another x": lambda x, w: w * (x.sin() * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)),
    "another dim": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)),
    "two dims": lambda x, w: w * (x * torch.rsqrt(x.pow(2).mean([1, 2], keepdim=True) + 1e-6)),
    "cube": lambda x, w: w * (x * torch.rsqrt(x.abs().pow(3).mean(-1, keepdim=True) + 1e-6)),
    "sum": lambda x, w: w * (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)),
    "unbiased": lambda x, w: w * centred(x) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("how", NO_NORMS)
def test_what_is_no_norm(how: str) -> None:
    assert "norm" not in " ".join(names(fused(Spelled(NO_NORMS[how], w=random(H)), random(B, S, H))))


def test_a_mean_that_is_read_elsewhere() -> None:
    def spelled(x: Tensor, w: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return w * (x * torch.rsqrt(mean + 1e-6)) + mean

    fusions = fused(Spelled(spelled, w=random(H)), random(B, S, H))
    assert names(fusions) == [] and "mean is also read by add" in reasons(fusions)


ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "new gelu": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
        "gelu",
    ),
    "fast gelu": (
        lambda x: 0.5 * x * (1.0 + torch.tanh(x * math.sqrt(2 / math.pi) * (1.0 + 0.044715 * x * x))),
        "gelu",
    ),
    "erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
    "swish": (lambda x: x * torch.sigmoid(x), "silu"),
    "x over": (lambda x: x / (1 + torch.exp(-x)), "silu"),
}


@pytest.mark.parametrize("how", ACTIVATIONS)
def test_activations(how: str) -> None:
    function, op = ACTIVATIONS[how]
    fusions = fused(Spelled(lambda x, w: function(x @ w), w=random(H, H)), random(B, S, H))
    assert names(fusions) == [op]


def test_an_activation_with_other_constants() -> None:
    def bloom(x: Tensor, w: Tensor) -> Tensor:
        x = x @ w
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    fusions = fused(Spelled(bloom, w=random(H, H)), random(B, S, H))
    assert names(fusions) == [] and any(
        "differ from those of gelu_tanh by" in why for why in reasons(fusions)
    )


def test_no_activation() -> None:
    quick = Spelled(lambda x, w: (x @ w) * torch.sigmoid(1.702 * (x @ w)), w=random(H, H))
    assert names(fused(quick, random(B, S, H))) == []


@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize(
    ("act", "op"),
    [
        (F.silu, "swiglu"),
        (lambda x: x * x.sigmoid(), "swiglu"),
        (F.gelu, "geglu"),
        (lambda x: F.gelu(x, approximate="tanh"), "geglu"),
    ],
)
def test_gated_products(act: Callable[[Tensor], Tensor], op: str, flipped: bool) -> None:
    def spelled(x: Tensor, w: Tensor) -> Tensor:
        gate, up = (x @ w).chunk(2, -1)
        return up * act(gate) if flipped else act(gate) * up

    assert names(fused(Spelled(spelled, w=random(H, 2 * H)), random(B, S, H))) == [op]


def halves(x: Tensor) -> Tensor:
    one, two = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-two, one), dim=-1)


def chunks(x: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), dim=-1)


def pairs(x: Tensor) -> Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


@pytest.mark.parametrize("turn", [halves, chunks, pairs])
def test_rotary(turn: Callable[[Tensor], Tensor]) -> None:
    def spelled(x: Tensor, w: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(S).double(), torch.ones(H, dtype=torch.float64))
        x = x @ w
        return x * angles.cos() + turn(x) * angles.sin()

    assert names(fused(Spelled(spelled, w=random(H, H)), random(B, S, H))) == ["rotary"]


ANGLES: dict[
    str, Callable[[Tensor], tuple[Any, Any]]
] = {  # of [S, H]: cosines and sines that the kernel does not take
    "of two shapes": lambda a: (a.cos(), a.sin()[None]),
    "one a position": lambda a: (a[:, :1].cos(), a[:, :1].sin()),
    "one": lambda a: (a[1, 1].cos(), a[1, 1].sin()),
    "numbers": lambda a: (0.8, 0.6),
    "a number and a tensor": lambda a: (0.8, a.sin()),
}


@pytest.mark.parametrize("how", ANGLES)
def test_angles_that_are_not_tables(how: str) -> None:
    def spelled(x: Tensor, w: Tensor) -> Tensor:
        cos, sin = ANGLES[how](torch.outer(torch.arange(S).double(), torch.ones(H, dtype=torch.float64)))
        x = x @ w
        return x * cos + halves(x) * sin

    assert names(fused(Spelled(spelled, w=random(H, H)), random(B, S, H))) == []


def test_what_is_no_rotation() -> None:
    def spelled(x: Tensor, w: Tensor) -> Tensor:
        x = x @ w
        one, two = x.chunk(2, -1)
        return x * 0.5 * x.detach().cos() + torch.cat((two, -one), -1) * x.detach().sin()

    assert names(fused(Spelled(spelled, w=random(H, H)), random(B, S, H))) == []


def later() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).triu(1)


def additive() -> Tensor:
    return torch.full((S, S), torch.finfo(torch.float32).min, dtype=torch.float64).triu(1)


MASKS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {  # of scores, and whether it is causal
    "none": (lambda x: x, False),
    "fill": (lambda x: x.masked_fill(later(), float("-inf")), True),
    "tril": (lambda x: x.masked_fill(torch.ones(S, S).tril() == 0, float("-inf")), True),
    "where": (lambda x: torch.where(~later(), x, torch.finfo(torch.float32).min), True),
    "where hidden": (lambda x: torch.where(later(), torch.full([], -1e30, dtype=torch.float64), x), True),
    "added": (lambda x: x + additive(), True),
    "added, four dims": (lambda x: x + additive()[None, None].expand(B, 1, S, S), True),
    "indices": (lambda x: x + torch.where(torch.arange(S) <= torch.arange(S)[:, None], 0.0, -1e30), True),
    "one off": (lambda x: x + torch.full((S, S), -1e30, dtype=torch.float64).triu(2), False),
    "weak": (lambda x: x + torch.full((S, S), -100.0, dtype=torch.float64).triu(1), False),
}


def attend(
    mask: Callable[[Tensor], Tensor], scale: Callable[[Tensor, Tensor], Tensor]
) -> Callable[..., Tensor]:
    def spelled(x: Tensor, w: Tensor) -> Tensor:
        q, k, v = ((x @ one).view(B, S, HEADS, -1).transpose(1, 2) for one in w.chunk(3, -1))
        return mask(scale(q, k)).softmax(-1) @ v

    return spelled


def after(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])


@pytest.mark.parametrize("how", MASKS)
def test_masks(how: str) -> None:
    mask, is_causal = MASKS[how]
    model = Spelled(attend(mask, after), w=random(H, 3 * H))
    assert names(fused(model, random(B, S, H))) == ["attention"]
    assert is_causal_in(model) is is_causal


def is_causal_in(model: Spelled) -> bool:
    captured = trace.capture(model, (random(B, S, H),), {}, None)
    ctx = context(captured)
    find_fusions(captured.graph, ctx)
    (group,) = ctx.found.groups.chosen
    return bool(group.keywords["causal"])


NO_MASKS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {  # not for torch's operator, and why
    "adds 1": (lambda x: x + later(), "its scores are a aten.add"),
    "of keys alone": (lambda x: x + torch.arange(S).double(), "its mask may hide all keys of a query"),
    "hides all keys": (
        lambda x: x + -1e30 * (torch.arange(S) == 2).double()[:, None],
        "its mask may hide all keys of a query",
    ),
    "is data": (lambda x: x + x.detach()[:, :1], "its mask may hide all keys of a query"),
    "rounds": (lambda x: torch.div(x, 0.25, rounding_mode="trunc") + additive(), "its scores are a aten.div"),
    "negative scale": (lambda x: (x * -1.0).masked_fill(later(), float("-inf")), "its scale is -0.5"),
}


@pytest.mark.parametrize("how", NO_MASKS)
def test_what_torch_would_get_wrong(how: str) -> None:
    mask, why = NO_MASKS[how]
    fusions = fused(Spelled(attend(mask, after), w=random(H, 3 * H)), random(B, S, H))
    assert "attention" not in names(fusions) and why in reasons(fusions)


def test_a_mask_with_more_rows_than_its_scores() -> None:
    def spelled(x: Tensor, w: Tensor) -> Tensor:
        return (((x @ w) @ x.mT)[:1] + torch.ones(B, S, S, dtype=torch.float64)).softmax(-1)

    assert names(fused(Spelled(spelled, w=random(H, H)), random(B, S, H))) == []


SCALES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "no scale": lambda q, k: q @ k.transpose(-2, -1),
    "product": lambda q, k: torch.matmul(q, k.mT) * 0.3,
    "queries": lambda q, k: (q * 0.3) @ k.transpose(2, 3),
    "tensor": lambda q, k: q @ k.transpose(-1, -2) / torch.full([], 2.0, dtype=torch.float64),
    "both": lambda q, k: (q @ k.transpose(-1, -2) / 2.0) * 0.7,
    "permuted": lambda q, k: q @ k.transpose(1, 2).permute(0, 2, 3, 1) * 0.3,
}


@pytest.mark.parametrize("how", SCALES)
def test_scales(how: str) -> None:
    model = Spelled(attend(MASKS["fill"][0], SCALES[how]), w=random(H, 3 * H))
    assert names(fused(model, random(B, S, H))) == ["attention"]


def handed(x: Tensor, mask: Tensor) -> Tensor:
    q = x.view(B, S, HEADS, H // HEADS).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


@pytest.mark.parametrize(
    "mask, is_causal",
    [
        (lambda: ~later(), True),
        (lambda: additive(), True),
        (lambda: (~later()).expand(B, 1, S, S), True),
        (lambda: torch.ones(S, S, dtype=torch.bool).tril(1), False),
        (lambda: torch.ones(S, S, dtype=torch.bool), False),
    ],
)
def test_a_causal_mask_handed_to_torch_is_not_read(mask: Callable[[], Tensor], is_causal: bool) -> None:
    model = Spelled(lambda x: handed(x, mask()))
    assert names(fused(model, random(B, S, H))) == ["attention"] * is_causal


def test_probabilities_that_are_read_elsewhere() -> None:
    def spelled(x: Tensor, w: Tensor) -> Tensor:
        scores = (x @ w) @ x.transpose(-2, -1) * 0.5
        p = scores.masked_fill(later(), float("-inf")).softmax(-1)
        return (p @ x).sum() + p.square().sum()

    fusions = fused(Spelled(spelled, w=random(H, H)), random(B, S, H))
    assert names(fusions) == ["masked_softmax"]


def test_a_mask_with_a_gradient() -> None:
    def spelled(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        q, k, v = ((x @ one).view(B, S, HEADS, -1).transpose(1, 2) for one in w.chunk(3, -1))
        return (q @ k.mT + bias).softmax(-1) @ v

    fusions = fused(Spelled(spelled, w=random(H, 3 * H), bias=random(S, S)), random(B, S, H))
    assert names(fusions) == [] and "its mask needs a gradient" in reasons(fusions)


def test_two_masks() -> None:
    model = Spelled(
        attend(lambda x: (x + 0.1 * additive().cos()).masked_fill(later(), -1e30), after), w=random(H, 3 * H)
    )
    fusions = fused(model, random(B, S, H))
    assert names(fusions) == [] and "it has several masks" in reasons(fusions)


@pytest.mark.parametrize("views", ["flat", "shifted"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [None, random(11)])
def test_the_loss_of_a_head(views: str, reduction: str, bias: Tensor | None) -> None:
    def spelled(x: Tensor, targets: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        logits = F.linear(x, w, b)
        if views == "shifted":
            logits, targets = logits[:, :-1].contiguous(), targets[:, 1:].contiguous()
        return F.cross_entropy(logits.view(-1, 11), targets.reshape(-1), reduction=reduction)

    targets = torch.arange(B * S).view(B, S) % 11
    targets[0, 2] = -100
    parameters = {"w": random(11, H)} | ({} if bias is None else {"b": bias})
    fusions = fused(Spelled(spelled, **parameters), random(B, S, H), targets)
    assert names(fusions) == ["linear_cross_entropy"]


def test_targets_that_are_probabilities() -> None:
    model = Spelled(lambda x, t, w: F.cross_entropy(F.linear(x, w).flatten(0, 1), t), w=random(11, H))
    fusions = fused(model, random(B, S, H), random(B * S, 11).softmax(-1))
    assert names(fusions) == []


def test_few_tokens_keep_their_logits() -> None:
    model = Spelled(
        lambda x, t, w: F.cross_entropy(F.linear(x, w).flatten(0, 1), t.flatten()), w=random(11, 64)
    )
    fusions = fused(model, random(B, S, 64), torch.zeros(B, S, dtype=torch.long))
    assert names(fusions) == [] and "12 tokens do not exceed the width 64" in reasons(fusions)[0]


def test_small_logits_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MIN_LOGITS_BYTES", 8 << 20)  # not that of the tests
    model = Spelled(
        lambda x, t, w: F.cross_entropy(F.linear(x, w).flatten(0, 1), t.flatten()), w=random(11, H)
    )
    fusions = fused(model, random(B, S, H), torch.zeros(B, S, dtype=torch.long))
    assert names(fusions) == [] and "MB: a loss in chunks is slower below 8.4 MB" in reasons(fusions)[0]


def test_logits_that_are_read_elsewhere() -> None:
    def spelled(x: Tensor, targets: Tensor, w: Tensor) -> Tensor:
        logits = F.linear(x, w)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + logits.square().mean()

    fusions = fused(Spelled(spelled, w=random(11, H)), random(B, S, H), torch.zeros(B, S, dtype=torch.long))
    assert names(fusions) == [] and any("is also read by" in why for why in reasons(fusions))


def test_a_bias_before_gelu_leaves_its_gemm_for_triton() -> None:
    model = Spelled(lambda x, w, b: F.gelu(F.linear(x, w, b)), w=random(4 * H, H), b=random(4 * H))
    assert names(fused(model, random(B, S, H))) == []
    assert names(fused(model, random(B, S, H), backend="triton")) == ["bias_gelu"]


def test_nothing_is_fused_without_a_backend() -> None:
    captured = trace.capture(Spelled(NORMS["llama"], w=random(H)), (random(B, S, H),), {}, None)
    ctx = context(captured, False)
    find_fusions(captured.graph, ctx)
    assert ctx.found.groups.chosen == ()


def test_a_group_that_a_stage_boundary_cuts() -> None:
    captured = trace.capture(Spelled(NORMS["llama"], w=random(H)), (random(B, S, H),), {}, None)
    graph = captured.graph
    ctx = context(captured)
    find_fusions(graph, ctx)
    for i, node in enumerate(ops(graph)):
        note(node).stages = (int(i > 2),)
    localize(graph, ctx)
    graph = substitute(graph, ctx)
    assert reasons(list(ctx.found.fusions)) == ["a stage boundary cuts it"]
    assert not any(node.target in markers.MARKERS for node in ops(graph))

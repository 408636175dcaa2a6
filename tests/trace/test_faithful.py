"""What a graph of operators would lose without a word is kept, or refused with the site and a remedy."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autoptd import trace
from autoptd.errors import AutoptdError, PlanError, TraceError
from autoptd.ir.notes import note, op_name, ops, value
from autoptd.trace import faithful
from tests.trace.test_capture import Net, captured, names

Tensor = torch.Tensor
X = torch.randn(4, 6)


def gradients_of(forward: Callable[..., Any]) -> None:
    """Capture, then compare loss and gradients exactly."""
    torch.manual_seed(0)
    captured(Net(forward), X)


# Gradients that stop where the user says.


def under_no_grad(self: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = self.first(x).abs().mean(-1, keepdim=True)
    return (self.second(x) * scale).mean()


def nested_grad_modes(self: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        outside = self.first(x)
        with torch.enable_grad():
            inside = self.second(x)
        both = outside * inside
    return (both + inside).mean()


def two_results_of_no_grad(self: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = self.first(x)
        low, high = h.amin(-1, keepdim=True), h.amax(-1, keepdim=True)
    return ((self.first(x) - low) / (high - low)).mean()


def detached(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    return (h.detach() * self.second(h)).mean()


@torch.no_grad()
def rotary(positions: int) -> Tensor:
    return torch.outer(torch.arange(positions), 1.0 / 10 ** torch.arange(0, 1, 1 / 6)).cos()[None, 1]


@pytest.mark.parametrize(
    "forward",
    [
        under_no_grad,
        nested_grad_modes,
        two_results_of_no_grad,
        detached,
        lambda self, x: (self.first(x) * rotary(4)).mean(),
        lambda self, x: self.first(x).mean() + self.second(x).mean().detach(),
    ],
)
def test_gradients_stop_where_they_stop(forward: Callable[..., Any]) -> None:
    gradients_of(forward)


def test_a_lost_no_grad_region_would_be_found() -> None:
    """`compare` is the last guard: without the detach it must complain."""
    model = Net(under_no_grad)
    found = trace.capture(model, (X,), {}, None)
    cut = next(node for node in ops(found.graph) if op_name(node) == "aten.detach")
    cut.replace_all_uses_with(cut.args[0])  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="gradient of first"):
        trace.compare(model, None, found.graph, found.buffers, (X,), {})


def test_a_wrong_loss_would_be_found() -> None:
    model = Net(lambda self, x: self.first(x).square().mean())
    found = trace.capture(model, (X,), {}, None)
    node = next(node for node in ops(found.graph) if op_name(node) == "aten.square")
    node.target = torch.ops.aten.abs.default
    with pytest.raises(TraceError, match="loss"):
        trace.compare(model, None, found.graph, found.buffers, (X,), {})


# In-place operators.


def adds_in_place(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    h += self.second(x)
    h.mul_(2.0).clamp_(min=-1.0)
    return h.mean()


def fills_in_place(self: Net, x: Tensor) -> Tensor:
    scores = self.first(x) * 1.0
    scores.masked_fill_(x > 0, 0.0)
    other = scores + 1
    scores.add_(other)
    return (scores * other).mean()


def relu_in_place(self: Net, x: Tensor) -> Tensor:
    return F.relu(self.first(x), inplace=True).mean()


def grown_zeros(self: Net, x: Tensor) -> Tensor:
    total = torch.zeros(4, 6)
    for layer in (self.first, self.second):
        total += layer(x)
    return total.square().mean()


def writes_a_row(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    h[0] = 0.0
    return h.square().mean()


def shifts(self: Net, x: Tensor) -> Tensor:
    h, other = torch.zeros(x.shape), self.first(x)
    h[:, 1:] = other[:, :-1].clone()
    h[..., 0] = torch.tensor(3.0)
    h.masked_fill_(h > 1, 0.5)
    return (h * other).sum()


def writes_a_slice_again(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    part = h[:, 2:][1]
    part.mul_(3.0)
    part += 1
    total = part.sum()
    h[:, :4].mul_(2.0)
    return (h * total).sum()


def adds_to_a_row(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    h[1] += 1.0
    h[2, :3] += h[3, 3:]
    return h.square().sum()


def writes_what_was_copied(self: Net, x: Tensor) -> Tensor:
    h, other = self.first(x), self.second(x)
    h[:] = other
    h.mul_(2.0)
    return (h * other).sum()


def divides_what_topk_gives(self: Net, x: Tensor) -> Tensor:
    top, _ = self.first(x).exp().topk(2, -1)
    top /= top.sum(-1, keepdim=True)
    return top.square().sum()


def raises_to_powers(self: Net, x: Tensor) -> Tensor:
    """Operators whose functional form has another overload, or its arguments in another order."""
    h = self.first(x).abs() + 1
    h.pow_(2).pow_(self.second(x))
    h = (h * 1).ldexp_(torch.ones(6)) + (h + 1).polygamma_(1)
    whole = torch.full((4, 6), 7.0).floor_divide_(x.abs() + 1)
    turned = (h * 1).transpose_(0, 1)
    wide = h.double().float_power_(2).float_power_(h.double())
    return (h * whole + turned.t()).mean() + wide.mean()


def fills_diagonals(self: Net, x: Tensor) -> Tensor:
    h, cube = self.first(x), self.second(x)[:3, :3].expand(3, 3, 3).clone()
    # Wide, tall, tall without a rest of rows, square; of whole numbers; in three dims.
    total = (h * 1).fill_diagonal_(3.0).square().mean() + h.t().clone().fill_diagonal_(-1).square().mean()
    total = total + torch.cat([h, h]).fill_diagonal_(0.5, wrap=True).square().mean()
    total = total + torch.cat([h, h])[:, :3].clone().fill_diagonal_(0.5, True).square().mean()
    total = total + (h.t() @ h).fill_diagonal_(0).square().mean()
    total = total + (h * (h > 0).long().fill_diagonal_(1.7)).mean()
    return total + cube.fill_diagonal_(2.0).square().mean()


def writes_views(self: Net, x: Tensor) -> Tensor:
    """Of what nothing reads but they; of a view of a view, a row, a mask that is cast."""
    flat, turned, pairs = self.first(x).view(-1), self.second(x).t(), self.first(x).view(-1, 2).view(2, -1, 2)
    flat.mul_(2.0)
    turned += 1
    pairs[1] *= 3.0
    drop = (x > 0).to(x.dtype).view(-1, 1)
    drop /= drop.mean()
    return flat.square().mean() + turned.square().mean() + pairs.square().mean() + (drop * x.sum()).mean()


IN_PLACE = [
    raises_to_powers,
    writes_views,
    fills_diagonals,
    adds_in_place,
    fills_in_place,
    relu_in_place,
    grown_zeros,
    writes_a_row,
    shifts,
    writes_a_slice_again,
]
IN_PLACE += [adds_to_a_row, writes_what_was_copied, divides_what_topk_gives]


@pytest.mark.parametrize("forward", IN_PLACE)
def test_in_place_operators_become_functional(forward: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    found = captured(Net(forward), X)
    assert not [name for name in names(found.graph) if name.endswith("_")]


def writes_through_a_view(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    h.view(-1).mul_(2.0)
    return h.mean()


def writes_under_a_second_view(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    flat, turned = h.view(-1), h.t()
    flat.mul_(2.0)
    return (flat * turned.flatten()).mean()


def writes_between_views(self: Net, x: Tensor) -> Tensor:
    flat = self.first(x).view(-1)
    pairs = flat.view(-1, 2)
    pairs.mul_(2.0)
    return flat.square().mean()


def writes_a_view_of_an_argument(self: Net, x: Tensor) -> Tensor:
    flat = x.view(-1)
    flat.mul_(2.0)
    return self.first(flat.view(x.shape)).mean()


def writes_under_a_view(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    row = h[0]
    h.mul_(2.0)
    return (row * h).mean()


def writes_under_a_view_of_a_view(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    entry = h.view(-1)[0]
    h[0] = 2.0
    return (entry * h).mean()


def writes_under_a_written_view(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    part = h[:, 2:]
    part.mul_(3.0)
    h[:, :4].mul_(2.0)
    return part.sum()


def writes_every_other(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    h[:, ::2] = 0.0
    return h.mean()


def writes_an_argument(self: Net, x: Tensor) -> Tensor:
    x.mul_(2.0)
    return self.first(x).mean()


def writes_a_parameter(self: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        self.first.weight.mul_(0.9)
    return self.first(x).mean()


@pytest.mark.parametrize(
    ("forward", "fact"),
    [
        (writes_through_a_view, "through a view"),
        (writes_under_a_second_view, "through a view"),
        (writes_between_views, "through a view"),
        (writes_a_view_of_an_argument, "through a view"),
        (writes_under_a_view, "through a view"),
        (writes_under_a_view_of_a_view, "through a view"),
        (writes_under_a_written_view, "through a view"),
        (writes_every_other, "through a view"),
        (writes_an_argument, "argument of the model is changed in place"),
        (writes_a_parameter, "first.weight is changed in place"),
    ],
)
def test_other_writes_are_refused(forward: Callable[..., Any], fact: str) -> None:
    model = Net(forward)
    with pytest.raises(AutoptdError, match=fact) as caught:
        trace.capture(model, (X,), {}, None)
    assert caught.value.remedy and ".py:" in caught.value.site


class WritesAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        h.view(-1).mul_(0.5)
        return h.mean()


def test_the_site_of_a_write_is_its_line() -> None:
    with pytest.raises(TraceError) as caught:
        trace.capture(WritesAView(), (X,), {}, None)
    line = WritesAView.forward.__code__.co_firstlineno + 2
    assert f"test_faithful.py:{line}" in caught.value.site


class ReassignsABuffer(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.count.copy_(x.detach().mean()) if not torch.compiler.is_exporting() else None
        return self.first(x).mean()


def test_a_change_that_tracing_does_not_see_is_found_and_undone() -> None:
    model = ReassignsABuffer()
    model.register_buffer("count", torch.zeros(()))
    with pytest.raises(TraceError, match="buffer count: changed by the forward"):
        captured(model, X)
    assert model.count == 0


def test_running_statistics_of_samples_are_refused_in_training() -> None:
    model = Net(lambda self, x: self.norm(self.first(x)[:, :, None].expand(4, 6, 3)).square().mean())
    model.norm = nn.InstanceNorm1d(6, track_running_stats=True)
    with pytest.raises(AutoptdError, match="statistics"):
        trace.capture(model, (X,), {}, None)


def test_statistics_by_function_are_updates_too() -> None:
    """Without a counter that is written: the graph shows no trace of the change."""
    model = Net(lambda self, x: F.batch_norm(self.first(x), self.mean, self.var, training=True).exp().mean())
    model.register_buffer("mean", torch.zeros(6))
    model.register_buffer("var", torch.ones(6))
    assert [name for name, _ in trace.updated_buffers(captured(model, X).graph)] == ["mean", "var"]
    frozen = Net(lambda self, x: F.batch_norm(self.first(x), self.mean, self.var).square().mean())
    frozen.register_buffer("mean", torch.zeros(6))
    frozen.register_buffer("var", torch.ones(6))
    captured(frozen, X)


def test_a_write_of_a_wider_dtype_keeps_that_of_its_target() -> None:
    def forward(self: Net, x: Tensor) -> Tensor:
        h = self.first(x)
        self.low.add_(h.detach().double().mean(0))
        return h.mean()

    model = Net(forward)
    model.register_buffer("low", torch.zeros(6))
    ((_, new),) = trace.updated_buffers(captured(model, X).graph)
    assert new.meta["val"].dtype == torch.float32


# Autocast.


def test_autocast_around_is_refused() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TraceError, match="autocast"):
        trace.capture(Net(lambda self, x: self.first(x).mean()), (X,), {}, None)


def autocast_inside(self: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = self.first(x)
    return h.float().mean()


def test_autocast_inside_is_traced() -> None:
    found = captured(Net(autocast_inside), X)
    assert torch.bfloat16 in {value(node).dtype for node in ops(found.graph)}


@pytest.mark.parametrize(("rate", "tolerance"), [(0.0, 2.0**-7), (0.2, 2.0**-6)])
def test_attention_that_drops_may_round_in_other_places(rate: float, tolerance: float) -> None:
    """In half precision, by 0.7% of the largest entry in some models that are right."""

    def attend(self: Net, x: Tensor) -> Tensor:
        q = self.first(x)[None, None]
        return F.scaled_dot_product_attention(q, q, q, dropout_p=rate).square().mean()

    found = captured(Net(attend).bfloat16(), X.bfloat16())
    assert faithful._tolerance(found.graph)[0] == tolerance


def autocast_off_inside(self: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        h = self.first(x)
    return h.mean()


def test_autocast_that_is_off_does_nothing() -> None:
    captured(Net(autocast_off_inside), X)


# Custom backwards and hooks.


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


def test_a_custom_backward_is_kept() -> None:
    captured(Net(lambda self, x: Doubled.apply(self.first(x)).mean()), X)
    x = torch.ones(1, requires_grad=True)
    Doubled.apply(x).backward()  # tracing leaves torch as it was
    assert x.grad == 2.0


def hooked(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    h.register_hook(lambda grad: 2 * grad)
    return h.mean()


def test_a_tensor_hook_is_refused() -> None:
    with pytest.raises(TraceError, match="hook"):
        trace.capture(Net(hooked), (X,), {}, None)
    torch.ones(1, requires_grad=True).register_hook(lambda grad: grad)


HOOKS: dict[str, Callable[[Net], Any]] = {
    "module backward": lambda net: net.first.register_full_backward_hook(lambda *_: None),
    "module backward pre": lambda net: net.first.register_full_backward_pre_hook(lambda *_: None),
    "model backward": lambda net: net.register_full_backward_hook(lambda *_: None),
    "parameter": lambda net: net.first.weight.register_hook(lambda grad: 2 * grad),
    "post accumulate": lambda net: net.first.weight.register_post_accumulate_grad_hook(lambda _: None),
}


@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_are_refused(kind: str) -> None:
    model = Net(lambda self, x: self.first(x).mean())
    HOOKS[kind](model)
    with pytest.raises(TraceError, match="hook") as caught:
        trace.capture(model, (X,), {}, None)
    assert "remove the hook" in caught.value.remedy


class Collecting(Net):
    """As transformers does for what is asked of a model beside its result: hooks that the first forward installs."""

    def __init__(self, once: bool) -> None:
        super().__init__(detached)
        self.is_ready, self.once = False, once

    def forward(self, x: Tensor) -> Tensor:
        if not (self.is_ready and self.once):
            self.first.register_forward_hook(lambda module, args, out: self.kept.append(out))
            self.is_ready = True
        self.kept: list[Tensor] = []
        loss = self.second(self.first(x).relu()).mean()
        for h in self.kept:
            loss = loss + 0.1 * h.square().mean()
        self.kept = []
        return loss


def test_hooks_that_the_forward_installs_are_taken_off_again() -> None:
    """Else every trace of the model would have those of the traces before it as well."""
    model = Collecting(once=True)
    sizes = [len(trace.capture(model, (X,), {}, None).graph.nodes) for _ in range(2)]
    assert sizes[0] == sizes[1] and not model.first._forward_hooks and not model.is_ready
    found = trace.capture(model, (X,), {}, None)
    trace.compare(model, None, found.graph, found.buffers, (X,), {})


def test_a_hook_more_at_every_call_is_refused() -> None:
    model = Collecting(once=False)
    with pytest.raises(TraceError, match="is changed by the forward"):
        trace.capture(model, (X,), {}, None)
    assert not model.first._forward_hooks


def test_forward_hooks_are_traced() -> None:
    model = Net(lambda self, x: self.first(x).mean())
    model.first.register_forward_hook(lambda module, args, out: out * 3)
    assert names(captured(model, X).graph) == ["linear", "mul", "mean"]


def checkpointed(self: Net, x: Tensor) -> Tensor:
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda h: self.second(self.first(h).tanh()), x, use_reentrant=False).square().mean()


def test_activation_checkpointing_is_traced_through_or_refused() -> None:
    """Never silently different: the same gradients, or a TraceError."""
    with warnings.catch_warnings(), contextlib.suppress(TraceError):
        warnings.simplefilter("ignore")
        captured(Net(checkpointed), X)


# Randomness.


@pytest.mark.parametrize("kind", [nn.Dropout1d, nn.AlphaDropout, nn.FeatureAlphaDropout])
def test_other_kinds_of_dropout_are_refused_in_training_with_their_module(
    kind: Callable[[float], nn.Module],
) -> None:
    model = Net(lambda self, x: self.drop(self.first(x)).mean())
    model.drop = kind(0.1)
    with pytest.raises(PlanError, match="draws masks other") as caught:
        trace.capture(model, (X,), {}, None)
    assert caught.value.site.startswith("drop")
    captured(model.eval(), X)
    model.train().drop.p = 0.0
    captured(model, X)


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: (self.first(x) * torch.bernoulli(x.sigmoid())).mean(),
        lambda self, x: (self.first(x)[torch.randperm(4)]).mean(),
        lambda self, x: (self.first(x) * torch.randint_like(x, 3)).mean(),
    ],
)
def test_random_operators_are_refused(forward: Callable[..., Any]) -> None:
    with pytest.raises(AutoptdError, match="random"):
        trace.capture(Net(forward), (X,), {}, None)


# What cannot be traced names the user's line.


def branches_on_data(self: Net, x: Tensor) -> Tensor:
    h = self.first(x)
    if h.sum() > 0:
        h = -h
    return h.mean()


def reads_an_item(self: Net, x: Tensor) -> Tensor:
    return self.first(x).mean() * int(x.abs().sum().item())


def wrong_shapes(self: Net, x: Tensor) -> Tensor:
    return (self.first(x) @ self.second(x)).mean()


@pytest.mark.parametrize(
    ("forward", "line"),
    [
        (branches_on_data, "if h.sum() > 0:"),
        (reads_an_item, "int(x.abs().sum().item())"),
        (wrong_shapes, "self.first(x) @ self.second(x)"),
    ],
)
def test_the_line_that_cannot_be_traced(forward: Callable[..., Any], line: str) -> None:
    with pytest.raises(TraceError) as caught:
        trace.capture(Net(forward), (X,), {}, None)
    assert __file__ in caught.value.site and line in caught.value.site
    number = int(caught.value.site.split(":")[1].split()[0])
    first = forward.__code__.co_firstlineno
    assert first < number < first + 5


class ShapeFromData(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)[x > 0].reshape(2, -1).mean()


def test_a_size_that_depends_on_values_is_refused() -> None:
    with pytest.raises(TraceError, match="depends on the values") as caught:
        trace.capture(ShapeFromData(), (X,), {}, None)
    assert "test_faithful.py:" in caught.value.site and "self.first(x)[x > 0]" in caught.value.site


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_every_operator_of_a_region_has_a_site() -> None:
    found = captured(Net(under_no_grad), X)
    assert all(note(node).source for node in ops(found.graph))


# Kernels that add in any order, as on CUDA.


@torch.library.custom_op("autoptd_tests::shaken", mutates_args=())
def shaken(x: Tensor, size: float) -> Tensor:
    return x * (1 + size * torch.randn(x.shape))


@shaken.register_fake
def _(x: Tensor, size: float) -> Tensor:
    return torch.empty_like(x)


def _keep_size(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.size = inputs[1]


def _shake_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return shaken(gradient, ctx.size), None


shaken.register_autograd(_shake_gradient, setup_context=_keep_size)


def test_a_model_that_differs_from_itself_has_that_tolerance() -> None:
    torch.manual_seed(0)
    for size in (0.0, 1e-4):
        captured(Net(lambda self, x, size=size: shaken(self.second(self.first(x)), size).square().mean()), X)
    model = Net(lambda self, x: shaken(self.second(self.first(x)), 1.0).square().mean())
    found = trace.capture(model, (X,), {}, None)
    with pytest.raises(TraceError, match="two runs on the same batch differ"):
        trace.compare(model, None, found.graph, found.buffers, (X,), {})
